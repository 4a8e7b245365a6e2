"""Each setting of the trainer does what it says to weights, gradient and logprobs. Expected numbers are worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from testing.trees import Watched

from vlmrl.config import Algo, Model, Optim
from vlmrl.model import tiny
from vlmrl.model.loading import LoadedModel, load_model
from vlmrl.train import master_weights
from vlmrl.train import trainer as trainer_module
from vlmrl.train.ranks import Ranks
from vlmrl.train.trainer import Trainer, TrainerSpec
from vlmrl.types import Sample


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.build(tmp_path_factory.mktemp("model") / "qwen3", "qwen3")


@pytest.fixture
def model(folder) -> LoadedModel:
    return load_model(Model(path=str(folder), device="cpu"), folder.parent, seed=0)


def row(name: str, response: list[int], mask: list[int], advantage: float = 1.0) -> Sample:
    size = len(response)
    lists = ([5, 6, 7], response, mask, [-1.0 * each for each in mask], [0] * size)
    return Sample(*lists, "g", name, True, "stop", advantage=advantage)


def two_rows(advantage: float = 1.0) -> list[Sample]:
    return [row("a", [10, 11, 12, 13], [1, 1, 0, 1], advantage), row("b", [20, 21], [1, 1], -2 * advantage)]


def spec_of(algo: Algo | None = None, optim: Optim | None = None, **changes) -> TrainerSpec:
    return TrainerSpec(
        algo or Algo(), optim or Optim(), **({"total_steps": 9, "tokens_per_micro_batch": 100} | changes)
    )


def copied(model: LoadedModel) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in model.policy.model.named_parameters()}


def moves(model: LoadedModel, before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: weight.detach() - before[name] for name, weight in model.policy.model.named_parameters()}


def distribution(model: LoadedModel, sample: Sample, temperature: float = 1.0) -> torch.Tensor:
    """The log-probabilities ``[response, vocabulary]`` by Hugging Face's own forward."""
    logits = model.policy.model(input_ids=torch.tensor([sample.token_ids])).logits[0].float() / temperature
    logits[:, list(model.policy.banned_ids)] = -torch.inf
    return logits.log_softmax(-1)[len(sample.prompt_token_ids) - 1 : -1]


def logprobs(model: LoadedModel, sample: Sample, temperature: float = 1.0) -> torch.Tensor:
    return distribution(model, sample, temperature)[range(len(sample.response_ids)), sample.response_ids]


def check_gradient(model: LoadedModel, trainer: Watched, rows: list[Sample], loss: torch.Tensor) -> None:
    """The trainer's gradient for ``rows`` is that of ``loss``, and is not zero."""
    trainer.step(rows)
    model.policy.zero_grad()
    loss.backward()
    assert sum(float(gradient.norm()) for gradient in trainer.gradient.values()) > 1e-3
    for name, parameter in model.policy.named_parameters():
        error = (parameter.grad - trainer.gradient[name]).norm()
        assert error <= 1e-4 * parameter.grad.norm() + 1e-7, name


def moved_a_bit(model: LoadedModel, scale: float = 0.02) -> None:
    """Move the weights, so that a reference that was copied before differs."""
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.policy.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=noise))


def test_weight_decay_shrinks_the_weights_by_the_learning_rate_times_the_decay(model):
    """Without advantages the gradient is zero, and only the decay of AdamW moves a weight: by 0.1 * 0.5 of it."""
    before = copied(model)
    Trainer(model.policy, spec_of(optim=Optim(lr=0.1, weight_decay=0.5))).step(two_rows(advantage=0.0))
    for name, weight in model.policy.model.named_parameters():
        torch.testing.assert_close(weight.detach(), 0.95 * before[name])


def test_without_weight_decay_a_zero_gradient_moves_nothing(model):
    before = copied(model)
    Trainer(model.policy, spec_of(optim=Optim(lr=0.1))).step(two_rows(advantage=0.0))
    assert all(not move.any() for move in moves(model, before).values())


def test_betas_are_those_of_adam(model):
    """A step with a gradient moves a weight by lr; one without it then by lr * b1/(1+b1) / sqrt(b2/(1+b2)).

    That is lr / 3 / sqrt(1/3) = 0.57735 lr for betas (0.5, 0.5), and 0.679 lr for the default (0.9, 0.95).
    """
    trainer = Trainer(model.policy, spec_of(optim=Optim(lr=1e-3, betas=(0.5, 0.5))))
    before = copied(model)
    trainer.step(two_rows())
    first, between = moves(model, before), copied(model)
    trainer.step(two_rows(advantage=0.0))
    second = moves(model, between)
    name = "lm_head.weight" if "lm_head.weight" in first else "model.embed_tokens.weight"
    moved = first[name].abs() > 0.99e-3  # where the gradient is far above Adam's epsilon
    assert moved.sum() > 100
    ratio = (second[name][moved] / first[name][moved]).median().item()
    assert ratio == pytest.approx(math.sqrt(1 / 3), rel=1e-2)


@pytest.mark.parametrize("clip", [1e-3, 1e3])
def test_the_gradient_is_clipped_to_its_largest_norm(model, clip):
    """After one step Adam's first moment is (1 - b1) of the clipped gradient."""
    trainer = Trainer(model.policy, spec_of(optim=Optim(grad_clip=clip, betas=(0.5, 0.5))))
    norm = trainer.step(two_rows()).metrics["grad_norm"]
    assert 1e-3 < norm < 1e3
    moments = [state["exp_avg"] for state in trainer.optimizer.state.values()]
    total = math.sqrt(sum(float(moment.square().sum()) for moment in moments))
    assert total == pytest.approx(0.5 * min(norm, clip), rel=1e-3)


def test_the_learning_rate_that_the_metric_shows_is_the_one_that_moves_the_weights(model):
    """Adam's first step moves a weight by the learning rate, which is half of the peak in a warmup of one step."""
    optim = Optim(lr=1e-3, warmup_steps=1, schedule="linear")
    trainer = Trainer(model.policy, spec_of(optim=optim, total_steps=2))
    rates, largest = [], []
    for _ in range(3):
        before = copied(model)
        rates.append(trainer.step(two_rows()).metrics["lr"])
        largest.append(max(float(move.abs().max()) for move in moves(model, before).values()))
    assert rates == pytest.approx([0.5e-3, 1e-3, 0.0])
    assert largest[0] == pytest.approx(0.5e-3, rel=1e-3)
    assert largest[1] > 0.5e-3 and largest[2] == 0.0


def test_a_step_trains_in_training_mode_and_leaves_the_policy_in_evaluation_mode(model):
    """Only in training mode checkpointed layers recompute their activations: each attention begins twice."""
    model.policy.enable_gradient_checkpointing()
    model.policy.eval()
    runs = []
    model.policy.model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda *_: runs.append(model.policy.training)
    )
    trainer = Trainer(model.policy, spec_of())
    trainer.step(two_rows())
    assert runs == [True, True]
    assert not model.policy.training


class Alone(Ranks):
    """One rank of several whose others are not there."""

    def sum(self, tensor):
        return tensor

    def max(self, tensor):
        return tensor

    def union(self, names):
        return list(names)


@pytest.mark.parametrize(("method", "in_steps"), [("score", False), ("step", True)])
def test_each_rank_computes_the_rows_that_rank_0_sends_images_for(model, method, in_steps, monkeypatch):
    rows = [
        replace(each, group_id=f"g{number}", trajectory_id=f"{number}{each.trajectory_id}")
        for number in range(3)
        for each in two_rows()
    ]
    spec = replace(spec_of(), groups_per_step=1, tokens_per_micro_batch=1)
    computed = []
    for rank in range(3):
        trainer, seen = Watched(model.policy, spec, ranks=Alone(rank, 3)), set()
        score = trainer._score

        def noted(policy, samples, plan, *more, score=score, seen=seen):
            seen.update(rows.index(samples[row]) for row in plan.rows)
            return score(policy, samples, plan, *more)

        monkeypatch.setattr(trainer, "_score", noted)
        getattr(trainer, method)(rows)
        computed.append(seen)
    assert trainer.rows_by_rank(rows, in_steps) == computed
    assert computed[0] != computed[1] and set().union(*computed) == set(range(6))


def test_logprobs_are_at_the_temperature_of_the_rollouts(model):
    rows = two_rows()
    expected = [logprobs(model, sample, temperature=2.0).detach().numpy() * sample.loss_mask for sample in rows]
    cold = [logprobs(model, sample).detach().numpy() * sample.loss_mask for sample in rows]
    trainer = Trainer(model.policy, spec_of(temperature=2.0))
    for scores in (trainer.score(rows), trainer.step(rows).logprobs):
        for sample, score, wanted, other in zip(rows, scores, expected, cold, strict=True):
            assert np.abs(score * sample.loss_mask - wanted).max() < 1e-5 < 1e-3 < np.abs(other - wanted).max()


def test_the_gradient_is_at_the_temperature_of_the_rollouts(model):
    rows = two_rows()
    terms = [-(logprobs(model, r, 2.0) * torch.tensor(r.loss_mask)).sum() * r.advantage / 5 for r in rows]
    check_gradient(model, Watched(model.policy, spec_of(temperature=2.0)), rows, sum(terms))


@pytest.mark.parametrize("kl", ["k2", "k3"])
def test_a_kl_penalty_in_the_loss_has_its_whole_weight(model, kl):
    """0.5 of the mean over the 5 trained tokens of k2, (p - r)^2 / 2, or of k3, exp(r - p) - (r - p) - 1."""
    reference, rows = model.policy.frozen_copy(), two_rows(advantage=0.0)
    of_reference = [logprobs(model, sample).detach() for sample in rows]
    moved_a_bit(model)
    loss = torch.zeros(())
    for sample, scores in zip(rows, of_reference, strict=True):
        gap = scores - logprobs(model, sample)
        term = gap.square() / 2 if kl == "k2" else gap.exp() - gap - 1
        loss = loss + 0.5 * (term * torch.tensor(sample.loss_mask)).sum() / 5
    trainer = Watched(model.policy, spec_of(Algo(kl_coef=0.5, kl=kl)), reference=reference)
    check_gradient(model, trainer, rows, loss)


def test_a_kl_penalty_in_the_reward_is_not_in_the_loss_too(model):
    reference, unfrozen = model.policy.frozen_copy(), model.policy.frozen_copy().requires_grad_(True)
    moved_a_bit(model)
    algo = Algo(kl_coef=0.5, kl="k1")
    trainer = Trainer(model.policy, spec_of(algo), reference=reference)
    assert np.abs(trainer.score(two_rows())[0] - Trainer(unfrozen, spec_of()).score(two_rows())[0]).max() > 1e-2
    assert trainer.step(two_rows(advantage=0.0)).metrics["grad_norm"] == 0.0


def test_the_entropy_bonus_raises_the_entropy(model):
    """Its loss is minus 0.5 of the mean entropy, in nats, over the 5 trained tokens."""
    moved_a_bit(model)
    rows, loss = two_rows(advantage=0.0), torch.zeros(())
    for sample in rows:
        of_all = distribution(model, sample)
        entropy = -(of_all.exp() * of_all.clamp(min=-1e9)).sum(-1)
        loss = loss - 0.5 * (entropy * torch.tensor(sample.loss_mask)).sum() / 5
    check_gradient(model, Watched(model.policy, spec_of(Algo(entropy_coef=0.5))), rows, loss)


def test_offloaded_optimizer_state_is_on_the_policys_device_for_its_part_of_a_step_and_gives_the_same_weights(
    model, monkeypatch, tmp_path
):
    initial = {name: weight.clone() for name, weight in model.policy.state_dict().items()}
    whole = Trainer(model.policy, spec_of())
    for _ in range(2):
        whole.step(two_rows())
    expected = {name: weight.clone() for name, weight in model.policy.state_dict().items()}
    model.policy.load_state_dict(initial)
    trainer = Trainer(model.policy, spec_of(optim=Optim(offload=True)))
    optimizer, there, events = trainer.optimizer, model.policy.device, []
    move, step = master_weights.move_state, optimizer.step

    def moved(optimizer, device, memory, parameters=None):
        events.append(("policy" if device is there else "host", parameters and [id(each) for each in parameters]))
        move(optimizer, device, memory, parameters)

    monkeypatch.setattr(type(model.policy), "device", property(lambda policy: there))
    for module in (trainer_module, master_weights):
        monkeypatch.setattr(module, "move_state", moved)
    monkeypatch.setattr(master_weights, "STATE_BYTES", 8 * 5000)
    monkeypatch.setattr(
        optimizer, "step", lambda: (events.append(("step", [*map(id, optimizer.param_groups[0]["params"])])), step())
    )
    for _ in range(2):
        trainer.step(two_rows())
    assert all(torch.equal(weight, expected[name]) for name, weight in model.policy.state_dict().items())
    parts = [part for what, part in events if what == "step"]
    assert events == [(what, part) for part in parts for what in ("policy", "step", "host")]
    assert len(parts) > 4 and sum(map(len, parts)) == 2 * len(optimizer.param_groups[0]["params"])
    (tmp_path / "checkpoint").mkdir()
    trainer.save(tmp_path / "checkpoint")
    events.clear()
    trainer.restore(tmp_path / "checkpoint")  # a fresh optimizer's state is made where the weights are
    assert events == [("host", None)]
