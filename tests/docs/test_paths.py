"""Every file and folder that README.md, CONTRIBUTING.md and the docs name exists, and the two trees list every folder."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = "vlmrl|envs|datasets|recipes|benchmarks|docs|tests|assets"
ROOMS = sorted(folder.name for folder in (ROOT / "vlmrl").iterdir() if (folder / "__init__.py").exists())
PATH = re.compile(rf"(?<![\w./-])(?:\.\./)?((?:{FOLDERS})/[\w./-]*\w)")
# `train/trainer.py` or `weight_sync/`; not metrics.
IN_VLMRL = re.compile(rf"`((?:{'|'.join(ROOMS)})/(?:[\w/]*(?:\.py|/))?)`")
EXAMPLES = {"vlmrl/families/my_vl.py", "datasets/__init__.py"}


def tree_of(page: str) -> dict[str, list[str]]:
    """The rooms in a page's drawn tree, each with the ``*.py`` names in its lines."""
    block = re.search(r"```\nvlmrl/\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert block is not None
    rooms: dict[str, list[str]] = {}
    for line in block[1].splitlines():
        if not line.startswith("  "):
            break  # the folders beside vlmrl/
        if name := re.match(r"  (\w+)/ ", line):
            rooms[name[1]] = []
        if rooms:
            rooms[list(rooms)[-1]] += re.findall(r"[\w/]+\.py", line)
    return rooms


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_are_there(page):
    text = page.read_text()
    named = set(PATH.findall(text)) - EXAMPLES
    named |= {f"vlmrl/{path}" for path in IN_VLMRL.findall(text)}
    assert not {path for path in named if not (ROOT / path).exists()}


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md"])
def test_the_tree_lists_every_room_and_only_files_that_are_there(page):
    rooms = tree_of(page)
    assert sorted(rooms) == ROOMS
    missing = [f"{room}/{name}" for room, names in rooms.items() for name in names]
    assert not [path for path in missing if not (ROOT / "vlmrl" / path).exists()]


def test_the_table_of_the_cluster_page_lists_every_file_of_its_folder():
    table = (ROOT / "docs/cluster.md").read_text().partition("| file in `vlmrl/cluster/` |")[2].partition("\n\n")[0]
    files = {path.name for path in (ROOT / "vlmrl/cluster").glob("*.py")} - {"__init__.py"}
    assert set(re.findall(r"`(\w+\.py)`", table)) == files
