"""Divergences from a teacher: hand-computed numbers, limits, and what clipping leaves."""

from __future__ import annotations

import math

import pytest
import torch

from vlmrl.algos.distillation import (
    DIVERGENCES,
    add_sampled,
    clipped,
    divergence_of,
    forward_kl,
    jensen_shannon,
    reverse_kl,
    top_k_and_rest,
)
from vlmrl.algos.losses import LossInputs


def distributions(rows=5, classes=7):
    torch.manual_seed(0)
    return tuple((2 * torch.randn(rows, classes, dtype=torch.float64)).log_softmax(1) for _ in range(2))


def test_two_classes_by_hand():
    p, q = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.1]]).log()
    assert reverse_kl(p, q).item() == pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1), abs=1e-6)
    assert forward_kl(p, q).item() == pytest.approx(0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5), abs=1e-6)
    m = [0.25 * 0.9 + 0.75 * 0.5, 0.25 * 0.1 + 0.75 * 0.5]
    of_q = 0.9 * math.log(0.9 / m[0]) + 0.1 * math.log(0.1 / m[1])
    of_p = 0.5 * math.log(0.5 / m[0]) + 0.5 * math.log(0.5 / m[1])
    assert jensen_shannon(p, q, 0.25).item() == pytest.approx(0.25 * of_q + 0.75 * of_p, abs=1e-6)


def test_jensen_shannon_tends_to_the_two_kls():
    p, q = distributions()
    assert torch.allclose(jensen_shannon(p, q, 1e-6) / 1e-6, forward_kl(p, q), atol=1e-4)
    assert torch.allclose(jensen_shannon(p, q, 1 - 1e-6) / 1e-6, reverse_kl(p, q), atol=1e-4)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_top_k_of_all_classes_is_the_exact_one_and_fewer_are_a_lower_bound(name):
    p, q = distributions()
    exact = divergence_of(name)(p, q)
    for k in (7, 100):
        assert torch.allclose(divergence_of(name, top_k=k)(p, q), exact, atol=1e-12)
    few = divergence_of(name, top_k=2)(p, q)
    assert (few < exact).all() and (few > 0).all()
    parts = top_k_and_rest(p, q, 2)
    for part in parts:
        assert torch.allclose(part.exp().sum(1), torch.ones(5, dtype=torch.float64))


def test_a_clipped_token_has_no_gradient():
    values = torch.tensor([0.5, 3.0], requires_grad=True)
    limited, outside = clipped(values, 1.0)
    limited.sum().backward()
    assert limited.tolist() == [0.5, 1.0] and outside.tolist() == [0, 1] and values.grad.tolist() == [1, 0]


def test_the_sampled_form_adds_the_teachers_lead_where_it_is_known():
    ones = torch.ones(1, 3)
    inputs = LossInputs(-ones, -2 * ones, -ones, ones, ones, teacher_logprobs=torch.tensor([[-1.0, -9.0, 0.0]]))
    changed, metrics = add_sampled(inputs, torch.tensor([[1.0, 1.0, 0.0]]), coef=0.5, limit=4.0)
    assert changed.advantages.tolist() == [[1.5, -1.0, 1.0]]  # leads of 1, -7 clipped to -4, and unknown
    assert metrics["teacher/clip_fraction"].tolist() == [[0, 1, 0]]
