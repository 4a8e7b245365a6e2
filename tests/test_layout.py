"""The layout of the package: rooms on the top level, and one name for one thing."""

import ast
from collections import defaultdict
from pathlib import Path

VLMRL = Path(__file__).parent.parent / "vlmrl"
SHARED_FILE_NAMES = {"__init__.py", "base.py"}  # of each room: its contract
SERVER_FILE_NAMES = {"backend.py", "requests.py", "receiver.py"}  # of each folder of a server program


def test_the_top_level_holds_rooms_and_the_nouns():
    files = {path.name for path in VLMRL.iterdir() if path.is_file()}
    assert files == {"__init__.py", "__main__.py", "parts.py", "types.py", "py.typed"}


def test_no_two_public_names_mean_two_things():
    places = defaultdict(set)
    for path in sorted(VLMRL.rglob("*.py")):
        if path == VLMRL / "__init__.py":  # `vlmrl.main` runs a recipe, as `vlmrl.cli.main.main` runs a command
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith(
                "_"
            ):
                places[node.name].add(str(path.relative_to(VLMRL)))
    twice = {name: sorted(where) for name, where in places.items() if len(where) > 1}
    assert not twice


def test_no_two_files_share_a_name():
    places = defaultdict(set)
    for path in sorted(VLMRL.rglob("*.py")):
        if path.name in SERVER_FILE_NAMES and path.parent.parent == VLMRL / "engine":
            continue
        if path.name not in SHARED_FILE_NAMES:
            places[path.name].add(str(path.relative_to(VLMRL)))
    twice = {name: sorted(where) for name, where in places.items() if len(where) > 1}
    assert not twice
