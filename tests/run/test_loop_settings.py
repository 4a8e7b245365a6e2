"""The warning about an optimizer step from few groups, and the settings that all ranks must have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest

from vlmrl.config import Config, Lora, Model, Train
from vlmrl.report.records import flat, plain
from vlmrl.run.loop import small_step_warning
from vlmrl.run.program import check_ranks
from vlmrl.train.ranks import Ranks


@pytest.mark.parametrize(
    ("train", "groups", "warns"),
    [
        (Train(groups_per_batch=16), 16, False),
        (Train(groups_per_batch=16), 9, False),
        (Train(groups_per_batch=16), 8, True),
        (Train(groups_per_batch=16), 1, True),
        (Train(groups_per_batch=16), 0, False),  # no optimizer step
        (Train(groups_per_batch=16, groups_per_step=4), 5, False),
        (Train(groups_per_batch=16, groups_per_step=4), 2, True),
        (Train(groups_per_batch=1), 1, False),
    ],
)
def test_half_of_the_groups_or_fewer_are_reported(train, groups, warns):
    warning = small_step_warning(Config(train=train), 7, groups)
    assert (warning is not None) is warns
    if warning:
        assert warning.startswith(f"warning: step 7 took an optimizer step from {groups} of")


class Beside(Ranks):
    """Rank 0 of two, whose other rank differs by ``other``."""

    other: ClassVar[dict[str, Any]] = {}

    def gather(self, item: Any) -> list[Any]:
        return [item, item | self.other]


def test_a_rank_with_other_settings_is_refused_before_any_model_is_loaded():
    """It would scale its adapters by another factor, so that its gradients are of another model, or hang in a collective."""
    config = Config(model=Model(path="a", lora=Lora(rank=4, alpha=8)))
    ranks = Beside(0, 2)
    check_ranks(config, ranks)
    ranks.other.update(flat(plain({"model": {"lora": Lora(rank=4, alpha=800)}})))
    with pytest.raises(
        ValueError, match=r"model\.lora\.alpha must be the same on all ranks, but it is 8 on rank 0 and 800 on rank 1"
    ):
        check_ranks(config, ranks)
    ranks.other.clear()
    elsewhere = replace(config, model=replace(config.model, path="/scratch/a", device="cuda"))
    seen = []
    ranks.gather = lambda item: seen.append(item) or [item]
    for each in (config, elsewhere):
        check_ranks(each, ranks)
    assert seen[0] == seen[1]
