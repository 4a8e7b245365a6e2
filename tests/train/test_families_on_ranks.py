"""Trees of other families: two ranks over gloo, one of them without images, train as one process does."""

import json

import numpy as np
import pytest

from vlmrl.model.tiny import build

pytestmark = pytest.mark.slow

FAMILIES = ["qwen3_5", "glm4v", "smolvlm"]


@pytest.fixture(scope="module")
def results(preloaded, tmp_path_factory):
    """Of one process and of two ranks, by family."""
    out = tmp_path_factory.mktemp("ranks")
    folders = [build(out / "models" / family, family) for family in FAMILIES]
    for size in (1, 2):
        preloaded.run_ranks(size, "testing.families_on_ranks_script", out, *folders)
    return [json.loads((out / f"of{size}.json").read_text()) for size in (1, 2)]


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_train_the_trees_of_a_family_as_one(family, results):
    one, two = (result[family] for result in results)
    assert one["images"] == [True] and sorted(two["images"]) == [False, True]
    assert len({step["loss"] for step in one["metrics"]}) == 3  # or equal losses would say nothing
    for mine, theirs in zip(one["metrics"], two["metrics"], strict=True):
        assert theirs == pytest.approx(mine, abs=1e-5, rel=1e-5)
    for mine, theirs in zip(one["logprobs"], two["logprobs"], strict=True):
        assert max(np.abs(np.subtract(a, b)).max() for a, b in zip(mine, theirs, strict=True)) < 1e-4
    assert two["weights"] == pytest.approx(one["weights"], rel=1e-4)
