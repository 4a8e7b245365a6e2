"""The output of `vlmrl data check` for tasks and conversations: labelled lines, marked text, tables of lengths."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Console
from rich.markup import escape
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from vlmrl.config import Config

MAX_LISTED = 100  # broken rows that are named


class CheckOutput:
    """Prints rows as the model of ``config`` reads them. ``problems`` counts those that cannot be used."""

    def __init__(self, config: Config, console: Console) -> None:
        from vlmrl.model.loading import load_reader

        self.config = config.rollout
        self.console = console
        self.reader = load_reader(config.model, config.models_dir)
        self.store = self.reader.new_store()
        self.problems = 0

    def say(self, label: str, text: str, style: str = "bold") -> None:
        line = Table.grid()
        line.add_column(width=10, style=style)
        line.add_column(overflow="fold")
        line.add_row(Text(label), Text(text))
        self.console.print(line)

    def heading(self, text: str) -> None:
        """An empty line, and ``text`` before a rule."""
        self.console.print()
        self.console.print(Rule(f"[bold]{escape(text)}[/bold]", align="left", style="dim"))

    def marked(self, token_ids: Sequence[int], images: Iterator[tuple[int, int]]) -> Text:
        """The text, with special tokens in brackets to distinguish them from text of the same spelling.

        ``images``: the number and the tokens of each image whose placeholder the text has.
        """
        renderer, text = self.reader.renderer, Text()
        special = {index for index, token in self.reader.tokenizer.added_tokens_decoder.items() if token.special}
        for is_special, run in groupby(token_ids, special.__contains__):
            if not is_special:
                text.append(renderer.decode(list(run)))
                continue
            for token in run:
                if token == renderer.image_token_id:
                    index, size = next(images)
                    text.append(f"⟦image {index}: {tokens_text(size)}⟧", "cyan")
                else:
                    text.append(f"⟦{renderer.decode([token])}⟧", "magenta")
        return text

    def problem(self, text: str) -> None:
        self.problems += 1
        self.say("problem", text, "bold red")


def tokens_text(number: int) -> str:
    return "1 token" if number == 1 else f"{number} tokens"


def quantiles(columns: dict[str, list[int]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("", "mean", "min", "median", "p95", "max"):
        table.add_column(title, justify="right" if title else "left", style=None if title else "bold")
    for name, values in columns.items():
        if values:
            ordered = sorted(values)
            quantiles = [ordered[round(share * (len(ordered) - 1))] for share in (0, 0.5, 0.95, 1)]
            table.add_row(f"{name:<9}", f"{statistics.fmean(values):.1f}", *map(str, quantiles))
    return table
