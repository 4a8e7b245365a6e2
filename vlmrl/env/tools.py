"""Tools that a model calls: its calls are read, run and answered.

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

A function's schema comes from its type hints and its docstring. What is wrong with a call is told to the model; what breaks in a
tool is an env error, which is retried and never told.
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

import jsonschema
from PIL import Image

from vlmrl.env.base import Env, obs
from vlmrl.types import Message
from vlmrl.utils.threads import DaemonPool

Schema = dict[str, Any]

CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
FUNCTION = re.compile(r"<function=([^<>\n]+)>(.*)</function>", re.DOTALL)
PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
SPOKEN = {"true": True, "false": False, "none": None, "null": None}  # templates write Python's True, models JSON's true


@dataclass(frozen=True)
class ToolCall:
    """A call as the model wrote it: ``ToolCall("zoom", {"bbox": [0, 0, 500, 500]})``. ``problem`` says why it cannot be run."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True)
class ToolResult:
    """What one call gave: the function's ``value``, or the ``problem`` that the model reads instead."""

    value: Any = None
    problem: str = ""


def read_tool_calls(text: str, tools: Sequence[Schema] = (), tool_format: str | None = None) -> list[ToolCall]:
    """The calls of a reply, in order; what it only thought of (``<think>``) is none.

    ``tool_format`` is a name in :data:`TOOL_FORMATS`, ``None`` for ``json``. ``tools`` are the schemas, by which a format
    without types of its own reads numbers.
    """
    name = tool_format or "json"
    if name not in TOOL_FORMATS:
        raise ValueError(f"tool_format must be one of {', '.join(TOOL_FORMATS)}, but it is {name!r}.")
    said = text.rpartition("</think>")[2].partition("<think>")[0]
    return TOOL_FORMATS[name](said, tools)


def read_json_calls(text: str, tools: Sequence[Schema] = ()) -> list[ToolCall]:
    """``<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>``: Qwen2.5, Qwen3, Qwen3-VL, and our templates."""
    return _each_call(text, _read_json_call)


def read_xml_calls(text: str, tools: Sequence[Schema] = ()) -> list[ToolCall]:
    """``<tool_call><function=add><parameter=a>1</parameter></function></tool_call>``: Qwen3.5, Qwen3.6, Qwen3-Coder."""
    schemas = {name_of(tool): tool for tool in tools}
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
            json.dumps(call.arguments, ensure_ascii=False).encode()  # half a surrogate pair is no text
        except (ValueError, RecursionError) as error:
            call = ToolCall(problem=str(error))
        calls.append(call)
    return calls


def _read_json_call(body: str) -> ToolCall:
    try:
        call = json.loads(body, parse_constant=_refuse)
        arguments = call.get("arguments", {}) if isinstance(call, dict) else None
        if isinstance(arguments, str):
            arguments = json.loads(arguments, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the call is not valid JSON: {error}.") from None
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        name = name if isinstance(name, str) else ""
        return ToolCall(name, problem='a call is {"name": <name>, "arguments": <object>}.')
    return ToolCall(name, arguments)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _read_xml_call(body: str, schemas: dict[str, Schema]) -> ToolCall:
    function = FUNCTION.fullmatch(body)
    if function is None or PARAMETER.sub("", function[2]).strip():
        raise ValueError(
            "a call is <function=NAME>, then <parameter=NAME>value</parameter> for each argument, then </function>."
        )
    name = function[1].strip()
    properties = _parameters(schemas.get(name, {})).get("properties", {})
    given = {key.strip(): value for key, value in PARAMETER.findall(function[2])}
    return ToolCall(name, {key: _typed(value, properties.get(key, {})) for key, value in given.items()})


def _typed(text: str, schema: Schema) -> Any:
    """An argument that was written as text, as its schema's type; as text where that is one of its types, or it is unreadable."""
    options = [schema, *schema.get("anyOf", ())]
    types = {kind for option in options for kind in _as_list(option.get("type", []))}
    if not types or "string" in types:
        return None if schema.get("nullable") and text.lower() in ("none", "null") else text
    if text.strip().lower() in SPOKEN:
        return SPOKEN[text.strip().lower()]
    try:
        return json.loads(text, parse_constant=_refuse)
    except ValueError:
        return text


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def name_of(tool: Schema) -> str:
    return tool.get("function", tool)["name"]


def _parameters(tool: Schema) -> Schema:
    return tool.get("function", tool).get("parameters") or {}


def tool_schema(function: Callable[..., Any]) -> Schema:
    """The JSON schema of a plain function or method: types from its hints, descriptions from its docstring (Google's style).

    Raises ValueError where a hint, the docstring or an argument's description is missing.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    variable = [
        p.name for p in inspect.signature(function).parameters.values() if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    name = getattr(function, "__name__", repr(function))
    if variable:
        raise ValueError(f"tool {name} takes {', '.join(variable)}: a tool's arguments must be named one by one.")
    try:
        schema = get_json_schema(function)
    except Exception as error:
        raise ValueError(
            f"tool {name} needs type hints, and a docstring with every argument under `Args:`: {error}"
        ) from error
    schema["function"].pop("return", None)  # what a tool gives is seen when it is given
    schema["function"]["parameters"]["properties"].pop("return", None)
    return schema


def problem_with(call: ToolCall, tools: Sequence[Schema]) -> str:
    """Why a call cannot be run, or ``""``: it was not readable, names no tool, or its arguments do not fit the tool's schema."""
    if call.problem:
        return call.problem
    tool = next((tool for tool in tools if name_of(tool) == call.name), None)
    if tool is None:
        return f"there is no tool {call.name!r}; the tools are {', '.join(map(name_of, tools))}."
    schema = {"additionalProperties": False, **_parameters(tool)}
    optional = [key for key, value in schema.get("properties", {}).items() if value.get("nullable")]
    given = {key: value for key, value in call.arguments.items() if value is not None or key not in optional}
    check = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
    error = jsonschema.exceptions.best_match(check.iter_errors(given))
    if error is None:
        return ""
    place = ".".join(map(str, ("arguments", *error.absolute_path)))
    return f"{call.name}: {place}: {error.message[:300]}."


class ToolEnv(Env):
    """An env whose replies call tools: subclass it, list the ``functions``, write ``judge``.

    All calls of a reply are answered at once, in their order, in a user message with one ``<tool_response>`` for each. Plain
    functions run side by side in threads of their own, async ones in the event loop; the env's own methods may be functions too
    (those whose first parameter is ``self``), and run one after another in the env's thread. A function gives text, an image, a
    list of both, :func:`~vlmrl.env.base.obs`, or anything that JSON can hold.
    """

    functions: ClassVar[Sequence[Callable[..., Any]]] = ()
    model_errors: ClassVar[tuple[type[Exception], ...]] = (ValueError,)
    """What a function raises about its arguments: told to the model. All else is an env error."""
    max_calls: ClassVar[int] = 8
    """Of one reply; further ones are refused."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "functions" in vars(cls):
            cls.tools = [tool_schema(function) for function in cls.functions]
            names = [name_of(tool) for tool in cls.tools]
            if len(set(names)) < len(names):
                raise ValueError(
                    f"{cls.__name__}.functions must have names of their own, but they are {', '.join(names)}."
                )

    @abc.abstractmethod
    def judge(self, reply: str) -> float | dict[str, Any]:
        """What a reply without a call, which ends the episode, is worth: a reward, or an info with one. May be ``async``."""

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
            return _ended(self.judge(response_text))
        return self._answered([self._begin(number, call, len(calls) > 1) for number, call in enumerate(calls)])

    def format_observation(self, observation: dict[str, Any]) -> Message | list[Message]:
        """One user message: in Qwen's templates just what messages of the role ``tool`` become, and it may hold images in all."""
        if "tool_results" not in observation:
            return super().format_observation(observation)
        parts: list[dict[str, Any]] = []
        for result in observation["tool_results"]:
            opening = "\n<tool_response>\n" if parts else "<tool_response>\n"
            parts += [_text(opening), *result, _text("\n</tool_response>")]
        has_images = any(part["type"] == "image" for part in parts)
        return {"role": "user", "content": parts if has_images else "".join(part["text"] for part in parts)}

    def _begin(self, number: int, call: ToolCall, several: bool) -> Future[Any]:
        """Starts a call, in the env's thread or in one of its own."""
        problem = call.problem
        if number >= self.max_calls:
            problem = f"at most {self.max_calls} calls are taken at once."
        if problem:
            return _called(_refuse_call, problem)
        function = self.find_function(call.name)
        own = getattr(function, "__self__", None) is self
        if own or not several or inspect.iscoroutinefunction(function):
            return _called(function, **call.arguments)
        thread = DaemonPool("tool")
        future = thread.submit(partial(function, **call.arguments))
        thread.close()
        return future

    async def _answered(self, begun: list[Future[Any]]) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        results: list[ToolResult] = []
        for result in await asyncio.gather(*map(self._result, begun), return_exceptions=True):  # waits for all
            if isinstance(result, BaseException):
                raise result
            results.append(result)
        observation, info = self.show_results(results)
        return observation, False, info

    async def _result(self, begun: Future[Any]) -> ToolResult:
        explained: tuple[type[Exception], ...] = (_RefusedCall, *self.model_errors)
        try:
            value = begun.result() if begun.done() else await asyncio.wrap_future(begun)
            return ToolResult(await value if inspect.isawaitable(value) else value)
        except explained as error:
            return ToolResult(problem=_encodable(str(error)) or type(error).__name__)


class _RefusedCall(Exception):
    """A call that names no tool, or does not fit it."""


def _refuse_call(problem: str) -> None:
    raise _RefusedCall(problem)


def _called(function: Callable[..., Any], *args: Any, **arguments: Any) -> Future[Any]:
    """Calls at once: a future that is done."""
    future: Future[Any] = Future()
    try:
        future.set_result(function(*args, **arguments))
    except Exception as error:
        future.set_exception(error)
    return future


async def _ended(verdict: Any) -> tuple[dict[str, Any], bool, dict[str, Any]]:
    verdict = await verdict if inspect.isawaitable(verdict) else verdict
    return obs(), True, verdict if isinstance(verdict, dict) else {"reward": verdict}


def _is_method(function: Callable[..., Any]) -> bool:
    return next(iter(inspect.signature(function).parameters), None) == "self"


def parts_of(value: Any) -> list[dict[str, Any]]:
    """A function's result as parts of a message: images stay images, all else becomes text."""
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
    """Without the half surrogate pairs that file names and broken JSON bring."""
    return text.encode(errors="replace").decode()
