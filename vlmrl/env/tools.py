"""Tool calls: parse them from a reply, run them, return their results.

    def price(item: str) -> float:
        \"\"\"What an item costs.

        Args:
            item: Its name.
        \"\"\"
        return PRICES[item]

    class Shop(ToolEnv):
        functions = [price]

        def judge(self, reply):                     # a reply that calls nothing is the answer
            return float(self.task.answer in reply)

A function's schema is made from its type hints and its docstring. The model reads what is wrong with its call. Any other failure of
a tool is an env error: it is retried, and the model never reads it.
"""

from __future__ import annotations

import abc
import asyncio
import inspect
import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from PIL import Image

from vlmrl.env.base import Env, obs
from vlmrl.env.tool_schema import check_arguments
from vlmrl.types import Message
from vlmrl.utils.threads import DaemonPool

Schema = dict[str, Any]

CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
FUNCTION = re.compile(r"<function=([^<>\n]+)>(.*)</function>", re.DOTALL)
PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
LITERALS = {
    "true": True,
    "false": False,
    "none": None,
    "null": None,
}  # templates write Python's literals, models JSON's


@dataclass(frozen=True)
class ToolCall:
    """A call as the model wrote it: ``ToolCall("zoom", {"bbox": [0, 0, 500, 500]})``. ``problem`` says why it could not be parsed."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True)
class ToolResult:
    """What one call returned: the function's ``value``, or the ``problem`` that the model reads instead."""

    value: Any = None
    problem: str = ""


def read_tool_calls(text: str, tools: Sequence[Schema] = (), tool_format: str | None = None) -> list[ToolCall]:
    """The calls of a reply, in order, without those inside its reasoning (``<think>``).

    ``tool_format`` is a key of :data:`TOOL_FORMATS`; ``None`` means ``json``. The XML format has no types, so its values are
    converted to the types in the schemas ``tools``.
    """
    name = tool_format or "json"
    if name not in TOOL_FORMATS:
        raise ValueError(f"tool_format must be one of {', '.join(TOOL_FORMATS)}, but it is {name!r}.")
    reply = text.rpartition("</think>")[2].partition("<think>")[0]
    return TOOL_FORMATS[name](reply, tools)


def read_json_calls(text: str, tools: Sequence[Schema] = ()) -> list[ToolCall]:
    """``<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>``: Qwen2.5, Qwen3, Qwen3-VL, and vlmrl's templates."""
    return _each_call(text, _read_json_call)


def read_xml_calls(text: str, tools: Sequence[Schema] = ()) -> list[ToolCall]:
    """``<tool_call><function=add><parameter=a>1</parameter></function></tool_call>``: Qwen3.5, Qwen3.6, Qwen3-Coder."""
    schemas = {tool_name(tool): tool for tool in tools}
    return _each_call(text, lambda body: _read_xml_call(body.strip(), schemas))


TOOL_FORMATS: dict[str, Callable[[str, Sequence[Schema]], list[ToolCall]]] = {
    "json": read_json_calls,
    "xml": read_xml_calls,
}


def _each_call(text: str, read: Callable[[str], ToolCall]) -> list[ToolCall]:
    calls = []
    for body, end in CALL.findall(text):
        try:
            if not end:
                raise ValueError("the call does not end with </tool_call>.")
            call = read(body)
            json.dumps(call.arguments, ensure_ascii=False).encode()  # raises for half a surrogate pair
        except (ValueError, RecursionError) as error:
            call = ToolCall(problem=str(error))
        calls.append(call)
    return calls


def _read_json_call(body: str) -> ToolCall:
    try:
        call = json.loads(body, parse_constant=_reject_constant)
        arguments = call.get("arguments", {}) if isinstance(call, dict) else None
        if isinstance(arguments, str):
            arguments = json.loads(arguments, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the call is not valid JSON: {error}.") from None
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        name = name if isinstance(name, str) else ""
        return ToolCall(name, problem='a call is {"name": <name>, "arguments": <object>}.')
    return ToolCall(name, arguments)


def _reject_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _read_xml_call(body: str, schemas: dict[str, Schema]) -> ToolCall:
    function = FUNCTION.fullmatch(body)
    if function is None or PARAMETER.sub("", function[2]).strip():
        raise ValueError(
            "a call is <function=NAME>, then <parameter=NAME>value</parameter> for each argument, then </function>."
        )
    name = function[1].strip()
    properties = _parameters(schemas.get(name, {})).get("properties", {})
    arguments = {key.strip(): value for key, value in PARAMETER.findall(function[2])}
    return ToolCall(name, {key: _typed(value, properties.get(key, {})) for key, value in arguments.items()})


def _typed(text: str, schema: Schema) -> Any:
    """An XML argument converted to its schema's type; unchanged if the schema allows strings, or if it cannot be converted."""
    options = [schema, *schema.get("anyOf", ())]
    types = {kind for option in options for kind in _as_list(option.get("type", []))}
    if not types or "string" in types:
        return None if schema.get("nullable") and text.lower() in ("none", "null") else text
    if text.strip().lower() in LITERALS:
        return LITERALS[text.strip().lower()]
    try:
        return json.loads(text, parse_constant=_reject_constant)
    except ValueError:
        return text


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def tool_name(tool: Schema) -> str:
    return tool.get("function", tool)["name"]


def _parameters(tool: Schema) -> Schema:
    return tool.get("function", tool).get("parameters") or {}


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
        return f"there is no tool {call.name!r}; the tools are {', '.join(map(tool_name, tools))}."
    return check_arguments(call.name, call.arguments, _parameters(tool))


class ToolEnv(Env):
    """An env whose replies may call tools: subclass it, list the ``functions``, and write ``judge``.

    The results of all calls in a reply form one user message, in order, each in a ``<tool_response>``. Plain functions run in parallel
    threads, async ones in the event loop. A function whose first parameter is ``self`` is a method of the env; methods run one by one
    in the env's thread. A function returns text, an image, a list of both, :func:`~vlmrl.env.base.obs`, or any JSON value.
    """

    functions: ClassVar[Sequence[Callable[..., Any]]] = ()
    model_errors: ClassVar[tuple[type[Exception], ...]] = (ValueError,)
    """Exceptions of a function whose text the model reads as the call's result. Any other exception is an env error."""
    schemas: ClassVar[list[Schema]] = []
    """The JSON schemas of ``functions``. They are also the class's ``tools``, which the prompt shows, unless the class sets those."""
    max_calls: ClassVar[int] = 8
    """Calls that run per reply; each further one gets an error as its result."""

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
    def judge(self, reply: str) -> float | dict[str, Any]:
        """Score a reply without calls, which ends the episode: a reward, or an info dict with one. May be ``async``."""

    def find_function(self, name: str) -> Callable[..., Any]:
        """The function behind the tool of this name."""
        function = next(function for function in self.functions if function.__name__ == name)
        return getattr(self, name) if _is_method(function) else function

    def read_calls(self, reply: str) -> list[ToolCall]:
        """The calls to run, in order; one with a ``problem`` is not run. An empty list makes the reply the answer.

        Override it, and :meth:`show_results`, for another protocol: fewer calls, looser arguments, other explanations.
        """
        calls = read_tool_calls(reply, self.tools, self.tool_format)
        return [replace(call, problem=problem_with(call, self.tools)) for call in calls]

    def show_results(self, results: list[ToolResult]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The observation and the info after a reply's calls."""
        info = {"tool_calls": len(results), "tool_errors": sum(bool(result.problem) for result in results)}
        shown = [f"Error: {result.problem}" if result.problem else result.value for result in results]
        return {"tool_results": [parts_of(value) for value in shown]}, info

    def step(self, response_text: str) -> Any:
        calls = self.read_calls(response_text)
        if not calls:
            return _end(self.judge(response_text))
        return self._collect([self._start(number, call, len(calls) > 1) for number, call in enumerate(calls)])

    def format_observation(self, observation: dict[str, Any]) -> Message | list[Message]:
        """One user message, as Qwen's templates render messages of the role ``tool``; images are allowed in every template."""
        if "tool_results" not in observation:
            return super().format_observation(observation)
        parts: list[dict[str, Any]] = []
        for result in observation["tool_results"]:
            opening = "\n<tool_response>\n" if parts else "<tool_response>\n"
            parts += [_text(opening), *result, _text("\n</tool_response>")]
        has_images = any(part["type"] == "image" for part in parts)
        return {"role": "user", "content": parts if has_images else "".join(part["text"] for part in parts)}

    def _start(self, number: int, call: ToolCall, several: bool) -> Future[Any]:
        """Start a call. Of several calls, plain functions run in new threads; anything else is called now, in the env's thread."""
        problem = call.problem
        if number >= self.max_calls:
            problem = f"at most {self.max_calls} calls are taken at once."
        if problem:
            return _call_now(_reject_call, problem)
        function = self.find_function(call.name)
        is_method = getattr(function, "__self__", None) is self
        if is_method or not several or inspect.iscoroutinefunction(function):
            return _call_now(function, **call.arguments)
        thread = DaemonPool("tool")
        future = thread.submit(partial(function, **call.arguments))
        thread.close()
        return future

    async def _collect(self, started: list[Future[Any]]) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        results: list[ToolResult] = []
        for result in await asyncio.gather(*map(self._result, started), return_exceptions=True):  # waits for all
            if isinstance(result, BaseException):
                raise result
            results.append(result)
        observation, info = self.show_results(results)
        return observation, False, info

    async def _result(self, started: Future[Any]) -> ToolResult:
        """A call's result; ``problem`` is set where the error is the model's."""
        model_errors: tuple[type[Exception], ...] = (_RejectedCall, *self.model_errors)
        try:
            value = started.result() if started.done() else await asyncio.wrap_future(started)
            return ToolResult(await value if inspect.isawaitable(value) else value)
        except model_errors as error:
            return ToolResult(problem=_encodable(str(error)) or type(error).__name__)


class _RejectedCall(Exception):
    """A call that cannot be run; see :func:`problem_with`."""


def _reject_call(problem: str) -> None:
    raise _RejectedCall(problem)


def _call_now(function: Callable[..., Any], *args: Any, **arguments: Any) -> Future[Any]:
    """Call a function in this thread. Returns a future that is done."""
    future: Future[Any] = Future()
    try:
        future.set_result(function(*args, **arguments))
    except Exception as error:
        future.set_exception(error)
    return future


async def _end(verdict: Any) -> tuple[dict[str, Any], bool, dict[str, Any]]:
    verdict = await verdict if inspect.isawaitable(verdict) else verdict
    return obs(), True, verdict if isinstance(verdict, dict) else {"reward": verdict}


def _is_method(function: Callable[..., Any]) -> bool:
    return next(iter(inspect.signature(function).parameters), None) == "self"


def parts_of(value: Any) -> list[dict[str, Any]]:
    """A function's result as parts of a message: images stay images, anything else becomes text."""
    if isinstance(value, list | tuple) and any(isinstance(item, Image.Image) for item in value):
        return [part for item in value for part in parts_of(item)]
    if isinstance(value, Image.Image):
        return [{"type": "image", "image": value}]
    if isinstance(value, dict) and "obs_str" in value:
        images = [{"type": "image", "image": image} for image in value.get("multi_modal_data", {}).get("image", [])]
        return [*images, _text(_encodable(value["obs_str"]))]
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return [_text(_encodable("" if value is None else text))]


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _encodable(text: str) -> str:
    """``text`` without half surrogate pairs, which come from file names and broken JSON."""
    return text.encode(errors="replace").decode()
