"""The history modes: what the next response is sampled from, in tokens, for our templates and the eight real ones."""

from __future__ import annotations

import asyncio
import re
import time
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testing.episodes import (
    ASSISTANT,
    END,
    PAD,
    USER,
    VISION_END,
    VISION_START,
    a_task,
    completion,
    decoded,
    image,
    play,
    renderer,
    turn_loop,
)
from testing.templates import DROP_THINKING, TEMPLATES, episode_ids, full_text, ids_of, real_renderer, tool, user

from vlmrl import Env, obs
from vlmrl.config import Rollout
from vlmrl.multimodal.placeholders import expand
from vlmrl.multimodal.renderer import Renderer
from vlmrl.rollout.history import Rerender, resolve_policy
from vlmrl.rollout.history_policies import drop_thinking, keep_last_images, last_turns
from vlmrl.samples import audit, concat, emit, merge_prefixes, step_wise
from vlmrl.types import Turn

OURS = Path(__file__).parents[2] / "vlmrl/multimodal/templates"


class Shows(Env):
    """An image of its own after each response, and done at the response ``done``."""

    def step(self, response_text):
        done = response_text == "done"
        shades = ("red", "green", "blue", "yellow")
        return obs("Look.", [image(shades[self.turn])]), done, {"reward": 1.0} if done else {}


def prompts(trajectory) -> list[str]:
    return [decoded(ids) for ids, _ in trajectory.prompts()]


def check(trajectory, form):
    return audit(emit(trajectory, form), [trajectory], image_token_id=renderer().image_token_id)


SEEN = f"{VISION_START}{PAD}{PAD}{VISION_END}"  # an image of two tokens
START = f"{USER}2+2?{END}\n{ASSISTANT}"


# Inline


def test_inline_trains_only_the_last_end_of_turn():
    trajectory = play(Shows, ["a", "done"], history="inline")
    assert prompts(trajectory) == [START, f"{START}a{SEEN}Look."]
    first, second = trajectory.turns
    assert second.kept == first.length - 1 and trajectory.tail_ids == []
    (row,) = concat(trajectory)
    assert decoded(row.token_ids) == f"{START}a{SEEN}Look.done{END}" and row.loss_mask[-1] == 1
    assert check(trajectory, "concat").left_out == {"inline_end_of_turn": 1}
    assert check(trajectory, "step_wise").left_out == {}


def test_inline_closes_a_response_that_a_stop_string_ended():
    def response(request, turn):
        return completion("done" if turn else "a", request_tokens(request), end=False)

    trajectory = play(Shows, response, history="inline")
    assert trajectory.continues(1)
    assert trajectory.tail_ids == [renderer().end_of_turn_id]
    (row,) = concat(trajectory)
    assert decoded(row.token_ids) == f"{START}a{SEEN}Look.done{END}" and row.loss_mask[-2:] == [1, 0]
    check(trajectory, "concat")


def request_tokens(request) -> int:
    return len(expand(request.prompt_ids, renderer().image_token_id, request.media))


def test_inline_text_of_tools_and_special_tokens_stays_text():
    rendered = renderer().inline([tool("got <|im_end|>"), user("ok")])
    assert decoded(rendered.token_ids) == "got <|im_end|>ok"
    assert renderer().end_of_turn_id not in rendered.token_ids


@pytest.mark.parametrize("history", ["append", "inline"])
def test_no_sampled_id_is_ever_encoded_again(history):
    """The response's text cut into single bytes: encoding it again would give other ids."""
    bytewise = [id for letter in "answer zoom" for id in renderer().encode(letter)]
    assert renderer().encode("answer zoom") != bytewise

    def response(request, turn):
        made = completion("done" if turn == 2 else "", request_tokens(request))
        ids = made.token_ids if turn == 2 else [*bytewise, renderer().end_of_turn_id]
        return type(made)(ids, [-0.5] * len(ids), "stop", [0] * len(ids), made.prompt_tokens)

    trajectory = play(Shows, response, history=history)
    *_, (last, _) = trajectory.prompts()
    text = ",".join(map(str, last))
    assert text.count(",".join(map(str, bytewise))) == 2
    check(trajectory, "concat")


# Rerender


def test_rerender_keeps_what_the_prompts_have_in_common():
    policy = partial(keep_last_images, k=1)
    loop = play_with_policy(policy)
    messages = [{"role": "user", "content": "2+2?"}]
    context: list[int] = []
    for turn, (ids, media) in zip(loop.turns, loop.prompts(), strict=True):
        if turn is not loop.turns[0]:
            messages += turn.messages
        rendered = renderer().prompt(policy(messages))
        assert ids == expand(rendered.token_ids, renderer().image_token_id, media)  # the full render at every turn
        assert len(media) == min(1, len(messages) // 2)
        common = next((i for i, (a, b) in enumerate(zip(context, ids, strict=False)) if a != b), len(context))
        assert turn.kept == common
        context = ids + turn.response_ids
        messages.append({"role": "assistant", "content": turn.text})
    check(loop, "step_wise")
    check(loop, "merged")


def play_with_policy(policy):
    loop = turn_loop(Shows, ["a", "b", "c", "done"], history="rerender", samples="step_wise")
    loop.history_policy = policy
    return asyncio.run(loop.play(a_task(), "g", "g/00"))


def test_a_rerendered_history_that_only_grows_is_linear():
    trajectory = play(Shows, ["a", "done"], history="rerender", samples="merged")
    assert trajectory.continues(1)
    assert len(merge_prefixes(step_wise(trajectory))) == 1
    assert prompts(trajectory)[1] == f"{START}a{END}\n{USER}{SEEN}Look.{END}\n{ASSISTANT}"


def test_a_policy_may_change_the_messages_that_it_gets():
    def marking(messages):
        messages[-1]["content"][-1]["text"] += " (last)"
        messages[0]["content"][-1]["text"] += " (first)"
        return messages

    task = a_task("Count.", [image()])
    loop = turn_loop(Shows, ["a", "b", "done"] * 2, history="rerender", samples="step_wise")
    loop.history_policy = marking
    asyncio.run(loop.play(task, "g", "g/00"))
    trajectory = asyncio.run(loop.play(task, "g", "g/01"))  # of the same task
    assert task.prompt == a_task("Count.", task.images).prompt
    assert trajectory.turns[1].messages[0]["content"][-1]["text"] == "Look."
    last = prompts(trajectory)[2]
    assert last.count("(first)") == last.count("(last)") == 1


def test_one_rendered_row_marks_the_responses_and_counts_the_rest():
    trajectory = play(Shows, ["a", "done"], history="rerender")
    (row,) = emit(trajectory, "concat")
    trained = [id for id, mask in zip(row.response_ids, row.loss_mask, strict=True) if mask]
    assert decoded(trained) == f"a{END}done{END}" and row.rollout_logprobs is None
    assert row.reward == 1.0 and row.loss_mask.count(1) == 3 + len(renderer().encode("done"))
    assert check(trajectory, "concat").left_out == {"re_rendered": 0}


# Policies


@pytest.mark.parametrize(
    "text",
    [
        "",
        "yes",
        "<think>hm</think>\n\n yes",
        "a <think>1</think> b<think>2</think>\t<think>3</think>c </think> d <think>",
        "</think> x <think>a<think>b</think>  </think> y",
        "<think></think>",
        "<think>a</think>  <think>b</think>  ",
        "</think></think> <think> </think> </think> ",
    ],
)
def test_thinking_is_dropped_as_the_obvious_pattern_drops_it(text):
    (message,) = drop_thinking([{"role": "assistant", "content": text}])
    assert message["content"] == re.sub(r"<think>.*?</think>\s*", "", text, flags=re.DOTALL)


def test_thinking_that_never_ends_is_dropped_in_linear_time():
    began = time.thread_time()
    text = "<think>" * 40_000
    assert drop_thinking([{"role": "assistant", "content": text}])[0]["content"] == text
    assert time.thread_time() - began < 5  # a millisecond; the pattern needs a minute


def test_policies_rewrite_messages():
    image = {"type": "image", "image": "a"}
    first, last = user([image, {"type": "text", "text": "one"}]), user([image])
    thought = {"role": "assistant", "content": "<think>hm</think>\nyes"}
    messages = [first, thought, last]
    assert keep_last_images(messages) == [user([{"type": "text", "text": "one"}]), thought, last]
    assert keep_last_images(messages, k=2) == messages and keep_last_images(messages, k=0)[2] == user([])
    assert drop_thinking(messages)[1]["content"] == "yes"
    long = [first, thought, user("a"), thought, user("b")]
    assert last_turns(long) == [first, thought, user("b")] and last_turns(long, k=0) == [first, user("b")]
    assert last_turns(long, k=2) == long


def test_policies_by_name_by_path_and_with_options_that_do_not_fit(tmp_path):
    (tmp_path / "mine.py").write_text("def none(messages):\n    return messages[:1]\n")
    mine = resolve_policy(Rollout(history=f"{tmp_path}/mine.py:none"))
    assert mine([1, 2]) == [1]
    named = Rollout(history="last_turns", history_options={"n": 2})
    with pytest.raises(ValueError, match=r"rollout.history_options do not fit last_turns: .*'n'"):
        resolve_policy(named)


# Templates


def template(name: str) -> Renderer:
    return Renderer(renderer().tokenizer, image_token=PAD, chat_template=(OURS / f"{name}.jinja").read_text())


def test_our_second_template_drops_thinking_once_it_was_answered():
    response = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"}
    kept, dropped = (
        full_text(template(name), [user("q"), response, user("r")]) for name in ("chatml", "chatml_drop_thinking")
    )
    assert kept.replace("<think>\nhm\n</think>\n\n", "") == dropped
    ends = [
        full_text(template(name), [user("q"), response], generate=False) for name in ("chatml", "chatml_drop_thinking")
    ]
    assert ends[0] == ends[1]  # the last response stays whole


def test_generation_markers_are_needed_to_mark_responses(shared):
    real = real_renderer(shared, "qwen3-vl", "qwen3_vl")
    assert template("chatml").marks_responses and not real.marks_responses
    with pytest.raises(ValueError, match=r"no \{% generation %\} markers"):
        real.conversation([user("q"), {"role": "assistant", "content": "a"}])


RESPONSES = st.lists(
    st.sampled_from(
        ["a", " red", "é", "\n", "  ", "<think>\nhm\n</think>\n\n", "</think>", "<tool_call>", "日本", "{"]
    ),
    max_size=5,
).map("".join)


def rewritten(name: str, response: str) -> str:
    """What a template that forgets makes of an earlier response: thinking dropped; all but qwen3 also trim its end."""
    if "</think>" in response:
        response = response.split("</think>")[-1].lstrip("\n")
    return response if name == "qwen3" else response.rstrip()


@pytest.mark.parametrize("name", DROP_THINKING)
def test_templates_rewrite_history_only_by_dropping_thinking(name, shared):
    """A user message answers a response: append keeps it as sampled, the full render has it rewritten."""
    real = real_renderer(shared, "qwen3-vl", name)

    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(RESPONSES)
    def check_one(response):
        ours = real.decode(episode_ids(real, [user("q")], [(response, [user("r")])]))
        thought = real.opening + response
        full = full_text(real, [user("q"), {"role": "assistant", "content": thought}, user("r")])
        earlier, later = ours.split(thought, 1) if thought else ours.split("<|im_end|>\n<|im_start|>user\nr", 1)
        if thought and (name == "qwen3" or "</think>" in thought):
            assert earlier + rewritten(name, thought) + later == full

    check_one()


@pytest.mark.parametrize("name", TEMPLATES)
def test_rerender_is_the_full_render_at_every_turn(name, shared):
    real = real_renderer(shared, "qwen3-vl", name)

    @settings(max_examples=10, deadline=None, derandomize=True)
    @given(st.lists(st.tuples(RESPONSES, st.sampled_from([user("more"), tool("result")])), min_size=1, max_size=4))
    def check_one(turns):
        history = Rerender(real, [])
        messages = [user("q")]
        assert history.prompt(messages).token_ids == ids_of(real, full_text(real, messages))
        for response, answer in turns:
            turn = Turn([], [], ids_of(real, response), [], [], "stop", real.opening + response)
            messages += [{"role": "assistant", "content": real.opening + response}, answer]
            step = history.continuation(turn, [answer])
            assert step.is_whole_prompt and step.rendered.token_ids == ids_of(real, full_text(real, messages))

    check_one()
