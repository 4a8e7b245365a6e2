"""`vlmrl data check` of `sft.data`: rows as the model will see them, with their masks, and every row that cannot be trained on."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

from rich.text import Text

from vlmrl.cli.check_output import MAX_LISTED, CheckOutput, quantiles
from vlmrl.config import Config

if TYPE_CHECKING:
    from vlmrl.data import TaskSource
    from vlmrl.types import Sample, Task

AT_ONCE = 32  # rows whose images are loaded together
TRAINED = "bold green"


def check_conversations(checker: CheckOutput, config: Config, show: int, rows: int | None) -> None:
    """Print the first ``show`` rows of each dataset with their masks, and read its first ``rows``, or all."""
    from vlmrl.data.conversations import load_conversations
    from vlmrl.multimodal.masks import check_masks

    mixed, held_out = load_conversations(config)
    try:
        check_masks(checker.reader.renderer, config.model.chat_template or f"of {config.model.path}")
    except ValueError as error:
        checker.problem(str(error))
        return
    for name, source in mixed.parts.items():
        share = mixed.weights[name] / sum(mixed.weights.values())
        checker.console.print()
        checker.say(name, f"{len(source)} conversations, {share:.0%} of the draws", style="bold magenta")
        for note in source.warnings:
            checker.say("note", note)
        for number in range(min(show, len(source))):
            _show(checker, source, number)
        _read(checker, source, rows)
    for name, source in held_out.parts.items() if held_out else ():
        checker.console.print()
        checker.say(name, f"{len(source)} conversations held out", style="bold magenta")
        _read(checker, source, rows)


async def _samples(checker: CheckOutput, task: Task) -> list[Sample]:
    from vlmrl.samples.conversation import samples_of_conversation

    limits: dict[str, Any] = {"max_tokens": checker.config.max_tokens, "seconds": checker.config.env_timeout}
    return await samples_of_conversation(task, checker.reader.renderer, checker.store, **limits)


def _show(checker: CheckOutput, source: TaskSource, number: int) -> None:
    """Print a row: its text with what has a loss between arrows and in green, a special token in brackets."""
    from vlmrl.multimodal.masks import RowError
    from vlmrl.samples.conversation import render_conversation

    try:
        task = source.draw(number)
        samples = asyncio.run(_samples(checker, task))
        rows = render_conversation(task, checker.reader.renderer)
    except RowError as error:
        return checker.problem(f"draw {number}: {error}")
    checker.heading(task.id)
    if len(rows) > 1:
        checker.say("rows", f"{len(rows)}, since the chat template changes earlier messages when others follow")
    for sample, row in zip(samples, rows, strict=True):
        trained, count = sum(sample.loss_mask), len(sample.media)
        checker.say("tokens", f"{len(sample)}, of which {trained} have a loss, and {count} image{'s' * (count != 1)}")
        images, text = iter(enumerate((item.num_tokens for item in sample.media), start=1)), Text()
        for ids, is_trained in row.pieces:
            piece = checker.marked(ids, images)
            text.append_text(
                Text.assemble(("▶", TRAINED), (piece.plain, TRAINED), ("◀", TRAINED)) if is_trained else piece
            )
        checker.console.print(text)


def _read(checker: CheckOutput, source: TaskSource, rows: int | None) -> None:
    """Read the rows with their images. Print their lengths, and each row that cannot be trained on."""
    from vlmrl.multimodal.masks import RowError

    bad: list[RowError] = []
    columns: dict[str, list[int]] = {"tokens": [], "trained": [], "images": []}

    async def read(number: int) -> list[Sample] | RowError:
        try:
            return await _samples(checker, source[number])
        except RowError as error:
            return error

    async def read_all(numbers: range) -> list[list[Sample] | RowError]:
        return await asyncio.gather(*map(read, numbers))

    count = len(source) if rows is None else min(rows, len(source))
    for start in range(0, count, AT_ONCE):
        for found in asyncio.run(read_all(range(start, min(start + AT_ONCE, count)))):
            if isinstance(found, RowError):
                bad.append(found)
                continue
            columns["tokens"].append(sum(map(len, found)))
            columns["trained"].append(sum(sum(sample.loss_mask) for sample in found))
            columns["images"].append(len(found[-1].media))
    checker.heading(f"{count} of {len(source)} rows read")
    checker.console.print(quantiles(columns))
    for error in bad[:MAX_LISTED]:
        checker.problem(f"{error.reason}: {error}")
    reasons = Counter(error.reason for error in bad)
    why = f" ({', '.join(f'{number} {reason}' for reason, number in reasons.most_common())})" if bad else ""
    style = "bold red" if bad else "bold green"
    checker.say("result", f"{count - len(bad)} of {count} rows can be trained on{why}", style=style)
