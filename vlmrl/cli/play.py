"""`vlmrl play`: try an env before training, with the embedded engine or with responses from the keyboard."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console
from rich.markup import escape

from vlmrl.cli.recipe import Recipe, RecipeOptions
from vlmrl.config import Config, Data, Model, Options, Rollout, resolve_config
from vlmrl.types import Trajectory
from vlmrl.utils.require import require
from vlmrl.utils.threads import DaemonPool, run_awake

if TYPE_CHECKING:
    from vlmrl.engine.base import Request
    from vlmrl.multimodal.renderer import Renderer
    from vlmrl.run.build import Run


@dataclass(frozen=True)
class Shown:
    """What is played and shown."""

    n: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 4
    """Number of tasks to play."""
    by_hand: bool = False
    """Read the responses from the keyboard instead of sampling them."""
    page: Path | None = None
    """Also write the episodes, with their images, to this HTML file."""


@dataclass(frozen=True)
class PlayOptions(RecipeOptions, Shown):
    """The options of `vlmrl play RECIPE`."""


@dataclass(frozen=True)
class PlayCommand(Shown):
    """Play an env, an agent or a recipe on a few tasks and print the episodes: prompts, responses, observations and rewards.

    `vlmrl play RECIPE` takes all settings of the recipe: see `vlmrl play RECIPE --help`."""

    env: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="RECIPE|ENV")] = None
    """Recipe: `file.py`. Env: `module:Name` or `file.py:Name`. Leave it out with `--agent`, `--agent-command` or
    `--rollout.generate`."""
    data: str | None = None
    """Tasks, unless a recipe has them: a generator (`file.py:function`), or a dataset: a Hub name, or a file or folder.
    Files: .parquet, .json, .jsonl, .csv. Folders: of such files, or of images."""
    env_options: Options = field(default_factory=dict)
    """Keyword arguments of the env, as pairs `NAME VALUE`."""
    agent: str | None = None
    """Agent: `module:function` or `file.py:function`, called with the task and a client."""
    agent_options: Options = field(default_factory=dict)
    """Keyword arguments of the agent, as pairs `NAME VALUE`."""
    agent_command: str | None = None
    """Command line of an agent."""
    reward: str | None = None
    """Reward function of an agent's trajectory, or of a single response with `--rollout.max-turns 1`: `file.py:function`."""
    columns: dict[str, str] = field(default_factory=dict)
    """Column names of prompt, images and answer as pairs `FIELD COLUMN`, for example `prompt problem`."""
    split: str = "train"
    """Split of the dataset."""
    model: Model = field(default_factory=Model)
    rollout: Rollout = field(
        default_factory=lambda: Rollout(max_turns=4, max_response_tokens=128, truncated_reward=0.0)
    )
    seed: int = 0
    """Seed of the sampling and of the weights of tiny models."""

    def run(self, options: Sequence[str]) -> None:
        shown: Shown = self
        if self.env is not None and self.env.endswith(".py"):
            recipe = Recipe.load(self.env)
            shown = chosen = recipe.options(PlayOptions(config=recipe.config()), options, f"vlmrl play {self.env}")
            config = resolve_config(chosen.config, recipe.folder)
        else:
            config = resolve_config(_config(self))
        try:
            run_awake(play(config, shown))
        except EOFError:  # the keyboard's
            raise KeyboardInterrupt from None


async def play(config: Config, shown: Shown) -> None:
    """Play the tasks of a resolved config one after the other, printing each episode when it ends.

    Raises:
        ValueError: the engine is not the embedded one.
    """
    from vlmrl.engine.scripted import ScriptedEngine
    from vlmrl.run.build import build_run

    require(config.engine == "embedded", "engine", "embedded with vlmrl play", config.engine)
    console = Console(soft_wrap=True, highlight=False)
    runs = Path(tempfile.gettempdir()) / "vlmrl-play"
    runs.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="play-", dir=runs) as folder:  # images and logs, until the command ends
        samples: Literal["merged", "step_wise"] = "merged" if config.has_agent else "step_wise"  # none are made
        rollout = replace(config.rollout, samples=samples)
        run = build_run(replace(config, rollout=rollout, output_dir=str(runs), name=Path(folder).name))
        by_hand = KeyboardResponses(console, run.model.renderer, run.folder)
        engine = ScriptedEngine(by_hand.response, run.model.renderer) if shown.by_hand else run.engine
        loop = run.runner(engine=engine).loop
        played = []
        try:
            for index in range(min(shown.n, len(run.tasks))):
                trajectory = await loop.play(run.tasks.draw(index), f"play/{index:05d}", f"play/{index:05d}/00")
                _print(console, trajectory, run.model.renderer)
                played.append(trajectory)
        finally:
            run.close()
        rewards = [trajectory.reward for trajectory in played if trajectory.reward is not None]
        console.print(f"\n{len(played)} episodes, mean reward {sum(rewards) / max(1, len(rewards)):.3f}")
        if shown.page is not None:
            await _write_page(run, played, shown.page)
            console.print(f"episodes with images: {shown.page}")


def _config(settings: PlayCommand) -> Config:
    """The config that a recipe would have for these tasks."""
    if settings.data is None:
        raise ValueError("--data must be set, unless a recipe (file.py) is played.")
    data = Data(path=settings.data, split=settings.split, columns=settings.columns, seed=None)
    if ".py:" in settings.data:
        data = Data(generator=settings.data, size=settings.n)
    shared = ("env", "env_options", "agent", "agent_options", "agent_command", "reward", "model", "seed")
    has_agent = settings.agent is not None or settings.agent_command is not None
    rollout = replace(settings.rollout, samples="merged") if has_agent else settings.rollout
    return Config(data=data, rollout=rollout, **{name: getattr(settings, name) for name in shared})


async def _write_page(run: Run, played: Sequence[Trajectory], path: Path) -> None:
    """Write the page of a run that has played these episodes and nothing else."""
    from vlmrl.report.run_log import RunLog
    from vlmrl.report.trajectory_log import TrajectoryLog
    from vlmrl.report.viewer.followed_run import FollowedRun
    from vlmrl.report.viewer.snapshot import write_snapshot

    with RunLog(run.folder) as log:
        await TrajectoryLog(log, run.model.renderer.decode, len(played)).write(0, "train", played)
    write_snapshot([FollowedRun(run.folder)], path, "vlmrl play")


class KeyboardResponses:
    """Prints the prompt that the model would read, writes its images to ``folder``, and reads the response from the keyboard."""

    def __init__(self, console: Console, renderer: Renderer, folder: Path) -> None:
        self._console = console
        self._renderer = renderer
        self._folder = folder
        self._shown: dict[str, list[int]] = {}
        self._keyboard = DaemonPool("keyboard")  # a daemon thread: an unanswered prompt does not block the exit

    async def response(self, request: Request, turn: int) -> str:
        old, new = self._shown.get(request.trajectory_id, []), list(request.prompt_ids)
        pairs = enumerate(zip(old, new, strict=False))
        same = next((index for index, (a, b) in pairs if a != b), min(len(old), len(new)))
        self._console.print(f"[dim]{escape(self._renderer.decode(new[same:]))}[/dim]")
        images = sum(token == self._renderer.image_token_id for token in new[:same])
        for number, item in enumerate(request.media[images:], start=images):
            file = self._folder / f"{request.trajectory_id.replace('/', '-')}-{number}.png"
            item.image.save(file)
            self._console.print(f"[cyan]image {number}: {file}[/cyan]")
        self._shown[request.trajectory_id] = new
        return await self._keyboard.run(self._console.input, "response> ")


def _print(console: Console, trajectory: Trajectory, renderer: Renderer) -> None:
    """Print one episode. Prompts of `rollout.generate` exist only as tokens and are decoded."""
    from vlmrl.multimodal.renderer import collapse
    from vlmrl.report.records import messages_text

    console.print(f"\n[bold]task {escape(trajectory.task.id)}[/bold]  answer {escape(repr(trajectory.task.answer))}")
    for number, turn in enumerate(trajectory.turns):
        sizes = "".join(f" {item.size[0]}x{item.size[1]} px, {item.num_tokens} tokens;" for item in turn.media)
        engine_ids = collapse(turn.prompt_ids, renderer.image_token_id, turn.media)
        text = messages_text(turn.messages) if turn.messages else renderer.decode(engine_ids)
        console.print(f"[dim]{escape(text)}[/dim]" + (f"[cyan] images:{sizes}[/cyan]" if sizes else ""))
        reward = "" if turn.reward is None else f"  reward {turn.reward:g}"
        console.print(f"[green]turn {number}>[/green] {escape(turn.text)}[yellow]{reward}[/yellow]")
    total = "none" if trajectory.reward is None else f"{trajectory.reward:g}"
    error = f": {escape(trajectory.error)}" if trajectory.error else ""
    console.print(f"[bold]{trajectory.ending}[/bold], reward {total}{error}")
