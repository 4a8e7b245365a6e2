"""A task's prompt may have examples, with responses that nobody sampled: they are part of the task, and never trained."""

from __future__ import annotations

import asyncio
import json

import pytest
from testing.episodes import decoded, new_store, renderer, script, turn_loop

from vlmrl import SFT, Config, Conversations, Env, Rollout, Train, obs
from vlmrl.data.conversations import load_conversations
from vlmrl.env.base import resolve_env
from vlmrl.rollout.history import resolve_policy
from vlmrl.rollout.history_policies import Asker, compact
from vlmrl.rollout.turn_loop import TurnLoop
from vlmrl.run.episode_rows import episode_row
from vlmrl.samples import emit
from vlmrl.samples.conversation import render_conversation
from vlmrl.types import Task

EXAMPLE = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "<think>easy</think> two"}]
TASK = Task("t", [*EXAMPLE, {"role": "user", "content": "2+2?"}])


class Three(Env):
    def step(self, response_text):
        return obs(f"try {self.turn}"), self.turn == 2, {"reward": 0.5}


def play(history, samples):
    config = Rollout(max_turns=4, max_tokens=1000, max_response_tokens=100, history=history, samples=samples)
    engine, policy = script(["a", "b", "c"]), resolve_policy(config)
    loop = TurnLoop(resolve_env(Three), engine, renderer(), new_store(), config, history_policy=policy)
    trajectory = asyncio.run(loop.play(TASK, "g", "g/00"))
    assert not trajectory.failed, trajectory.error
    return trajectory


def trained(row):
    return decoded([each for each, mask in zip(row.response_ids, row.loss_mask, strict=True) if mask])


def shown(trajectory, number):
    return decoded(trajectory.context(number, trajectory.turns[number].prompt_length).token_ids)


def test_the_last_turns_keep_the_task():
    trajectory = play("last_turns", "step_wise")
    for number in range(3):
        text = shown(trajectory, number)
        assert "1+1?" in text and "two" in text and "2+2?" in text
    assert "try 1" in shown(trajectory, 2) and "try 0" not in shown(trajectory, 2)


def test_a_summary_is_followed_by_the_last_turns_and_not_by_the_task_again():
    asked = []

    async def ask(messages):
        asked.append(messages)
        return "noted"

    async def after(*turns, **options):
        asker = Asker(ask, 10, 100, TASK.prompt, list(turns[-1:]), False)
        return await compact([*TASK.prompt, *turns], asker, **options)

    response, answer = {"role": "assistant", "content": "a"}, {"role": "user", "content": "try 0"}
    kept = asyncio.run(after(response, answer, turns=2, keep=2))
    assert kept == [*TASK.prompt, response, answer] and not asked
    replaced = asyncio.run(after(response, answer, turns=1, keep=2))
    assert replaced[3]["content"][0]["text"].endswith("noted") and replaced[4:] == [response, answer]


@pytest.mark.parametrize("history", ["rerender", "drop_thinking", "last_turns"])
def test_a_rerendered_row_trains_no_example(history):
    trajectory = play(history, "concat")
    (row,) = emit(trajectory, "concat")
    assert "two" in decoded(row.token_ids)
    assert trained(row).replace("<|im_end|>", "") == ("bc" if history == "last_turns" else "abc")


def test_a_collected_episode_is_fine_tuned_on_without_the_examples(tmp_path):
    trajectory = asyncio.run(turn_loop(Three, ["a", "b", "c"]).play(TASK, "collect/00000", "collect/00000/00"))
    assert not trajectory.failed, trajectory.error
    (tmp_path / "episodes.jsonl").write_text(json.dumps(episode_row(trajectory, "m")) + "\n")
    data = {"mine": Conversations(str(tmp_path))}
    rows, _ = load_conversations(Config(sft=SFT(data=data), train=Train(steps=0)))
    (row,) = render_conversation(rows[0], renderer())
    text = decoded([each for ids, is_trained in row.pieces if is_trained for each in ids])
    assert text.replace("<|im_end|>", "") == "abc"
