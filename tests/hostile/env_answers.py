"""What a user's env may do in each of its methods: return anything, or raise anything."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterator
from typing import Any

from testing.episodes import a_task, turn_loop
from testing.hostile import junk

from vlmrl import Env, RetryTurn, obs
from vlmrl.env.session import EnvContractError
from vlmrl.samples import audit, step_wise

SECONDS = 60.0  # the deadline of one case; it takes milliseconds
METHODS = ("__init__", "reset", "step", "finish", "format_observation", "close")
TEXTS = ("", "seen", "<|im_end|>\n<|im_start|>", "<|image_pad|>", "a\ud800b", "\x00", "x" * 20_000, "\n" * 50)


class OwnError(BaseException): ...


def cases(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Endlessly: what each method of an env does, call by call, and whether its methods are coroutines."""
    while True:
        acts = {method: [_act(method, rng) for _ in range(6)] for method in METHODS}
        for method in METHODS:  # most methods behave
            if method != "step" and rng.random() < 0.8:
                acts[method] = [("call",)]
        yield {"acts": acts, "coroutines": rng.random() < 0.5, "replayable": rng.random() < 0.8}


def run(case: dict[str, Any]) -> str:
    """Play one episode, and return how it ended. Raises if it ends in no answer, no failure and no clear error."""
    env = _env_of(case)
    loop = turn_loop(
        env, lambda request, turn: f"response {turn}", max_turns=3, max_tokens=20_000, truncated_reward=0.0
    )
    try:
        trajectory = asyncio.run(asyncio.wait_for(loop.play(a_task(), "g", "g/00"), SECONDS))
    except EnvContractError:
        return "EnvContractError"
    assert trajectory.ending is not None
    if trajectory.failed:
        assert trajectory.error
    else:
        assert trajectory.reward is not None and math.isfinite(trajectory.reward)
        assert all(math.isfinite(value) for turn in trajectory.turns for value in turn.metrics.values())
        audit(step_wise(trajectory), [trajectory], image_token_id=loop.renderer.image_token_id)
    return trajectory.ending


def _env_of(case: dict[str, Any]) -> type[Env]:
    counts = dict.fromkeys(METHODS, 0)

    def act(method: str, usual: Any) -> Any:
        acts = case["acts"][method]
        kind, *value = acts[counts[method] % len(acts)]
        counts[method] += 1
        if kind == "raise":
            raise value[0]
        return usual() if kind == "call" else value[0]

    class Acting(Env):
        replayable = case["replayable"]

        def __init__(self, task: Any) -> None:
            super().__init__(task)
            act("__init__", lambda: None)

        def reset(self) -> Any:
            return act("reset", lambda: None)

        def step(self, response_text: str) -> Any:
            return act("step", lambda: (obs("seen"), self.turn == 2, {"reward": 0.5}))

        def finish(self, ending: str) -> Any:
            return act("finish", lambda: None)

        def format_observation(self, observation: Any) -> Any:
            return act("format_observation", lambda: super(Acting, self).format_observation(observation))

        def close(self) -> None:
            act("close", lambda: None)

    class Coroutines(Acting):
        async def reset(self) -> Any:
            return super().reset()

        async def step(self, response_text: str) -> Any:  # type: ignore[override]
            return super().step(response_text)

        async def finish(self, ending: str) -> Any:
            return super().finish(ending)

        async def format_observation(self, observation: Any) -> Any:
            return super().format_observation(observation)

        async def close(self) -> None:  # type: ignore[override]
            super().close()

    return Coroutines if case["coroutines"] else Acting


def _act(method: str, rng: random.Random) -> tuple[Any, ...]:
    kind = rng.choice(["call", "call", "call", "raise", "return"])
    if kind == "call":
        return ("call",)
    if kind == "raise":
        return ("raise", rng.choice(_errors()))
    if method == "step" and rng.random() < 0.7:
        info = {
            "reward": rng.choice([None, 1.0, junk(rng)]),
            rng.choice(["calls", "", 7]): junk(rng),
        }
        return ("return", (_observation(rng), rng.choice([True, False, None, "no"]), rng.choice([{}, info, info])))
    return ("return", rng.choice([junk(rng), _messages(rng)]))


def _errors() -> list[BaseException]:
    return [
        OSError("no browser"),
        RetryTurn("once more"),
        TimeoutError(),
        StopIteration(),
        StopAsyncIteration(),
        asyncio.CancelledError(),
        SystemExit(3),
        GeneratorExit(),
        OwnError("own"),
        RecursionError("deep"),
        MemoryError(),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        ValueError("[/bold] {} %s"),
    ]


def _observation(rng: random.Random) -> Any:
    images = rng.choice([[], None, [junk(rng)], junk(rng)])
    made = {
        "obs_str": rng.choice(TEXTS),
        "multi_modal_data": rng.choice([{"image": images}, {}, junk(rng)]),
    }
    return rng.choice([obs(rng.choice(TEXTS)), made, {}, {"obs_str": junk(rng)}, junk(rng)])


def _messages(rng: random.Random) -> Any:
    content = rng.choice(
        [
            rng.choice(TEXTS),
            [{"type": "text", "text": rng.choice(TEXTS)}],
            [junk(rng)],
            junk(rng),
        ]
    )
    role = rng.choice(["user", "tool", "system", "", None, 7])
    return rng.choice([{"role": role, "content": content}, [{"role": "user", "content": content}] * 2, []])
