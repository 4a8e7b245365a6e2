"""Tools: run the calls of a response, return their results.

    def price(item: str) -> float:
        \"\"\"What an item costs.

        Args:
            item: Its name.
        \"\"\"
        return PRICES[item]

    class Shop(ToolEnv):
        functions = [price]

        def judge(self, response):                     # a response that calls nothing is the answer
            return float(self.task.answer in response)

A function's schema is made from its type hints and its docstring. The model reads what is wrong with its call. Any other failure of
a tool is an env error: it is retried, and the model never reads it.
"""

from __future__ import annotations

import abc
import asyncio
import dataclasses
import inspect
import json
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np
from PIL import Image

from vlmrl.env.base import Env, Observation, encodable, obs
from vlmrl.env.session import EnvContractError
from vlmrl.env.tool_arguments import hinted_arguments
from vlmrl.env.tool_calls import Schema, ToolCall, parameters_of, read_tool_calls, tool_name
from vlmrl.env.tool_schema import check_arguments
from vlmrl.multimodal.images import DecodedImage
from vlmrl.multimodal.messages import is_image, text_part
from vlmrl.types import Message
from vlmrl.utils.threads import DaemonPool
from vlmrl.utils.users_line import defined_at

T = TypeVar("T")


@dataclass(frozen=True)
class ToolResult:
    """What one call returned: the function's ``value``, or the ``problem`` that the model reads instead."""

    value: Any = None
    problem: str = ""


def tool_schema(function: Callable[..., Any]) -> Schema:
    """The JSON schema of a plain function or method: types from its hints, descriptions from its docstring (Google's style).

    Raises ValueError if a type hint, the docstring or the description of an argument is missing.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    variable = [
        p.name for p in inspect.signature(function).parameters.values() if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    name = getattr(function, "__name__", repr(function))
    if variable:
        raise ValueError(
            f"tool {name} must name each argument, but it takes the variable arguments {', '.join(variable)}."
        )
    try:
        schema = get_json_schema(function)
    except Exception as error:
        raise ValueError(
            f"tool {name} must have type hints, and a docstring that describes every argument under `Args:`: {error}"
        ) from error
    schema["function"].pop("return", None)  # the model sees the result itself
    schema["function"]["parameters"]["properties"].pop("return", None)
    return schema


def problem_with(call: ToolCall, tools: Sequence[Schema]) -> str:
    """Why a call cannot be run, or ``""``. It may be unparsable, name no tool, or have arguments that violate the tool's schema.

    Nothing outside the schema is read: a reference to another document allows any value, and the tool itself must check it.

    Raises:
        RuntimeError: the schema itself is wrong, such as an unknown type.
    """
    if call.problem:
        return call.problem
    tool = next((tool for tool in tools if tool_name(tool) == call.name), None)
    if tool is None:
        return f"there is no tool {call.name[:100]!r}; the tools are {', '.join(map(tool_name, tools))}."
    return check_arguments(call.name, call.arguments, parameters_of(tool))


class ToolEnv(Env):
    """An env whose responses may call tools: subclass it, list the ``functions``, and write ``judge``.

    The results of all calls in a response are messages of the role ``tool``, in order. Plain functions run in parallel threads, async
    ones in the event loop. A function whose first parameter is ``self`` is a method of the env; methods run one by one in the env's
    thread. A function returns text, an image, a list of both, :func:`~vlmrl.env.base.obs`, or any JSON value.
    """

    functions: ClassVar[Sequence[Callable[..., Any]]] = ()
    model_errors: ClassVar[tuple[type[Exception], ...]] = (ValueError,)
    """Exceptions of a function whose text the model reads as the call's result. Any other exception is an env error."""
    schemas: ClassVar[list[Schema]] = []
    """The JSON schemas of ``functions``. They are also the class's ``tools``, which the prompt shows, unless the class sets those."""
    max_calls: ClassVar[int] = 8
    """Calls that run per response; each further one gets an error as its result."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "functions" in vars(cls):
            cls.schemas = [tool_schema(function) for function in cls.functions]
            if "tools" not in vars(cls):
                cls.tools = cls.schemas
            names = [tool_name(tool) for tool in cls.schemas]
            if len(set(names)) < len(names):
                raise ValueError(
                    f"{cls.__name__}.functions must have different names, but they are {', '.join(names)}."
                )

    @abc.abstractmethod
    def judge(self, response: str) -> float | dict[str, Any]:
        """Score a response without calls, which ends the episode: a reward, or an info dict with one. May be ``async``."""

    def find_function(self, name: str) -> Callable[..., Any]:
        """The function behind the tool of this name."""
        function = next(function for function in self.functions if function.__name__ == name)
        is_method = next(iter(inspect.signature(function).parameters), None) == "self"
        return getattr(self, name) if is_method else function

    def read_calls(self, response: str) -> list[ToolCall]:
        """The calls to run, in order; one with a ``problem`` is not run. An empty list makes the response the answer.

        Override it, and :meth:`show_results`, for another protocol: fewer calls, looser arguments, other explanations.
        """
        calls = read_tool_calls(response, self.tools, self.tool_format)
        # Those that are not run are not checked, which may take seconds for each, in processes that all episodes share.
        checked = [replace(call, problem=problem_with(call, self.tools)) for call in calls[: self.max_calls]]
        return checked + [self._late()] * (len(calls) - len(checked))

    def show_results(self, results: list[ToolResult]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The observation and the info after a response's calls."""
        info = {"tool_calls": len(results), "tool_errors": sum(bool(result.problem) for result in results)}
        shown = [f"Error: {result.problem}" if result.problem else result.value for result in results]
        return {"tool_results": [parts_of(value) for value in shown]}, info

    def step(self, response_text: str) -> Any:
        calls = list(self.read_calls(response_text))
        if not calls:
            return self._end(self.judge(response_text))
        calls[self.max_calls :] = [self._late()] * len(calls[self.max_calls :])
        started = [self._start(call, len(calls) > 1) for call in calls]
        if any(isinstance(call, Future) and not _has_value(call) for call in started):
            return self._collect(started)
        return _finished(self._observe([self._read(call) if isinstance(call, Future) else call for call in started]))

    def _late(self) -> ToolCall:
        return ToolCall(problem=f"at most {self.max_calls} calls are taken at once.")

    async def _end(self, verdict: Any) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        """The last result of ``step``, with what ``judge`` returned."""
        verdict = await verdict if inspect.isawaitable(verdict) else verdict
        if isinstance(verdict, str | bytes | list | tuple):
            raise EnvContractError(
                f"env {type(self).__name__}: judge must return a number, or a dict with a reward, but it returned "
                f"{verdict!r:.200}{defined_at(self.judge)}."
            )
        return obs(), True, verdict if isinstance(verdict, dict) else {"reward": verdict}

    def format_observation(self, observation: dict[str, Any]) -> Message | list[Message]:
        """A message of the role ``tool`` for each result. A template without that role gets a user message with tags."""
        if "tool_results" not in observation:
            return super().format_observation(observation)
        return [tool_message(result) for result in observation["tool_results"]]

    def _start(self, call: ToolCall, several: bool) -> ToolResult | Future[Any]:
        """Start a call. Of several, plain functions run in new threads; anything else is called now, in the env's thread."""
        if call.problem:
            return ToolResult(problem=encodable(call.problem))
        function = self.find_function(call.name)
        arguments = hinted_arguments(self.functions, call.name, call.arguments)
        if not several:
            return _call_now(function, **arguments)
        run = partial(_as_returned, function)
        if getattr(function, "__self__", None) is self or inspect.iscoroutinefunction(function):
            return _call_now(run, **arguments)
        thread = DaemonPool("tool")
        future = thread.submit(partial(run, **arguments))
        thread.close()
        return future

    async def _collect(self, started: list[ToolResult | Future[Any]]) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        running = [self._result(call) for call in started if isinstance(call, Future)]
        results = await asyncio.gather(*running, return_exceptions=True)  # waits for all
        for result in results:
            if isinstance(result, BaseException):
                raise result
        finished = iter(results)
        shown: Any = [next(finished) if isinstance(call, Future) else call for call in started]
        if self.own_thread is None:
            return self._observe(shown)
        observed: tuple[dict[str, Any], bool, dict[str, Any]] = await self.own_thread.run(self._observe, shown)
        return observed

    def _observe(self, results: list[ToolResult]) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        observation, info = self.show_results(results)
        return observation, False, info

    async def _result(self, started: Future[Any]) -> ToolResult:
        if _has_value(started):
            return self._read(started)
        finished: Future[Any] = Future()
        try:
            value = started.result() if started.done() else await asyncio.wrap_future(started)
            finished.set_result(await value if inspect.isawaitable(value) else value)
        except Exception as error:
            finished.set_exception(error)
        return self._read(finished)

    def _read(self, finished: Future[Any]) -> ToolResult:
        """A call's result; ``problem`` is set where the error is the model's."""
        try:
            return ToolResult(finished.result())
        except self.model_errors as error:
            return ToolResult(problem=encodable(str(error)) or type(error).__name__)


def _has_value(call: Future[Any]) -> bool:
    """Whether a call has ended, and not with a coroutine that is still to be awaited."""
    return call.done() and not (call.exception() is None and inspect.isawaitable(call.result()))


def _call_now(function: Callable[..., Any], *args: Any, **arguments: Any) -> Future[Any]:
    """Call a function in this thread. Returns a future that is done."""
    future: Future[Any] = Future()
    try:
        future.set_result(function(*args, **arguments))
    except Exception as error:
        future.set_exception(error)
    return future


async def _finished(result: T) -> T:
    return result


def _as_returned(function: Callable[..., Any], /, **arguments: Any) -> Any:
    """What one of several calls returns, as it is then: the next call may draw on its image, or add to its list."""
    value = function(**arguments)
    return _copied_when_awaited(value) if inspect.isawaitable(value) else _copied(value)


async def _copied_when_awaited(value: Awaitable[Any]) -> Any:
    return _copied(await value)


def _copied(value: Any) -> Any:
    """A deep copy; the value itself if it has none, such as an image that does not decode, whose error is raised where it is shown."""
    try:
        return deepcopy(value)
    except Exception:
        return value


def parts_of(value: Any) -> list[dict[str, Any]]:
    """A function's result as parts of a message: images stay images, anything else becomes text.

    Images deeper in a value, such as ``{"crop": image, "scale": 2}``, are before its text, which has ``"image 1"`` in their places. A
    list that has images may also have texts as TRL's tools write them, ``{"type": "text", "text": "Closer"}``. Paths and addresses
    in a value are text: it may be an answer of somebody else's server.
    """
    if isinstance(value, list | tuple) and any(_image_of(item) is not None for item in value):
        return [part for item in value for part in parts_of(_text_of(item))]
    if (image := _image_of(value)) is not None:
        return [{"type": "image", "image": image}]
    if isinstance(value, Observation):
        images = [{"type": "image", "image": image} for image in value.get("multi_modal_data", {}).get("image", [])]
        return [*images, text_part(encodable(value["obs_str"]))]
    inner: list[dict[str, Any]] = []

    def plain(item: Any) -> Any:
        if isinstance(item, Image.Image | DecodedImage):
            inner.append({"type": "image", "image": item})
            return f"image {len(inner)}"
        if dataclasses.is_dataclass(item):
            return {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}
        return item.item() if isinstance(item, np.generic) else str(item)

    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=plain)
    return [*inner, text_part(encodable("" if value is None else text))]


def _image_of(value: Any) -> Image.Image | DecodedImage | None:
    """The image that a value is, also as a part of a message; ``None`` for anything else."""
    image = value["image"] if is_image(value) else value
    return image if isinstance(image, Image.Image | DecodedImage) else None


def _text_of(item: Any) -> Any:
    """The text of a part of a message; anything else as it is."""
    return item["text"] if isinstance(item, dict) and item.keys() == {"type", "text"} else item


def tool_message(parts: list[dict[str, Any]]) -> Message:
    """A tool's result, as :func:`parts_of` makes it, as a message."""
    has_images = any(part["type"] == "image" for part in parts)
    return {"role": "tool", "content": parts if has_images else "".join(part["text"] for part in parts)}
