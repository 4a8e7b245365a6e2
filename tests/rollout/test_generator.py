"""A user's own generator: recorded, audited, and failing as a trajectory, never as a run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading

import numpy as np
import pytest
from testing.episodes import PAD, a_task, image, new_store, renderer, script

from vlmrl.config import Config, Rollout
from vlmrl.rollout.generator import GeneratorLoop, resolve_generate
from vlmrl.samples import audit, concat, emit, from_columns
from vlmrl.types import Completion

TASK = a_task("What?", [image("red")])


def play(generate, responses=("one", "two", "three"), **rollout):
    config = Rollout(max_turns=3, max_tokens=500, max_response_tokens=50, **rollout)
    loop = GeneratorLoop(generate, script(responses), renderer(), new_store(), config, seed=0)
    return asyncio.run(loop.play(TASK, "step1/0", "step1/0/00"))


def check(trajectory, how="concat"):
    return audit(emit(trajectory, how), [trajectory], image_token_id=renderer().image_token_id)


async def two_turns(client, renderer, task):
    """A prompt with an image, a response, one more user message with another image, a response."""
    prompt = renderer.prompt(task.prompt)
    first = await client.generate(prompt.token_ids, prompt.images)
    more = renderer.delta([{"role": "user", "content": [{"type": "image", "image": image("blue")}]}])
    ids = [*prompt.token_ids, *first.token_ids, *more.token_ids]
    await client.generate(ids, [*prompt.images, *more.images])
    return client.trajectory(reward=1.0, metrics={"calls": client.calls})


def test_an_episode_of_two_turns_is_one_linear_history():
    trajectory = play(two_turns)
    assert (trajectory.ending, trajectory.reward, trajectory.metrics) == ("env_done", 1.0, {"calls": 2})
    assert [turn.text for turn in trajectory.turns] == ["one", "two"]
    assert [turn.parent for turn in trajectory.turns] == [None, 0] and trajectory.continues(1)
    assert [len(turn.media) for turn in trajectory.turns] == [1, 1]
    assert check(trajectory).samples == 1
    assert check(trajectory, "step_wise").samples == 2
    (row,) = concat(trajectory)
    assert renderer().decode(row.token_ids).count(PAD) == 4  # expanded, two tokens an image


async def branches(client, renderer, task):
    """Two responses to the same prompt."""
    prompt = renderer.prompt(task.prompt)
    for _ in range(2):
        await client.generate(prompt.token_ids, prompt.images)
    return client.trajectory(reward=1.0)


def test_an_episode_that_does_not_fit_one_row_fails_where_one_is_wanted():
    """In the batch it would end the run. Also one that a budget cut, which has `rollout.truncated_reward`."""

    async def too_many(client, renderer, task):
        prompt = renderer.prompt(task.prompt)
        while True:
            await client.generate(prompt.token_ids, prompt.images)

    for generate, settings in ((branches, {}), (too_many, {"truncated_reward": 0.0})):
        trajectory = play(generate, **settings)
        assert trajectory.failed and "turn 1: its prompt does not continue the turn before it" in trajectory.error
        whole = play(generate, samples="merged", **settings)
        assert not whole.failed and check(whole, "merged").samples == len(whole.turns) > 1


def as_columns(client, ids, prompt_ids, completion, **more):
    return {
        "prompt_token_ids": [prompt_ids],
        "response_ids": [completion.token_ids],
        "loss_masks": [[1] * len(completion.token_ids)],
        "rollout_logprobs": [completion.logprobs],
        "rewards": [0.5],
        "trajectory_ids": [client.trajectory_id],
        "is_last_step": [True],
    } | more


async def best_of_two(client, renderer, task):
    """Two responses to a text prompt, the second of which is trained."""
    ids = renderer.prompt([{"role": "user", "content": "Hi"}]).token_ids
    await client.generate(ids)
    response = await client.generate(ids)
    return as_columns(client, ids, ids, response, rollout_metrics={"tried": 2.0})


def test_columns_are_audited_and_unused_responses_counted():
    trajectory = play(best_of_two)
    assert trajectory.error is None
    assert (trajectory.reward, trajectory.metrics) == (0.5, {"responses_unused": 1.0, "tried": 2.0})
    assert [turn.text for turn in trajectory.turns] == ["two"]
    assert trajectory.samples is not None and trajectory.samples[0].group_id == "step1/0"
    assert check(trajectory).trained_tokens == len(trajectory.turns[0].response_ids)


def test_columns_are_not_read_in_the_event_loop(monkeypatch):
    readers = []

    def read(columns):
        readers.append(threading.current_thread())
        return from_columns(columns)

    monkeypatch.setattr("vlmrl.rollout.generator.from_columns", read)
    assert play(best_of_two).error is None
    assert len(readers) == 1 and readers[0] is not threading.main_thread()


def test_metrics_of_columns_may_be_scalars_of_numpy():
    async def counted(client, renderer, task):
        return {**await best_of_two(client, renderer, task), "rollout_metrics": {"tried": np.float32(2)}}

    assert json.dumps(play(counted).metrics) == '{"responses_unused": 1.0, "tried": 2.0}'


def test_policy_versions_come_from_the_record():
    def response(request, turn):
        return Completion([5, 6, renderer().end_of_turn_id], [-0.1] * 3, "stop", [7, 7, 8], len(request.prompt_ids))

    trajectory = play(best_of_two, response)
    assert trajectory.samples[0].policy_versions == [7, 7, 8]
    check(trajectory)


def test_logprobs_that_columns_leave_out_come_from_the_record_too():
    async def without(client, renderer, task):
        return {**await best_of_two(client, renderer, task), "rollout_logprobs": None}

    trajectory = play(without)
    assert trajectory.samples[0].rollout_logprobs == trajectory.turns[0].logprobs
    check(trajectory)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda row: {"prompt_token_ids": [[*row["prompt_token_ids"][0], 5]]},
            "turn 0, prompt token .*: the model saw nothing",
        ),
        (lambda row: {"is_last_step": [False]}, "is_last_step must be set on its last row alone"),
        (
            lambda row: {
                "rewards": [[0.5, *[0.0] * (len(row["response_ids"][0]) - 1)]],
                "rollout_logprobs": [[0.5] * len(row["response_ids"][0])],
            },
            "rollout_logprobs must be finite and at most 0",
        ),
        (
            lambda row: (
                {name: 2 * column for name, column in row.items()}
                | {
                    "loss_masks": [row["loss_masks"][0], [0] * len(row["loss_masks"][0])],
                    "rollout_logprobs": None,
                    "is_last_step": [False, True],
                }
            ),
            "no token has mask 1, so there is nothing to train on",
        ),
    ],
)
def test_rows_that_break_a_rule_of_the_batch_fail_their_trajectory_alone(change, message):
    async def generate(client, renderer, task):
        ids = renderer.prompt([{"role": "user", "content": "Hi"}]).token_ids
        row = as_columns(client, ids, ids, await client.generate(ids))
        return row | change(row)

    failed = play(generate)
    assert failed.ending == "error" and re.search(message, failed.error)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"response_ids": [[5, 5]], "loss_masks": [[1, 1]], "rollout_logprobs": [[0.0, 0.0]]}, "never sampled them"),
        ({"trajectory_ids": ["another"]}, "'trajectory_ids' must be step1/0/00 in every row"),
        ({"rewards": None}, "column 'rewards' must be given"),
    ],
)
def test_columns_that_are_wrong_fail_the_trajectory(change, message):
    async def generate(client, renderer, task):
        ids = renderer.prompt([{"role": "user", "content": "Hi"}]).token_ids
        return as_columns(client, ids, ids, await client.generate(ids), **change)

    trajectory = play(generate)
    assert trajectory.failed and message in trajectory.error


@pytest.mark.parametrize(
    ("sampling", "error"), [({"temperature": 0.5}, "set rollout.temperature"), ({"top_q": 1}, "unexpected keyword")]
)
def test_sampling_that_cannot_be_is_refused(sampling, error):
    async def generate(client, renderer, task):
        await client.generate(renderer.prompt(task.prompt).token_ids, [image()], **sampling)

    assert error in play(generate).error


def test_a_generator_that_raises_or_hangs_fails_its_trajectory():
    async def raises(client, renderer, task):
        raise OSError("disk full")

    async def hangs(client, renderer, task):
        await asyncio.Event().wait()

    async def nothing(client, renderer, task):
        return None

    async def unsampled(client, renderer, task):
        return client.trajectory(reward=1.0)

    assert "OSError: disk full" in play(raises).error
    assert "no end within" in play(hangs, engine_timeout=0.02, env_timeout=0.02).error
    assert "it has no turns; sample with client.generate" in play(unsampled).error
    assert "must return client.trajectory(...) or columns, but it returned None" in play(nothing).error


def test_a_generator_that_cancels_its_own_task_fails_its_trajectory_alone():
    async def cancels_itself(client, renderer, task):
        asyncio.current_task().cancel()
        await asyncio.sleep(0)

    trajectory = play(cancels_itself)
    assert (trajectory.ending, "it cancelled itself." in trajectory.error) == ("error", True)


def test_a_trajectory_with_tokens_that_were_never_sampled_is_refused():
    async def forged(client, renderer, task):
        trajectory = await two_turns(client, renderer, task)
        trajectory.turns[1].response_ids = [5]
        return trajectory

    assert "turn 1: its response was never sampled" in play(forged).error


@pytest.mark.parametrize(
    "spoil",
    [
        lambda turn: turn.response_ids.__setitem__(0, 5),
        lambda turn: turn.response_ids.pop(),
        lambda turn: turn.logprobs.__setitem__(0, -0.5),
        lambda turn: turn.prompt_ids.append(5),
        lambda turn: turn.policy_versions.clear(),
        lambda turn: turn.media.clear(),
    ],
)
def test_a_change_within_a_turns_lists_is_refused_too(spoil):
    """The lists were those of the record, so that a token that was never sampled was trained, or the batch's audit ended the run."""

    async def changed(client, renderer, task):
        trajectory = await two_turns(client, renderer, task)
        spoil(trajectory.turns[1])
        return trajectory

    assert "turn 1: its response was never sampled" in play(changed).error


def test_rows_of_a_trajectorys_own_that_break_a_rule_fail_it_alone():
    async def with_rows(client, renderer, task):
        trajectory = await two_turns(client, renderer, task)
        trajectory.samples = concat(trajectory)
        trajectory.samples[0].loss_mask = [1] * len(trajectory.samples[0].loss_mask)
        return trajectory

    failed = play(with_rows)
    assert failed.ending == "error" and "has mask 0, but the row has" in failed.error


def test_generate_is_checked_at_the_start():
    with pytest.raises(ValueError, match="must be an async function"):
        resolve_generate(Rollout(generate=print))
    with pytest.raises(ValueError, match="env and reward must be unset"):
        Config(rollout=Rollout(generate=two_turns), env="x.py:Env")


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda t: t.metrics.update(score="abc"), "its metric 'score' must be a finite number, but it is 'abc'"),
        (lambda t: t.metrics.update(score=float("nan")), "its metric 'score'"),
        (lambda t: t.turns[0].metrics.update(score=10**400), "its metric 'score'"),
        (lambda t: setattr(t, "final_reward", 10**400), "too large to convert to float"),
        (lambda t: setattr(t, "ending", "tired"), "its ending must be one of env_done"),
    ],
)
def test_what_cannot_be_averaged_fails_the_trajectory_and_not_the_run(spoil, named):
    async def generate(client, renderer, task):
        trajectory = await two_turns(client, renderer, task)
        spoil(trajectory)
        return trajectory

    failed = play(generate)
    assert failed.ending == "error" and named in failed.error


def test_a_trajectory_stays_in_its_group():
    async def generate(client, renderer, task):
        trajectory = await two_turns(client, renderer, task)
        trajectory.group_id, trajectory.task = "other", a_task("another")
        return trajectory

    assert (play(generate).group_id, play(generate).task) == ("step1/0", TASK)


def test_a_generator_that_ignores_its_deadline_holds_up_nobody_and_samples_nothing_more():
    later: list[str] = []

    async def play_two() -> None:
        gone_on, ended = asyncio.Event(), asyncio.Event()

        async def generate(client, renderer, task):
            prompt = renderer.prompt(task.prompt)
            while not ended.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await ended.wait()
            try:
                await client.generate(prompt.token_ids, prompt.images)
            except RuntimeError as error:
                later.append(str(error))
            gone_on.set()

        config = Rollout(max_turns=1, max_tokens=500, engine_timeout=0.01, env_timeout=0.01)
        loop = GeneratorLoop(generate, script(["one"]), renderer(), new_store(), config, seed=0)
        failed = await asyncio.wait_for(loop.play(TASK, "g", "g/00"), 60)
        assert failed.ending == "error" and "no end within 0.02 s" in failed.error
        ended.set()
        await gone_on.wait()

    asyncio.run(play_two())
    assert len(later) == 1 and "has ended" in later[0]


def test_the_engine_keeps_nothing_for_a_request_that_the_episode_did_not_wait_for():
    reached, late, left, kept = asyncio.Event(), asyncio.Event(), list[asyncio.Task](), set()

    async def respond(request, turn):
        reached.set()
        await late.wait()
        kept.add(request.trajectory_id)  # as the embedded engine keeps the keys and values of a response
        return "late"

    async def leaves_one(client, renderer, task):
        prompt = renderer.prompt(task.prompt)
        left.append(asyncio.create_task(client.generate(prompt.token_ids)))
        await reached.wait()
        raise OSError("enough")

    engine = script(respond)
    engine.release = kept.discard
    loop = GeneratorLoop(leaves_one, engine, renderer(), new_store(), Rollout(max_tokens=1000), 0)

    async def go():
        await loop.play(a_task(), "g", "g/00")
        late.set()
        await left[0]

    asyncio.run(go())
    assert not kept
