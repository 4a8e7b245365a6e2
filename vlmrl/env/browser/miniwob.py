"""MiniWoB++ as an environment: over 100 small web tasks, whose pages come with the package ``miniwob``.

    Config(env="vlmrl:MiniWobEnv", env_options={"tasks": ["click-test-2", "click-button"], "scale": 2.0}, ...)

``miniwob_tasks()`` returns their names.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from vlmrl.env.browser.browser_env import BrowserEnv
from vlmrl.types import Task

WIDTH, HEIGHT = 160, 210  # of every page, in CSS pixels
NO_LIMIT = 2**31 - 1  # milliseconds, the longest timer
START = """([seed, limit]) => {
  // The reward's display is beside the task: nobody can scroll to it.
  document.head.insertAdjacentHTML("beforeend", "<style>#reward-display, #click-canvas { display: none }</style>");
  core.EPISODE_MAX_TIME = limit;
  core.endEpisode(0);
  Math.seedrandom(seed);
  core.startEpisodeReal();
  return core.getUtterance();
}"""


class MiniWobEnv(BrowserEnv):
    """One episode of a MiniWoB++ task, made from ``task.seed``.

    ``tasks`` is a task's name (``"click-test-2"``) or several: the task's column ``miniwob`` selects one, else its seed does.
    ``reward`` is ``raw`` (-1 to 1), ``timed`` (less the more page time has passed) or ``success`` (1 if raw is above 0, else 0).
    ``time_limit`` are the seconds of page time after which the episode has failed; ``None``: only the turns are limited. Without
    ``reload``, the next episode starts in the page that is loaded, at a quarter of the CPU time; some pages then still show something
    of the episode before, and their replays differ (docs/browser.md). The other options are those of :class:`BrowserEnv`.
    The prompt is the screenshot, the task's own text and the instruction.
    """

    root = "#wrap"
    reuse_tabs = True

    def __init__(
        self,
        task: Task,
        tasks: str | Sequence[str] | None = None,
        reward: Literal["raw", "timed", "success"] = "raw",
        time_limit: float | None = None,
        scale: float = 1.0,
        observe: Literal["screenshot", "marks", "tree"] = "screenshot",
        coordinates: Literal["thousandths", "pixels"] = "thousandths",
        tools_in_prompt: bool = True,
        step_seconds: float = 1.0,
        reload: bool = True,
        timeout: float = 30.0,
        sessions: int | None = None,
        memory_mib: int | None = None,
        chromium: str | None = None,
    ) -> None:
        names = [tasks] if isinstance(tasks, str) else list(tasks or ())
        self.name = task.data.get("miniwob") or (random.Random(task.seed).choice(names) if names else None)
        page, look = str(page_of(self.name)), (scale, observe, coordinates, tools_in_prompt, step_seconds)
        super().__init__(task, page, WIDTH, HEIGHT, *look, timeout, sessions, memory_mib, chromium)
        self.reward = reward
        self.reload = reload
        self.time_limit = time_limit
        self.unfinished_reward = 0.0 if reward == "success" else -1.0  # as for an episode whose time is over

    async def prepare(self) -> str:
        limit = NO_LIMIT if self.time_limit is None else round(1000 * self.time_limit)
        utterance = await self.evaluate(START, [self.seed, limit])
        return str(utterance)

    async def judge(self) -> dict[str, Any] | None:
        done, raw, timed = await self.evaluate("[WOB_DONE_GLOBAL, WOB_RAW_REWARD_GLOBAL, WOB_REWARD_GLOBAL]")
        if not done:
            return None
        reward = {"raw": raw, "timed": timed, "success": float(raw > 0)}[self.reward]
        return {"reward": float(reward), "success": float(raw > 0)}

    def _folder(self, page: Path) -> Path:
        return page.parent.parent  # the pages share scripts


def miniwob_tasks() -> list[str]:
    """The names of all tasks, in order: ``["ascending-numbers", "bisect-angle", ...]``."""
    return sorted(path.stem for path in _pages().glob("*.html"))


def page_of(name: str | None) -> Path:
    """The page of a task. Raises ValueError if there is no such task."""
    if name not in miniwob_tasks():
        raise ValueError(
            f"env_options.tasks must name tasks of MiniWoB++, such as click-test-2, but one is {name!s:.100}. There are: "
            f"{', '.join(miniwob_tasks())}."
        )
    return _pages() / f"{name}.html"


@cache
def _pages() -> Path:
    try:
        package = metadata.distribution("miniwob")  # importing it would import Selenium, or find a recipe of this name
    except metadata.PackageNotFoundError:
        raise ValueError("miniwob is not installed. Install it with pip install 'vlmrl[browser]'.") from None
    return Path(str(package.locate_file("miniwob"))) / "html" / "miniwob"
