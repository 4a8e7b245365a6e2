"""The mismatch between the trainer's and the rollout's logprobs, of whatever a server reported."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from testing.fakes import make_trajectory, two_turns

from vlmrl.checks.logprob_mismatch import record_trained, turn_mismatches
from vlmrl.report.run_log import RunLog
from vlmrl.samples import step_wise


def test_k3_is_the_mean_of_exp_d_minus_1_minus_d():
    trajectory = make_trajectory("t", two_turns())
    samples = step_wise(trajectory)
    [first, _] = turn_mismatches(
        [trajectory], samples, [np.array(row.rollout_logprobs, np.float32) + 0.5 for row in samples]
    )
    assert (first.mean, first.max, first.k3) == pytest.approx((0.5, 0.5, math.exp(0.5) - 1.5), rel=1e-5)


@pytest.mark.parametrize("reported", [-1000.0, -1e30])
def test_a_logprob_that_no_model_has_does_not_end_the_run_by_its_metrics(reported: float, tmp_path: Path):
    trajectory = make_trajectory("t", two_turns())
    samples = step_wise(trajectory)
    for row in samples:
        row.rollout_logprobs, row.advantage = [reported] * len(row.response_ids), 1.0
    trained = [np.full(len(row.response_ids), -1.0, np.float32) for row in samples]
    with RunLog(tmp_path) as log:
        log.log(1, record_trained([trajectory], samples, trained))
        [row] = log.rows()
    assert row["logprob_mismatch/max"] == -1.0 - reported
    assert row["logprob_mismatch/k3"] == pytest.approx(math.exp(20) - 21)
