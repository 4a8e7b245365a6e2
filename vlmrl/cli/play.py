"""`vlmrl play`: try an env before training, with the embedded engine or with responses from the keyboard."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.markup import escape

from vlmrl.cli.check_output import tokens_text
from vlmrl.cli.recipe import Recipe, RecipeOptions
from vlmrl.config import Config, Data, Rollout, resolve_config
from vlmrl.types import Trajectory
from vlmrl.utils.folders import CACHE_VARIABLE, cache_root
from vlmrl.utils.output_files import output_errors
from vlmrl.utils.require import require
from vlmrl.utils.terminal import Terminal
from vlmrl.utils.threads import DaemonPool, run_awake

if TYPE_CHECKING:
    from vlmrl.engine.base import Request
    from vlmrl.multimodal.renderer import Renderer
    from vlmrl.run.build import Run

MOST_TASKS = 10_000  # of a dataset or a generator that is played without a recipe


@dataclass(frozen=True)
class PlayOptions(RecipeOptions):
    n: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 4
    """Number of tasks to play."""
    by_hand: bool = False
    """Read the responses from the keyboard instead of sampling them. A backslash at a line's end continues the response."""
    page: Path | None = None
    """Also write the episodes, with their images, to this HTML file."""


@dataclass(frozen=True)
class PlayCommand:
    """Play a few tasks and print the episodes: prompts, responses, observations and rewards.
    `vlmrl play RECIPE` plays a recipe's tasks. Every setting is an option.
    `vlmrl play file.py:Env --data.generator file.py:tasks` plays an env.
    `vlmrl play --agent file.py:run --data.generator file.py:tasks` plays an agent."""

    env: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="RECIPE|ENV")] = None
    """Recipe: `file.py`. Env: `module:Name` or `file.py:Name`. Omit it with `--agent` or `--rollout.generate`."""

    def run(self, options: Sequence[str]) -> None:
        recipe = Recipe(self._config, Path.cwd(), "")
        if self.env is not None and self.env.endswith(".py"):
            recipe = Recipe.load(self.env)
        prog = f"vlmrl play {self.env or ''}".rstrip()
        chosen = recipe.options(PlayOptions(recipe.config()), options, prog, self.__doc__)
        try:
            run_awake(play(resolve_config(chosen.config, recipe.folder), chosen))
        except EOFError:  # the keyboard's
            raise KeyboardInterrupt from None

    def _config(self) -> Config:
        """The settings without a recipe: the first tasks, in their order, and short episodes."""
        rollout = Rollout(max_turns=4, max_response_tokens=128, truncated_reward=0.0, samples="merged")
        return Config(env=self.env, data=Data(size=MOST_TASKS, seed=None), rollout=rollout)


async def play(config: Config, shown: PlayOptions) -> None:
    """Play the tasks of a resolved config one after another, and print each episode when it ends.

    Raises:
        ValueError: the engine is not the embedded one.
    """
    from vlmrl.engine.scripted import ScriptedEngine
    from vlmrl.run.build import build_run

    require(config.engine == "embedded", "engine", "embedded with vlmrl play", config.engine)
    console = Terminal(soft_wrap=True, highlight=False)
    runs = cache_root() / "play"  # not in /tmp, where another user could put a model of this name
    with output_errors(runs, f"the environment variable {CACHE_VARIABLE}"):
        runs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="play-", dir=runs) as folder:  # images and logs, until the command ends
        samples: Literal["merged", "step_wise"] = "merged" if config.has_agent else "step_wise"  # none are made
        rollout = replace(config.rollout, samples=samples)
        run = build_run(replace(config, rollout=rollout, output_dir=str(runs), name=Path(folder).name))
        by_hand = KeyboardResponses(console, run.model.renderer, rollout.max_response_tokens)
        engine = ScriptedEngine(by_hand.response, run.model.renderer) if shown.by_hand else run.engine
        loop = run.runner(engine=engine).loop
        played, ended = [], None
        try:
            for index in range(min(shown.n, len(run.tasks))):
                trajectory = await loop.play(run.tasks.draw(index), f"play/{index:05d}", f"play/{index:05d}/00")
                _print(console, trajectory, run.model.renderer, has_step=config.env is not None)
                played.append(trajectory)
        except EOFError as error:  # end of the keyboard's input: still print the summary of the finished episodes
            ended = error
        finally:
            run.close()
        if played or ended is None:
            console.print(f"\n{_summary(played)}")
        if played and shown.page is not None:
            await _write_page(run, played, shown.page)
            console.print(f"episodes with images: {shown.page}")
        if ended is not None:
            raise ended


def _summary(played: Sequence[Trajectory]) -> str:
    """``3 episodes, mean reward 0.500``; failed ones have no reward: ``3 episodes, of which 1 failed, mean reward 0.500``."""
    rewards = [trajectory.reward for trajectory in played if trajectory.reward is not None and not trajectory.failed]
    failed = sum(trajectory.failed for trajectory in played)
    count = f"{len(played)} episode{'' if len(played) == 1 else 's'}" + (
        f", of which {failed} failed" if failed else ""
    )
    return f"{count}, mean reward " + (f"{sum(rewards) / len(rewards):.3f}" if rewards else "none")


async def _write_page(run: Run, played: Sequence[Trajectory], path: Path) -> None:
    """Write the page of a run that has played these episodes and nothing else."""
    from vlmrl.report.run_log import RunLog
    from vlmrl.report.trajectory_log import TrajectoryLog
    from vlmrl.report.viewer.followed_run import FollowedRun
    from vlmrl.report.viewer.page import write_snapshot

    with RunLog(run.folder) as log:
        await TrajectoryLog(log, run.model.renderer.decode, len(played)).write(0, "train", played)
    write_snapshot([FollowedRun(run.folder)], path, "vlmrl play")


class KeyboardResponses:
    """Prints the prompt that the model would read, saves its images in a folder, and reads the response from the keyboard.

    ``max_tokens`` is ``rollout.max_response_tokens``.
    """

    def __init__(self, console: Terminal, renderer: Renderer, max_tokens: int) -> None:
        self._console = console
        self._renderer = renderer
        self._max_tokens = max_tokens
        self._folder: Path | None = None
        self._shown: dict[str, list[int]] = {}
        self._keyboard = DaemonPool("keyboard")  # a daemon thread: an unanswered prompt does not block the exit

    async def response(self, request: Request, turn: int) -> str:
        from vlmrl.rollout.record import common_start

        new = list(request.prompt_ids)
        same = common_start(self._shown.get(request.trajectory_id, []), new)
        self._console.print(f"[dim]{escape(self._renderer.decode(new[same:]))}[/dim]")
        images = sum(token == self._renderer.image_token_id for token in new[:same])
        for number, item in enumerate(request.media[images:], start=images):
            self._folder = self._folder or Path(tempfile.mkdtemp(prefix="vlmrl-images-"))
            file = self._folder / f"{request.trajectory_id.replace('/', '-')}-{number}.png"
            item.image.save(file)
            self._console.print(f"[cyan]image {number}: {file}[/cyan]")
        self._shown[request.trajectory_id] = new
        typed: str = await self._keyboard.run(self._typed)
        ids, limit = self._renderer.tokenizer.encode(typed, add_special_tokens=False), request.sampling.max_tokens
        count = len(ids) + (not self._renderer.stop_ids.intersection(ids[-1:]))
        if count > limit:
            rules = f"rollout.max_response_tokens is {self._max_tokens}, and rollout.max_tokens limits the episode"
            message = f"your response has {count} tokens and is cut to {limit}: {rules}"
            self._console.print(f"[bold red]{message}[/bold red]")
        return typed

    def _typed(self) -> str:
        """The response: a line, and the next one where it ends with a backslash."""
        lines = [self._console.input("response> ")]
        while (len(lines[-1]) - len(lines[-1].rstrip("\\"))) % 2:  # two are a backslash of LaTeX
            lines[-1:] = [lines[-1][:-1], self._console.input("........> ")]
        return "\n".join(lines)


def _print(console: Terminal, trajectory: Trajectory, renderer: Renderer, has_step: bool) -> None:
    """Print one episode. Prompts of `rollout.generate` exist only as tokens and are decoded."""
    from vlmrl.multimodal.placeholders import collapse
    from vlmrl.report.records import messages_text

    console.print(f"\n[bold]task {escape(trajectory.task.id)}[/bold]  answer {escape(repr(trajectory.task.answer))}")
    for number, turn in enumerate(trajectory.turns):
        sizes = ";".join(f" {item.size[0]}x{item.size[1]} px, {tokens_text(item.num_tokens)}" for item in turn.media)
        engine_ids = collapse(turn.prompt_ids, renderer.image_token_id, turn.media)
        text = messages_text(turn.messages) if turn.messages else renderer.decode(engine_ids)
        console.print(f"[dim]{escape(text)}[/dim]" + (f"\n[cyan]images:{sizes}[/cyan]" if sizes else ""))
        numbers = ({} if turn.reward is None else {"reward": turn.reward}) | turn.metrics
        shown = "".join(f"  {name} {value:g}" for name, value in numbers.items())
        console.print(f"[green]turn {number}>[/green] {escape(turn.text)}[yellow]{escape(shown)}[/yellow]")
    total = "none" if trajectory.reward is None or trajectory.failed else f"{trajectory.reward:g}"
    error = f": {escape(trajectory.error)}" if trajectory.error else ""
    without = ", and step() was not called with it" if has_step else ""
    cut = f" (a response was cut at rollout.max_response_tokens{without})" if trajectory.ending == "length" else ""
    console.print(f"[bold]{trajectory.ending}[/bold]{cut}, reward {total}{error}")
