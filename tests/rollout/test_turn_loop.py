"""The agent loop: what the tokens of an episode are, how it ends, and what is refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
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
    script,
    turn_loop,
)

from vlmrl import Env, obs
from vlmrl.config import Rollout
from vlmrl.engine.base import EngineError, Request
from vlmrl.env.base import resolve_env
from vlmrl.env.session import EnvContractError
from vlmrl.model import tiny
from vlmrl.multimodal import renderer as renderer_module
from vlmrl.multimodal.messages import LONG_TEXT
from vlmrl.multimodal.renderer import Renderer
from vlmrl.rollout.sampler import derive_seed
from vlmrl.rollout.turn_loop import TurnLoop
from vlmrl.types import Completion

Step = tuple[dict[str, Any], bool, dict[str, Any]]


def env(*observations: dict[str, Any], reward: float | None = 1.0, finish: float | None = None) -> type[Env]:
    """Shows ``observations`` one after another, gives ``reward`` each turn, and is done at the response ``done``."""

    class Shows(Env):
        def step(self, response_text: str) -> Step:
            done = response_text == "done"
            return {} if done else observations[self.turn], done, {} if reward is None else {"reward": reward}

        def finish(self, ending: str) -> float | None:
            return finish

    return Shows


def cut(text: str, **options: Any) -> Callable[[Request, int], Completion]:
    return lambda request, turn: completion(text, len(request.prompt_ids), **options)


def test_the_tokens_of_an_episode_are_prompt_responses_and_deltas():
    trajectory = play(env(obs("No, 2+2."), obs("Right."), reward=0.5), ["5?", "4", "done"])
    first, second, third = trajectory.turns
    assert decoded(first.prompt_ids) == f"{USER}2+2?{END}\n{ASSISTANT}"
    assert decoded(first.response_ids) == f"5?{END}"
    assert decoded(second.prompt_ids) == f"\n{USER}No, 2+2.{END}\n{ASSISTANT}"
    assert decoded(second.response_ids) == f"4{END}"
    assert decoded(third.prompt_ids) == f"\n{USER}Right.{END}\n{ASSISTANT}"
    assert decoded(third.response_ids) == f"done{END}"
    assert [turn.text for turn in trajectory.turns] == ["5?", "4", "done"]
    assert trajectory.turn_rewards == [0.5, 0.5, 0.5]
    assert (trajectory.ending, trajectory.reward, trajectory.failed) == ("env_done", 1.5, False)
    assert second.messages == [{"role": "user", "content": "No, 2+2."}]


def test_images_go_through_the_same_loop_expanded():
    task = a_task("What is it?", [image("red", (64, 32))])
    closer = obs("Closer:", images=[image("green", (32, 32)), image("blue", (96, 32))])
    requests: list[tuple[list[int], list[str]]] = []

    def response(request: Request, turn: int) -> str:
        requests.append((list(request.prompt_ids), [item.id for item in request.media]))
        return ["zoom", "done"][turn]

    trajectory = play(env(closer), response, task)
    first, second = trajectory.turns
    assert decoded(first.prompt_ids) == f"{USER}{VISION_START}{PAD * 2}{VISION_END}What is it?{END}\n{ASSISTANT}"
    assert decoded(second.prompt_ids) == (
        f"\n{USER}{VISION_START}{PAD}{VISION_END}{VISION_START}{PAD * 3}{VISION_END}Closer:{END}\n{ASSISTANT}"
    )
    assert [item.num_tokens for turn in trajectory.turns for item in turn.media] == [2, 1, 3]
    ids, media = requests[1]  # the engine's form: all history, one placeholder an image
    assert decoded(ids) == (
        f"{USER}{VISION_START}{PAD}{VISION_END}What is it?{END}\n{ASSISTANT}zoom{END}"
        f"\n{USER}{VISION_START}{PAD}{VISION_END}{VISION_START}{PAD}{VISION_END}Closer:{END}\n{ASSISTANT}"
    )
    assert media == [item.id for turn in trajectory.turns for item in turn.media]
    assert len(set(media)) == 3


def test_reset_messages_take_the_place_of_the_tasks_prompt():
    class Starts(Env):
        def reset(self) -> list[dict[str, Any]]:
            return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go."}]

        def step(self, response_text: str) -> Step:
            return obs(), True, {"reward": 1.0}

    turn = play(Starts, ["a"]).turns[0]
    assert decoded(turn.prompt_ids) == f"<|im_start|>system\nBe brief.{END}\n{USER}Go.{END}\n{ASSISTANT}"


def test_a_response_that_a_stop_string_ended_is_closed_unsampled():
    engine = script(["a</call>", "b</call>"], end_turns=False)
    first, second = play(env(obs("x"), obs("y")), engine, max_turns=2).turns
    assert first.text == "a</call>"
    assert renderer().end_of_turn_id not in first.response_ids
    assert second.prompt_ids[0] == renderer().end_of_turn_id  # in the prompt, so that nothing trains on it
    assert decoded(second.prompt_ids) == f"{END}\n{USER}x{END}\n{ASSISTANT}"


def test_another_stop_id_than_the_end_of_turn_is_closed_too():
    endoftext = renderer().tokenizer.pad_token_id
    ids = [*renderer().encode("a"), endoftext]

    def response(request: Request, turn: int) -> Any:
        return Completion(ids, [0.0] * len(ids), "stop", [0] * len(ids), len(request.prompt_ids))

    first, second = play(env(obs("x"), obs("y")), response, max_turns=2).turns
    assert first.text == "a"
    assert first.response_ids == ids
    assert second.prompt_ids[0] == renderer().end_of_turn_id


def test_at_the_turn_limit_the_last_observation_is_not_appended():
    rendered: list[Any] = []

    class Watched(env(obs("x"), obs("never", images=[b"no image"]))):  # type: ignore[misc]
        def format_observation(self, observation: dict[str, Any]) -> Any:
            rendered.append(observation["obs_str"])
            return super().format_observation(observation)

    trajectory = play(Watched, ["a", "b"], max_turns=2)
    assert trajectory.ending == "max_turns"  # the broken image after the last turn was never looked at
    assert len(trajectory.turns) == 2
    assert "never" not in "".join(decoded(turn.prompt_ids) for turn in trajectory.turns)


@pytest.mark.parametrize("with_image", [False, True])
def test_an_observation_that_does_not_fit_is_left_out_whole(with_image: bool):
    seen = obs("look", images=[image("red", (128, 128))]) if with_image else obs("look " * 16)
    loop = turn_loop(env(seen, seen), ["a", "done"])
    whole = asyncio.run(loop.play(a_task(), "g", "g/00"))
    before = len(whole.turns[0].prompt_ids) + len(whole.turns[0].response_ids)
    added = len(whole.turns[1].prompt_ids)
    assert added > 16
    for room, turns, ending in [
        (1, 2, "max_tokens"),
        (0, 1, "max_tokens"),
        (-added + 1, 1, "max_tokens"),
        (6, 2, "env_done"),
    ]:
        limits = {"max_tokens": before + added + room, "max_response_tokens": 30}
        trajectory = play(env(seen, seen), ["a", "done"], **limits)
        assert (len(trajectory.turns), trajectory.ending) == (turns, ending), room
        assert trajectory.num_tokens <= before + added + room
        if turns == 1:
            assert trajectory.turns[0].media == []
            assert trajectory.num_tokens == before
            assert trajectory.reward == 1.0


def test_a_response_may_use_its_own_limit_or_what_the_budget_leaves():
    limits: list[int] = []

    def response(request: Request, turn: int) -> str:
        limits.append(request.sampling.max_tokens)
        return "a" * 60

    long = play(env(), response, max_response_tokens=20, truncated_reward=0.0)
    assert (long.ending, len(long.turns[0].response_ids), limits) == ("length", 20, [20])
    prompt = len(long.turns[0].prompt_ids)
    spent = play(env(), response, max_tokens=prompt + 15, max_response_tokens=20, truncated_reward=0.0)
    assert (spent.ending, spent.num_tokens, limits) == ("max_tokens", prompt + 15, [20, 15])


def test_a_truncated_response_is_not_shown_to_step():
    steps: list[str] = []

    class Watched(Env):
        def step(self, response_text: str) -> Step:
            steps.append(response_text)
            return obs("x"), False, {"reward": 1.0}

        def finish(self, ending: str) -> float:
            return 10.0 if self.last_response == "a" * 5 else -10.0

    trajectory = play(Watched, ["a", "a" * 40], max_response_tokens=5)
    assert steps == ["a"]
    assert (trajectory.ending, trajectory.turn_rewards, trajectory.reward) == ("length", [1.0, None], 11.0)


@pytest.mark.parametrize(
    ("responses", "limits", "ending", "remedy"),
    [
        (["done"], {}, "env_done", "return a reward from finish"),
        (["a"], {"max_turns": 1}, "max_turns", r"step never returned done within rollout.max_turns \(1\)"),
        (["a"], {"max_turns": 1}, "max_turns", r"set unfinished_reward .*_turn_loop.py, line \d+, in step\)"),
        (["a" * 90], {"max_response_tokens": 5}, "length", "set unfinished_reward .*or rollout.truncated_reward"),
    ],
)
def test_an_episode_without_any_reward_stops_the_run(
    responses: list[str], limits: dict[str, Any], ending: str, remedy: str
):
    said = rf"Shows, task train/7: the episode ended \({ending}\) without a reward: .*{remedy}"
    with pytest.raises(EnvContractError, match=said):
        play(env(obs("x"), reward=None), responses, a_task(id="train/7"), **limits)


def test_truncated_reward_is_for_truncated_episodes_that_got_none():
    long = ["a" * 90]
    assert play(env(reward=None), long, max_response_tokens=5, truncated_reward=-1.0).reward == -1.0
    assert play(env(reward=None, finish=0.25), long, max_response_tokens=5, truncated_reward=-1.0).reward == 0.25
    assert play(env(obs("x"), reward=1.0), ["a", *long], max_response_tokens=5, truncated_reward=-1.0).reward == 1.0
    with pytest.raises(EnvContractError, match="without a reward"):
        play(env(reward=None), ["done"], truncated_reward=-1.0)


def test_a_reward_function_judges_whole_and_cut_off_responses():
    spec = resolve_env(None, lambda text, task: float(len(text)))
    whole = play(spec, ["abc"], max_turns=1)
    assert (whole.ending, whole.reward, whole.turn_rewards, whole.final_reward) == ("env_done", 3.0, [3.0], None)
    cut_off = play(spec, ["a" * 40], max_turns=1, max_response_tokens=5)
    assert (cut_off.ending, cut_off.reward, cut_off.turn_rewards) == ("length", 5.0, [None])


def test_a_prompt_without_room_for_a_response_fails_with_what_to_do():
    prompt = len(play(env(), ["done"]).turns[0].prompt_ids)
    assert play(env(), ["done"], max_tokens=prompt + 10, max_response_tokens=10).ending == "env_done"
    trajectory = play(env(), ["done"], a_task(id="train/9"), max_tokens=prompt, max_response_tokens=prompt - 1)
    assert trajectory.ending == "error"
    assert trajectory.turns == []
    assert trajectory.error is not None
    assert trajectory.error.startswith(f"task train/9: the prompt has {prompt} tokens and leaves no room")
    assert f"rollout.max_tokens ({prompt})" in trajectory.error


def test_an_engine_that_counts_the_prompt_differently_is_refused():
    with pytest.raises(
        ValueError, match=r"trajectory g/00, request 0: the engine counted 3 prompt tokens, but the renderer \d+"
    ):
        play(env(), lambda request, turn: completion("a", prompt_tokens=3))


def test_an_engine_error_or_timeout_fails_the_trajectory():
    def dies(request: Request, turn: int) -> str:
        if turn:
            raise EngineError("server 3 is gone")
        return "a"

    async def silent(request: Request, turn: int) -> str:
        await asyncio.Event().wait()
        return "a"

    died = play(env(obs("x"), obs("y")), dies)
    assert (died.ending, died.error, len(died.turns)) == ("error", "server 3 is gone", 1)
    late = play(env(obs("x")), lambda request, turn: silent(request, turn), engine_timeout=0.1)
    assert late.ending == "error"
    assert late.error == "trajectory g/00, request 0: no response in rollout.engine_timeout (0.1 s)."


def test_the_engine_releases_every_trajectory_however_it_ended():
    class Engine:
        policy_version = 0

        def __init__(self, response: str) -> None:
            self.scripted = script([response])
            self.released: list[str] = []

        async def generate(self, request: Request) -> Completion:
            return await self.scripted.generate(request)

        def release(self, trajectory_id: str) -> None:
            self.released.append(trajectory_id)

        def close(self) -> None: ...

    class Fails(Env):
        def step(self, response_text: str) -> Any:
            return {"fail": None, "done": (obs(), True, {"reward": 1.0})}.get(response_text) or 1 / 0

    for response, ending in [("done", "env_done"), ("other", "error")]:
        engine = Engine(response)
        assert play(Fails, engine).ending == ending
        assert engine.released == ["g/00"]


def test_tools_of_an_env_are_in_the_prompt_only():
    class Tooled(env(obs("x"), obs("y"))):  # type: ignore[misc]
        tools: ClassVar[list[dict[str, Any]]] = [
            {"type": "function", "function": {"name": "zoom", "parameters": {"type": "object"}}}
        ]

    first, second = play(Tooled, ["a", "b"], max_turns=2).turns
    assert "zoom" in decoded(first.prompt_ids)
    assert decoded(second.prompt_ids) == f"\n{USER}x{END}\n{ASSISTANT}"


@pytest.mark.parametrize("history", ["append", "rerender"])
def test_tools_that_an_env_changes_later_are_kept_as_they_were_shown(history: str):
    """Logs, teachers and collected episodes had tools that the policy never saw."""

    class Changing(env(obs("x"), obs("y"))):  # type: ignore[misc]
        def reset(self) -> Any:
            self.tools = [{"type": "function", "function": {"name": "zoom", "parameters": {"type": "object"}}}]
            return super().reset()

        def step(self, response_text: str) -> Any:
            self.tools[0]["function"]["name"] = "later"
            self.tools.append(self.tools[0])
            return super().step(response_text)

    trajectory = play(Changing, ["a", "b"], max_turns=2, history=history, samples="step_wise")
    assert [tool["function"]["name"] for tool in trajectory.tools] == ["zoom"]
    assert not any("later" in decoded(turn.prompt_ids) for turn in trajectory.turns)


def test_the_messages_may_be_of_any_role_and_number():
    class Tool(env(obs("x"), obs("y"))):  # type: ignore[misc]
        def format_observation(self, observation: dict[str, Any]) -> Any:
            return [{"role": "tool", "content": observation["obs_str"]}, {"role": "user", "content": "Go on."}]

    _, second = play(Tool, ["a", "b"], max_turns=2).turns
    tool = f"{USER}<tool_response>\nx\n</tool_response>{END}\n"
    assert decoded(second.prompt_ids) == f"\n{tool}{USER}Go on.{END}\n{ASSISTANT}"


def test_special_tokens_in_an_observation_stay_text():
    _, second = play(env(obs(f"{END}{PAD}"), obs("y")), ["a", "b"], max_turns=2).turns
    assert renderer().image_token_id not in second.prompt_ids
    assert second.prompt_ids.count(renderer().end_of_turn_id) == 1


@pytest.mark.parametrize("history", ["append", "inline", "rerender"])
def test_a_huge_observation_ends_the_episode_without_being_encoded(history, monkeypatch):
    """2,000,000 characters: the event loop goes on while they are measured, and they have more tokens than fit."""
    encoded: list[int] = []
    encode = renderer_module.ids_of_text
    monkeypatch.setattr(
        renderer_module, "ids_of_text", lambda backend, text: encoded.append(len(text)) or encode(backend, text)
    )
    samples = "step_wise" if history == "rerender" else "concat"
    trajectory = play(
        env(obs("<|im_end|> and so on " * 100_000)), ["a", "b"], max_turns=2, history=history, samples=samples
    )
    assert (trajectory.ending, len(trajectory.turns)) == ("max_tokens", 1)
    assert max(encoded) < 1000


def test_long_texts_are_encoded_outside_the_event_loop(monkeypatch):
    threads: list[str] = []
    encode = renderer_module.ids_of_text

    def watched(backend, text):
        threads.extend([threading.current_thread().name] if len(text) > LONG_TEXT else [])
        return encode(backend, text)

    monkeypatch.setattr(renderer_module, "ids_of_text", watched)
    long = "red " * 30_000
    trajectory = play(env(obs(long), obs("x")), ["a", "b"], a_task(long), max_turns=2, max_tokens=1_000_000)
    assert trajectory.ending == "max_turns" and long in decoded(trajectory.turns[1].prompt_ids)
    assert len(threads) >= 2 and all(name.startswith("vlmrl-cpu") for name in threads)


@pytest.mark.parametrize("history", ["append", "rerender"])
def test_long_tools_are_rendered_outside_the_event_loop(monkeypatch, history):
    threads: list[str] = []
    render = Renderer.write

    def watched(own, messages, tools, *args, **options):
        threads.extend([threading.current_thread().name] if tools else [])
        return render(own, messages, tools, *args, **options)

    class Many(env(obs("x"), obs("y"))):
        tools: ClassVar = [
            {"type": "function", "function": {"name": f"tool_{n}", "description": "Looks. " * 100, "parameters": {}}}
            for n in range(20)
        ]

    monkeypatch.setattr(Renderer, "write", watched)
    assert (
        play(Many, ["a", "b"], max_turns=2, max_tokens=100_000, history=history, samples="step_wise").ending
        == "max_turns"
    )
    assert len(threads) >= 2 and all(name.startswith("vlmrl-cpu") for name in threads)


def test_a_huge_prompt_is_the_tasks_error():
    failed = play(env(obs("x")), ["a"], a_task("a" * 2_000_000))
    assert failed.ending == "error" and failed.non_retryable
    assert "the prompt has at least" in failed.error and "rollout.max_tokens (1000)" in failed.error


def test_a_text_model_needs_no_image_store():
    loop = TurnLoop(
        resolve_env(env(obs("x"))), script(["a", "done"]), Renderer(tiny.tokenizer()), None, Rollout(max_turns=2)
    )
    assert asyncio.run(loop.play(a_task(), "g", "g/00")).ending == "env_done"
    bad = asyncio.run(loop.play(a_task("What?", [image()]), "g", "g/01"))
    assert (bad.ending, bad.non_retryable) == ("error", True)
    assert "task t, turn 0: the prompt cannot be rendered: ValueError" in str(bad.error) and "reads text only" in str(
        bad.error
    )


def test_metrics_of_turns_and_time_are_kept():
    class Measured(Env):
        def step(self, response_text: str) -> Step:
            return obs("x"), self.turn == 1, {"reward": 1, "calls": self.turn + 2, "note": "text"}

    trajectory = play(Measured, ["a", "b"])
    assert [turn.metrics for turn in trajectory.turns] == [{"calls": 2.0}, {"calls": 3.0}]
    assert trajectory.metrics.keys() == {"env_seconds", "env_cpu_seconds"}
    assert trajectory.metrics["env_seconds"] > 0
    assert all(turn.env_seconds > 0 and turn.engine_seconds > 0 for turn in trajectory.turns)


def test_each_request_has_its_own_reproducible_seed():
    def seeds(run_seed: int, task_seed: int, trajectory_id: str) -> list[int]:
        found: list[int] = []

        def response(request: Request, turn: int) -> str:
            found.append(request.sampling.seed)
            return "a"

        loop = turn_loop(env(obs("x"), obs("y")), response, max_turns=2)
        loop.seed = run_seed
        asyncio.run(loop.play(a_task(seed=task_seed), "g", trajectory_id))
        return found

    runs = [
        seeds(0, 5, "step1/00000/00"),
        seeds(1, 5, "step1/00000/00"),
        seeds(0, 5, "step9/00000/00"),  # the task's next epoch
        seeds(0, 5, "step1/00000/01"),
    ]
    assert len({seed for run in runs for seed in run}) == 8
    assert seeds(0, 5, "step1/00000/00") == runs[0]
    assert derive_seed(0, "step1/00000/00", 0, 0) == runs[0][0]
    assert all(0 <= seed < 2**63 for run in runs for seed in run)


def test_sampling_options_reach_the_engine():
    def response(request: Request, turn: int) -> str:
        s = request.sampling
        assert (s.temperature, s.top_p, s.top_k, s.stop) == (0.7, 0.8, 20, ("</call>",))
        return "done"

    assert play(env(), response, temperature=0.7, top_p=0.8, top_k=20, stop=("</call>",)).ending == "env_done"
