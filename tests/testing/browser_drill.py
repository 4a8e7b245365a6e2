"""The browser drill: many episodes in parallel sessions, while browsers are killed at random. No episode may be scored wrongly, each
failure is counted, memory stays flat, and no process is left. `tests/env/test_browser_drill.py` runs a small part.

    python tests/testing/browser_drill.py --episodes 500 --sessions 32 --kills 20
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from testing.browsers import call, click, left_of, processes
from vlmrl import MiniWobEnv
from vlmrl.env.base import resolve_env
from vlmrl.env.session import EnvError, EnvSession
from vlmrl.types import Task

CENTERS = """['#subbtn', '#subbtn2'].map((id) => {
  const box = document.querySelector(id).getBoundingClientRect();
  const [x, y] = [(box.left + box.right) / 2, (box.top + box.bottom) / 2];
  return [x / 0.16, y / 0.21, document.elementFromPoint(x, y).id]; // the buttons may cover each other
})"""


@dataclass
class DrillResult:
    """What a drill saw. ``wrong`` are the episodes whose reward is not that of what was clicked."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    megabytes: list[int] = field(default_factory=list)  # of all browsers, measured now and then
    kinds: Counter[str] = field(default_factory=Counter)  # of what was done to the browsers
    pool: dict[str, int] = field(default_factory=dict)
    left: list[int] = field(default_factory=list)  # processes that still ran at the end
    playing: float = 0.0  # seconds until the last episode ended
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return (
            not self.wrong and not self.left and self.counts["scored"] + self.counts["lost"] == self.counts["episodes"]
        )


class Noted(MiniWobEnv):
    """Notes where the buttons are, for the drill alone."""

    centers: tuple[Any, ...] = ()

    async def prepare(self) -> str:
        text = await super().prepare()
        type(self).places[self.task.id] = await self.evaluate(CENTERS)
        return text

    places: dict[str, Any] = {}  # noqa: RUF012


async def play(spec: Any, number: int, result: DrillResult) -> None:
    """One episode of three turns: a miss, a wait, and a click on button ONE or TWO."""
    luck = random.Random(number)
    task = Task(f"task-{number}", [{"role": "user", "content": ""}], seed=luck.randrange(10**6))
    session = EnvSession(spec, task, max_turns=3, timeout=60, max_retries=2)
    right = luck.random() < 0.5
    result.counts["episodes"] += 1
    reward, hit = None, ""
    try:
        await session.start()
        for response in (click(1, 999), call("wait", time=1)):
            step = await session.step(response)
            await asyncio.sleep(0.2 * luck.random())  # the model responds
            if step.done or step.reward is not None:
                result.wrong.append(f"{task.id}: done too early with {step.reward}")
        x, y, hit = Noted.places[task.id][0 if right else 1]
        step = await session.step(click(x, y))
        reward = step.reward if step.done else await session.finish("max_turns", "")
    except EnvError as error:
        result.counts["lost"] += 1
        result.reasons[str(error).partition("turn ")[2][3:60]] += 1
    else:
        result.counts["scored"] += 1
        if reward != (1.0 if hit == "subbtn" else -1.0):
            result.wrong.append(f"{task.id}: {reward}, but {hit} was clicked")
    finally:
        result.counts["env_errors"] += session.counts["errors"] + session.counts["timeouts"]
        result.counts["retries"] += session.counts["retries"]
        await session.close()


async def disturb(
    kills: int, seconds: float, luck: random.Random, pool: Any, others: dict[int, int], result: DrillResult
) -> None:
    """Kill, stop or crash processes of the browsers, but those of ``others``, at random times."""
    while sum(result.kinds.values()) < kills:
        await asyncio.sleep(seconds * luck.random())
        found = list(processes(but=others))
        if len(found) < 4:
            continue
        kind = luck.choice(["browser killed", "driver killed", "some process killed", "browser stopped"])
        browsers = [process for process in pool._all if process.alive]
        if not browsers:
            continue
        (driver,) = luck.choice(browsers)._driver
        try:
            main = int(Path(f"/proc/{driver}/task/{driver}/children").read_text().split()[0])
            target = {"driver killed": driver, "some process killed": luck.choice(found)}.get(kind, main)
            os.kill(target, signal.SIGSTOP if kind == "browser stopped" else signal.SIGKILL)
            result.kinds[kind] += 1
        except (OSError, IndexError):  # it has ended
            pass


async def watch(pool: Any, result: DrillResult) -> None:
    while True:
        await asyncio.sleep(2)
        try:
            result.megabytes.append(await asyncio.wait_for(pool.measure(), 5) // 2**20)
        except Exception:
            result.megabytes.append(-1)  # a browser that is stopped cannot be measured


async def drill(episodes: int, sessions: int, kills: int, seed: int = 0, every: float = 10.0) -> DrillResult:
    """Play ``episodes``, ``sessions`` at once, while ``kills`` disturbances happen, up to ``every`` seconds after each other."""
    result, began, others = DrillResult(), time.monotonic(), processes()  # another test's browser stays
    spec = resolve_env(Noted, options={"tasks": "click-test-2", "sessions": sessions, "timeout": 25.0})
    pool = spec.build(Task("t", [], seed=0))._pool  # type: ignore[attr-defined]
    places = asyncio.Semaphore(sessions + 4)  # some wait for a session

    async def one(number: int) -> None:
        async with places:
            await play(spec, number, result)
        ended = result.counts["scored"] + result.counts["lost"]
        if ended % 50 == 0:
            print(f"{ended} episodes, {time.monotonic() - began:.0f} s, {len(result.wrong)} wrong", flush=True)

    helpers = [asyncio.create_task(disturb(kills, every, random.Random(seed), pool, others, result))]
    helpers.append(asyncio.create_task(watch(pool, result)))
    await asyncio.gather(*map(one, range(episodes)))
    result.playing = time.monotonic() - began
    for helper in helpers:
        helper.cancel()
    seen = processes(but=others)
    result.pool = dict(pool.counts)
    await asyncio.to_thread(pool.close)
    until = time.monotonic() + 120  # Playwright gives a stopped Chromium 30 s
    while left_of(seen) and time.monotonic() < until:
        await asyncio.sleep(0.1)
    result.left, result.seconds = left_of(seen), time.monotonic() - began
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=500)
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--every", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    result = asyncio.run(
        drill(arguments.episodes, arguments.sessions, arguments.kills, arguments.seed, arguments.every)
    )
    for name, value in vars(result).items():
        print(f"{name}: {dict(value) if isinstance(value, Counter) else value}")
    sys.exit(0 if result.ok else 1)


if __name__ == "__main__":
    main()
