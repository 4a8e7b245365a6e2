"""Reductions against weights worked out by hand."""

import pytest
import torch

from vlmrl.algos import REDUCTIONS


def test_token_mean_counts_the_whole_mini_batch():
    weights = REDUCTIONS["token_mean"](torch.tensor([[1.0, 0.0], [1.0, 1.0]]), ["a", "b"])
    assert torch.allclose(weights, torch.tensor([[1 / 3, 0.0], [1 / 3, 1 / 3]]))


def test_prompt_mean_gives_each_group_the_same_weight():
    mask = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    weights = REDUCTIONS["prompt_mean"](mask, ["a", "b", "b"])
    assert torch.allclose(weights, torch.tensor([[1 / 2, 0.0], [1 / 6, 1 / 6], [0.0, 1 / 6]]))
    masked = REDUCTIONS["prompt_mean"](torch.tensor([[0.0, 0.0], [1.0, 1.0]]), ["a", "b"])
    assert torch.allclose(masked, torch.tensor([[0.0, 0.0], [0.5, 0.5]]))


def test_prompt_mean_finds_a_groups_rows_wherever_they_stand():
    # Group a: rows 0 and 2 with 1 + 3 tokens: 1/2 * 1/4 each. Group b: row 1 with 2 tokens: 1/2 * 1/2 each.
    mask = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
    weights = REDUCTIONS["prompt_mean"](mask, ["a", "b", "a"])
    assert torch.allclose(weights, torch.tensor([[0, 1 / 8, 0], [1 / 4, 0, 1 / 4], [1 / 8, 1 / 8, 1 / 8]]))


def test_sequence_mean_gives_each_row_the_same_weight():
    # Three rows, one of them without trained tokens: 1/2 each for the two, over 1 and 2 tokens.
    mask = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [1.0, 0.0, 1.0]])
    weights = REDUCTIONS["sequence_mean"](mask, ["a", "a", "b"])
    assert torch.allclose(weights, torch.tensor([[0, 1 / 2, 0], [0, 0, 0], [1 / 4, 0, 1 / 4]]))


def test_seq_mean_token_sum_norm_gives_each_token_the_same_weight_whatever_its_rows_length():
    # Norm 10 and two rows with trained tokens: 1 / (10 * 2) for each token.
    mask = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    weights = REDUCTIONS["seq_mean_token_sum_norm"](mask, ["a", "b", "b"], norm=10)
    assert torch.allclose(weights, torch.tensor([[1 / 20, 0.0], [1 / 20, 1 / 20], [0.0, 0.0]]))
    assert REDUCTIONS["seq_mean_token_sum_norm"](mask, ["a", "b", "b"])[0, 0] == 1 / 2048  # the default norm, 1024


def test_seq_mean_token_sum_norm_refuses_a_norm_of_0():
    with pytest.raises(ValueError, match="norm must be greater than 0, but it is 0"):
        REDUCTIONS["seq_mean_token_sum_norm"](torch.ones(1, 2), ["a"], norm=0)


@pytest.mark.parametrize("name", ["token_mean", "prompt_mean", "sequence_mean"])
def test_the_weights_of_a_mean_sum_to_one_and_a_single_token_has_it_all(name):
    mask = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0, 0.0]])
    assert REDUCTIONS[name](mask, ["a", "b", "a", "c"]).sum() == pytest.approx(1.0)
    assert REDUCTIONS[name](torch.tensor([[0.0, 1.0, 0.0]]), ["a"]).tolist() == [[0.0, 1.0, 0.0]]


@pytest.mark.parametrize("name", REDUCTIONS)
def test_padding_and_rows_without_trained_tokens_change_nothing_and_weigh_nothing(name):
    mask = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    padded = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    weights = REDUCTIONS[name](padded, ["a", "c", "b"])
    assert torch.allclose(weights[[0, 2], :2], REDUCTIONS[name](mask, ["a", "b"]))
    assert not weights[padded == 0].any()
    assert REDUCTIONS[name](torch.zeros(2, 3), ["a", "b"]).tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_row_of_a_hundred_thousand_tokens_keeps_positive_weights(name):
    assert (REDUCTIONS[name](torch.ones(2, 100_000), ["a", "b"]) > 0).all()
