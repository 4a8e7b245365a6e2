"""Every setting with its default and its help text, as docs/settings.md shows them.

python docs/settings.py          # writes docs/settings.md
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from vlmrl.config import Config, Conversations, Part, name_of

PAGE = Path(__file__).with_suffix(".md")
INTRODUCTION = """# Settings

Every setting of a run: a field of `vlmrl.Config`, which a recipe returns, and an option on the command line (`--optim.lr 1e-5`).
`vlmrl train RECIPE --help` prints them with the recipe's values. `python docs/settings.py` writes this page from the fields.
"""


@dataclass(frozen=True)
class Setting:
    name: str
    """With its sections: ``model.lora.rank``."""
    default: Any
    help: str
    """One line or several, each of which begins a sentence or a value."""


def settings(section: Any = Config, prefix: str = "") -> Iterator[Setting]:
    """The settings of a section and of the sections in it, in order."""
    types, helps = typing.get_type_hints(section), _help_texts(section)
    for each in dataclasses.fields(section):
        if dataclasses.is_dataclass(types[each.name]):
            yield from settings(types[each.name], f"{prefix}{each.name}.")
        else:
            default = each.default if each.default_factory is MISSING else each.default_factory()
            yield Setting(prefix + each.name, default, helps.get(each.name, ""))


def _help_texts(section: type) -> dict[str, str]:
    """The string below each field, of this class and of those that it extends."""
    texts = {}
    for cls in reversed(section.__mro__):
        if dataclasses.is_dataclass(cls):
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
            assert isinstance(tree, ast.ClassDef)
            for field, after in zip(tree.body, tree.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
                    texts[ast.unparse(field.target)] = inspect.cleandoc(ast.literal_eval(after.value))
    return texts


def page() -> str:
    """The text of docs/settings.md."""
    parts = [INTRODUCTION]
    found = list(settings())
    sections = dict.fromkeys(each.name.rpartition(".")[0] for each in found)
    for section in sorted(sections, key=lambda name: (name != "", name)):
        chosen = [each for each in found if each.name.rpartition(".")[0] == section]
        parts.append(f"## {f'`{section}`' if section else 'Of the run'}\n\n" + "\n".join(map(_item, chosen)) + "\n")
    own = [each for each in settings(Part, "mixture.NAME.") if "data." not in each.name]
    parts.append(
        "## Parts of a mixture\n\n`mixture.NAME.data` and `mixture.NAME.eval_data` have the settings of `data` and `eval.data`.\n\n"
        + "\n".join(map(_item, own))
        + "\n"
    )
    conversations = map(_item, settings(Conversations, "sft.data.NAME."))
    parts.append("## Conversations of `sft.data`\n\n" + "\n".join(conversations) + "\n")
    return "\n".join(parts)


def _item(setting: Setting) -> str:
    value = setting.default
    shown = "unset" if value is None or value in ((), {}) else f"`{name_of(value)}`"
    return f"- `{setting.name}` ({shown})\n" + textwrap.indent(setting.help, "  ")


if __name__ == "__main__":
    PAGE.write_text(page())
