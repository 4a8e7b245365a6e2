"""docs/settings.md has every setting, as the fields give them, and there are few enough to read."""

import importlib.util
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
SPEC = importlib.util.spec_from_file_location("settings_page", DOCS / "settings.py")
PAGE = importlib.util.module_from_spec(SPEC)
sys.modules["settings_page"] = PAGE  # its dataclass looks its types up here
SPEC.loader.exec_module(PAGE)


def test_the_page_is_that_of_the_fields():
    assert (DOCS / "settings.md").read_text() == PAGE.page(), "write it again: python docs/settings.py"


def test_there_are_at_most_138_settings_and_each_has_help():
    found = list(PAGE.settings())
    assert len({each.name for each in found}) == len(found) <= 138
    assert {"optim.lr", "model.lora.rank", "eval.data.size", "algo.options"} <= {each.name for each in found}
    assert not [each.name for each in found if not each.help]
