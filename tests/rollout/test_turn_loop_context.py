"""What the turn loop keeps of the context from turn to turn: tokens, images, room for the next response, routing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from testing.episodes import a_task, completion, decoded, image, play, renderer, turn_loop

from vlmrl import Env, obs
from vlmrl.engine.base import EngineError, Request
from vlmrl.engine.scripted import ScriptedEngine
from vlmrl.model import tiny
from vlmrl.multimodal.renderer import Renderer
from vlmrl.samples import audit, emit
from vlmrl.types import Completion, ExpertRouting

EXPERT = ExpertRouting(bytes([0, 0]), top_k=1)


class Shows(Env):
    """Says "Look." until the response is `done`, which is worth 1."""

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        done = response_text == "done"
        return obs() if done else obs("Look."), done, {"reward": float(done)}


def rerendered(policy, responses, task=None, **rollout):
    """An episode whose messages ``policy`` rewrites before each response."""
    loop = turn_loop(Shows, responses, history="rerender", samples="step_wise", **rollout)
    loop.history_policy = policy
    return asyncio.run(loop.play(task or a_task(), "g", "g/00"))


def check(trajectory, how="step_wise"):
    return audit(emit(trajectory, how), [trajectory], image_token_id=renderer().image_token_id)


def test_the_engine_is_asked_for_routing_from_the_last_token_that_it_has_not_run():
    asked = []

    def response(request: Request, turn: int) -> str:
        asked.append(request.routing_from)
        return "a" if turn < 2 else "done"

    first, second, third = play(Shows, response).turns
    context = len(first.prompt_ids) + len(first.response_ids)
    following = context + len(second.prompt_ids) + len(second.response_ids)
    assert len(third.prompt_ids) > 1
    assert asked == [0, context - 1, following - 1]  # a response's last token is run with the next prompt


def test_an_end_of_turn_that_inline_history_drops_makes_room_for_a_token():
    whole = play(Shows, ["a", "done"], history="inline")
    first, second = whole.turns
    assert second.kept == first.length - 1
    context = len(first.prompt_ids) + len(first.response_ids) + len(second.prompt_ids)
    fits = play(Shows, ["a", "d"], history="inline", max_tokens=context, max_response_tokens=10, truncated_reward=0.0)
    assert (len(fits.turns), len(fits.turns[1].response_ids), fits.ending) == (2, 1, "max_tokens")
    short = play(
        Shows, ["a", "d"], history="inline", max_tokens=context - 1, max_response_tokens=10, truncated_reward=0.0
    )
    assert (len(short.turns), short.ending) == (1, "max_tokens")


def test_the_context_of_the_engine_is_that_of_the_turns_in_inline_history():
    seen = []

    def response(request: Request, turn: int) -> str:
        seen.append(decoded(request.prompt_ids))
        return "a" if turn < 2 else "done"

    trajectory = play(Shows, response, history="inline")
    assert seen == [decoded(ids) for ids, _ in trajectory.prompts()]


def test_another_image_of_the_same_size_in_the_same_place_is_new():
    colors = iter(["red", "green"])

    def repaint(messages):
        content = [{"type": "image", "image": image(next(colors))}, {"type": "text", "text": "What is it?"}]
        return [{"role": "user", "content": content}, *messages[1:]]

    shown = []

    def response(request: Request, turn: int) -> str:
        shown.append([item.id for item in request.media])
        return ["a", "done"][turn]

    first, second = rerendered(repaint, response, a_task("What is it?", [image("red")])).turns
    assert [item.id for item in first.media] == shown[0]
    assert [item.id for item in second.media] == shown[1]
    assert shown[0] != shown[1] and len(shown[1]) == 1
    assert second.kept == first.prompt_ids.index(renderer().image_token_id) and second.kept_media == 0


def test_images_before_a_rewritten_message_are_kept():
    seen = []

    def forget(messages):
        """Rewrite the last message once there is a response."""
        return messages if len(messages) == 1 else [messages[0], {"role": "user", "content": "Again."}]

    def response(request: Request, turn: int) -> str:
        seen.append((decoded(request.prompt_ids), [item.id for item in request.media]))
        return ["a", "done"][turn]

    task = a_task("Which?", [image("red", (64, 64)), image("green", (96, 64))])
    trajectory = rerendered(forget, response, task)
    first, second = trajectory.turns
    assert seen[1][1] == [item.id for item in first.media]
    assert (second.media, second.kept_media) == ([], 2)
    assert second.parent == 0 and decoded(second.prompt_ids).endswith("Again.<|im_end|>\n<|im_start|>assistant\n")
    assert decoded(first.prompt_ids[: second.kept]).count("<|image_pad|>") == 4 + 6
    check(trajectory)


def test_a_prompt_that_the_context_begins_with_has_its_last_token_anew():
    """Its hidden state is needed to sample the first token of the response."""
    first, second = rerendered(lambda messages: messages[:1], ["a", "done"]).turns
    assert second.prompt_ids == first.prompt_ids[-1:]
    assert (second.kept, second.kept_media) == (len(first.prompt_ids) - 1, 0)


def test_the_rerendered_row_is_of_the_last_version_and_pays_on_its_last_trained_token():
    def response(request: Request, turn: int) -> Completion:
        said = completion(["a", "done"][turn], len(request.prompt_ids))
        return Completion(said.token_ids, said.logprobs, "stop", [4 + turn] * len(said.token_ids), said.prompt_tokens)

    trajectory = play(Shows, response, history="rerender")
    (row,) = emit(trajectory, "concat")
    assert row.policy_versions == [5] * len(row.response_ids)
    assert row.loss_mask[-1] == 0  # the template's newline
    assert row.rewards == {max(index for index, mask in enumerate(row.loss_mask) if mask): 1.0}


def test_only_a_task_that_cannot_be_played_is_not_retried():
    def dies(request: Request, turn: int) -> str:
        raise EngineError("server 3 is gone")

    too_long = play(Shows, ["done"], a_task("word " * 100), max_tokens=50, max_response_tokens=10)
    assert (too_long.ending, too_long.non_retryable) == ("error", True)
    assert [play(Shows, dies).non_retryable, play(Shows, ["done"]).non_retryable] == [False, False]


def test_seconds_of_engine_and_env_are_counted_apart(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])

    def response(request: Request, turn: int) -> str:
        clock[0] += 3.0
        return "done"

    class Slow(Shows):
        def step(self, response_text):
            clock[0] += 5.0
            return super().step(response_text)

    (turn,) = play(Slow, response).turns
    assert (turn.engine_seconds, turn.env_seconds) == (3.0, 5.0)


@pytest.mark.parametrize(("seen", "routed"), [(1, True), (0, False)])
def test_routing_of_a_responses_last_token_comes_with_the_next_prompt(seen, routed):
    """The engine reports the tokens that it runs; it never runs the last one of a response before the next turn."""

    def response(request: Request, turn: int) -> Completion:
        said = completion(["a", "done"][turn], len(request.prompt_ids))
        tokens = len(request.prompt_ids) + len(said.token_ids) - request.routing_from
        routing = [EXPERT] * (tokens - 1) + [None] if seen else []
        return Completion(said.token_ids, said.logprobs, "stop", said.policy_versions, said.prompt_tokens, routing)

    first, second = play(Shows, response).turns
    expected = [EXPERT] * (len(first.prompt_ids) + len(first.response_ids)) if routed else []
    assert list(first.expert_routing) == expected
    assert list(second.expert_routing[-1:]) == ([None] if routed else [])


THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


@pytest.mark.parametrize(("history", "second"), [("append", "<think>\nb"), ("inline", "b")])
def test_a_response_is_shown_with_what_its_own_prompt_opened(history, second):
    """With inline history only the first response follows a generation prompt."""
    thinks = Renderer(tiny.tokenizer(), chat_template=THINKS)
    loop = turn_loop(Shows, ["a", "b"], history=history, max_turns=2)
    loop.renderer = thinks
    loop.engine = ScriptedEngine(lambda request, turn: ["a", "b"][turn], thinks)
    turns = asyncio.run(loop.play(a_task(), "g", "g/00")).turns
    assert [turn.text for turn in turns] == ["<think>\na", second]
