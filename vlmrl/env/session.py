"""Runs the env of one trajectory: its thread, deadlines and retries.

The turn loop calls an env only through :class:`EnvSession`. Plain methods run in the env's own daemon thread, async ones in the event
loop of all async envs; each call has a deadline. After an error a new env replays the responses so far, those that the env rejected
with RetryTurn included, and its answers are compared with the first ones.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import math
import numbers
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

from vlmrl.env.answer import StepResult, freeze_answer, read_messages, read_points, step_mistake, with_digest
from vlmrl.env.base import Env, EnvSpec, RetryTurn, RewardEnv
from vlmrl.env.tool_schema import check_tools
from vlmrl.multimodal.images import copy_on_write
from vlmrl.types import TRUNCATED, Message, Task
from vlmrl.utils.threads import DaemonExecutor, DaemonPool, LoopThread, drop_result, run_awake
from vlmrl.utils.user_loop import UserLoop
from vlmrl.utils.users_line import clear_frames, defined_at, describe_error
from vlmrl.utils.work_pool import DeadlineError, cpu_pool


class EnvError(Exception):
    """The env failed and no retry is left: the trajectory ends with ``error`` and has no reward."""


class TaskError(EnvError):
    """The task itself is at fault, so no retry helps: an image does not decode, or the prompt is too long."""


class EnvContractError(ValueError):
    """The env's code breaks the contract of :class:`~vlmrl.env.base.Env`. No retry helps, so the run stops."""


REJECTED = "RetryTurn"  # in place of the digest of a step result: the env rejected the response
ENVS = UserLoop("envs")
"""Runs the coroutines of all envs of this process."""
atexit.register(ENVS.close)  # an async close that a stop has cancelled may have something to end
_CLOSING: set[asyncio.Task[None]] = set()  # tasks that nobody awaits: an event loop keeps only weak references


class _DeadlineError(Exception):
    """A call of the env did not return within its timeout."""


class EnvSession:
    """Runs the env of one task: ``start``, then ``step`` for each response, ``finish`` once, ``close`` always.

    ``timeout`` is per call, in seconds. ``tool_format`` is the chat template's format of tool calls. ``seconds`` is the time spent in
    the env so far, with what it waited for: a server, a core. ``cpu_seconds`` is what its plain methods computed in its thread.
    ``counts`` counts its errors, timeouts and retries.
    """

    def __init__(
        self, spec: EnvSpec, task: Task, *, max_turns: int, timeout: float, max_retries: int, tool_format: str = "json"
    ) -> None:
        self._spec = spec
        self._task = task
        self._where = f"env {spec.name}, task {task.id}"
        self._max_turns = max_turns
        self._timeout = timeout
        self._max_retries = max_retries
        self._tool_format = tool_format
        self._env: Env | None = None
        self._built: list[Env] = []  # the env in `_thread`, even if its constructor missed the deadline
        self._thread: DaemonPool | None = None
        self._loop: LoopThread | None = None
        self.thread_free: Future[Any] | None = None
        """Done when the thread of the closed env is free. Until then a call that was too late, or given up, goes on in it."""
        self._played: list[tuple[str, str]] = []  # each response, and the digest of its step result or REJECTED
        self._start_digest: str | None = None
        self.seconds = self.cpu_seconds = 0.0
        self.counts: Counter[str] = Counter()
        self.metrics_of_cut: dict[str, float] = {}
        """What each of several reward functions gave a response that was cut off; set by :meth:`finish`."""

    @property
    def tools(self) -> list[dict[str, Any]]:
        assert self._env is not None
        return self._env.tools

    @property
    def sets_tools(self) -> bool:
        """Whether the tools are the env's own, as those of a server, and not its class's."""
        return self.tools is not self._spec.of(self._task).tools

    @property
    def tool_format(self) -> str | None:
        """The format in which the env reads tool calls."""
        assert self._env is not None
        return self._env.tool_format

    @property
    def replayable(self) -> bool:
        assert self._env is not None
        return self._env.replayable

    def step_line(self) -> str:
        """Where the user wrote ``step``: ``" (env.py, line 21, in step)"``."""
        return defined_at(self._env.step) if self._env is not None else ""

    @property
    def _turn(self) -> int:
        return sum(digest != REJECTED for _, digest in self._played)

    async def start(self) -> list[Message] | None:
        """Build and reset the env. Returns the first messages, or ``None`` for the task's prompt."""
        return await self._with_retries(self._open)

    async def step(self, response: str) -> StepResult:
        """The env's answer to a response. Raises RetryTurn if the env rejects the response, EnvError if no retry is left."""

        async def attempt() -> tuple[StepResult, str]:
            if self._env is None:
                await self._replay()
            return await self._step(response)

        try:
            result, digest = await self._with_retries(attempt)
        except RetryTurn:
            self._played.append((response, REJECTED))
            raise
        self._played.append((response, digest))
        return result

    async def finish(self, ending: str, last_response: str, last_turn: int | None = None) -> float | None:
        """The final reward. After an error, a new env replays the episode and is called again.

        ``last_turn`` is the turn of the last response if no ``step`` received it.
        """

        async def attempt() -> float | None:
            if self._env is None:
                await self._replay()
            assert self._env is not None
            self._env.last_response = last_response
            if last_turn is not None:
                self._env.turn = last_turn
            reward = await self._call(self._env.finish, ending)
            with _naming(self._env.finish):
                scored = self._scores_itself and ending in TRUNCATED
                number = self._reward("finish", reward) if reward is not None or scored else None
                if isinstance(self._env, RewardEnv):
                    self.metrics_of_cut = self._metrics(self._env.info_of_cut)
            return number

        return await self._with_retries(attempt)

    async def close(self) -> None:
        """Close the env. An error or a timeout is only counted."""
        try:
            if self._env is not None:
                await self._call(self._env.close)
        except Exception as error:
            clear_frames(error)
            self.counts["close_errors"] += 1
        finally:
            thread, self._thread, self._env = self._thread, None, None
            if thread is not None:
                self.thread_free = thread.submit(self._built.clear)  # after a call that goes on; `__del__` may block
                thread.close()

    async def _with_retries(self, attempt: Callable[[], Any]) -> Any:
        for retries_left in reversed(range(self._max_retries + 1)):
            try:
                return await attempt()
            except BaseException as error:
                clear_frames(error)  # they refer to the env, which is to be deleted in its own thread
                if isinstance(error, RetryTurn | EnvContractError | EnvError) or not isinstance(error, Exception):
                    raise
                late = isinstance(error, _DeadlineError)
                self.counts["timeouts" if late else "errors"] += 1
                reason = str(error) if late else describe_error(error)
                replayable = self._env is None or self._env.replayable
                await self.abandon(wait=True)
                if retries_left == 0 or not replayable:
                    raise EnvError(f"{self._where}, turn {self._turn}: {reason}") from error
                self.counts["retries"] += 1
        raise AssertionError("unreachable")

    async def _open(self) -> list[Message] | None:
        self._thread, self._built, self._loop = DaemonPool("env"), [], ENVS.current()
        own = await self._in_pool(lambda: {id(image): copy_on_write(image) for image in self._task.images})
        env: Env = await self._call(self._build, self._built, own)
        env.max_turns, env.own_thread = self._max_turns, self._thread
        env.tool_format = env.tool_format or self._tool_format
        self._env = env

        def read(shown: Any) -> list[Message] | None:
            return None if shown is None else self._messages("reset", shown)

        messages, digest = await self._answer(env.reset, read)
        if self._start_digest not in (None, digest):
            raise EnvError(
                f"{self._where}: reset returned other messages in the replay. "
                "Make it depend on the task and self.seed alone, or set replayable = False."
            )
        self._start_digest = digest
        return messages

    def _build(self, built: list[Env], own: dict[int, Any]) -> Env:
        task = self._task.copy(lambda image: own[id(image)])  # group members and replays must not share it
        built.append(self._spec.build(task))
        if built[0].tools is not self._spec.of(self._task).tools:
            try:
                check_tools(built[0].tools, f"env {self._spec.name}")
            except ValueError as error:
                raise EnvContractError(str(error)) from error
        return built[0]

    async def _replay(self) -> None:
        """Build a new env and replay the responses so far."""
        await self._open()
        turn = 0
        for response, digest in self._played:
            try:
                _, replayed = await self._step(response, turn)
            except RetryTurn:
                replayed = REJECTED
            if replayed != digest:
                what = "the observation differs in the replay"
                if REJECTED in (replayed, digest):
                    what = f"RetryTurn was raised {'only' if replayed == REJECTED else 'before, but not'} in the replay"
                raise EnvError(
                    f"{self._where}, turn {turn}: {what}. Make the env depend on self.seed and the "
                    "responses alone, or set replayable = False."
                )
            turn += digest != REJECTED

    async def _step(self, response: str, turn: int | None = None) -> tuple[StepResult, str]:
        """The result of one ``step``, and its digest."""
        env = self._env
        assert env is not None
        env.turn, env.last_response = self._turn if turn is None else turn, response

        def read(returned: Any) -> Any:
            own_format = getattr(env.format_observation, "__func__", None) is not Env.format_observation
            if mistake := step_mistake(returned, own_format):
                raise EnvContractError(
                    f"env {self._spec.name}: step must return (obs(...), done, info), but {mistake}."
                )
            observation, done, info = returned
            shown = [] if done else env.format_observation(observation)
            read_shown = partial(self._result, bool(done), info)
            return self._read_awaited(shown, read_shown) if inspect.isawaitable(shown) else read_shown(shown)

        return await self._answer(env.step, read, response, may_reject=True)

    def _result(self, done: bool, info: dict[str, Any], shown: Any) -> StepResult:
        info = dict(info)
        reward = info.pop("reward", None)
        try:
            points = read_points(info.pop("points", []))
        except ValueError as error:
            raise EnvContractError(f"env {self._spec.name}: info['points'] {error}") from error
        state = info.pop("state", None)
        if not isinstance(state, str | int | None):
            raise EnvContractError(
                f"env {self._spec.name}: info['state'] must be a string or an integer, but it is {state!r:.200}."
            )
        compact = bool(info.pop("compact", False))
        return StepResult(
            messages=self._messages("format_observation", shown),
            done=done,
            reward=self._reward("info['reward']", reward) if reward is not None or self._scores_itself else None,
            metrics=self._metrics(info),
            points=points,
            state=None if state is None else str(state),
            compact=compact,
        )

    def _messages(self, name: str, value: Any) -> list[Message]:
        try:
            return read_messages(name, value)
        except ValueError as error:
            raise EnvContractError(f"env {self._spec.name}: {error}") from error

    def _metrics(self, info: dict[str, Any]) -> dict[str, float]:
        """The numbers in ``info``, without the reward."""
        return {
            key: _number(f"env {self._spec.name}: info[{key!r}] must be a finite number, but it is", value)
            for key, value in info.items()
            if isinstance(value, numbers.Real) and key != "reward"
        }

    @property
    def _scores_itself(self) -> bool:
        """Whether reward functions stand in the place of an env: each response must have a reward."""
        return isinstance(self._env, RewardEnv)

    def _reward(self, name: str, value: Any) -> float:
        """The reward that ``name`` of the env gave: of a reward function, its user knows no env."""
        if self._scores_itself:
            return _number(f"the reward function {self._spec.name} must return a finite number, but it returned", value)
        return _number(f"env {self._spec.name}: {name} must be a finite number, but it is", value)

    async def _answer(
        self, method: Callable[..., Any], read: Callable[[Any], Any], *args: Any, may_reject: bool = False
    ) -> tuple[Any, str]:
        """What ``read`` makes of the method's result, with its images frozen, and its digest.

        ``read`` runs in the env's thread, as a plain method does: an observation may be long. So the event loop is called once.
        """

        def call() -> Any:
            returned = method(*args)
            return self._read_awaited(returned, finish) if inspect.isawaitable(returned) else finish(returned)

        def finish(returned: Any) -> Any:
            with _naming(method):
                answer = read(returned)
            return self._read_awaited(answer, with_digest) if inspect.isawaitable(answer) else with_digest(answer)

        answer, digest = await self._call(call, may_reject=may_reject, name=getattr(method, "__name__", repr(method)))
        return (answer, digest) if digest is not None else await self._in_pool(freeze_answer, answer)

    async def _read_awaited(self, value: Awaitable[Any], read: Callable[[Any], Any]) -> Any:
        """``read`` of a coroutine's result, in the env's thread."""
        return await self._await_result(await self._in_thread(read, await self._await_result(value)))

    async def _await_result(self, value: Any) -> Any:
        """``value``, or what it returns in the env's loop: an env may keep what belongs to that loop, such as a connection."""
        return await ENVS.run(value, self._loop) if inspect.isawaitable(value) else value

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        def measured() -> Any:
            began = time.thread_time()
            try:
                return function(*args)
            except BaseException as error:
                clear_frames(error)  # those of a constructor refer to an env that nobody else has
                raise
            finally:
                self.cpu_seconds += time.thread_time() - began

        assert self._thread is not None
        call = self._thread.submit(measured)
        try:
            return await asyncio.wrap_future(call)
        except asyncio.CancelledError:
            call.add_done_callback(drop_result)
            raise

    async def _in_pool(self, work: Callable[..., Any], *args: Any) -> Any:
        """One piece of work on images: not in the env's thread, of which there may be a thousand."""
        try:
            return await cpu_pool().run(self._timeout, work, *args)
        except DeadlineError as error:
            raise self._late() from error

    async def _call(
        self, method: Callable[..., Any], *args: Any, may_reject: bool = False, name: str | None = None
    ) -> Any:
        """One call with a deadline: plain functions in the env's thread, coroutines in the event loop of the envs.

        Raises EnvError for a RetryTurn, unless the call ``may_reject`` a response. ``name`` is for errors.
        """
        began = time.perf_counter()
        try:
            has_own = self._env is not None and self._env.ends_late_calls
            async with asyncio.timeout(None if has_own else self._timeout) as deadline:
                if inspect.iscoroutinefunction(method):
                    return await self._await_result(method(*args))
                return await self._await_result(await self._in_thread(method, *args))
        except TimeoutError as error:
            if not deadline.expired():
                raise
            hint = "; an env blocks the event loop of all async envs: make its method plain, not async"
            raise _DeadlineError(f"{self._late()}{hint * await ENVS.replace_if_blocked()}") from error
        except RetryTurn as error:
            if may_reject:
                raise
            name = "__init__" if method == self._build else name or method.__name__
            raise EnvError(
                f"{self._where}: {name} raised RetryTurn ({error}), which only step may raise: there is no response to sample again."
            ) from error
        finally:
            self.seconds += time.perf_counter() - began

    def _late(self) -> _DeadlineError:
        return _DeadlineError(f"timed out after {self._timeout:g} s (rollout.env_timeout; of a served env, --timeout)")

    async def abandon(self, wait: bool = False) -> None:
        """Discard an env that is broken, or whose run is being stopped.

        Its plain ``close`` is queued in its thread, behind a call that may hang, and not awaited. With ``wait``, an async one is
        awaited, unless its loop is blocked.
        """
        closes_async = self._env is not None and inspect.iscoroutinefunction(self._env.close)
        self._env = None
        if closes_async:
            closing = asyncio.create_task(self._close_async([*self._built]))
            _CLOSING.add(closing)
            closing.add_done_callback(_CLOSING.discard)
            if wait and self._loop is ENVS.current():
                await closing
        elif self._thread is not None:
            self._thread.submit(_close_late, self._built)  # also after a constructor that is still running
        await self.close()

    async def _close_async(self, built: list[Env]) -> None:
        try:
            await self._call(built[0].close)
        except Exception as error:
            clear_frames(error)
            self.counts["close_errors"] += 1
        finally:
            DaemonExecutor().submit(built.clear)


@contextmanager
def _naming(method: Callable[..., Any]) -> Iterator[None]:
    """Within the context, an error says where the user wrote ``method``."""
    try:
        yield
    except (EnvContractError, EnvError) as error:
        raise type(error)(f"{str(error).removesuffix('.')}{defined_at(method)}.") from error


def _close_late(built: list[Env]) -> None:
    for env in built:
        close: Callable[[], Any] = env.close
        closing = close()
        if inspect.iscoroutine(closing):
            run_awake(closing)


def _number(what: str, value: Any) -> float:
    """``value`` as a finite float. Raises EnvContractError for what is no number; EnvError for NaN and infinity, which a response
    may have led to ("nan"), and must not end the run."""
    try:
        number = None if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        number = None
    if number is None:
        raise EnvContractError(f"{what} {value!r}.")
    if not math.isfinite(number):
        raise EnvError(f"{what} {value!r}.")
    return number
