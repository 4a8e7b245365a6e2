"""`vlmrl data check`: a recipe's first tasks as the model will see them, and every row's prompt and images. No weights are loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress

from vlmrl.cli.check_output import MAX_LISTED, CheckOutput, quantiles, tokens_text
from vlmrl.cli.conversation_check import check_conversations
from vlmrl.cli.recipe import Recipe, RecipeOptions, RecipePath
from vlmrl.config import Config, resolve_config
from vlmrl.env.base import EnvSpec, resolve_envs
from vlmrl.env.session import EnvSession
from vlmrl.types import ImageSource, Message, Task
from vlmrl.utils.terminal import Terminal
from vlmrl.utils.threads import run_awake

if TYPE_CHECKING:
    from vlmrl.data import Tasks, TaskSource


@dataclass(frozen=True)
class DataCheckCommand:
    """Show the first tasks of a recipe as the model will see them, and read every row with its images.

    With `sft.data`, also show which tokens of the first conversations have a loss, and read every conversation."""

    recipe: RecipePath
    """Python file with a function `config() -> Config`. For its options, see `vlmrl data check RECIPE --help`."""

    def run(self, options: Sequence[str]) -> None:
        recipe = Recipe.load(self.recipe)
        settings = recipe.options(
            CheckOptions(recipe.config()), options, f"vlmrl data check {self.recipe}", self.__doc__
        )
        settings = replace(settings, config=resolve_config(settings.config, recipe.folder))
        if not check(settings):
            raise SystemExit(1)


@dataclass(frozen=True)
class CheckOptions(RecipeOptions):
    show: int = 2
    """Number of tasks to show, per part of a mixture."""
    rows: int | None = None
    """Number of rows to read and measure, per part. Unset: all."""


def check(settings: CheckOptions, console: Console | None = None) -> bool:
    """Show the first tasks and read the rows. Returns False if a row or one of its images cannot be played."""
    from vlmrl.data import load_run_tasks

    config = settings.config
    checker = Checker(config, console or Terminal(highlight=False))
    checker.say("model", f"{config.model.path}; chat template: {config.model.chat_template or 'its own'}")
    if config.sft.data:
        check_conversations(checker, config, settings.show, settings.rows)
    if not config.has_tasks and config.sft.data:
        return not checker.problems
    tasks, held_out = load_run_tasks(config)
    checker.say("env", checker.spec.name if checker.spec else f"none: {config.episode_setting} plays the episodes")
    checker.say("data", f"{len(tasks)} tasks to train on, {len(held_out) if held_out else 'none'} held out")
    for name, source in _parts(tasks).items():
        if name:
            share = config.mixture[name].weight / sum(part.weight for part in config.mixture.values())
            checker.console.print()
            checker.say(name, f"{len(source)} tasks, {share:.0%} of the draws", style="bold magenta")
        checker.warn(source)
        for number in range(min(settings.show, len(source))):
            checker.show(source, number)
        checker.read(source, settings.rows)
    for name, source in _parts(held_out).items() if held_out else ():
        checker.console.print()
        checker.say("held out", f"{len(source)} tasks" + (f" of {name}" if name else ""), style="bold magenta")
        checker.read(source, settings.rows)
    return not checker.problems


def _parts(tasks: Tasks) -> Mapping[str, TaskSource]:
    from vlmrl.data import TaskMixture

    return tasks.parts if isinstance(tasks, TaskMixture) else {"": tasks}


class Checker(CheckOutput):
    """Prints tasks as the model reads them: started by the env of ``spec``, rendered and tokenized by ``reader``."""

    def __init__(self, config: Config, console: Console) -> None:
        from vlmrl.data import PromptLength
        from vlmrl.rollout.history import asks, resolve_policy

        super().__init__(config, console)
        plays = config.episode_setting == "env" and (config.has_tasks or not config.sft.data)
        self.spec: EnvSpec | None = resolve_envs(config) if plays else None
        policy = resolve_policy(config.rollout)
        self.policy = None if asks(policy) else policy  # one that asks gets no first prompt
        self.count = PromptLength(self.reader.renderer, self.store, self._class_tools)

    def warn(self, source: TaskSource) -> None:
        """Print what a run warns of, but for empty texts, which :meth:`read` counts."""
        from vlmrl.data.source import EMPTY

        for warning in source.warnings:
            if not warning.endswith(tuple(EMPTY.values())):
                self.say("warning", warning, "bold yellow")

    def show(self, source: TaskSource, number: int) -> None:
        """Print the task of one draw: token counts, images, tools and the rendered prompt."""
        from vlmrl.rollout.history import new_history

        try:
            task = source.draw(number)
            messages, tools = run_awake(self._opening(task))
            rendered = new_history(self.config, self.reader.renderer, tools, self.policy).prompt(messages)
            images = [self._image(image) for image in rendered.images]
            own = self.count(task)
        except Exception as error:  # of the row, the env, an image or the chat template
            return self.problem(f"draw {number}: {error}")
        self.heading(task.id)
        total = len(rendered.token_ids) + sum(tokens - 1 for _, tokens in images)
        room = f"{max(0, self.config.max_tokens - total)} of rollout.max_tokens ({self.config.max_tokens}) remain for the episode"
        self.say("tokens", f"{total}; {room}")
        if own != total:
            self.say("", f"the env changes the messages or tools of the row: the row itself has {own} tokens", "")
        for index, (description, _) in enumerate(images, start=1):
            self.say(f"image {index}", description)
        self.say("tools", ", ".join(map(_tool_name, tools)) or "none")
        self.say("answer", repr(task.answer))
        self.say("source", task.source)
        if task.data:
            self.say("data", ", ".join(f"{key}={value!r:.60}" for key, value in task.data.items()))
        sizes = iter(enumerate((tokens for _, tokens in images), start=1))
        self.console.print(self.marked(rendered.token_ids, sizes), end="")

    def read(self, source: TaskSource, rows: int | None) -> None:
        """Read the first rows, or all. Print the lengths of their prompts, and each row that cannot be played."""
        from vlmrl.checks.data_rows import check_rows, grouped
        from vlmrl.data.source import empty_warning, named_rows

        count = len(source) if rows is None else min(rows, len(source))
        with Progress(console=self.console, transient=True) as progress:
            bar = progress.add_task("reading rows", total=count)
            report = check_rows(source, count, self.count, lambda: progress.advance(bar))
        self.heading(f"{count} of {len(source)} rows read")
        self.console.print(quantiles({"tokens": report.lengths, "images": report.images}))
        if report.resized:
            self.say("resized", f"{report.resized} of {sum(report.images)} images change their size")
        self._say_limits(report.lengths, source.max_prompt_tokens)
        for name, empty in report.empty.items():
            if empty:
                self.say("warning", empty_warning(name, f"the {name}", empty), "bold yellow")
        if report.marks_left:
            rows_left = named_rows(report.marks_left)
            why = "more <image> marks than images, and the model reads those left over as text"
            self.say("warning", f"{why}: {rows_left}", "bold yellow")
        if report.no_answer:
            why = f"task.answer is None in {named_rows(report.no_answer)}"
            self.say("warning", f"{why}: give 'answer' if the env reads it", "bold yellow")
        problems = grouped(source, report.broken)
        for problem in problems[:MAX_LISTED]:
            self.problem(problem)
        if len(problems) > MAX_LISTED:
            self.problem(f"and {len(problems) - MAX_LISTED} more problems")
        checked = f"{count - len(report.broken)} of {count} rows can be played, with {sum(report.images)} images"
        self.say("result", checked, "bold red" if report.broken else "bold green")

    def _say_limits(self, lengths: Sequence[int], limit: int | None) -> None:
        if limit is not None:
            over = sum(length > limit for length in lengths)
            self.say("too long", f"{over} of {len(lengths)} are over data.max_prompt_tokens ({limit}) and skipped")
        kept = [length for length in lengths if limit is None or length <= limit]
        rooms = {"any response": 1, "a response of rollout.max_response_tokens": self.config.max_response_tokens}
        for what, room in rooms.items():
            if cut := sum(self.config.max_tokens - length < room for length in kept):
                remedy = "raise rollout.max_tokens, or set data.max_prompt_tokens"
                self.say("no room", f"{cut} are too long for {what}: {remedy}")
                break

    async def _opening(self, task: Task) -> tuple[list[Message], list[dict[str, Any]]]:
        """The first messages and the tools of the episode: the env's, or the row's own."""
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
        """A description of an image and its number of tokens. Decodes the image, so that broken files are found."""
        assert self.store is not None  # the renderer of a text model refuses images
        given, shown, _ = self.store.measure(source)
        tokens = self.store.load(source).num_tokens
        seen = "unchanged" if given == shown else f"resized to {shown[0]}x{shown[1]}"
        return f"{given[0]}x{given[1]} px, {seen}: {tokens_text(tokens)}", tokens


def _tool_name(tool: dict[str, Any]) -> str:
    function = tool.get("function", tool)
    arguments = function.get("parameters", {}).get("properties", {})
    return f"{function.get('name')}({', '.join(arguments)})"
