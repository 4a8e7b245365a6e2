"""The warning about an optimizer step from few groups."""

from __future__ import annotations

import pytest

from vlmrl.config import Config, Train
from vlmrl.run.loop import small_step_warning


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
