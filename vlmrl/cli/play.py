"""`vlmrl play`: try an env out before training, with the embedded engine or by typing the replies."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape

from vlmrl.config import Data, Model, Options, Rollout, name_of
from vlmrl.data import load_tasks
from vlmrl.engine.base import Engine, Request
from vlmrl.engine.hf.engine import HFEngine
from vlmrl.engine.scripted import ScriptedEngine
from vlmrl.env.base import resolve_env
from vlmrl.model.loading import load_model
from vlmrl.multimodal.renderer import Renderer, collapse
from vlmrl.report.records import messages_text
from vlmrl.report.viewer import write_page
from vlmrl.rollout.generator import GeneratorLoop, resolve_generate
from vlmrl.rollout.history import resolve_policy
from vlmrl.rollout.runner import EpisodeLoop
from vlmrl.rollout.turn_loop import TurnLoop
from vlmrl.types import Trajectory
from vlmrl.utils.threads import DaemonPool


@dataclass(frozen=True)
class PlayArguments:
    env: tyro.conf.Positional[str | None] = None
    """`module:Name` or `file.py:Name`; unset with `--rollout.generate`, which plays by itself."""
    data: str = tyro.MISSING
    """A dataset (hub name, parquet, json, jsonl, folder) or a generator of tasks (`file.py:function`)."""
    n: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 4
    """How many tasks to play."""
    by_hand: bool = False
    """Type the replies instead of sampling them."""
    env_options: Options = field(default_factory=dict)
    columns: dict[str, str] = field(default_factory=dict)
    """Where prompt, images and answer are found, if not under these names."""
    split: str = "train"
    model: Model = field(default_factory=Model)
    rollout: Rollout = field(default_factory=lambda: Rollout(max_turns=4, max_reply_tokens=128, truncated_reward=0.0))
    page: Path | None = None
    """Write the episodes, with their images, to this HTML file too."""
    seed: int = 0


async def play(settings: PlayArguments) -> None:
    """Play an env on a few tasks and print what happens: what the model read, what it said, what it was given for it."""
    console = Console(soft_wrap=True, highlight=False)
    base_dir = Path.cwd()
    new_loop = _resolve_loop(settings, base_dir)
    tasks = load_tasks(_data(settings), base_dir)
    model = load_model(settings.model, base_dir, Path(tempfile.gettempdir()) / "vlmrl-models", settings.seed)
    engine: Engine = HFEngine(model.policy, model.renderer)
    if settings.by_hand:
        engine = ScriptedEngine(Typist(console, model.renderer).reply, model.renderer)
    loop = new_loop(engine, model.renderer, model.new_store(), settings.rollout, settings.seed)
    played = []
    try:
        for index in range(min(settings.n, len(tasks))):
            trajectory = await loop.play(tasks[index], f"play/{index:05d}", f"play/{index:05d}/00")
            _print(console, trajectory, model.renderer)
            played.append(trajectory)
    finally:
        engine.close()
    rewards = [trajectory.reward for trajectory in played if trajectory.reward is not None]
    console.print(f"\n{len(played)} episodes, mean reward {sum(rewards) / max(1, len(rewards)):.3f}")
    if settings.page is not None:
        title = settings.env or name_of(settings.rollout.generate)
        write_page(played, settings.page, title=title, decode=model.renderer.decode)
        console.print(f"episodes with images: {settings.page}")


def _resolve_loop(settings: PlayArguments, base_dir: Path) -> Callable[..., EpisodeLoop]:
    """What makes the loop that plays an episode: of the env, or of a generator."""
    generate = resolve_generate(settings.rollout, base_dir)
    if generate is None:
        spec = resolve_env(settings.env, None, dict(settings.env_options), base_dir)
        return partial(TurnLoop, spec, history_policy=resolve_policy(settings.rollout, base_dir))
    if settings.env is not None:
        raise ValueError("rollout.generate plays whole episodes by itself, so no env must be named.")
    return partial(GeneratorLoop, generate)


def _data(settings: PlayArguments) -> Data:
    if ".py:" in settings.data:
        return Data(generator=settings.data, size=settings.n)
    return Data(path=settings.data, split=settings.split, columns=settings.columns, shuffle=False)


class Typist:
    """Shows what the model would read, raw, with images as files, and takes the reply from the keyboard."""

    def __init__(self, console: Console, renderer: Renderer) -> None:
        self._console = console
        self._renderer = renderer
        self._folder = Path(tempfile.mkdtemp(prefix="vlmrl-play-"))
        self._shown: dict[str, list[int]] = {}
        self._keyboard = DaemonPool("keyboard")  # a daemon: a prompt that nobody answers keeps no process alive

    async def reply(self, request: Request, turn: int) -> str:
        old, new = self._shown.get(request.trajectory_id, []), list(request.prompt_ids)
        same = next(
            (place for place, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new))
        )
        self._console.print(f"[dim]{escape(self._renderer.decode(new[same:]))}[/dim]")
        images = sum(token == self._renderer.image_token_id for token in new[:same])
        for number, item in enumerate(request.media[images:], start=images):
            file = self._folder / f"{request.trajectory_id.replace('/', '-')}-{number}.png"
            item.image.save(file)
            self._console.print(f"[cyan]image {number}: {file}[/cyan]")
        self._shown[request.trajectory_id] = new
        return await self._keyboard.run(self._console.input, "reply> ")


def _print(console: Console, trajectory: Trajectory, renderer: Renderer) -> None:
    """One episode as a transcript; a generator's prompts are known only as tokens."""
    console.print(f"\n[bold]task {escape(trajectory.task.id)}[/bold]  answer {escape(repr(trajectory.task.answer))}")
    for number, turn in enumerate(trajectory.turns):
        sizes = "".join(f" {item.image.width}x{item.image.height} px, {item.num_tokens} tokens;" for item in turn.media)
        engine_ids = collapse(turn.prompt_ids, renderer.image_token_id, turn.media)
        text = messages_text(turn.messages) if turn.messages else renderer.decode(engine_ids)
        console.print(f"[dim]{escape(text)}[/dim]" + (f"[cyan] images:{sizes}[/cyan]" if sizes else ""))
        given = "" if turn.reward is None else f"  reward {turn.reward:g}"
        console.print(f"[green]turn {number}>[/green] {escape(turn.text)}[yellow]{given}[/yellow]")
    reward = "none" if trajectory.reward is None else f"{trajectory.reward:g}"
    console.print(
        f"[bold]{trajectory.ending}[/bold], reward {reward}"
        + (f": {escape(trajectory.error)}" if trajectory.error else "")
    )
