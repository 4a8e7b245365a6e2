"""The documentation site: every page is in its navigation, and every link and anchor of every page resolves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import vlmrl
from vlmrl.report.advisories import CHECKS, PAGE

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "envs").rglob("README.md")),
]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def text_of(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings: lower case, without punctuation, with dashes for spaces."""
    titles = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).strip().lower() for title in titles]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


def pages_of(nav: list | dict | str) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for part in (nav.values() if isinstance(nav, dict) else nav) for page in pages_of(part)]


def test_every_page_is_in_the_navigation_once():
    text = (ROOT / "mkdocs.yml").read_text()
    listed = pages_of(yaml.safe_load(text[text.index("\nnav:") :])["nav"])
    assert sorted(listed) == sorted(str(page.relative_to(ROOT)) for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_anchors_resolve(page):
    for link in LINK.findall(text_of(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), link


def test_the_reference_has_every_public_name():
    page = (ROOT / "docs/reference.md").read_text()
    assert not [name for name in vlmrl.__all__ if not re.search(rf"(\.|`){name}\b", page)]
    for module, name in re.findall(r"^::: ([\w.]+)\.(\w+)$", page, re.MULTILINE):
        assert hasattr(__import__(module, fromlist=[name]), name)


def test_every_advisory_has_its_section():
    assert set(CHECKS) <= anchors_of(ROOT / PAGE)
