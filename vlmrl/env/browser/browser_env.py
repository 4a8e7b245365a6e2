"""An environment over a web page in real Chromium: the agent sees screenshots, and uses mouse and keyboard.

    class Counter(BrowserEnv):
        page = "counter.html"                                  # beside this file
        reward_script = "window.count >= 3 ? 1 : null"         # null: the episode goes on

    Config(env="counter.py:Counter", env_options={"width": 320, "height": 240}, ...)

docs/browser.md has a whole example, and every option.
"""

from __future__ import annotations

import inspect
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar
from urllib.parse import unquote, urlsplit

from vlmrl.env.base import Env, Observation, encodable, obs
from vlmrl.env.browser.browser_pool import BrowserFailure, BrowserPool, Lease, PoolLimits, shared_pool
from vlmrl.env.browser.browser_tab import BrowserTab, TabKind
from vlmrl.env.browser.computer_use import NAME, Action, computer_use_schema, read_action
from vlmrl.env.browser.marks import marked
from vlmrl.env.tool_calls import read_tool_calls
from vlmrl.env.tools import parts_of, problem_with, tool_message
from vlmrl.types import Message, Task
from vlmrl.utils.output_files import LONGEST_PATH
from vlmrl.utils.require import import_extra, moderate_number, require
from vlmrl.utils.work_pool import cpu_pool

T = TypeVar("T")

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
MAX_ACTIONS = 8  # of one response
LONG_RESPONSE = 20_000  # characters; reading them takes about 5 ms
MAX_TREE = 20_000  # characters of an accessibility tree
SHORT_VALUE = """async (script) => {
  let value = (0, eval)(script);
  value = await (typeof value === "function" ? value() : value);
  if (value === undefined || value === null || ["number", "boolean"].includes(typeof value)) return value ?? null;
  if (typeof value === "string") return JSON.stringify(value.slice(0, 100));
  return Array.isArray(value) ? `a list of ${value.length} values` : `a value of the type ${typeof value}`;
}"""
"""The value of a script if it is a number or null, else what it is: a long value would be copied through all processes."""


class BrowserEnv(Env):
    """One episode on ``page``: an HTML file, or a URL of this machine. Subclass it, and say where the reward comes from.

    ``width`` and ``height`` are the window's, in CSS pixels, and ``scale`` the screenshot's pixels for each of them. ``observe`` is
    ``screenshot``, ``marks`` (numbers are drawn on what can be clicked) or ``tree`` (the accessibility tree follows as text).
    ``coordinates`` are ``thousandths`` of the screen (Qwen3-VL) or ``pixels`` of the screenshot (Qwen2.5-VL).

    The page's clock stands still while the model thinks: after each action ``step_seconds`` pass, and a wait takes no real time. So
    the same seed and actions give the same observations. ``timeout`` limits each call of the browser, in seconds, ``sessions`` the
    episodes at once, and ``memory_mib`` the memory of one browser (see :class:`PoolLimits`). ``chromium`` names the program.
    """

    page: ClassVar[str] = ""
    """The HTML file, relative to the class's own file, or the URL. The option ``page`` goes first, then the task's column ``page``.
    A task may come from a dataset or another machine, so its column names a file in or below the folder of the class's own file."""
    reward_script: ClassVar[str] = "window.reward"
    """A JavaScript expression: the reward, which ends the episode, or null while it goes on. See :meth:`judge`."""
    root: ClassVar[str] = "body"
    """The CSS selector of the element whose accessibility tree is shown."""
    reuse_tabs: ClassVar[bool] = False
    """An episode may get the tab of an earlier one: four times faster, for pages that leave no cookies or stored data."""
    reload: bool = True
    """``False``: a tab that shows the page already does not load it again, for pages that :meth:`prepare` sets back to their start."""

    ends_late_calls = True
    unfinished_reward = 0.0

    def __init__(
        self,
        task: Task,
        page: str | None = None,
        width: int = 1280,
        height: int = 720,
        scale: float = 1.0,
        observe: Literal["screenshot", "marks", "tree"] = "screenshot",
        coordinates: Literal["thousandths", "pixels"] = "thousandths",
        tools_in_prompt: bool = True,
        step_seconds: float = 1.0,
        timeout: float = 30.0,
        sessions: int | None = None,
        memory_mib: int | None = None,
        chromium: str | None = None,
    ) -> None:
        super().__init__(task)
        _check_sizes(width, height, scale, step_seconds)
        self.url, self.place = self._address(page or self._page_of(task) or self.page)
        self.scale, self.observe, self.step_seconds = scale, observe, step_seconds
        self.frame = (1000, 1000) if coordinates == "thousandths" else (round(width * scale), round(height * scale))
        self.schema = computer_use_schema(self.frame, marks=observe == "marks")
        self.tools = [self.schema] if tools_in_prompt else []
        server = "" if self.url.startswith("file:") else urlsplit(self.url).netloc
        self._kind = TabKind(width, height, scale, server)
        self._pool: BrowserPool = self.shared or shared_pool(PoolLimits.of(chromium, sessions, memory_mib, timeout))
        self._lease = Lease()
        self._boxes: list[tuple[int, int, int, int]] = []

    @classmethod
    def setup(cls, **options: Any) -> Any:
        import_extra("playwright.async_api", "browser")  # fails at startup if it is missing
        names = ("chromium", "sessions", "memory_mib", "timeout")
        return shared_pool(PoolLimits.of(**{name: options[name] for name in names if name in options}))

    async def prepare(self) -> str:
        """Called on the loaded page, before the first screenshot. Returns the instruction that follows the prompt's text."""
        return ""

    async def judge(self) -> float | dict[str, Any] | None:
        """The reward, or an info dict with one, which ends the episode; ``None`` while it goes on. Called after each action."""
        reward = await self.evaluate(SHORT_VALUE, self.reward_script)
        if reward is not None and not isinstance(reward, int | float):
            name = f"reward_script of {type(self).__name__}"
            raise ValueError(f"{name} must give a number, or null while the episode goes on, but it gave {reward}.")
        return None if reward is None else float(reward)

    def end(self, action: Action) -> float:
        """The reward of an episode that the model ended: by ``terminate``, or by ``answer`` with a text."""
        return self.unfinished_reward or 0.0

    def read_actions(self, response: str) -> list[Action]:
        """The actions in a response. Override it for another protocol. The text of a ValueError becomes the observation.

        A response of over LONG_RESPONSE characters is read in a thread.
        """
        calls = read_tool_calls(response, [self.schema], self.tool_format)
        if not calls:
            raise ValueError(f"Call {NAME}; to end the task, with the action terminate.")
        actions = []
        for call in calls[:MAX_ACTIONS]:
            if problem := problem_with(call, [self.schema]):
                raise ValueError(f"Error: {problem}")
            actions.append(read_action(call.arguments, self.frame, marks=self.observe == "marks"))
        return actions

    async def evaluate(self, script: str, argument: Any = None) -> Any:
        """The value of a JavaScript expression, or of a function called with ``argument``, in the page."""
        return await self._call(self._tab.evaluate(script, argument))

    async def reset(self) -> list[Message]:  # type: ignore[override]
        await self._pool.open(self._lease, self._kind, self.reuse_tabs)
        await self._call(self._tab.open(self._seeded_url(), self.seed, self.place, self.reload))
        await self._call(self._tab.advance(self.step_seconds))
        instruction = await self.prepare()
        *before, last = self.task.prompt or [{"role": "user", "content": ""}]
        text = last["content"]
        parts = [{"type": "text", "text": text}] if isinstance(text, str) else list(text)
        if instruction:
            parts.append({"type": "text", "text": "\n" * bool(text) + encodable(instruction)})
        content = [part for part in [*parts_of(await self._look()), *parts] if part.get("text") != ""]
        return [*before, {**last, "content": content}]

    async def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:  # type: ignore[override]
        try:
            actions = [self._at_mark(action) for action in await self._actions(response_text)]
        except ValueError as error:
            return obs(str(error)), False, {"invalid": 1}
        info: dict[str, Any] = {"invalid": 0, "points": []}
        for action in actions:
            await self._call(self._tab.act(action))
            if action.points:
                info["points"].append({"label": action.kind, "at": [list(point) for point in action.points]})
            await self._call(self._tab.advance(action.seconds if action.kind == "wait" else self.step_seconds))
            verdict = await self.judge()
            if verdict is None and action.kind in ("terminate", "answer"):
                verdict = self.end(action)
            if verdict is not None:
                given = verdict if isinstance(verdict, dict) else {"reward": verdict}
                self._check_reward(given)
                return obs(), True, info | {"blocked_requests": self._tab.blocked} | given
        return await self._look(), False, info | {"blocked_requests": self._tab.blocked}

    async def _actions(self, response: str) -> list[Action]:
        """The actions in a response, read in a thread if it is long: 45,000 calls take a second."""
        if len(response) <= LONG_RESPONSE:
            return self.read_actions(response)
        return await cpu_pool().run(self._pool.limits.timeout, self.read_actions, response)

    def format_observation(self, observation: dict[str, Any]) -> Message | list[Message]:
        """A message of the role ``tool`` if the prompt shows the tool, else of the role ``user``."""
        return (
            tool_message(parts_of(Observation(observation))) if self.tools else super().format_observation(observation)
        )

    async def close(self) -> None:  # type: ignore[override]
        await self._pool.give_back(self._lease, self.reuse_tabs)

    @property
    def _tab(self) -> BrowserTab:
        if self._lease.tab is None:
            raise BrowserFailure("the episode has no browser: reset was not called, or it is closed")
        return self._lease.tab

    async def _call(self, call: Coroutine[Any, Any, T]) -> T:
        return await self._pool.run(self._lease, call)

    async def _look(self) -> dict[str, Any]:
        """The observation of the page as it is now."""
        tab = self._tab
        shown: Any = await self._call(tab.screenshot())
        lines = [f"The page showed a dialog, which was accepted: {dialog}" for dialog in tab.take_dialogs()]
        if self.observe == "marks":
            self._boxes = await self._call(tab.boxes())
            shown = await cpu_pool().run(self._pool.limits.timeout, marked, shown, self._boxes, self.scale)
        elif self.observe == "tree":
            tree = await self._call(tab.tree(self.root))
            lines.append(tree if len(tree) <= MAX_TREE else tree[:MAX_TREE] + "\n... (cut)")
        return obs("\n".join(lines), images=[shown])

    def _at_mark(self, action: Action) -> Action:
        """The action at its mark's center."""
        if action.mark is None:
            return action
        if not 1 <= action.mark <= len(self._boxes):
            raise ValueError(f"there is no mark {action.mark}; the last screenshot has marks 1 to {len(self._boxes)}.")
        left, top, right, bottom = self._boxes[action.mark - 1]
        center = ((left + right) / 2 / self._kind.width, (top + bottom) / 2 / self._kind.height)
        return replace(action, points=(*action.points[:-1], center))

    def _check_reward(self, info: dict[str, Any]) -> None:
        """An error of this episode: what a policy types into a page may be what makes its reward NaN, and must not stop the run."""
        reward = info.get("reward")
        if isinstance(reward, int | float):
            moderate_number(reward, f"the reward of the page of {type(self).__name__}")

    def _page_of(self, task: Task) -> str | None:
        """The file that the task's column ``page`` names. Raises ValueError if it is not in the folder of the class's own file."""
        page = task.data.get("page")
        if page is None:
            return None
        folder = Path(inspect.getfile(type(self))).resolve().parent
        if not _is_page_in(folder, page):
            raise ValueError(
                f"the column page of task {task.id} must name a file in the folder of {type(self).__name__}, {folder}, with "
                f"the suffix .html or .htm, but it is {page!r:.100}: move the page there, or set env_options.page."
            )
        return str(folder / page)

    def _address(self, page: Any) -> tuple[str, str]:
        """The page's URL, and the beginning of all URLs that it may load: its own folder, or its own server."""
        where = f"the page of {type(self).__name__}"
        if not isinstance(page, str) or not page:
            raise ValueError(
                f"{where} is missing: set the class's `page`, env_options.page or the task's column `page`."
            )
        if "://" in page and not page.startswith("file://"):
            parts = urlsplit(page)
            if parts.scheme not in ("http", "https") or parts.netloc.rpartition(":")[0] not in LOOPBACK:
                raise ValueError(
                    f"{where} must be an HTML file, or a URL of this machine with its port (http://127.0.0.1:8000/), but it is {page}."
                )
            return page, f"{parts.scheme}://{parts.netloc}/"
        path = Path(unquote(page.removeprefix("file://")) if page.startswith("file://") else page)
        path = (Path(inspect.getfile(type(self))).parent / path).resolve()
        if not path.is_file():
            raise ValueError(f"{where} must be an HTML file, but there is no file {path}.")
        return path.as_uri(), self._folder(path).as_uri() + "/"

    def _folder(self, page: Path) -> Path:
        """The folder whose files the page may load."""
        return page.parent

    def _seeded_url(self) -> str:
        parts = urlsplit(self.url)
        return parts._replace(query="&".join(filter(None, (parts.query, f"seed={self.seed}")))).geturl()


def _is_page_in(folder: Path, page: Any) -> bool:
    """Whether ``page`` names a web page in ``folder``, which may also hold keys and settings that no task may show."""
    if not isinstance(page, str) or len(page) > LONGEST_PATH:
        return False
    try:
        path = (folder / page).resolve()
    except (OSError, RuntimeError, ValueError):  # too long, a link in a circle, or with a null byte
        return False
    return "://" not in page and path.suffix.lower() in (".html", ".htm") and path.is_relative_to(folder)


def _check_sizes(width: int, height: int, scale: float, step_seconds: float) -> None:
    for name, value, low, high in (
        ("width", width, 16, 4096),
        ("height", height, 16, 4096),
        ("scale", scale, 0.1, 4),
        ("step_seconds", step_seconds, 0, 3600),
    ):
        require(low <= value <= high, f"env_options.{name}", f"from {low} to {high}", value)
