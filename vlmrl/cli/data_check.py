"""`vlmrl data check`: a recipe's first tasks as the model will see them, and what would be passed over. Loads no weights."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.progress import track
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from vlmrl.config import Config
from vlmrl.data import TaskMixture, TaskSource, load_run_tasks
from vlmrl.data.stream import prompt_tokens
from vlmrl.env.base import EnvSpec, resolve_envs
from vlmrl.env.session import EnvError, EnvSession
from vlmrl.model.loading import Reader, load_reader
from vlmrl.multimodal.renderer import Rendered
from vlmrl.multimodal.store import MediaStore
from vlmrl.rollout.history import new_history, resolve_policy
from vlmrl.types import ImageSource, Message, Task


@dataclass(frozen=True)
class CheckArguments:
    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)
    rows: int = 2
    """How many tasks to show, of each part of a mixture."""
    measure: int = 1000
    """How many prompts to measure, of each part, in the order in which they will be drawn."""


def check(settings: CheckArguments, base_dir: Path | None, console: Console | None = None) -> bool:
    """Show and measure tasks; whether all of those could be made and shown."""
    config = settings.config
    checker = Checker(config, base_dir, console or Console(highlight=False))
    tasks, held_out = load_run_tasks(config, base_dir)
    parts = tasks.parts if isinstance(tasks, TaskMixture) else {"": tasks}
    checker.say("model", f"{config.model.path}; chat template: {config.model.chat_template or 'its own'}")
    checker.say("env", checker.spec.name if checker.spec else "none: rollout.generate plays by itself")
    checker.say("data", f"{len(tasks)} tasks to train on, {len(held_out) if held_out else 'none'} held out")
    for name, source in parts.items():
        if name:
            share = config.mixture[name].weight / sum(part.weight for part in config.mixture.values())
            checker.console.print()
            checker.say(name, f"{len(source)} tasks, {share:.0%} of the draws", style="bold magenta")
        for number in range(min(settings.rows, len(source))):
            checker.show(source, number)
        checker.measure(source, min(settings.measure, len(source)))
    return not checker.problems


class Checker:
    """Shows tasks on one console, as one model's ``reader`` reads them and ``spec``'s env begins them."""

    def __init__(self, config: Config, base_dir: Path | None, console: Console) -> None:
        self.config = config.rollout
        self.console = console
        generate = config.rollout.generate is not None
        self.spec: EnvSpec | None = None if generate else resolve_envs(config, base_dir)
        self.policy = resolve_policy(config.rollout, base_dir)
        self.reader: Reader = load_reader(config.model, base_dir, config.models_dir)
        self.store: MediaStore | None = self.reader.new_store()
        self.count = prompt_tokens(self.reader.renderer, self.store, self._class_tools)
        self.problems = 0

    def say(self, label: str, text: str, style: str = "bold") -> None:
        line = Table.grid()
        line.add_column(width=10, style=style)
        line.add_column(overflow="fold")
        line.add_row(Text(label), Text(text))
        self.console.print(line)

    def show(self, source: TaskSource, number: int) -> None:
        """The task of one draw: its tokens, its images, its tools, and the prompt itself."""
        try:
            task = source.draw(number)
            messages, tools = asyncio.run(self._opening(task))
            rendered = new_history(self.config, self.reader.renderer, tools, self.policy).prompt(messages)
            images = [self._image(image) for image in rendered.images]
            own = self.count(task)
        except (ValueError, EnvError) as error:
            return self._problem(f"draw {number}: {error}")
        self.console.print()
        self.console.print(Rule(f"[bold]{task.id}[/bold]", align="left", style="dim"))
        total = len(rendered.token_ids) + sum(tokens - 1 for _, tokens in images)
        room = f"{max(0, self.config.max_tokens - total)} of rollout.max_tokens ({self.config.max_tokens}) are left for the episode"
        self.say("tokens", f"{total}; {room}")
        if own != total:
            self.say("", f"the env begins with other messages or tools than the row's, which are {own} tokens", "")
        for place, (told, _) in enumerate(images, start=1):
            self.say(f"image {place}", told)
        self.say("tools", ", ".join(map(_tool_name, tools)) or "none")
        self.say("answer", repr(task.answer))
        if task.data:
            self.say("data", ", ".join(f"{key}={value!r:.60}" for key, value in task.data.items()))
        self.console.print(self._marked(rendered, [tokens for _, tokens in images]), end="")

    def measure(self, source: TaskSource, count: int) -> None:
        """How long the prompts are, and what becomes of those that are too long or cannot be made."""
        lengths: list[int] = []
        images: list[int] = []
        resized = 0
        broken: list[str] = []
        for number in track(range(count), "measuring", console=self.console, transient=True):
            try:
                task = source.draw(number)
                lengths.append(self.count(task))
                sizes = [self.store.measure(image) for image in task.images] if self.store else []
            except ValueError as error:
                broken.append(str(error))
                continue
            images.append(len(sizes))
            resized += sum(size.given != size.shown for size in sizes)
        self.console.print()
        self.console.print(Rule(f"[bold]{count} of {len(source)} prompts measured[/bold]", align="left", style="dim"))
        self.console.print(_quantiles({"tokens": lengths, "images": images}))
        if resized:
            self.say("resized", f"{resized} of {sum(images)} images do not keep their size")
        self._tell_limits(lengths, source.max_prompt_tokens)
        for problem in broken[:5]:
            self._problem(problem)
        if len(broken) > 5:
            self._problem(f"and {len(broken) - 5} more such rows")

    def _tell_limits(self, lengths: Sequence[int], limit: int | None) -> None:
        over = sum(length > limit for length in lengths) if limit else 0
        if limit is not None:
            self.say("too long", f"{over} of {len(lengths)} are over data.max_prompt_tokens ({limit}) and passed over")
        kept = [length for length in lengths if limit is None or length <= limit]
        for room, what in ((1, "any reply"), (self.config.max_reply_tokens, "a reply of rollout.max_reply_tokens")):
            cut = sum(self.config.max_tokens - length < room for length in kept)
            if cut:
                self.say(
                    "no room", f"{cut} leave none for {what}: raise rollout.max_tokens, or set data.max_prompt_tokens"
                )
                break

    async def _opening(self, task: Task) -> tuple[list[Message], list[dict[str, Any]]]:
        """What the episode begins with: the env's messages and tools, or the row's own."""
        if self.spec is None:
            return task.prompt, []
        config = self.config
        session = EnvSession(
            self.spec.of(task), task, max_turns=config.max_turns, timeout=config.env_timeout, max_retries=0
        )
        try:
            return await session.start() or task.prompt, session.tools
        finally:
            await session.close()

    def _class_tools(self, task: Task) -> list[dict[str, Any]]:
        return self.spec.of(task).tools if self.spec else []

    def _image(self, source: ImageSource) -> tuple[str, int]:
        """An image's sizes in words, and its tokens; decodes it, so that a broken one is found."""
        assert self.store is not None  # the renderer of a text model refuses images
        given, shown, _ = self.store.measure(source)
        tokens = self.store.load(source).num_tokens
        seen = "as it is" if given == shown else f"seen as {shown[0]}x{shown[1]}"
        return f"{given[0]}x{given[1]} px, {seen}: {_tokens(tokens)}", tokens

    def _marked(self, rendered: Rendered, image_tokens: Sequence[int]) -> Text:
        """The prompt's text; real special tokens stand out from the same words in a text, also where there are no colors."""
        renderer, text = self.reader.renderer, Text()
        special = {index for index, token in self.reader.tokenizer.added_tokens_decoder.items() if token.special}
        images: Iterator[tuple[int, int]] = iter(enumerate(image_tokens, start=1))
        for is_special, run in groupby(rendered.token_ids, special.__contains__):
            if not is_special:
                text.append(renderer.decode(list(run)))
                continue
            for token in run:
                if token == renderer.image_token_id:
                    place, size = next(images)
                    text.append(f"⟦image {place}: {_tokens(size)}⟧", "cyan")
                else:
                    text.append(f"⟦{renderer.decode([token])}⟧", "magenta")
        return text

    def _problem(self, text: str) -> None:
        self.problems += 1
        self.say("problem", text, "bold red")


def _tool_name(tool: dict[str, Any]) -> str:
    function = tool.get("function", tool)
    arguments = function.get("parameters", {}).get("properties", {})
    return f"{function.get('name')}({', '.join(arguments)})"


def _tokens(number: int) -> str:
    return "1 token" if number == 1 else f"{number} tokens"


def _quantiles(columns: dict[str, list[int]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("", "mean", "least", "half below", "95% below", "most"):
        table.add_column(title, justify="right" if title else "left", style=None if title else "bold")
    for name, values in columns.items():
        if values:
            ordered = sorted(values)
            places = [ordered[round(share * (len(ordered) - 1))] for share in (0, 0.5, 0.95, 1)]
            table.add_row(f"{name:<9}", f"{statistics.fmean(values):.1f}", *map(str, places))
    return table
