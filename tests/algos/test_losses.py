"""Losses and KL penalties against numbers and gradients worked out by hand."""

import math

import pytest
import torch

from vlmrl.algos import KL, LOSSES, REDUCTIONS, LossInputs
from vlmrl.algos.choose import choose, note_on_reduction
from vlmrl.config import Algo

E20 = math.exp(20.0)  # log-ratios are cut off at 20


def inputs(logprobs, old, advantages, mask, dtype=torch.float64):
    new, old, advantages, mask = (torch.tensor(rows, dtype=dtype) for rows in (logprobs, old, advantages, mask))
    return LossInputs(new.requires_grad_(), old, old, advantages, mask)


def one_row(probabilities, old, advantages, mask=None):
    logs = ([[math.log(p) for p in row]] for row in (probabilities, old))
    return inputs(*logs, [advantages], [mask or [1] * len(old)])


def values(data, name, **options):
    return LOSSES[name](data, **options).per_token.tolist()[0]


def gradient(data, name, **options):
    (grad,) = torch.autograd.grad(LOSSES[name](data, **options).per_token.sum(), data.logprobs)
    return grad.tolist()[0]


def central_difference(function, at, step=1e-6):
    """The gradient of a number in each entry of ``at``."""
    at, grad = at.detach(), torch.zeros_like(at)
    for place in range(at.numel()):
        nudge = torch.zeros_like(at)
        nudge.view(-1)[place] = step
        grad.view(-1)[place] = (function(at + nudge) - function(at - nudge)) / (2 * step)
    return grad


def test_ppo_clips_high_and_low_on_their_own():
    # Ratios 1.5 and 0.5 with advantages 1, -1: clip to 1.28 and 0.8.
    #   r=1.5, A=+1: min(1.5, 1.28) = 1.28 (clipped);  r=1.5, A=-1: min(-1.5, -1.28) = -1.5
    #   r=0.5, A=+1: min(0.5, 0.8) = 0.5;              r=0.5, A=-1: min(-0.5, -0.8) = -0.8 (clipped)
    data = one_row([0.6, 0.6, 0.2, 0.2], [0.4] * 4, [1.0, -1.0, 1.0, -1.0])
    got = LOSSES["ppo"](data, clip_low=0.2, clip_high=0.28)
    assert got.per_token.tolist()[0] == pytest.approx([-1.28, 1.5, -0.5, 0.8])
    assert got.metrics["clip_fraction"].tolist() == [[1.0, 0.0, 0.0, 1.0]]
    assert got.metrics["ratio"].tolist()[0] == pytest.approx([1.5, 1.5, 0.5, 0.5])
    assert gradient(data, "ppo") == pytest.approx([0.0, 1.5, -0.5, 0.0])  # no gradient where it is clipped


def test_dual_clip_bounds_what_a_negative_advantage_costs():
    # Ratios 4, 2, 1/2, 4 with A = -2, -1, -1, 1. PPO: 8, 2, 0.8, -1.28. The bound -cA is 6, 3, 3 and only for A < 0.
    data = one_row([0.8, 0.4, 0.1, 0.8], [0.2] * 4, [-2.0, -1.0, -1.0, 1.0])
    assert values(data, "dual_clip") == pytest.approx([6.0, 2.0, 0.8, -1.28])
    assert gradient(data, "dual_clip") == pytest.approx([0.0, 2.0, 0.0, 0.0])
    metrics = LOSSES["dual_clip"](data).metrics
    assert metrics["dual_clip_fraction"].tolist() == [[1.0, 0.0, 0.0, 0.0]]
    assert metrics["clip_fraction"].tolist() == [[0.0, 0.0, 1.0, 1.0]]
    assert values(data, "dual_clip", c=5.0) == pytest.approx([8.0, 2.0, 0.8, -1.28])


def test_gspo_has_one_ratio_a_row_the_geometric_mean_over_its_trained_tokens():
    # Row 0: ratios 4, 1: s = 2. Row 1: ratios 1/8, (masked), 1/2: s = sqrt(1/16) = 1/4.
    logs = (torch.tensor(rows).log().tolist() for rows in ([[8, 5, 9], [1, 9, 2.5]], [[2, 5, 1], [8, 1, 5]]))
    data = inputs(*logs, [[1.0, -1.0, 0.0], [2.0, 0.0, -1.0]], [[1, 1, 0], [1, 0, 1]])
    got = LOSSES["gspo"](data, clip_low=0.2, clip_high=0.28)
    trained = data.loss_mask > 0
    assert got.per_token[trained].tolist() == pytest.approx([-1.28, 2.0, -0.5, 0.8])
    assert got.metrics["ratio"][trained].tolist() == pytest.approx([2.0, 2.0, 0.25, 0.25])
    assert got.metrics["clip_fraction"][trained].tolist() == [1.0, 0.0, 0.0, 1.0]
    # Token form: s counts as constant, each token has the gradient -s A, and none where it is clipped.
    (grad,) = torch.autograd.grad((got.per_token * data.loss_mask).sum(), data.logprobs)
    assert grad[trained].tolist() == pytest.approx([0.0, 2.0, -0.5, 0.0]) and not grad[~trained].any()


def test_gspo_clips_at_3e_4_and_4e_4():
    for ratio, advantage, expected in ((1.0005, 1, -1.0004), (1.00035, 1, -1.00035), (0.9995, -1, 0.9997)):
        assert values(one_row([0.5 * ratio], [0.5], [advantage]), "gspo") == pytest.approx([expected], abs=1e-9)


def test_gspo_gradient_under_sequence_mean_is_that_of_the_sequence_objective():
    # Equation 5: mean over rows of min(s A, clip(s) A), s a function of all the row's tokens, differenced numerically.
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0], [0, 1, 1, 0]], dtype=torch.float64)
    old = torch.tensor([[-1.0, -2, -0.5, -1], [-1, -0.3, 0, 0], [0, -2, -1, 0]], dtype=torch.float64)
    moved = torch.tensor([[0.1, 9, 0.05, -0.02], [0.6, 0.4, 9, 9], [9, -0.3, 0.2, 9]], dtype=torch.float64)
    advantages = torch.tensor([[1.5], [2.0], [-0.5]], dtype=torch.float64)  # row 1 is clipped: s = exp(0.5)

    def objective(logprobs):
        s = (((logprobs - old) * mask).sum(1) / mask.sum(1)).exp()
        return -torch.minimum(s * advantages[:, 0], s.clamp(0.8, 1.28) * advantages[:, 0]).mean()

    start = (old + moved).requires_grad_()
    data = LossInputs(start, old, old, advantages.expand(3, 4), mask)
    per_token = LOSSES["gspo"](data, clip_low=0.2, clip_high=0.28).per_token
    (grad,) = torch.autograd.grad((per_token * REDUCTIONS["sequence_mean"](mask, ["a", "b", "c"])).sum(), start)
    assert torch.allclose(grad, central_difference(objective, start), atol=1e-8)
    assert grad[0, 0] != 0 and not grad[1].any()


def test_cispo_clips_the_weight_and_keeps_the_gradient():
    # Ratios 8, 1/2 with log p = log 0.8, log 0.1: weights 5 (the default bound), 1/2.
    data = one_row([0.8, 0.1], [0.1, 0.2], [1.0, -2.0])
    assert values(data, "cispo") == pytest.approx([-5 * math.log(0.8), 0.5 * 2 * math.log(0.1)])
    assert gradient(data, "cispo") == pytest.approx([-5.0, 1.0])  # -weight A
    assert LOSSES["cispo"](data).metrics["clip_fraction"].tolist() == [[1.0, 0.0]]
    assert gradient(data, "cispo", ratio_min=0.75, ratio_max=2.0) == pytest.approx([-2.0, 1.5])


def test_sapo_gates_by_a_sigmoid_with_a_tau_for_each_sign():
    # r = 1: sigmoid(0) 4 / tau = 2 / tau: 2 and 2 / 1.05. r = 2, tau 1: 4 / (1 + exp(-1)) = 2.924234.
    data = one_row([0.2, 0.2, 0.4], [0.2] * 3, [1.0, -1.0, 1.0])
    assert values(data, "sapo") == pytest.approx([-2.0, 2 / 1.05, -2.924234])
    # At r = 1 the gradient is that of -r A; at r = 2: -4 sigmoid(1) (1 - sigmoid(1)) 2 = -1.572896.
    assert gradient(data, "sapo") == pytest.approx([-1.0, 1.0, -1.572896])
    # r = 3 with tau_neg 1/2: 8 sigmoid(1) = 5.848469.
    assert values(one_row([0.6], [0.2], [-1.0]), "sapo", tau_neg=0.5) == pytest.approx([5.848469])


def test_dppo_tv_drops_what_has_moved_too_far_in_the_wanted_direction():
    # Moves 0.5 -> 0.66 and 0.5 -> 0.34 (0.16 > 0.15), 0.5 -> 0.64 and 0.01 -> 0.1 (within, though r = 10).
    data = one_row([0.66, 0.66, 0.34, 0.34, 0.64, 0.1], [0.5] * 5 + [0.01], [1.0, -1.0, 1.0, -1.0, 1.0, 1.0])
    expected = [0.0, 1.32, -0.68, 0.0, -1.28, -10.0]  # -r A or nothing
    assert gradient(data, "dppo_tv") == pytest.approx(expected)
    assert torch.allclose(LOSSES["dppo_tv"](data).per_token, torch.tensor(expected).double() * data.logprobs)
    assert LOSSES["dppo_tv"](data).metrics["clip_fraction"].tolist() == [[1.0, 0.0, 0.0, 1.0, 0.0, 0.0]]
    assert gradient(data, "dppo_tv", ratio_max=4.0)[-1] == pytest.approx(-4.0)
    assert gradient(data, "dppo_tv", limit=0.25)[0] == pytest.approx(-1.32)


def test_dppo_kl_measures_from_the_old_policy_to_the_new():
    # 0.5 -> 0.7: 0.5 log(0.25 / 0.21) = 0.0872 > 0.05. 0.5 -> 0.6: 0.5 log(0.25 / 0.24) = 0.0204.
    # 0.1 -> 0.03: 0.1 log(10 / 3) + 0.9 log(90 / 97) = 0.0530 > 0.05; the other way round it would be 0.0365.
    data = one_row([0.7, 0.7, 0.6, 0.03, 0.03], [0.5, 0.5, 0.5, 0.1, 0.1], [1.0, -1.0, 1.0, -1.0, 1.0])
    assert gradient(data, "dppo_kl") == pytest.approx([0.0, 1.4, -1.2, 0.0, -0.3])
    expected = [0.0, 1.4 * math.log(0.7), -1.2 * math.log(0.6), 0.0, -0.3 * math.log(0.03)]
    assert values(data, "dppo_kl") == pytest.approx(expected)
    assert gradient(data, "dppo_kl", limit=0.054)[3] == pytest.approx(0.3)


def test_reinforce_is_the_advantage_times_the_logprob_and_sft_the_logprob_alone():
    data = inputs([[-0.5, -2.0]], [[-9.0, 0.0]], [[3.0, -1.0]], [[1, 0]])
    assert values(data, "reinforce") == [1.5, -2.0] and gradient(data, "reinforce") == [-3.0, 1.0]
    assert values(data, "sft") == [0.5, 2.0] and gradient(data, "sft") == [-1.0, -1.0]


# Weights the formula treats as constant, at ratios 2, 1/4, 1.1, 1, 8 from 0.1, with A = 1, -1, -1, 1/2, -2.
S = 4.4 ** (1 / 5)  # 2 * 1/4 * 1.1 * 1 * 8 = 4.4
CONSTANT = {
    "gspo": [0.0, S, S, 0.0, S],  # clipped where A > 0, S being more than 1.0004
    "cispo": [2.0, 0.25, 1.1, 1.0, 5.0],
    "dppo_tv": [2.0, 0.25, 1.1, 1.0, 8.0],
    "dppo_kl": [2.0, 0.0, 1.1, 1.0, 8.0],  # 0.1 -> 0.025: 0.1 log 4 + 0.9 log(0.9 / 0.975) = 0.0666 > 0.05
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_agree_with_central_differences(name):
    data = one_row([0.2, 0.025, 0.11, 0.1, 0.8], [0.1] * 5, [1.0, -1.0, -1.0, 0.5, -2.0])

    def loss(logprobs):
        if name in CONSTANT:  # the reference: -weight A log p with the weight held
            return -(torch.tensor(CONSTANT[name], dtype=torch.float64) * data.advantages * logprobs).sum()
        moved = LossInputs(logprobs, data.old_logprobs, data.old_logprobs, data.advantages, data.loss_mask)
        return LOSSES[name](moved).per_token.sum()

    expected = central_difference(loss, data.logprobs)
    assert gradient(data, name) == pytest.approx(expected.tolist()[0], abs=1e-6)
    assert expected.any()


@pytest.mark.parametrize("name", LOSSES)
def test_masked_tokens_do_not_change_the_others(name):
    def trained(p, old, advantage):
        data = one_row([0.2, p, 0.7], [0.1, old, 0.5], [1.0, advantage, -1.0], [1, 0, 1])
        got = LOSSES[name](data)
        (grad,) = torch.autograd.grad((got.per_token * data.loss_mask).sum(), data.logprobs)
        return [t[0, [0, 2]].tolist() for t in (got.per_token, grad, *got.metrics.values())], grad[0, 1]

    kept, masked = trained(0.5, 0.5, 0.0)
    assert trained(1e-20, 0.9, 1e6)[0] == kept and masked == 0


@pytest.mark.parametrize(("new", "old"), [(-math.inf, -1.0), (-1.0, -math.inf), (-math.inf, -math.inf)])
@pytest.mark.parametrize("name", LOSSES)
def test_a_masked_infinity_does_not_change_the_others(name, new, old):
    def trained(new, old):
        return values(inputs([[-1.0, -2.0, new]], [[-1.1, -2.2, old]], [[1.0, -1.0, 1.0]], [[1, 1, 0]]), name)[:2]

    assert trained(new, old) == trained(-1.0, -1.0)


@pytest.mark.parametrize("name", LOSSES)
def test_with_nothing_to_train_and_no_advantage_there_is_no_loss_but_sfts(name):
    data = inputs([[-1.0, -2.0]], [[-1.5, -1.0]], [[0.0, 0.0]], [[0, 0]])
    expected = ([1.0, 2.0], [-1.0, -1.0]) if name == "sft" else ([0.0, 0.0], [0.0, 0.0])
    assert (values(data, name), gradient(data, name)) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", LOSSES)
def test_log_ratios_of_50_stay_finite(name, dtype):
    for mask in ([[1, 1, 1, 1]], [[0, 1, 0, 1]], [[1, 0, 1, 0]]):  # gspo has one ratio a row
        data = inputs([[-0.5, -50.5] * 2], [[-50.5, -0.5] * 2], [[1.0, 1.0, -1.0, -1.0]], mask, dtype=dtype)
        got = LOSSES[name](data)
        assert all(tensor.isfinite().all() for tensor in (got.per_token, *got.metrics.values()))
        assert all(map(math.isfinite, gradient(data, name)))


def test_log_ratios_of_50_by_hand():
    # A = -1 and r cut off at exp(20): dual_clip's bound 3, cispo's 5, dppo's 20 (p went the other way), sapo's 4 / tau.
    data = inputs([[50.0]], [[0.0]], [[-1.0]], [[1]])
    names = ["ppo", "gspo", "dual_clip", "sapo", "cispo", "dppo_tv", "dppo_kl"]
    expected = [E20, E20, 3, 4 / 1.05, 5 * 50, 20 * 50, 20 * 50]
    assert [values(data, name)[0] for name in names] == pytest.approx(expected)
    assert values(inputs([[-50.0]], [[0.0]], [[-1.0]], [[1]]), "ppo") == pytest.approx([0.8])


@pytest.mark.parametrize(
    ("name", "expected", "slope"),  # log p - log ref = 0.5, -log 2
    [
        ("k1", [0.5, -math.log(2)], [1.0, 1.0]),
        ("k2", [0.125, math.log(2) ** 2 / 2], [0.5, -math.log(2)]),
        ("k3", [math.exp(-0.5) - 0.5, 1 - math.log(2)], [1 - math.exp(-0.5), -1.0]),  # ref / p = 2: 2 - 1 - log 2
        ("abs", [0.5, math.log(2)], [1.0, -1.0]),
    ],
)
def test_kl_values_and_gradients_of_either_sign(name, expected, slope):
    ref = torch.tensor([-1.5, -1.0], dtype=torch.float64)
    p = (ref + torch.tensor([0.5, -math.log(2)], dtype=torch.float64)).requires_grad_()
    got = KL[name](p, ref)
    assert got.tolist() == pytest.approx(expected)
    got.sum().backward()
    assert p.grad.tolist() == pytest.approx(slope)
    assert torch.allclose(p.grad, central_difference(lambda x: KL[name](x, ref).sum(), p), atol=1e-8)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("k1", [50, -50]), ("k2", [1250, 1250]), ("k3", [math.exp(-20) + 19, E20 - 21]), ("abs", [50, 50])],
)
def test_kl_of_log_ratios_of_50_is_finite_and_of_equal_probabilities_nothing(name, expected):
    p = torch.tensor([-1.0, -51.0], dtype=torch.float64)
    assert KL[name](p, p.flip(0)).tolist() == pytest.approx(expected)
    assert KL[name](p, p).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("chosen", "shares"), [(Algo(loss="gspo"), [0.5, 0.5]), (Algo(), [0.25, 0.75])])
def test_the_default_reduction_is_that_of_the_losss_source(chosen, shares):
    """GSPO's equations 5 and 10 give a row of 10 tokens and one of 30 the same share of the gradient; DAPO's mean is over tokens."""
    mask = torch.tensor([[1.0] * 10 + [0.0] * 20, [1.0] * 30])
    logprobs = torch.full((2, 30), -1.0, requires_grad=True)
    inputs = LossInputs(logprobs, logprobs.detach(), logprobs.detach(), torch.ones(2, 30), mask)
    per_token = choose(chosen, "loss")(inputs).per_token
    (per_token * choose(chosen, "reduction")(mask, ["a", "a"])).sum().backward()
    assert (-logprobs.grad.sum(1)).tolist() == pytest.approx(shares)


def test_another_reduction_than_that_of_the_source_is_said():
    assert note_on_reduction(Algo(loss="gspo")) == "" == note_on_reduction(Algo(loss="gspo", reduction="sequence_mean"))
    line = "reduction token_mean; the source of the loss gspo has sequence_mean"
    assert note_on_reduction(Algo(loss="gspo", reduction="token_mean")) == line
