"""docs/security.md: each server and input has a section and tests that exist, and each limit in italics is a setting."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from vlmrl.env.browser.browser_pool import PoolLimits
from vlmrl.env.remote.env_server import EnvServerArguments
from vlmrl.retrieval.retrieval_server import RetrieverServerArguments

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/security.md").read_text()
SECTIONS = re.findall(r"^### (.+)$", PAGE, re.MULTILINE)
TESTS = dict(re.findall(r"^- \*\*(.+?)\*\*(.*(?:\n  .*)*)", PAGE.partition("\n## Tests\n")[2], re.MULTILINE))
SETTINGS = re.findall(r"^- `([\w.]+)`", (ROOT / "docs/settings.md").read_text(), re.MULTILINE)
LISTENS = re.compile(r"\b(open_port|run_server|ServerThread)\(")
SERVERS = {  # the files that listen, and their sections
    "gateway/gateway_server.py": "gateway",
    "env/remote/env_server.py": "vlmrl env serve",
    "retrieval/retrieval_server.py": "vlmrl retriever serve",
    "cli/view.py": "vlmrl view",
}
OWN_CODE = "it is code, and runs"  # of what nothing holds back


@cache
def functions_of(path: Path) -> set[str]:
    parts = ast.parse(path.read_text()).body
    return {part.name for part in parts if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_each_line_of_the_tables_has_a_section_and_tests():
    linked = re.findall(r"^\| \[[^\]]+\]\(#([\w-]+)\)", PAGE, re.MULTILINE)
    assert linked == [re.sub(r"[^\w\s-]", "", section).lower().replace(" ", "-") for section in SECTIONS]
    assert list(TESTS) == SECTIONS


@pytest.mark.parametrize("section", SECTIONS)
def test_each_section_names_tests_that_exist(section):
    files = re.findall(r"`(tests/[\w/]+\.py)`:((?:\s+`test_\w+`,?)+)", TESTS[section])
    named = [(ROOT / path, name) for path, names in files for name in re.findall(r"test_\w+", names)]
    assert named or OWN_CODE in TESTS[section]
    assert len(named) == len(re.findall(r"`test_\w+`", TESTS[section]))
    assert [name for path, name in named if not path.is_file() or name not in functions_of(path)] == []


def test_every_file_that_listens_has_a_section():
    files = {str(path.relative_to(ROOT / "vlmrl")): path.read_text() for path in (ROOT / "vlmrl").rglob("*.py")}
    assert {name for name, text in files.items() if LISTENS.search(text)} - {"utils/http_server.py"} == SERVERS.keys()
    assert set(SERVERS.values()) <= set(SECTIONS)


def test_limits_in_italics_are_settings():
    options = {
        field.name for kind in (EnvServerArguments, RetrieverServerArguments, PoolLimits) for field in fields(kind)
    }
    named = re.findall(r"\*`([\w.-]+)`\*", PAGE)
    assert len(named) > 10
    assert [name for name in named if name not in SETTINGS and name.strip("-").replace("-", "_") not in options] == []
