"""The reading path of docs/architecture.md: ten files that are there and can be read in an afternoon."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_LINES = 2500


def test_the_reading_path_is_short():
    page = (ROOT / "docs/architecture.md").read_text()
    table = page.partition("## Read these files")[2].partition("\n## ")[0]
    files = re.findall(r"^\| `([\w/.]+\.py)` \|", table, re.MULTILINE)
    assert len(files) == 10
    assert sum(len((ROOT / file).read_text().splitlines()) for file in files) <= MOST_LINES
