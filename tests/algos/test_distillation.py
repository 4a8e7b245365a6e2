"""Divergences from a teacher: hand-computed numbers, limits, and what clipping leaves."""

from __future__ import annotations

import math

import pytest
import torch

from vlmrl.algos.distillation import (
    DIVERGENCES,
    add_sampled,
    clipped,
    coefficient,
    divergence_of,
    forward_kl,
    image_weights,
    jensen_shannon,
    listed_and_rest,
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


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_list_of_the_teachers_most_likely_classes_leaves_the_rest_of_1(name):
    """As a server sends it: the same as cutting the whole distribution, for 2 classes and for all 7."""
    p, q = distributions()
    for k in (2, 7):
        listed = q.topk(k, dim=1)
        found = divergence_of(name)(*listed_and_rest(p, listed.indices, listed.values))
        assert torch.allclose(found, divergence_of(name, top_k=k)(p, q), atol=1e-12)
    whole = torch.tensor([[0.0, -60.0, -70.0]])  # rounded to float32, the first class leaves nothing
    mine = torch.tensor([[0.5, 0.25, 0.25]]).log().requires_grad_()
    value = divergence_of(name)(*listed_and_rest(mine, torch.tensor([[0]]), whole[:, :1]))
    value.sum().backward()
    assert torch.isfinite(value).all() and torch.isfinite(mine.grad).all()


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_listed_class_that_the_policy_may_not_sample_counts_in_the_rest(name):
    """A server bans no ids, and may list one."""
    logits = torch.tensor([[0.0, 1.0, torch.finfo(torch.float32).min, 2.0]]).requires_grad_()
    listed, ids = torch.tensor([[0.5, 0.2]]).log(), torch.tensor([[1, 2]])
    value = divergence_of(name)(*listed_and_rest(logits.log_softmax(1), ids, listed))
    assert value.item() == pytest.approx(
        divergence_of(name)(*listed_and_rest(logits.log_softmax(1), ids[:, :1], listed[:, :1])).item()
    )
    value.sum().backward()
    assert logits.grad.isfinite().all() and logits.grad[0, 2] == 0


@pytest.mark.parametrize("name", DIVERGENCES)
def test_listed_classes_that_the_policy_does_not_have_count_in_the_rest(name):
    """A teacher's larger head may have more padded rows: here the ids 4 and 9, of a policy with four."""
    logits = torch.tensor([[0.0, 1.0, 0.5, 2.0]]).requires_grad_()
    listed, ids = torch.tensor([[0.5, 0.2, 0.1]]).log(), torch.tensor([[3, 4, 9]])
    value = divergence_of(name)(*listed_and_rest(logits.log_softmax(1), ids, listed))
    wanted = divergence_of(name)(*listed_and_rest(logits.log_softmax(1), ids[:, :1], listed[:, :1]))
    assert value.item() == pytest.approx(wanted.item())
    gradients = [torch.autograd.grad(each.sum(), logits)[0] for each in (value, wanted)]
    assert torch.allclose(*gradients) and gradients[0].abs().max() > 0.01


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


def test_the_coefficient_goes_to_its_end_in_a_straight_line():
    assert [coefficient(2.0, 0.5, done) for done in (0.0, 0.5, 1.0)] == [2.0, 1.25, 0.5]
    assert coefficient(2.0, None, 0.5) == 2.0


def test_tokens_that_depend_on_an_image_have_their_share_of_the_mean():
    """One of four gains 3 nats by its image: with a share of 0.5 it has half of the weight, the others the other half."""
    gains = torch.tensor([0.0, 3.0, -0.5, 0.1])
    weights = image_weights(gains, 0.5)
    assert weights.tolist() == pytest.approx([2 / 3, 2, 2 / 3, 2 / 3]) and weights.mean().item() == pytest.approx(1)
    losses = torch.tensor([0.3, 0.8, 0.6, 0.9])
    assert (weights * losses).mean().item() == pytest.approx(0.5 * 0.8 + 0.5 * (0.3 + 0.6 + 0.9) / 3)
    assert image_weights(torch.zeros(3), 0.5).tolist() == [1, 1, 1]
