"""A tree of an agent's requests on a tiny model goes through all that rows go through: logprobs, packing, credit, mismatch, viewer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from testing.agent_episodes import ZOOM, Agent, agent_episode, says
from testing.episodes import image, sharp_model
from testing.trees import largest_difference, train, worst_gradient

from vlmrl.checks.logprob_mismatch import record_trained
from vlmrl.config import Algo, Config
from vlmrl.engine.hf.engine import HFEngine
from vlmrl.gateway.episode import AgentEpisode
from vlmrl.model.loading import LoadedModel
from vlmrl.report.token_columns import TokenTexts, token_columns
from vlmrl.rollout.teacher_rows import TeacherRows, seen_messages
from vlmrl.samples import audit, emit
from vlmrl.train.credit import assign_advantages
from vlmrl.train.packing import response_logprobs
from vlmrl.types import Sample, Trajectory

HOW = ["merged", "step_wise"]


@pytest.fixture(scope="module")
def model(qwen3_vl: Path) -> LoadedModel:
    return sharp_model(qwen3_vl)


async def act(episode: AgentEpisode) -> None:
    """A conversation with two forks, of which one is continued, a retry, an edit, and a sub-agent. Images are shown throughout."""
    agent = Agent(episode, says("user", "What is it?", image("red")), tools=[ZOOM])
    await agent.ask()
    fork = agent.fork()
    await asyncio.gather(
        agent.ask(says("tool", "crop", image("blue"))),
        fork.ask(says("user", "And this?", image("green"), image("red"))),
    )
    helper = Agent(episode, says("system", "Count."), says("user", "How many?", image("red")))
    await asyncio.gather(agent.ask(says("user", "Sure?")), fork.ask(says("user", "Sure?")), helper.ask())
    retry = fork.fork()
    retry.messages.pop()
    await retry.ask()
    edited = agent.fork()
    edited.messages[1] = says("assistant", "Red.")
    await edited.ask(says("user", "Answer."))
    await agent.ask(says("user", "Answer.", image("yellow")))


def play_tree(model: LoadedModel, number: int = 0) -> Trajectory:
    engine = HFEngine(model.policy, model.renderer)

    async def play() -> Trajectory:
        episode = agent_episode(engine, max_response_tokens=12)
        episode.renderer, episode.store = model.renderer, model.new_store()
        episode.seed = number
        await asyncio.wait_for(act(episode), 300)
        assert episode.failure is None
        episode.finish()
        return episode.trajectory

    try:
        trajectory = asyncio.run(play())
    finally:
        engine.close()
    trajectory.id, trajectory.final_reward = f"g/{number:02d}", float(number % 2)
    return trajectory


@pytest.fixture(scope="module")
def trees(model: LoadedModel) -> list[Trajectory]:
    """A group of two."""
    return [play_tree(model, number) for number in range(2)]


def rows_of(model: LoadedModel, trajectories: Sequence[Trajectory], how: str) -> list[Sample]:
    rows = [row for trajectory in trajectories for row in emit(trajectory, how)]
    audit(rows, trajectories, image_token_id=model.policy.image_token_id, banned_ids=model.policy.banned_ids)
    return rows


def test_the_tree_has_a_row_for_each_branch(model: LoadedModel, trees: list[Trajectory]):
    for trajectory in trees:
        assert len(trajectory.turns) == 9
        assert len(rows_of(model, [trajectory], "merged")) == trajectory.metrics["branches"] == 5
        assert len(rows_of(model, [trajectory], "step_wise")) == 9
        assert trajectory.metrics["requests_continued"] == 6 / 8


@pytest.mark.parametrize("how", HOW)
def test_the_trainer_computes_the_logprobs_of_the_engine(model: LoadedModel, trees: list[Trajectory], how: str):
    rows = rows_of(model, trees, how)
    for row, logprobs in zip(rows, response_logprobs(model.policy, rows, 1.0), strict=True):
        mask = np.array(row.loss_mask, dtype=bool)
        np.testing.assert_allclose(logprobs[mask], np.array(row.rollout_logprobs)[mask], atol=1e-4)


@pytest.mark.parametrize("how", HOW)
def test_a_packed_tree_has_the_logprobs_and_gradients_of_its_rows(
    model: LoadedModel, trees: list[Trajectory], how: str
):
    rows = rows_of(model, trees, how)
    for number, row in enumerate(rows):
        row.advantage = math.sin(number)
    alone, packed = train(model, rows, 1, share=False), train(model, rows, 100_000, share=True)
    assert largest_difference(alone, packed) < 1e-5
    assert worst_gradient(alone, packed)[0] < 1e-4


@pytest.mark.parametrize("how", HOW)
def test_each_response_is_found_once(model: LoadedModel, trees: list[Trajectory], how: str):
    for trajectory in trees:
        rows = rows_of(model, [trajectory], how)
        spans = [(row, span) for row in rows for span in row.responses]
        assert [span.turn for _, span in spans] == list(range(len(trajectory.turns)))
        for row, span in spans:
            assert row.response_ids[span.start : span.end] == trajectory.turns[span.turn].response_ids
            assert set(row.loss_mask[span.start : span.end]) == {1}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("credit", ["trajectory", "turn"])
def test_credit_mismatch_and_the_viewers_columns_reach_every_response(
    model: LoadedModel, trees: list[Trajectory], how: str, credit: str
):
    rows = rows_of(model, trees, how)
    algo = Algo(credit=credit, options={"grpo.scale_by_std": False})  # type: ignore[arg-type]
    assign_advantages(rows, trees, Config(algo=algo))
    metrics = record_trained(trees, rows, response_logprobs(model.policy, rows, 1.0))
    assert metrics["logprob_mismatch/max"] < 1e-4
    for trajectory, advantage in zip(trees, (-0.5, 0.5), strict=True):
        for turn in trajectory.turns:
            assert turn.logprob_mismatch is not None
            columns = token_columns(turn, TokenTexts(model.renderer.decode))
            assert columns["advantages"] == [advantage] * len(columns["tokens"])
            assert columns["loss_mask"] == [1] * len(columns["tokens"])
            np.testing.assert_allclose(columns["trainer_logprobs"], columns["logprobs"], atol=1e-4)


def test_a_branch_that_goes_on_is_not_prefilled_again(model: LoadedModel):
    engine = HFEngine(model.policy, model.renderer)

    async def prefilled() -> list[int]:
        episode = agent_episode(engine, max_response_tokens=500)
        episode.renderer, episode.store = model.renderer, model.new_store()
        left = Agent(episode, says("user", "What is it? " * 20, image("red")))
        await left.ask()
        right = left.fork()
        counts = []
        for agent in (left, right, left, right, left):
            before = engine.tokens_prefilled
            await agent.ask(says("user", "Left?" if agent is left else "Right?"))
            counts.append(engine.tokens_prefilled - before)
        episode.finish()
        return counts

    try:
        left, right, *later = asyncio.run(asyncio.wait_for(prefilled(), 300))
    finally:
        engine.close()
    assert right > 60  # a fork runs its whole prompt once
    assert max(left, *later) < 20


def test_a_teacher_that_sees_the_same_messages_has_the_contexts_of_the_policy(model: LoadedModel):
    """Of a branch it saw only the messages that no earlier request had, and each request with the tools of the last one."""
    trajectory = play_tree(model)
    samples = emit(trajectory, "step_wise")
    rows = TeacherRows(
        lambda task, trajectory, turn: seen_messages(trajectory, turn), model.renderer, model.new_store()
    )
    rows.attach(samples, [trajectory])
    for sample, (ids, media) in zip(samples, trajectory.prompts(), strict=True):
        (row,) = sample.teacher_rows
        assert row.image_ids == [item.id for item in media]
        assert model.renderer.decode(row.prompt_token_ids) == model.renderer.decode(ids)
