"""A teacher in the trainer, for every family: against plain forward passes of single rows and autograd of the written divergence."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from family_conformance import load
from testing.trees import Watched, noise

from vlmrl.algos.distillation import divergence_of
from vlmrl.checks.doctor_model import highest_id
from vlmrl.config import Algo, Optim, Teacher
from vlmrl.engine.server_scores import TeacherScores
from vlmrl.families import FAMILIES
from vlmrl.model import divergence
from vlmrl.model.policy import Policy
from vlmrl.multimodal.placeholders import image_ids
from vlmrl.run.teaching import skip_padded
from vlmrl.train.packing import collate, response_logprobs
from vlmrl.train.trainer import TrainerSpec
from vlmrl.types import ResponseSpan, Sample

TEMPERATURE = 0.7
SPANS = [ResponseSpan(0, 0, 3), ResponseSpan(1, 5, 7)]


def other_policy(policy: Policy) -> Policy:
    """A teacher with other weights, and with two more padded rows in its vocabulary."""
    torch.manual_seed(1)
    teacher = policy.frozen_copy()
    old = teacher.model.lm_head.weight
    head = torch.nn.Linear(old.shape[1], len(old) + 2, bias=False)
    with torch.no_grad():
        head.weight[:-2] = old + 0.3 * torch.randn_like(old)
    teacher.model.lm_head = head.requires_grad_(False)
    return teacher


def row(prompt, media, response, mask, name) -> Sample:
    size = len(response)
    return Sample(prompt, response, mask, None, [0] * size, name[0], name, True, "stop", media, 0.0)


def taught_rows(model) -> list[Sample]:
    """Two groups that share prompts and first tokens. Each response of two turns has a row of the teacher's, but one turn has none."""
    store = model.new_store()

    def prompt(size, seed, *ids):
        item = None if store is None else store.load(noise(size, seed))
        shown = [] if item is None else [7, *image_ids(item, model.policy.image_token_id), 8]
        return [*shown, *ids], [] if item is None else [item]

    rows = []
    for group in range(2):
        for member in range(3):
            ids, media = prompt((64, 32), group, 3, 4, group)
            response = [20, 21 + member // 2, 30 + member, 40, 41, 50 + member, 60]
            taught = row(ids, media, response, [1, 1, 1, 0, 0, 1, 1], f"{'ab'[group]}/{member}")
            taught.responses = list(SPANS)
            ids, media = prompt((64, 64), group + 5, 5, member)
            seen = [row(ids, media, response[:3], [1] * 3, taught.trajectory_id)]
            seen.append(row([*ids, *response[:3], 40, 41], media, response[5:], [1] * 2, taught.trajectory_id))
            taught.teacher_rows = [None if group and not member else seen[0], seen[1]]
            rows.append(taught)
    return rows


def plain_logprobs(policy: Policy, sample: Sample) -> torch.Tensor:
    """Of the whole vocabulary at each response token: one row, one forward pass."""
    batch = collate([sample], policy.family)
    images = policy.encode_images(batch.images) if batch.images else []
    hidden = policy.hidden(batch.token_ids, batch.position_ids, [images[index] for index in batch.image_order])
    start = len(sample.prompt_token_ids)
    return policy.logits(hidden[0, start - 1 : len(sample) - 1], TEMPERATURE)


def written_loss(policy: Policy, teacher: Policy, rows: list[Sample], settings: Teacher) -> torch.Tensor:
    """The mean over all trained tokens of the divergence, at those that the teacher scores."""
    total, tokens = torch.zeros(()), 0
    function = divergence_of(settings.loss, settings.js_weight, settings.top_k)
    for sample in rows:
        own = plain_logprobs(policy, sample)
        tokens += sum(sample.loss_mask)
        for span, seen in zip(sample.responses, sample.teacher_rows, strict=True):
            if seen is not None:
                with torch.no_grad():
                    other = plain_logprobs(teacher, seen)[:, : own.shape[1]]
                total = total + function(own[span.start : span.end].log_softmax(1), other.log_softmax(1)).sum()
    return settings.coef * total / tokens


def trainer_of(model, teacher, settings, share, budget):
    algo = Algo(loss="reinforce")
    spec = TrainerSpec(algo, Optim(), 1, budget, temperature=TEMPERATURE, share_prefixes=share, teacher=settings)
    return Watched(model.policy, spec, teacher=teacher)


@pytest.fixture(scope="module", params=FAMILIES)
def parts(request, tmp_path_factory):
    model = load(request.param, tmp_path_factory.mktemp(request.param))
    return model, other_policy(model.policy)


@pytest.mark.parametrize("share", [True, False])
def test_logprobs_and_gradients_are_those_of_single_rows(parts, share, monkeypatch):
    """Packed as trees or padded, with several micro-batches, of several of the teacher's each, and few tokens a chunk."""
    model, teacher = parts
    monkeypatch.setattr(divergence, "LOGITS", 4 * len(model.policy.model.lm_head.weight))
    rows = taught_rows(model)
    settings = Teacher(model="elsewhere", coef=0.5, loss="reverse_kl")
    trainer = trainer_of(model, teacher, settings, share, budget=60)
    seen = [each for sample in rows for each in sample.teacher_rows if each is not None]
    plainly = response_logprobs(teacher, seen, TEMPERATURE)
    for mine, single in zip(trainer.score(seen, by_teacher=True), plainly, strict=True):
        # glm4v: 1.04e-6 with Python 3.13
        assert np.abs(mine - single).max() < 2e-6 * max(1.0, float(np.abs(single).max()))
    metrics = trainer.step(rows).metrics
    loss = written_loss(model.policy, teacher, rows, settings)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["teacher/share"] == pytest.approx(27 / 30)
    assert metrics["teacher/divergence"] == pytest.approx(loss.item() / 0.5 * 30 / 27, rel=1e-5)
    named = dict(model.policy.named_parameters())
    wanted = torch.autograd.grad(loss, [named[name] for name in trainer.gradient], allow_unused=True)
    scale = max(float(gradient.abs().max()) for gradient in wanted if gradient is not None)
    for (name, gradient), plain in zip(trainer.gradient.items(), wanted, strict=True):
        assert float((gradient - (0 if plain is None else plain)).abs().max()) < 1e-5 * scale, name


@pytest.mark.parametrize("parts", ["qwen3_vl"], indirect=True)
def test_a_teacher_with_fewer_padded_rows_says_nothing_about_their_ids(parts):
    model, _ = parts
    teacher, highest = model.policy.frozen_copy(), highest_id(model.tokenizer)
    teacher.model.resize_token_embeddings(highest + 1)
    rows, settings = taught_rows(model), Teacher(model="elsewhere")
    rows[0].responses, rows[0].teacher_rows = [], []  # what the teacher sees is the policy's row
    rows[0].response_ids[-1] = rows[1].teacher_rows[1].response_ids[0] = highest + 1
    skip_padded(rows, highest)
    assert rows[0].teacher_rows == [None] and rows[1].teacher_rows[1] is None
    assert all(each is not None for each in [rows[1].teacher_rows[0], *rows[2].teacher_rows])
    metrics = trainer_of(model, teacher, settings, True, budget=60).step(rows).metrics
    assert metrics["teacher/share"] == pytest.approx((30 - 5 - 2 - 3) / 30)  # `taught_rows` leaves out 3 tokens itself


@pytest.mark.parametrize("parts", ["qwen3_vl"], indirect=True)
@pytest.mark.parametrize("loss", ["reverse_kl", "forward_kl", "jensen_shannon", "sampled"])
def test_scores_of_a_server_are_a_teacher_in_the_trainers_process(parts, loss, monkeypatch):
    """With all ids of the vocabulary listed for each token, in the order of their logprobs."""
    model, teacher = parts
    monkeypatch.setattr(divergence, "LOGITS", 4 * len(model.policy.model.lm_head.weight))
    rows, size = taught_rows(model), len(model.policy.model.lm_head.weight)
    settings = Teacher(model="elsewhere", coef=0.5, loss=loss)
    here = trainer_of(model, teacher, settings, True, budget=60).step(rows).metrics
    for seen in (each for sample in rows for each in sample.teacher_rows if each is not None):
        with torch.no_grad():
            logprobs = plain_logprobs(teacher, seen)[:, :size].log_softmax(1)
        listed = logprobs.topk(size, dim=1)
        own = logprobs.gather(1, torch.tensor(seen.response_ids)[:, None])[:, 0]
        seen.teacher_scores = TeacherScores(own.numpy(), listed.indices.numpy(), listed.values.numpy())
    settings = replace(settings, model="vllm:http://host:1", top_k=None if loss == "sampled" else size)
    served = trainer_of(model, None, settings, True, budget=60).step(rows).metrics
    assert served == pytest.approx(here, rel=1e-5, abs=1e-6)
    rows[0].teacher_rows[0].teacher_scores = None
    with pytest.raises(ValueError, match="trajectory a/0: no teacher server has scored this row"):
        trainer_of(model, None, settings, True, budget=60).step(rows)


def test_the_teachers_logprobs_reach_the_advantages(parts):
    """The sampled form is REINFORCE with the teacher's logprob minus the policy's as the advantage."""
    model, teacher = parts
    rows = taught_rows(model)[:1]
    trainer = trainer_of(model, teacher, Teacher(model="elsewhere", loss="sampled"), True, 1000)
    metrics = trainer.step(rows).metrics
    (own,) = response_logprobs(model.policy, rows, TEMPERATURE)
    theirs = np.concatenate(response_logprobs(teacher, rows[0].teacher_rows, TEMPERATURE))
    own = own[np.flatnonzero(rows[0].loss_mask)]
    assert metrics["loss"] == pytest.approx(float(-((theirs - own) * own).mean()), rel=1e-4)
    assert metrics["teacher/kl"] == pytest.approx(float((own - theirs).mean()), rel=1e-4)
    assert metrics["teacher/kl_turn_1"] == pytest.approx(float((own - theirs)[3:].mean()), rel=1e-4)


@pytest.mark.parametrize("parts", ["qwen3_vl"], indirect=True)
@pytest.mark.parametrize("loss", ["reverse_kl", "sampled"])
def test_weights_and_the_schedule_scale_the_teachers_part_alone(parts, loss):
    """Beside rewards: the loss is that of the rewards plus the coefficient times the weighted part of the teacher."""
    model, teacher = parts
    rows = [replace(each, advantage=0.5) for each in taught_rows(model)[:2]]

    def loss_of(**settings):
        named = Teacher(model="elsewhere", loss=loss, **settings)
        spec = TrainerSpec(Algo(loss="reinforce"), Optim(), 3, 1000, temperature=TEMPERATURE, teacher=named)
        trainer = Watched(model.policy, spec, teacher=teacher)
        trainer.steps_done = 1  # of three: half of the way
        return trainer.step(rows).metrics

    whole, half, more = loss_of(), loss_of(coef_end=0.0), loss_of(coef=3.0, coef_end=3.0)
    assert (half["teacher/coef"], more["teacher/coef"]) == (0.5, 3.0)
    part = 2 * (whole["loss"] - half["loss"])
    rewards = whole["loss"] - part
    assert more["loss"] == pytest.approx(rewards + 3 * part, rel=1e-4)
    for row in rows:
        for seen in row.teacher_rows:
            seen.teacher_weights = [2.0] * len(seen.response_ids)
    assert loss_of()["loss"] == pytest.approx(rewards + 2 * part, rel=1e-4)
