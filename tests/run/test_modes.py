"""Whole short runs in each history mode and sample form, with images in the middle."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace

import pytest
from testing.runs import RECIPES, short_quickstart, train

from vlmrl.config import Algo, Config, Data, Eval, Model, Rollout, Train, WarmStart
from vlmrl.config.code import load_object
from vlmrl.data import TaskStream
from vlmrl.run.build import build_run

pytestmark = pytest.mark.slow

TURNS = 3
ZOOM_OR_ANSWER = load_object(f"{RECIPES / 'quickstart.py'}:demonstrate")


def demonstrate(task, turn: int) -> str:
    """Two zooms, then an answer: three turns that show two new images."""
    return ZOOM_OR_ANSWER(task, 0 if turn < TURNS - 1 else 1)


def settings(folder, **rollout) -> Config:
    base = short_quickstart(folder, deterministic=True)
    return replace(
        base,
        rollout=Rollout(group_size=2, max_turns=TURNS, max_tokens=512, max_response_tokens=48, **rollout),
        warm_start=WarmStart(),
        train=Train(steps=1, groups_per_batch=2),
        eval=Eval(),
    )


@pytest.fixture(scope="module")
def taught(tmp_path_factory) -> str:
    """A tiny model that knows the form of an episode."""
    folder = tmp_path_factory.mktemp("taught")
    base = settings(folder)
    lessons = WarmStart(demonstrate=demonstrate, steps=50, trajectories_per_step=16)
    run, _, _ = train(replace(base, warm_start=lessons, train=replace(base.train, steps=0)))
    run.engine.close()
    return str(run.folder / "model")


def config(tmp_path, taught, template=None, **rollout) -> Config:
    model = Model(path=taught, device="cpu", chat_template=template)
    return replace(settings(tmp_path, **rollout), model=model, save_model=False)


def one_step(tmp_path, taught, template=None, **rollout) -> dict:
    run, rows, _ = train(config(tmp_path, taught, template, **rollout))
    run.engine.close()
    assert rows[-1]["turns/mean"] > 1 and rows[-1]["images/mean"] >= 1
    return rows[-1]


def test_the_sample_forms_of_a_linear_history_train_the_same(tmp_path, taught):
    rows = {form: one_step(tmp_path / form, taught, samples=form) for form in ("concat", "step_wise", "merged")}
    concat, step_wise, merged = rows.values()
    assert concat["samples"] == merged["samples"] == 4
    assert step_wise["samples"] == concat["samples/unmerged"] > 4
    for row in rows.values():
        assert (
            row["logprob_mismatch/max"] < 1e-4
            and row["logprob_mismatch/k3"] + 1 > 0
            and ", turn " in row["logprob_mismatch/worst"]
        )
        assert row["tokens"] == concat["tokens"]
        assert row["loss"] == pytest.approx(concat["loss"], abs=1e-5)
        assert row["grad_norm"] == pytest.approx(concat["grad_norm"], rel=1e-4)


def test_inline_drops_and_counts_end_of_turns(tmp_path, taught):
    row = one_step(tmp_path, taught, history="inline")
    assert row["left_out/inline_end_of_turn"] >= 1 and row["logprob_mismatch/max"] < 1e-4
    assert "left_out/inline_end_of_turn" not in one_step(
        tmp_path / "steps", taught, history="inline", samples="step_wise"
    )


def test_rerender_with_a_history_policy_is_exact_step_by_step(tmp_path, taught):
    policy = {"history": "keep_last_images", "history_options": {"k": 1}}
    row = one_step(tmp_path, taught, samples="step_wise", **policy)
    assert row["logprob_mismatch/max"] < 1e-4
    assert row["samples"] == row["samples/unmerged"]


def test_a_rerendered_episode_in_one_row_has_no_rollout_logprobs(tmp_path, taught):
    row = one_step(tmp_path, taught, "chatml_drop_thinking", history="rerender")
    assert row["samples"] == 4 and row["samples/unmerged"] > 4
    assert not any(name.startswith("logprob_mismatch") for name in row)


def test_one_row_needs_generation_markers(tmp_path, taught):
    bare = tmp_path / "bare.jinja"
    bare.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    )
    with pytest.raises(ValueError, match=re.escape("needs a chat template with {% generation %} markers")):
        build_run(config(tmp_path, taught, str(bare), history="rerender"))


async def guess(client, renderer, task):
    prompt = renderer.prompt(task.prompt)
    response = await client.generate(prompt.token_ids, prompt.images)
    return client.trajectory(reward=float(task.answer in renderer.text(response.token_ids)))


def test_a_users_generator_trains(tmp_path, taught):
    base = replace(config(tmp_path, taught), env=None, env_options={}, warm_start=WarmStart())
    run, rows, _ = train(replace(base, rollout=replace(base.rollout, generate=guess)))
    run.engine.close()
    assert rows[-1]["samples"] == 4 and rows[-1]["logprob_mismatch/max"] < 1e-4


def test_a_single_turn_goes_to_the_engine_as_one_batch(tmp_path, taught, monkeypatch):
    base = replace(
        config(tmp_path, taught),
        deterministic=False,
        warm_start=WarmStart(),
        env=None,
        env_options={},
        reward=lambda text, task: float(len(text) % 2),
        rollout=Rollout(group_size=4, max_turns=1, max_tokens=256, max_response_tokens=8),
        data=Data(generator=f"{RECIPES}/../datasets/shapes.py:make_task", size=8),
    )
    run = build_run(base)
    sizes = []
    generate_batch = run.engine.generate_batch

    def watched(requests):
        sizes.append(len(requests))
        return generate_batch(requests)

    monkeypatch.setattr(run.engine, "generate_batch", watched)
    rollouts = asyncio.run(run.runner().play(TaskStream(run.tasks), 6, "x"))
    run.engine.close()
    assert len(rollouts.groups) == 6 and sizes == [24]


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"history": "rerendr"}, "rollout.history must be one of append, inline, rerender"),
        ({"history_options": {"k": 1}}, "rollout.history must be a function with history_options, but it is 'append'"),
    ],
)
def test_history_settings_that_do_not_fit_are_refused(rollout, message):
    with pytest.raises(ValueError, match=message):
        Rollout(**rollout)


def test_penalties_and_corrections_in_a_whole_step(tmp_path, taught):
    """KL off the reward, an entropy bonus, a correction, and truncated episodes left out."""
    base = config(tmp_path, taught)
    algo = Algo(
        kl_coef=0.1,
        kl="k1",
        entropy_coef=0.01,
        corrections=("token_truncation", "veto"),
        mask_truncated=True,
    )
    run, rows, _ = train(replace(base, algo=algo, train=Train(steps=1, groups_per_batch=4)))
    run.engine.close()
    row = rows[-1]
    assert row["left_out/overlong"] >= 0
    assert row["correction/token_truncation/fraction"] == row["correction/veto/fraction"] == 0.0
    assert row["mismatch/ratio_max"] == pytest.approx(1.0, abs=1e-3) and row["entropy"] > 0


def test_a_step_that_the_filters_leave_empty_is_logged_and_not_trained(tmp_path, taught):
    never = Algo(filters=("reward_band",), options={"reward_band.low": 2.0, "reward_band.high": 3.0})
    run, rows, _ = train(replace(config(tmp_path, taught), algo=never))
    run.engine.close()
    assert (rows[-1]["groups/filtered"], rows[-1]["samples"]) == (2.0, 0) and "loss" not in rows[-1]
