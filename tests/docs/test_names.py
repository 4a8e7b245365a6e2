"""Every setting that the docs and the README name is one, and every page that they link is there."""

import dataclasses
import re
import typing
from pathlib import Path

import pytest

from vlmrl import Config

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("envs/**/README.md"), ROOT / "benchmarks/README.md"]
)
SECTIONS = [field.name for field in dataclasses.fields(Config) if field.default_factory is not dataclasses.MISSING]


def names_a_setting(name: str) -> bool:
    kind: typing.Any = Config
    for part in name.split("."):
        fields = typing.get_type_hints(kind) if dataclasses.is_dataclass(kind) else {}
        if part not in fields:
            return False
        kind = fields[part]
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_settings_and_links_are_there(page):
    text = page.read_text()
    named = set(re.findall(rf"`((?:{'|'.join(SECTIONS)})\.(?!py\b)[a-z_]+(?:\.[a-z_]+)?)[ `]", text))
    # The first column of the porting tables.
    theirs = {
        name
        for line in text.splitlines()
        if line.startswith("|") and page.stem == "porting"
        for name in re.findall(r"`([a-z_.]+)`", line.split("|")[1])
    }
    if page.stem != "CHANGELOG":  # it also has the names that settings had
        assert not {name for name in named - theirs if not names_a_setting(name)}
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", prose) if "://" not in link]
    assert not [link for link in links if not (page.parent / link).exists()]


def test_both_columns_of_the_porting_tables_are_looked_at():
    ours = re.findall(r"^\| [^|]+ \| ([^|]*) \|", (ROOT / "docs/porting.md").read_text(), re.MULTILINE)
    names = {name for cell in ours for name in re.findall(r"`([a-z_.]+)`", cell)}
    assert len(names) > 40
    assert not {name for name in names if not names_a_setting(name)}
