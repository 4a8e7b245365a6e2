"""The theorem: for a linear history, concat, step-wise and merged samples give the same gradient and as many optimizer steps."""

from __future__ import annotations

import random

import pytest
from testing.trees import noise

from vlmrl.checks.logprob_mismatch import turn_mismatches
from vlmrl.config import Algo, Model, Optim
from vlmrl.model.loading import load_model
from vlmrl.samples import audit, concat, merge_prefixes, step_wise
from vlmrl.train.trainer import Trainer, TrainerSpec
from vlmrl.types import Task, Trajectory, Turn

FORMS = {
    "concat": concat,
    "step_wise": step_wise,
    "merged": lambda trajectory: merge_prefixes(step_wise(trajectory)),
}
TURNS = (1, 4, 2, 3)  # of the members of a group


class Watched(Trainer):
    """Keeps each optimizer step's gradient by parameter instead of using it."""

    def _apply_gradient(self) -> dict[str, float]:
        self.gradients = [
            *getattr(self, "gradients", []),
            {n: p.grad.clone() for n, p in self._named() if p.grad is not None},
        ]
        self.policy.zero_grad()
        return {}

    def _named(self):
        return self.policy.named_parameters()


def play(model, images: str) -> list[Trajectory]:
    """Two groups of four with 1 to 4 turns; ``images``: none, one in the prompt, or one in every turn."""
    dice, store = random.Random(0), model.new_store()
    shown_in_turn = (noise((32 * dice.randint(1, 3), 32), number) for number in range(99))
    trajectories = []
    for group in ("a", "b"):
        first = store.load(next(shown_in_turn))
        for member, turns in enumerate(TURNS):
            trajectory = Trajectory(f"{group}/{member}", group, Task(group, []), ending="env_done")
            trajectory.final_reward = float(member % 2)
            for number in range(turns):
                shown = images == "every turn" or (images == "one" and number == 0)
                media = [first if number == 0 else store.load(next(shown_in_turn))] if shown else []
                prompt = [id for item in media for id in [7, *[model.policy.image_token_id] * item.num_tokens, 8]]
                prompt += [dice.randrange(200) for _ in range(6)] if number else [1, 2, 3]  # a group shares its prompt
                response = [dice.randrange(200) for _ in range(dice.randint(2, 9))]
                logprobs = [-dice.random() for _ in response]
                turn = Turn(prompt, media, response, logprobs, [0] * len(response), "stop", "")
                if number:
                    before = trajectory.turns[-1]
                    turn.parent, turn.kept, turn.kept_media = number - 1, before.length, before.num_images
                trajectory.turns.append(turn)
            trajectories.append(trajectory)
    return trajectories


def gradients(model, trajectories: list[Trajectory], form: str, reduction: str, groups_per_step: int | None) -> Watched:
    samples = [sample for trajectory in trajectories for sample in FORMS[form](trajectory)]
    policy = model.policy
    audit(samples, trajectories, image_token_id=policy.image_token_id, banned_ids=policy.banned_ids)
    advantages = {t.id: (1.5, -0.5, 0.7, -1.1)[index % 4] for index, t in enumerate(trajectories)}
    for sample in samples:
        sample.advantage = advantages[sample.trajectory_id]
    algo = Algo(reduction=reduction)
    spec = TrainerSpec(algo, Optim(), total_steps=9, tokens_per_micro_batch=300, groups_per_step=groups_per_step)
    trainer = Watched(policy, spec)
    trainer.logprobs = trainer.step(samples).logprobs
    return trainer


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl"])
def model(request, tmp_path_factory):
    return load_model(Model(path=f"tiny:{request.param}", device="cpu"), tmp_path_factory.mktemp("models"), seed=0)


@pytest.mark.parametrize(
    ("images", "reduction"), [("none", "token_mean"), ("one", "prompt_mean"), ("every turn", "token_mean")]
)
def test_gradients_agree_whatever_the_form(model, images, reduction):
    trajectories = play(model, images)
    wanted = gradients(model, trajectories, "concat", reduction, groups_per_step=1).gradients
    for form in ("step_wise", "merged"):
        found = gradients(model, trajectories, form, reduction, groups_per_step=1).gradients
        assert len(found) == len(wanted) == 2  # one step a group, whatever the number of rows
        for step, other in zip(wanted, found, strict=True):
            assert step.keys() == other.keys()
            for name, gradient in step.items():
                off = float((gradient - other[name]).norm())
                assert off <= 1e-5 * float(gradient.norm()) + 1e-9, (
                    f"{form}, {name}: {off:.2e} of {float(gradient.norm()):.2e}"
                )
    assert any(float(gradient.norm()) > 1e-3 for gradient in wanted[0].values())


def test_the_mismatch_is_by_turn_in_every_form(model):
    trajectories = play(model, "one")
    mismatches = {}
    for form, emit in FORMS.items():
        trainer = gradients(model, trajectories, form, "token_mean", None)
        samples = [s for t in trajectories for s in emit(t)]
        mismatches[form] = turn_mismatches(trajectories, samples, trainer.logprobs)
    turns = [(t.id, number) for t in trajectories for number in range(len(t.turns))]
    for form, found in mismatches.items():
        assert [(each.trajectory_id, each.turn) for each in found] == turns, form
        for each, same in zip(found, mismatches["concat"], strict=True):
            assert (each.tokens, each.max) == (same.tokens, pytest.approx(same.max, abs=1e-5))
            assert each.max >= each.mean > 0 and each.k3 > 0
