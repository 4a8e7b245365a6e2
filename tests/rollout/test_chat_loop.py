"""Episodes of envs with a model behind a chat API: messages, images, tools, endings, retries."""

import asyncio
import base64
import io
import json
from typing import ClassVar

import pytest
from aiohttp import web
from PIL import Image
from testing.clocks import pass_time
from testing.episodes import a_task, image, new_store, renderer
from testing.episodes import play as play_policy
from testing.fake_api import GARBAGE, call, fake_api, says
from testing.servers import answering

from vlmrl import Env, ToolEnv, obs
from vlmrl.config import SFT, Config, Conversations, Rollout
from vlmrl.data.conversations import load_conversations
from vlmrl.engine import chat_engine
from vlmrl.engine.chat_engine import LONGEST_WAIT, ApiModel, ChatEngine, retry_after
from vlmrl.env.base import RetryTurn, resolve_env
from vlmrl.multimodal.masks import RowError
from vlmrl.rollout.chat_loop import ChatLoop
from vlmrl.run.episode_rows import episode_row
from vlmrl.samples.conversation import samples_of_conversation
from vlmrl.samples.emit import concat
from vlmrl.utils import http
from vlmrl.utils.http import http_loop

pytestmark = pytest.mark.slow


class Guess(Env):
    """Done when the response says 7; shows an image after each other response."""

    def step(self, response_text):
        if "7" in response_text:
            return obs(), True, {"reward": 1.0, "guesses": self.turn + 1}
        return obs("no", images=[image("blue")]), False, {"reward": 0.0}


def crop(left: int) -> Image.Image:
    """A part of the image.

    Args:
        left: Where it begins.
    """
    if left < 0:
        raise ValueError("left must be 0 or more")
    return image("green", (64, 32))


class Crop(ToolEnv):
    functions: ClassVar = [crop]

    def judge(self, response):
        return float("green" in response)


def play(env, url, task=None, *, api_options=None, history_policy=None, **rollout):
    limits = {"max_turns": 4, "max_tokens": 1000, "max_response_tokens": 100, "engine_timeout": 600.0} | rollout
    api = ChatEngine(ApiModel(url, "m", **(api_options or {})))
    loop = ChatLoop(resolve_env(env), api, renderer(), new_store(), Rollout(**limits), history_policy)
    return asyncio.run(loop.play(task or a_task(), "g", "g/00")), api


def shown_image(part):
    head, _, content = part["image_url"]["url"].partition(",")
    assert part["type"] == "image_url" and head == "data:image/png;base64"
    return Image.open(io.BytesIO(base64.b64decode(content)))


def test_an_episode_of_messages_has_text_rewards_and_no_tokens():
    with fake_api(says("3", "7")) as (api, url):
        trajectory, chat = play(Guess, url, a_task("Guess.", [image("red", (64, 64))]), temperature=0.5, stop=("!",))
    assert (trajectory.ending, trajectory.reward, [turn.text for turn in trajectory.turns]) == (
        "env_done",
        1.0,
        ["3", "7"],
    )
    assert all(turn.response_ids == turn.logprobs == turn.prompt_ids == [] for turn in trajectory.turns)
    assert [turn.metrics["api_prompt_tokens"] for turn in trajectory.turns] == [10, 10] and chat.spent == 24
    first, second = api.requests
    sampling = {name: first[name] for name in ("model", "max_tokens", "temperature", "stop")}
    assert sampling == {"model": "m", "max_tokens": 100, "temperature": 0.5, "stop": ["!"]} and "tools" not in first
    assert shown_image(first["messages"][0]["content"][0]).getpixel((0, 0)) == (255, 0, 0)
    assert second["messages"][:1] == first["messages"] and second["messages"][1]["content"] == "3"
    observation = second["messages"][2]["content"]
    assert shown_image(observation[0]).getpixel((0, 0)) == (0, 0, 255) and observation[1] == {
        "type": "text",
        "text": "no",
    }
    assert trajectory.turns[1].media[0].size == (64, 32) and trajectory.continues(1)


def test_tools_go_out_and_calls_come_back_in_the_apis_form():
    calls = [call("crop", '{"left": 1}', "a"), call("crop", '{"left": "</tool_call>"}', "b"), call("crop", "{", "c")]

    def respond(body):
        if len(body["messages"]) == 1:
            return {"role": "assistant", "content": None, "tool_calls": calls}
        return {"role": "assistant", "content": "green"}

    with fake_api(respond) as (api, url):
        trajectory, _ = play(Crop, url)
    assert trajectory.reward == 1.0
    first, second = api.requests
    assert [tool["function"]["name"] for tool in first["tools"]] == ["crop"]
    asked, *results, images = second["messages"][1:]
    assert asked == {"role": "assistant", "content": None, "tool_calls": calls}
    assert [(each["role"], each["tool_call_id"]) for each in results] == [("tool", "a"), ("tool", "b"), ("tool", "c")]
    assert "not of type" in results[1]["content"] and "not valid JSON" in results[2]["content"]  # one call each
    assert images["role"] == "user" and shown_image(images["content"][0]).size == (64, 32)
    kept = trajectory.turns[1].messages
    assert [each["tool_call_id"] for each in kept] == ["a", "b", "c"] and kept[0]["content"][0]["type"] == "image"


def test_an_answer_in_another_form_still_answers_each_call():
    class Plain(Env):
        tools: ClassVar = Crop.schemas

        def step(self, response_text):
            return obs("seen"), self.turn == 1, {"reward": 0.5}

    with fake_api(lambda body: {"content": "", "tool_calls": [call("crop", "{}", "x")]}) as (api, url):
        trajectory, _ = play(Plain, url)
    assert trajectory.reward == 1.0
    assert api.requests[1]["messages"][2:] == [
        {"role": "tool", "tool_call_id": "x", "content": ""},
        {"role": "user", "content": "seen"},
    ]
    assert trajectory.turns[1].messages == [{"role": "user", "content": "seen"}]  # what the policy would see


class Hints(Env):
    """Answers each response, also one with calls, as a user. Done after the second response."""

    tools: ClassVar = Crop.schemas
    unfinished_reward = 0.0

    def step(self, response_text):
        return obs("a hint"), self.turn == 1, {"reward": 0.5}


def fine_tuned(tmp_path, trajectory):
    """The row that `vlmrl sft` makes of a collected episode."""
    trajectory.id = "collect/00000/00"
    (tmp_path / "episodes.jsonl").write_text(json.dumps(episode_row(trajectory, "m")) + "\n")
    tasks, _ = load_conversations(Config(sft=SFT(data={"x": Conversations(path=str(tmp_path))})))
    limits = {"max_tokens": 1000, "seconds": 600.0}
    (sample,) = asyncio.run(samples_of_conversation(tasks.draw(0), renderer(), new_store(), **limits))
    return sample


@pytest.mark.parametrize(
    ("env", "calls"),
    [
        (Hints, [call("crop", '{"left": 1}', "a")]),
        (Hints, [call("crop", '{"left": 1}', "a"), call("crop", '{"left": 2}', "b")]),
        (Crop, [call("crop", '{"left": -1}', "a"), call("crop", '{"left": -2}', "b")]),
    ],
)
def test_fine_tuning_shows_an_apis_episode_as_the_policy_would_have_seen_it(tmp_path, env, calls):
    """Where an env answered calls as a user, as that of geo3k, the rows had an empty result of each, which no other prompt has."""

    def respond(body):
        return {"content": "red"} if len(body["messages"]) > 1 else {"content": "looking", "tool_calls": calls}

    with fake_api(respond) as (_, url):
        trajectory, _ = play(env, url, a_task("Look."))
    row = fine_tuned(tmp_path, trajectory)
    (own,) = concat(play_policy(env, [turn.text for turn in trajectory.turns], a_task("Look.")))
    assert renderer().decode(row.token_ids) == renderer().decode(own.token_ids)
    assert row.loss_mask == own.loss_mask


def test_results_of_calls_in_a_text_beside_others_go_out_as_a_users_and_stay_results(tmp_path):
    written = '<tool_call>\n{"name": "crop", "arguments": {"left": -1}}\n</tool_call>'

    def respond(body):
        first = {"content": written, "tool_calls": [call("crop", '{"left": -2}', "a")]}
        return {"content": "red"} if len(body["messages"]) > 1 else first

    with fake_api(respond) as (api, url):
        trajectory, _ = play(Crop, url)
    assert [each["role"] for each in api.requests[1]["messages"][2:]] == ["tool", "user"]
    assert [each["role"] for each in trajectory.turns[1].messages] == ["tool", "tool"]


def test_fine_tuning_does_not_train_the_end_of_an_apis_response_that_was_cut(tmp_path):
    """It taught the model to end a response where the API had run out of tokens."""

    def respond(body):
        is_first = len(body["messages"]) == 1
        return {"content": "whole"} if is_first else {"content": "the first step is", "finish_reason": "length"}

    with fake_api(respond) as (_, url):
        trajectory, _ = play(Hints, url)
    row = fine_tuned(tmp_path, trajectory)
    trained = [token for token, mask in zip(row.response_ids, row.loss_mask, strict=True) if mask]
    assert renderer().decode(trained) == "whole<|im_end|>the first step is"
    assert renderer().decode(row.response_ids).rstrip("\n").endswith("the first step is<|im_end|>")


def test_an_apis_only_response_that_was_cut_before_its_text_is_no_row_to_learn_from(tmp_path):
    with fake_api(lambda body: {"content": "", "finish_reason": "length"}) as (_, url):
        trajectory, _ = play(Hints, url)
    with pytest.raises(RowError) as error:
        fine_tuned(tmp_path, trajectory)
    assert error.value.reason == "untrained"


@pytest.mark.parametrize(
    ("limits", "reply", "tokens", "ending", "turns"),
    [
        ({"max_turns": 2}, {"content": "3"}, (10, 2), "max_turns", 2),
        ({}, {"content": "3", "finish_reason": "length"}, (10, 100), "length", 1),
        ({"max_tokens": 12}, {"content": "3"}, (10, 2), "max_tokens", 1),
    ],
)
def test_budgets_end_an_episode_as_with_the_policy(limits, reply, tokens, ending, turns):
    with fake_api(lambda body: dict(reply)) as (api, url):
        api.tokens = tokens
        trajectory, _ = play(Guess, url, truncated_reward=0.25, **limits)
    assert (trajectory.ending, len(trajectory.turns)) == (ending, turns)


def test_a_history_policy_rewrites_what_the_api_sees():
    texts = iter("127")
    with fake_api(lambda body: {"content": next(texts)}) as (api, url):
        trajectory, _ = play(Guess, url, history="last_turns", history_policy=lambda messages: messages[-1:])
    assert trajectory.reward == 1.0 and [len(each["messages"]) for each in api.requests] == [1, 1, 1]
    with pytest.raises(ValueError, match="inline"):
        play(Guess, "http://127.0.0.1:1", history="inline")


def test_what_a_history_policy_changes_in_its_messages_is_sent_once():
    def marking(messages):
        messages[0]["content"] += " (first)"
        return messages

    texts = iter("127")
    with fake_api(lambda body: {"content": next(texts)}) as (api, url):
        play(Guess, url, history="rerender", history_policy=marking)
    assert [str(each["messages"]).count("(first)") for each in api.requests] == [1, 1, 1]


@pytest.mark.parametrize("fault", ["500", "429", "cut", *GARBAGE])
def test_a_passing_fault_is_retried(fault):
    with fake_api(says("7"), [fault, fault]) as (api, url):
        trajectory, chat = play(Guess, url)
    assert trajectory.reward == 1.0 and len(api.requests) == 3 and chat.retries == 2
    assert chat.spent == 12


def test_an_attempt_that_hangs_is_given_up_after_half_of_the_time():
    with fake_api(says("7"), ["hang"]) as (api, url):
        api.on_hang = lambda: pass_time(http_loop().loop, 300.0)  # the attempts' limits are kept there
        trajectory, _ = play(Guess, url, engine_timeout=600.0)
    assert trajectory.reward == 1.0 and len(api.requests) == 2


def test_lasting_faults_fail_the_episode_with_their_reason(monkeypatch):
    monkeypatch.setattr(http, "FIRST_PAUSE", 700.0)  # longer than the time that is left
    monkeypatch.setattr(chat_engine, "LONGEST_PAUSE", 700.0)
    with fake_api(says("7"), ["garbage"]) as (_, url):
        trajectory, _ = play(Guess, url, engine_timeout=600.0)
    assert trajectory.ending == "error" and "Bad gateway" in trajectory.error and not trajectory.non_retryable


def test_a_long_response_is_not_read_to_its_end(monkeypatch):
    """It is read in the event loop of all episodes: one of 250 MB took 7 s there."""
    monkeypatch.setattr(http, "FIRST_PAUSE", 700.0)
    monkeypatch.setattr(chat_engine, "LONGEST_PAUSE", 700.0)
    with fake_api(says("7" * chat_engine.MOST_BYTES)) as (_, url):
        trajectory, _ = play(Guess, url, engine_timeout=600.0)
    assert trajectory.ending == "error" and f"more than {chat_engine.MOST_BYTES} bytes" in trajectory.error


def test_a_refused_request_fails_its_task_and_a_wrong_key_the_run(monkeypatch):
    with fake_api(says("7"), ["400"]) as (_, url):
        trajectory, _ = play(Guess, url)
    assert trajectory.non_retryable and "400" in trajectory.error
    monkeypatch.setenv("SOME_KEY", "secret")
    with (
        fake_api(says("7"), ["401"]) as (api, url),
        pytest.raises(ValueError, match="environment variable SOME_KEY") as raised,
    ):
        play(Guess, url, api_options={"key_variable": "SOME_KEY"})
    assert api.keys == ["Bearer secret"] and "secret" not in str(raised.value)


@pytest.mark.parametrize("status", [400, 200, 500])
def test_a_key_that_an_api_repeats_in_an_error_is_not_recorded(status, monkeypatch):
    monkeypatch.setenv("SOME_KEY", "secret-key-of-an-api")
    monkeypatch.setattr(http, "FIRST_PAUSE", 700.0)
    monkeypatch.setattr(chat_engine, "LONGEST_PAUSE", 700.0)

    async def repeat(request: web.Request) -> web.Response:
        return web.Response(status=status, text=f'"no such key: {request.headers["Authorization"]}"')

    with answering(repeat) as url:
        trajectory, _ = play(Guess, url, engine_timeout=600.0, api_options={"key_variable": "SOME_KEY"})
    assert trajectory.ending == "error" and "secret" not in trajectory.error


def test_the_budget_stops_requests():
    with fake_api(says("3")) as (api, url), pytest.raises(ValueError, match="--budget 20: 24 tokens are spent"):
        play(Guess, url, api_options={"budget": 20})
    assert len(api.requests) == 2


def test_further_fields_replace_and_remove():
    body = {"max_tokens": None, "max_completion_tokens": 5}
    with fake_api(says("7")) as (api, url):
        play(Guess, url, api_options={"body": body})
    assert api.requests[0]["max_completion_tokens"] == 5 and "max_tokens" not in api.requests[0]


def test_a_rejected_turn_is_sampled_again():
    class Picky(Guess):
        def step(self, response_text):
            if response_text == "no":
                raise RetryTurn("no")
            return super().step(response_text)

    texts = iter(["no", "7"])
    with fake_api(lambda body: {"content": next(texts)}) as (api, url):
        trajectory, _ = play(Picky, url)
    assert trajectory.reward == 1.0 and trajectory.turns[0].metrics["turns_resampled"] == 1
    assert api.requests[0]["messages"] == api.requests[1]["messages"]


def test_retry_after_is_seconds_or_a_date():
    assert retry_after({"Retry-After": "7"}) == 7.0
    assert retry_after({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}) == 0.0
    assert retry_after({}) == retry_after({"Retry-After": "soon"}) == retry_after({"Retry-After": "nan"}) == 0.0
    for endless in ("inf", "1e999", "Fri, 31 Dec 9999 23:59:59 GMT"):  # no later request would ever be sent
        assert retry_after({"Retry-After": endless}) == LONGEST_WAIT
