"""Summaries that the policy writes: what the next response is sampled from, what is trained, and which budgets hold."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import itemgetter

import pytest
from testing.clocks import pass_time
from testing.episodes import a_task, decoded, image, new_store, renderer, script

from vlmrl import Env, obs
from vlmrl.config import Rollout
from vlmrl.engine.base import Request
from vlmrl.engine.scripted import ScriptedEngine
from vlmrl.env.base import RetryTurn, resolve_env
from vlmrl.rollout.asking_loop import AskingLoop
from vlmrl.rollout.history import resolve_policy
from vlmrl.rollout.history_policies import compact, keep_images
from vlmrl.samples import audit, concat, emit
from vlmrl.train.turn_states import states_of
from vlmrl.types import Completion, Trajectory

REQUEST = "Sum up."
COLORS = ("red", "green", "blue", "yellow", "black", "white", "orange", "purple")


class Screens(Env):
    """A screen of its own colour and number after each response, and done at the response ``done``."""

    def step(self, response_text):
        done = response_text == "done"
        return obs(f"Screen {self.turn}.", [image(COLORS[self.turn])]), done, {"reward": 1.0} if done else {}


def play(env, responses, policy=None, **limits):
    limits = {"max_turns": 8, "max_tokens": 400, "max_response_tokens": 60} | limits
    policy = policy or partial(compact, turns=2, request=REQUEST)
    engine = responses if isinstance(responses, ScriptedEngine) else script(responses)
    loop = AskingLoop(resolve_env(env), engine, renderer(), new_store(), Rollout(**limits), 0, policy)
    trajectory = asyncio.run(loop.play(a_task("Count."), "g", "g/0"))
    if not trajectory.failed:
        check(trajectory)
    return trajectory


def check(trajectory):
    """Every sampled token is trained once, with its logprob, in the two forms of rows that such an episode has."""
    sampled = [(turn.response_ids, turn.logprobs) for turn in trajectory.turns]
    for form in ("step_wise", "merged"):
        rows = emit(trajectory, form)
        audit(rows, [trajectory], image_token_id=renderer().image_token_id)
        assert sum(sum(row.loss_mask) for row in rows) == trajectory.num_sampled
        spans = sorted(((span.turn, row, span) for row in rows for span in row.responses), key=itemgetter(0))
        assert [number for number, _, _ in spans] == list(range(len(sampled)))
        for number, row, span in spans:
            trained = slice(span.start, span.end)
            assert all(row.loss_mask[trained])
            assert (row.response_ids[trained], row.rollout_logprobs[trained]) == sampled[number]


def prompts(trajectory):
    return [decoded(ids) for ids, _ in trajectory.prompts()]


def test_the_summary_and_what_it_names_replace_the_conversation():
    trajectory = play(Screens, ["a", "b", "it was [image 1], then nothing", "c", "done"])
    turns, shown = trajectory.turns, prompts(trajectory)
    assert [turn.text for turn in turns] == ["a", "b", "it was [image 1], then nothing", "c", "done"]
    assert [turn.asked for turn in turns] == [False, False, True, False, False]
    assert shown[2].endswith(f"{REQUEST}<|im_end|>\n<|im_start|>assistant\n") and "Screen 1" not in shown[2]
    assert "it was [image 1], then nothing" in shown[3] and "Screen 0" not in shown[3] and "Screen 1" in shown[3]
    images = [[item.id for item in media] for _, media in trajectory.prompts()]
    red, green, blue = (turns[number].media[-1].id for number in (1, 3, 4))
    assert images == [[], [red], [red], [red, green], [red, green, blue]]  # "b" stays, with the screen after it
    assert shown[4].startswith(shown[3]) and turns[4].parent == 3  # appended as sampled
    assert trajectory.reward == 1.0 and trajectory.ending == "env_done"
    assert trajectory.metrics["asked_turns"] == 1
    assert [len(emit(trajectory, form)) for form in ("step_wise", "merged")] == [5, 2]
    with pytest.raises(ValueError, match=r"step_wise or merged"):
        concat(trajectory)


def test_a_summary_is_written_before_the_context_is_full_and_leaves_its_predecessor_out():
    long, limit = "word " * 10, 300

    class Ends(Screens):
        unfinished_reward = 0.0

    def response(request: Request, turn: int) -> str:
        text = decoded(request.prompt_ids)
        assert len(request.prompt_ids) < limit
        return f"summary {turn}" if text.rstrip().endswith(f"{REQUEST}<|im_end|>\n<|im_start|>assistant") else long

    trajectory = play(Ends, response, partial(compact, at=0.5, request=REQUEST), max_tokens=limit)
    asked = [number for number, turn in enumerate(trajectory.turns) if turn.asked]
    assert trajectory.ending == "max_turns"  # and not max_tokens
    assert trajectory.metrics["saved_tokens"] > 0
    assert len(asked) >= 2 and len(trajectory.turns) - len(asked) == 8
    after = prompts(trajectory)[asked[1] + 1]
    assert f"summary {asked[1]}" in after and f"summary {asked[0]}" not in after


def test_the_env_asks_for_a_summary():
    class Asks(Screens):
        def step(self, response_text):
            observation, done, info = super().step(response_text)
            return observation, done, info | ({"compact": True} if response_text == "remember" else {})

    trajectory = play(Asks, ["a", "remember", "sum", "done"], partial(compact, request=REQUEST))
    assert [turn.asked for turn in trajectory.turns] == [False, False, True, False]
    assert "compact" not in trajectory.turns[1].metrics


def test_a_summary_has_the_share_that_it_copies():
    trajectory = play(Screens, ["a", "b", "Screen 0.", "done"])
    assert trajectory.turns[2].metrics == {"copied": 1.0}
    assert "copied" not in trajectory.turns[3].metrics


@pytest.mark.parametrize(
    ("limits", "ending"), [({"max_response_tokens": 12}, "length"), ({"max_tokens": 70}, "max_tokens")]
)
def test_a_summary_that_a_budget_cuts_ends_the_episode(limits, ending):
    class Ends(Screens):
        unfinished_reward = 0.25

    trajectory = play(Ends, ["a", "b", "word " * 40], **limits)
    assert (trajectory.ending, trajectory.reward) == (ending, 0.25)


def test_max_turns_counts_the_envs_turns_and_finish_gets_the_last_of_them():
    class Finishes(Screens):
        def finish(self, ending):
            return float(self.turn) if self.last_response == "c" else None

    trajectory = play(Finishes, ["a", "b", "sum", "c"], max_turns=3)
    assert (trajectory.ending, trajectory.reward, len(trajectory.turns)) == ("max_turns", 2.0, 4)


def test_a_policy_of_the_user_may_ask_and_change_nothing():
    async def think_first(messages, asker):
        await asker.ask([{"role": "user", "content": "Think."}])
        return messages

    trajectory = play(Screens, ["a", "hm", "done"], think_first)
    assert [turn.parent for turn in trajectory.turns] == [None, 0, 0]
    assert "Think" not in prompts(trajectory)[2] and trajectory.reward == 1.0


def test_what_a_policy_of_the_user_changes_in_its_messages_is_shown_to_the_model():
    async def marking(messages, asker):
        messages[-1]["content"][-1]["text"] += " (last)"
        return messages

    trajectory = play(Screens, ["a", "done"], marking)
    assert "Screen 0. (last)" in prompts(trajectory)[1]


@pytest.mark.parametrize("error", [KeyError("mine"), asyncio.CancelledError("mine"), SystemExit("mine")])
def test_an_error_of_the_users_policy_fails_the_episode_with_its_line(error: BaseException):
    async def fails(messages, asker):
        raise error

    trajectory = play(Screens, ["a", "b"], fails)
    assert trajectory.failed and "mine" in trajectory.error and "test_compact.py" in trajectory.error


def test_a_policy_that_hangs_and_ignores_its_end_fails_the_episode():
    """The time of its requests does not count, although one ends before the other."""
    first_ended, both_ended, numbers = asyncio.Event(), asyncio.Event(), itertools.count(1)

    async def hangs(messages, asker):
        async def ask():
            await asker.ask([{"role": "user", "content": REQUEST}])
            first_ended.set()

        await asyncio.gather(ask(), ask())
        both_ended.set()
        with suppress(asyncio.CancelledError):
            pass_time(asyncio.get_running_loop(), 40.0)
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    async def response(request, turn):
        if turn and next(numbers) == 2:
            await first_ended.wait()
            pass_time(asyncio.get_running_loop(), 40.0)
            await asyncio.sleep(30.0)
        return "a"

    limits = Rollout(max_turns=8, max_tokens=400, max_response_tokens=60, env_timeout=20.0)
    engine = ScriptedEngine(response, renderer())
    loop = AskingLoop(resolve_env(Screens), engine, renderer(), new_store(), limits, 0, hangs)
    trajectory = asyncio.run(loop.play(a_task("Count."), "g", "g/0"))
    assert trajectory.ending == "error"
    assert trajectory.error == "rollout.history: no answer in 20 s (rollout.env_timeout)"
    assert both_ended.is_set() and [turn.asked for turn in trajectory.turns] == [False, True, True]


def test_concat_is_refused():
    with pytest.raises(ValueError, match=r"rollout\.samples must be merged or step_wise"):
        resolve_policy(Rollout(history="compact"))
    assert resolve_policy(Rollout(history="compact", samples="merged", history_options={"at": 0.5})) is not None


def test_a_summary_begins_in_the_state_of_the_response_after_it():
    class Named(Screens):
        def step(self, response_text):
            observation, done, info = super().step(response_text)
            return observation, done, info | {"state": f"s{self.turn}"}

    trajectory = play(Named, ["a", "b", "sum", "done"])
    assert states_of(trajectory)[1:] == ["state s0", "state s1", "state s1"]


def test_windows_of_images():
    messages = [{"role": "user", "content": [{"type": "image", "image": color}]} for color in COLORS]
    shown = keep_images(messages, first=1, last=1, every=3, text="[image {number}]")
    kept = [message["content"][0].get("image") or message["content"][0]["text"] for message in shown]
    assert kept == ["red", "[image 2]", "blue", "[image 4]", "[image 5]", "white", "[image 7]", "purple"]


class Numbered(ScriptedEngine):
    """Each token has a logprob of its own."""

    numbers = itertools.count(1)

    async def generate(self, request: Request) -> Completion:
        completion = await super().generate(request)
        return replace(completion, logprobs=[-float(next(self.numbers)) for _ in completion.token_ids])


@pytest.mark.slow
def test_random_episodes_train_each_sampled_token_once(how_many):
    """Summaries anywhere, of any size, with images kept by number, env errors, rejected responses and budgets that end them.

    `--hostile 10000` plays more of them.
    """
    seen = Counter[str]()
    for seed in range(how_many(300)):
        trajectory = random_episode(random.Random(seed))
        asked = [number for number, turn in enumerate(trajectory.turns) if turn.asked]
        after = [trajectory.turns[number + 1] for number in asked if number + 1 < len(trajectory.turns)]
        in_summary = bool(asked) and asked[-1] == len(trajectory.turns) - 1
        seen["failed"] += trajectory.failed
        seen["summaries"] += len(asked)
        seen["retried"] += bool(trajectory.metrics.get("env_retries")) and not trajectory.failed
        seen["rejected"] += any(turn.metrics.get("turns_resampled") for turn in trajectory.turns)
        seen["images kept"] += any(turn.num_images > 1 for turn in after)
        seen["images dropped"] += any(
            turn.num_images < trajectory.turns[number].num_images for number, turn in zip(asked, after, strict=False)
        )
        seen[f"{trajectory.ending} in a summary"] += in_summary and trajectory.turns[-1].stop_reason == "length"
    print(dict(seen))
    kinds = ("retried", "rejected", "images kept", "images dropped", "length in a summary", "max_tokens in a summary")
    assert seen["summaries"] > 100 and all(seen[kind] for kind in kinds), seen
    assert seen["failed"] < how_many(300) / 4, seen


def random_episode(rng: random.Random) -> Trajectory:
    """One episode, checked unless it failed: every response is in one row of each form, with its tokens and its logprobs."""
    errors, requests = rng.choice((0.0, 0.05)), [rng.random() < 0.1 for _ in COLORS]

    class Chance(Screens):
        unfinished_reward = 0.0

        def step(self, response_text):
            if rng.random() < 0.02:
                raise RetryTurn("again")
            if rng.random() < errors:
                raise OSError("the env's own")  # a new env replays the episode
            shown, done, info = super().step(response_text)
            return shown, done, info | {"compact": requests[self.turn]}

    def response(request: Request, turn: int) -> str:
        words = ["done", *(f"[image {rng.randrange(12)}]" for _ in range(3)), "word " * rng.randrange(30), "a"]
        return rng.choice(words) or "a"

    options = {
        "at": rng.uniform(0.1, 1),
        "turns": rng.randrange(4),
        "keep": rng.randrange(3),
        "images": rng.randrange(3),
    }
    policy = partial(compact, **options, request=REQUEST)
    engine, limit = Numbered(response, renderer()), rng.randrange(60, 400)
    return play(Chance, engine, policy, max_tokens=limit, max_response_tokens=rng.choice((20, 60)))
