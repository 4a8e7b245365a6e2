"""docs/security.md names a test for each line of its tables, settings that exist, and every server of the package."""

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
ROWS = [line for line in (ROOT / "docs/security.md").read_text().splitlines() if line.startswith("| ")]
SETTINGS = re.findall(r"^- `([\w.]+)`", (ROOT / "docs/settings.md").read_text(), re.MULTILINE)
LISTENS = re.compile(r"\b(open_port|run_server|ServerThread)\(")
SERVERS = {  # the files that listen, and how their lines begin
    "gateway/gateway_server.py": "gateway, for agents",
    "env/remote/env_server.py": "`vlmrl env serve`",
    "retrieval/retrieval_server.py": "`vlmrl retriever serve`",
    "cli/view.py": "`vlmrl view --serve`",
}
BEGINNINGS = ("| --- |", "| server |", "| input |")
OWN_CODE = "is code, and runs"  # a line about what nothing holds back


@cache
def functions_of(path: Path) -> set[str]:
    parts = ast.parse(path.read_text()).body
    return {part.name for part in parts if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("row", [row for row in ROWS if not row.startswith(BEGINNINGS)], ids=lambda row: row[2:40])
def test_each_line_names_tests_that_exist(row):
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row)
    assert named or OWN_CODE in row
    assert [name for path, name in named if not (ROOT / path).is_file() or name not in functions_of(ROOT / path)] == []


def test_every_file_that_listens_has_a_line():
    files = {str(path.relative_to(ROOT / "vlmrl")): path.read_text() for path in (ROOT / "vlmrl").rglob("*.py")}
    assert {name for name, text in files.items() if LISTENS.search(text)} - {"utils/http_server.py"} == SERVERS.keys()
    for beginning in SERVERS.values():
        assert [row for row in ROWS if row.startswith(f"| {beginning} |")], beginning


def test_limits_in_italics_are_settings():
    options = {
        field.name for kind in (EnvServerArguments, RetrieverServerArguments, PoolLimits) for field in fields(kind)
    }
    named = re.findall(r"\*`([\w.-]+)`\*", "".join(ROWS))
    assert len(named) > 10
    assert [name for name in named if name not in SETTINGS and name.strip("-").replace("-", "_") not in options] == []
