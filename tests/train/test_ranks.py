"""Metrics of many micro-batches as one number each, and each rank's share of the micro-batches."""

from __future__ import annotations

import pytest
import torch

from vlmrl.train.ranks import MetricAccumulator, Ranks

CPU = torch.device("cpu")


def result(tokens: float, *added: tuple[str, torch.Tensor, torch.Tensor]) -> dict[str, float]:
    accumulator = MetricAccumulator()
    for name, value, mask in added:
        accumulator.add(name, value, mask)
    return accumulator.result(tokens, Ranks(), CPU)


def test_means_are_over_trained_tokens_and_maxima_over_micro_batches():
    one, three = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 1.0, 1.0]])
    of_tokens = [("kl", torch.tensor([[9.0, 2.0]]), one), ("kl", torch.tensor([[1.0, 2.0, 3.0]]), three)]
    of_parts = [("ratio", torch.tensor(0.8), one), ("ratio", torch.tensor(1.2), three)]
    largest = [("ratio_max", torch.tensor(1.5), one), ("ratio_max", torch.tensor(1.25), three)]
    assert result(4.0, *of_tokens, *of_parts, *largest) == pytest.approx({"kl": 2.0, "ratio": 1.1, "ratio_max": 1.5})


def test_a_repeated_micro_batch_that_does_not_count_has_no_maximum():
    """As on a rank with fewer micro-batches than another: its last one is computed again, with a mask of zeros."""
    mask, none = torch.ones(1, 2), torch.zeros(1, 2)
    added = [("ratio_max", torch.tensor(1.5), mask), ("ratio_max", torch.tensor(7.0), none)]
    assert result(2.0, *added) == {"ratio_max": 1.5}


def test_a_maximum_over_tokens_is_over_trained_ones():
    value, mask = torch.tensor([[7.0, -2.0], [-3.0, 8.0]]), torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    assert result(2.0, ("drift_max", value, mask), ("drift_max", value, torch.zeros(2, 2))) == {"drift_max": -2.0}


def test_ranks_compute_neighbours_at_the_same_time_and_repeat_the_last_where_there_are_too_few():
    assert Ranks().shard("abc") == [("a", True), ("b", True), ("c", True)]
    assert Ranks(0, 2).shard("abc") == [("a", True), ("c", True)]
    assert Ranks(1, 2).shard("abc") == [("b", True), ("c", False)]
