"""Tool calls: parsed in each format, checked against schemas, run in parallel, results in order, with images."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from itertools import islice, product
from pathlib import Path
from typing import Any, Literal

import pytest
from PIL import Image
from testing.episodes import a_task, completion, decoded, image, play, play_audited
from testing.episodes import renderer as renderer_of_tests
from testing.templates import TEMPLATES, full_text, ids_of, real_renderer

from vlmrl import Config, Data, Env, Model, ToolCall, ToolEnv, obs, read_tags, read_tool_calls
from vlmrl.env import tools
from vlmrl.env.base import resolve_env
from vlmrl.env.session import EnvContractError
from vlmrl.env.tools import parts_of, problem_with, tool_schema
from vlmrl.model import tiny
from vlmrl.multimodal.renderer import BASE, Renderer
from vlmrl.rollout.history import Inline
from vlmrl.run.build import build_run
from vlmrl.types import Turn

STRICT = """{%- for m in messages -%}
{%- if m.role not in ['system', 'user', 'assistant'] -%}{{- raise_exception('only user and assistant') -}}{%- endif -%}
{{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
SHOW_IMAGES = ["qwen2_5_vl", "qwen3_vl", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6"]


def add(a: int, b: float = 1.0, unit: Literal["m", "cm"] = "m", note: str | None = None) -> str:
    """Add two lengths.

    Args:
        a: The first.
        b: The second.
        unit: Of both.
        note: Kept.

    Returns:
        The sum.
    """
    return f"{a + b:g} {unit}"


ADD = tool_schema(add)


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def test_a_schema_comes_from_hints_and_docstring():
    assert ADD == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two lengths.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The first."},
                    "b": {"type": "number", "description": "The second."},
                    "unit": {"type": "string", "enum": ["m", "cm"], "description": "Of both."},
                    "note": {"type": "string", "nullable": True, "description": "Kept."},
                },
                "required": ["a"],
            },
        },
    }


def test_a_function_without_a_schema_is_an_error_when_the_class_is_defined():
    def bare(x):
        """Do.

        Args:
            x: It.
        """

    def undescribed(x: int):
        """Do."""

    def many(*xs: int):
        """Do."""

    for function, message in [
        (bare, "tool bare must have type hints"),
        (undescribed, "under `Args:`"),
        (many, "variable arguments xs"),
    ]:
        with pytest.raises(ValueError, match=message):
            type("Broken", (ToolEnv,), {"functions": [function]})


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('I add. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', [ToolCall("add", {"a": 1})]),
        (call("add", a=1) + "\n" + call("sub"), [ToolCall("add", {"a": 1}), ToolCall("sub", {})]),
        ('<tool_call>{"name": "add"}</tool_call>', [ToolCall("add", {})]),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 2}"}</tool_call>', [ToolCall("add", {"a": 2})]),
        ("The answer is 4.", []),
        (f"<think>\nMaybe {call('add', a=1)}?\n</think>\n\n{call('add', a=2)}", [ToolCall("add", {"a": 2})]),
        (f"Maybe {call('add', a=1)}?</think>Four.", []),  # the prompt opened the thought
        (f"<think>I call {call('add', a=1)}", []),  # a thought that never ends
    ],
)
def test_json_calls_are_parsed_in_order_without_those_in_reasoning(text: str, calls: list[ToolCall]):
    assert read_tool_calls(text) == calls


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("<tool_call>{", "does not end with </tool_call>"),
        ('<tool_call>{"name": "add", }</tool_call>', "not valid JSON: "),
        ('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN is not JSON"),
        ('<tool_call>{"name": 5, "arguments": {}}</tool_call>', 'a call is {"name"'),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', 'a call is {"name"'),
        ("<tool_call>[]</tool_call>", 'a call is {"name"'),
        ('<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>', "surrogates not allowed"),
        ('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', "surrogates not allowed"),
        (f"<tool_call>{'[' * 100_000}</tool_call>", "decoding a JSON array"),
        ('<tool_call>{"name": "add", "arguments": {"a": -1e999}}</tool_call>', "-1e999 is too large a number"),
        (
            f'<tool_call>{{"name": "add", "arguments": {{"a": {"[" * 100}{"]" * 100}}}}}</tool_call>',
            "the arguments are nested more than 100 levels deep",
        ),
    ],
)
def test_an_unparsable_call_says_why(body: str, message: str):
    (read,) = read_tool_calls(body)
    assert message in read.problem and read.arguments == {}


def test_xml_calls_take_their_types_from_the_schemas():
    text = (
        "<tool_call>\n<function=add>\n<parameter=a>\n41\n</parameter>\n<parameter=b>\n1.5\n</parameter>\n"
        "<parameter=note>\ntwo\nlines, {1}\n</parameter>\n</function>\n</tool_call>"
    )
    assert read_tool_calls(text, [ADD], "xml") == [ToolCall("add", {"a": 41, "b": 1.5, "note": "two\nlines, {1}"})]
    assert read_tool_calls(text, [], "xml")[0].arguments["a"] == "41"  # nothing says that it is a number


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"type": ["integer", "string"]}, "7", "7"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "7", 7),
        ({"type": "string", "nullable": True}, "None", None),
        ({"type": "string"}, "None", "None"),
        ({"type": "integer"}, "seven", "seven"),
        (True, "7", "7"),
        ({"anyOf": [True, {"type": "integer"}]}, "7", 7),
        ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, "7", 7),
        ({"enum": [1, 7]}, "7", 7),
        ({"enum": ["1", "7"]}, "7", "7"),
        ({"const": 7}, "7", 7),
        ({"$ref": "#/$defs/Point"}, '{"x": 7}', {"x": 7}),
        ({"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]}, '{"x": 7}', {"x": 7}),
        ({"allOf": [{"$ref": "#/$defs/Point"}], "description": "."}, '{"x": 7}', {"x": 7}),
        ({"$ref": "#/$defs/Size"}, "7", "7"),
        ({"$ref": "#/$defs/Circle"}, "7", "7"),
        ({"$ref": "#/$defs/Nothing"}, "7", "7"),
        ({"$ref": "https://example.com/schema"}, "7", "7"),
    ],
)
def test_an_xml_argument_has_the_type_of_its_schema(schema: dict[str, Any], text: str, value: Any):
    defined = {
        "Point": {"type": "object", "properties": {"x": {"type": "integer"}}},
        "Size": {"type": "string", "enum": ["1", "7"]},
        "Circle": {"$ref": "#/$defs/Circle"},
    }
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"x": schema}, "$defs": defined}}
    written = f"<tool_call><function=f><parameter=x>{text}</parameter></function></tool_call>"
    assert read_tool_calls(written, [tool], "xml") == [ToolCall("f", {"x": value})]
    others = {"name": "f", "parameters": {"type": "object", "additionalProperties": schema, "$defs": defined}}
    assert read_tool_calls(written, [others], "xml") == [ToolCall("f", {"x": value})]


@pytest.mark.parametrize(
    "body",
    [
        "add",
        '{"name": "add"}',
        "<function=add>",
        "<function=add>a=1</function>",
        "<function=add><parameter=a>1</function>",
        "<function=add</function>",
        "<function=></function>",
        "<function=add><parameter=a</parameter></function>",
        "<function=add><parameter=>1</parameter></function>",
        "<function=add><parameter=a>1</parameter>2</function>",
    ],
)
def test_an_unparsable_xml_call_says_how_to_write_it(body: str):
    (read,) = read_tool_calls(f"<tool_call>{body}</tool_call>", [ADD], "xml")
    assert read.problem.startswith("a call is <function=NAME>")


def test_xml_parameters_may_stand_anywhere_and_hold_anything():
    text = (
        "<tool_call> <function=f>\n\n <parameter= a >1</parameter><parameter=b>\n\n<x>\n\n</parameter> \n"
        "<parameter=c></parameter><parameter=a>2</parameter></function> </tool_call>"
    )
    assert read_tool_calls(text, [], "xml") == [ToolCall("f", {"a": "2", "b": "\n<x>\n", "c": ""})]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", []),
        ("<a>1</a> <a>2</a>", ["1", "2"]),
        ("<a>1<a>2</a>3</a>", ["1<a>2"]),
        ("</a><a>1", []),
        ("<a>1</a><a>", ["1"]),
        ("<a>\n</a>", ["\n"]),
    ],
)
def test_tags_are_read_as_the_obvious_pattern_reads_them(text: str, found: list[str]):
    assert read_tags(text, "a") == found == re.findall("<a>(.*?)</a>", text, re.DOTALL)


@pytest.mark.parametrize(
    "body",
    [
        "<function=f>" + " " * 128_000 + "x</function>",
        "<function=f>" + "<parameter=a>" * 40_000 + "</function>",
        "<function=" * 40_000,
        "<tool_call>" * 40_000,
        "<arg_key>a</arg_key><arg_value>" * 40_000,
        "add" + "</arg_value>" * 40_000,
    ],
    ids=["spaces", "open parameters", "open functions", "open calls", "open values", "closed values"],
)
@pytest.mark.parametrize("tool_format", ["json", "xml", "glm"])
def test_a_hostile_response_is_read_in_linear_time(body: str, tool_format: str):
    began = time.thread_time()
    assert all(call.problem for call in read_tool_calls(f"<tool_call>\n{body}\n</tool_call>", [ADD], tool_format))
    assert time.thread_time() - began < 5  # milliseconds; a pattern with two repeats needs minutes


def test_a_hostile_schema_is_read_in_linear_time():
    """A key of twelve tildes has 4,096 references, and each of them led to all of the schema."""
    name, aliases = "~" * 12, product(("~", "~0"), repeat=12)
    references = [{"$ref": f"#/{''.join(each)}"} for each in islice(aliases, 1000)]
    parameters = {"additionalProperties": {"anyOf": references}, name: {"anyOf": [True] * 10_000 + references}}
    written = "<tool_call><function=f><parameter=x>7</parameter></function></tool_call>"
    began = time.thread_time()
    tool = {"name": "f", "parameters": {**parameters, "properties": {"y": {"enum": [*range(100_000)]}}}}
    assert read_tool_calls(written, [tool], "xml") == [ToolCall("f", {"x": "7"})]
    assert read_tool_calls(written.replace("=x", "=y"), [tool], "xml") == [ToolCall("f", {"y": 7})]
    assert time.thread_time() - began < 1  # it was 3.5 s


def test_calls_that_are_not_run_are_not_checked(monkeypatch):
    """A check may take two seconds in processes that all episodes share, also long after its own episode has timed out."""
    checked: list[str] = []
    monkeypatch.setattr(tools, "check_arguments", lambda name, *_: checked.append(name) or "")
    _, _, info = step(new(Sums), call("add", a=1) * 100)
    assert len(checked) == Sums.max_calls and info == {"tool_calls": 100, "tool_errors": 100 - Sums.max_calls}


def test_thousands_of_calls_get_their_errors_at_once():
    observation, _, info = step(new(Sums), "<tool_call></tool_call>" * 20_000)
    assert info == {"tool_calls": 20_000, "tool_errors": 20_000}
    assert "not valid JSON" in observation["tool_results"][0][0]["text"]
    assert observation["tool_results"][-1] == [{"type": "text", "text": "Error: at most 8 calls are taken at once."}]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"a": 1}, ""),
        ({"a": 1, "note": None}, ""),
        ({}, "add: arguments: 'a' is a required property."),
        ({"a": "1"}, "add: arguments.a: '1' is not of type 'integer'."),
        ({"a": 1, "unit": "km"}, "add: arguments.unit: 'km' is not one of ['m', 'cm']."),
        ({"a": 1, "z": 2}, "add: arguments: Additional properties are not allowed ('z' was unexpected)."),
    ],
)
def test_arguments_must_fit_the_schema(arguments: dict[str, Any], message: str):
    assert problem_with(ToolCall("add", arguments), [ADD]) == message


def test_two_functions_of_one_name_are_an_error():
    with pytest.raises(ValueError, match=r"Twice.functions must have different names, but they are add, add"):
        type("Twice", (ToolEnv,), {"functions": [add, add]})
    with pytest.raises(ValueError, match="tool_format must be one of json, xml, glm, but it is 'yaml'"):
        read_tool_calls("", [], "yaml")


def test_a_call_of_an_unknown_tool_lists_the_tools():
    assert problem_with(ToolCall("sub"), [ADD]) == "there is no tool 'sub'; the tools are add."
    assert len(problem_with(ToolCall("x" * 10_000), [ADD])) < 200


def test_results_become_parts_of_a_message():
    red = image()
    shown = {"type": "image", "image": red}
    assert parts_of("a") == [{"type": "text", "text": "a"}]
    assert parts_of(None) == [{"type": "text", "text": ""}]
    assert parts_of({"é": [1, 2]}) == [{"type": "text", "text": '{"é": [1, 2]}'}]
    assert parts_of(red) == [shown]
    assert parts_of(["left", red, 3]) == [{"type": "text", "text": "left"}, shown, {"type": "text", "text": "3"}]
    assert parts_of(obs("Closer:", images=[red])) == [shown, {"type": "text", "text": "Closer:"}]
    assert parts_of("\ud800") == [{"type": "text", "text": "?"}]


class Sums(ToolEnv):
    """Adds, draws and fails on request; the answer is what the response without a call says."""

    def draw(self, color: str) -> Image.Image:
        """Draw an image.

        Args:
            color: Its color.
        """
        self.threads = [*getattr(self, "threads", []), threading.current_thread()]
        return image(color)

    async def wait(self) -> list[Any]:
        """Wait a moment."""
        await asyncio.sleep(0)
        return ["waited", 1]

    functions = [add, draw, wait]  # noqa: RUF012

    def judge(self, response: str) -> float:
        return float(response == "4 m")


def step(env: ToolEnv, response: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
    return asyncio.run(env.step(response))


def new(cls: type[ToolEnv], **options: Any) -> ToolEnv:
    return resolve_env(cls, options=options).build(a_task())  # type: ignore[return-value]


def test_a_class_with_functions_is_a_whole_env():
    env = new(Sums)
    assert [tool["function"]["name"] for tool in env.tools] == ["add", "draw", "wait"]
    observation, done, info = step(env, call("add", a=1, b=3))
    assert (done, info) == (False, {"tool_calls": 1, "tool_errors": 0})
    assert env.format_observation(observation) == [{"role": "tool", "content": "4 m"}]
    assert step(env, "4 m") == ({"obs_str": ""}, True, {"reward": 1.0})


def test_results_are_in_the_order_of_the_calls_errors_too():
    env = new(Sums)
    response = call("wait") + call("draw", color="no color") + call("add") + call("mul") + call("add", a=3)
    observation, done, info = step(env, response)
    assert (done, info) == (False, {"tool_calls": 5, "tool_errors": 3})
    assert [message["content"] for message in env.format_observation(observation)] == [
        '["waited", 1]',
        "Error: unknown color specifier: 'no color'",
        "Error: add: arguments: 'a' is a required property.",
        "Error: there is no tool 'mul'; the tools are add, draw, wait.",
        "4 m",
    ]


def test_functions_run_in_parallel_and_methods_in_the_envs_thread():
    both = threading.Barrier(2, timeout=600)

    def meet() -> str:
        """Wait for the other call."""
        return "first" if both.wait() == 0 else "second"

    class Meeting(Sums):
        functions = [meet, Sums.draw]  # noqa: RUF012

    env = new(Meeting)
    observation, _, info = step(
        env, call("meet") + call("draw", color="red") + call("meet") + call("draw", color="blue")
    )
    texts = sorted(parts[0]["text"] for parts in observation["tool_results"] if parts[0]["type"] == "text")
    assert texts == ["first", "second"] and info["tool_errors"] == 0
    assert env.threads == [threading.current_thread()] * 2


def test_calls_beyond_the_limit_are_errors():
    class Few(Sums):
        max_calls = 2

    observation, _, info = step(new(Few), call("add", a=1) * 3)
    assert info == {"tool_calls": 3, "tool_errors": 1}
    assert observation["tool_results"][2] == [{"type": "text", "text": "Error: at most 2 calls are taken at once."}]


def test_a_subclass_may_override_a_tool_and_judge_with_metrics():
    class Loud(Sums):
        def draw(self, color: str) -> Any:
            return color.upper()

        async def judge(self, response: str) -> dict[str, float]:  # type: ignore[override]
            return {"reward": 0.5, "length": len(response)}

    env = new(Loud)
    assert step(env, call("draw", color="red"))[0] == {"tool_results": [[{"type": "text", "text": "RED"}]]}
    assert step(env, "abc")[2] == {"reward": 0.5, "length": 3}


def test_what_judge_must_not_return_names_judge_and_its_line():
    class Yes(Sums):
        def judge(self, response: str) -> float:
            return "yes"  # type: ignore[return-value]

    with pytest.raises(EnvContractError, match=r"env Yes: judge must .* returned 'yes' \(.*, line \d+, in judge\)\."):
        play(Yes, ["4 m"])


def test_an_env_without_judge_is_an_error_at_startup():
    with pytest.raises(ValueError, match=r"must define judge\(self, response\)"):
        resolve_env(type("Silent", (ToolEnv,), {"functions": [add]}))


def test_whole_episodes_with_images_pass_the_audit():
    responses = [
        call("draw", color="blue") + call("add", a=1) + call("draw", color="red"),
        "Add. " + call("add", a=1, b=3),
        "4 m",
    ]
    trajectory = play_audited(Sums, responses)
    assert (trajectory.ending, trajectory.reward) == ("env_done", 1.0)
    assert [[item.image.getpixel((0, 0)) for item in turn.media] for turn in trajectory.turns] == [
        [],
        [(0, 0, 255), (255, 0, 0)],
        [],
    ]
    assert [turn.metrics for turn in trajectory.turns] == [
        {"tool_calls": 3.0, "tool_errors": 0.0},
        {"tool_calls": 1.0, "tool_errors": 0.0},
        {},
    ]


def test_a_failing_tool_is_an_env_error_that_the_model_never_reads():
    calls: list[str] = []

    def flaky() -> str:
        """Fails once."""
        calls.append("flaky")
        if len(calls) == 1:
            raise ConnectionError("the service is away")
        return "back"

    class Service(Sums):
        functions = [flaky]  # noqa: RUF012

    trajectory = play(Service, [call("flaky"), "4 m"])
    assert (trajectory.ending, trajectory.reward, trajectory.metrics["env_retries"]) == ("env_done", 1.0, 1.0)
    assert "away" not in str([turn.messages for turn in trajectory.turns])

    calls.clear()
    broken = play(Service, [call("flaky"), "4 m"], max_env_retries_per_turn=0)
    assert broken.ending == "error" and "the service is away" in (broken.error or "") and broken.reward is None


# Templates


def reader(shared: Path, template: str, images: bool) -> Renderer:
    return real_renderer(shared, "qwen3-vl", template, "<|image_pad|>" if images else None)


def shown(env: Env, *results: Any) -> list[dict[str, Any]]:
    messages = env.format_observation({"tool_results": [parts_of(result) for result in results]})
    assert isinstance(messages, list)
    return messages


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("results", [["one", "2\n3"], [" padded \n\n", "\n", ""], ["a" * 50]])
def test_results_render_like_the_templates_tool_messages(template: str, results: list[str], shared: Path):
    """Trimmed and joined into blocks as the template does it: Qwen3.5 trims a result, Qwen3 does not."""
    env, renderer = new(Sums), reader(shared, template, images=False)
    messages = renderer.adapt_tool_messages(shown(env, *results))
    wanted = full_text(renderer, [*BASE, *({"role": "tool", "content": result} for result in results)])
    base = full_text(renderer, BASE, generate=False).removesuffix("\n")
    assert renderer.delta(messages).token_ids == ids_of(renderer, wanted.removeprefix(base))


@pytest.mark.parametrize("template", SHOW_IMAGES)
def test_every_template_that_shows_images_shows_those_of_tools(template: str, shared: Path):
    env, renderer = new(Sums), reader(shared, template, images=True)
    native = shown(env, ["left", image(), "right"], "plain", image("blue"))
    delta = renderer.delta(renderer.adapt_tool_messages(native))
    assert len(delta.images) == 2
    box = "<|vision_start|><|image_pad|><|vision_end|>"
    blocks = (
        f"<tool_response>\nleft{box}right\n</tool_response>\n<tool_response>\nplain\n</tool_response>\n"
        f"<tool_response>\n{box}\n</tool_response><|im_end|>\n"
    )
    if template == "qwen2_5_vl":  # it writes the role as it is
        blocks = f"<|im_start|>tool\nleft{box}right<|im_end|>\n<|im_start|>tool\nplain<|im_end|>\n<|im_start|>tool\n{box}<|im_end|>\n"
    assert blocks in renderer.decode(delta.token_ids)
    assert renderer.delta(native).token_ids == delta.token_ids


@pytest.mark.parametrize("template", ["qwen2_5", "qwen3", "qwen3_instruct_2507"])
def test_a_template_that_loses_the_images_of_tools_gets_a_user_message(template: str, shared: Path):
    text, both = (reader(shared, template, images=images) for images in (False, True))
    assert (text.has_tool_role, both.has_tool_role) == (True, False)
    results = shown(new(Sums), "one", "2\n3")
    assert both.delta(both.adapt_tool_messages(results)).token_ids == text.delta(results).token_ids


def test_tool_messages_become_one_user_message_where_the_template_has_no_tool_role():
    renderer = Renderer(tiny.tokenizer(), chat_template=STRICT)
    messages = [*shown(new(Sums), "one <tool_response>", "two"), {"role": "user", "content": "Go on."}]
    with pytest.raises(Exception, match="only user and assistant"):
        renderer.delta(messages)
    ids = renderer.delta(renderer.adapt_tool_messages(messages)).token_ids
    assert renderer.decode(ids) == (
        "\n<|im_start|>user\n<tool_response>\none <tool_response>\n</tool_response>\n"
        "<tool_response>\ntwo\n</tool_response><|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
    )
    start, end = renderer.tokenizer.convert_tokens_to_ids(["<tool_response>", "</tool_response>"])
    assert [token for token in ids if token in (start, end)] == [start, end, start, end]  # ours, not the result's


def test_results_inside_a_response_stand_between_tags():
    history = Inline(renderer_of_tests(), ())
    made = completion("x", 1)
    turn = Turn([], [], made.token_ids, made.logprobs, made.policy_versions, "stop", "x")
    ids = history.continuation(turn, shown(new(Sums), "</tool_response>")).rendered.token_ids
    tokenizer = renderer_of_tests().tokenizer
    assert decoded(ids) == "<tool_response>\n</tool_response>\n</tool_response>"
    assert ids.count(tokenizer.convert_tokens_to_ids("</tool_response>")) == 1


@pytest.mark.parametrize(("template", "how"), [("qwen3_vl", "json"), ("qwen3_6", "xml")])
def test_calls_are_parsed_in_the_templates_format(template: str, how: str, shared: Path):
    assert reader(shared, template, images=True).tool_format == how


def test_the_loop_sets_the_envs_tool_format():
    class Curious(Sums):
        def judge(self, response: str) -> dict[str, Any]:
            return {"reward": 1.0, "json": self.tool_format == "json"}

    class Strict(Curious):
        tool_format = "xml"

    assert play(Curious, ["x"]).turns[0].metrics == {"json": 1.0}
    assert play(Strict, ["x"]).turns[0].metrics == {"json": 0.0}


def test_a_template_without_tools_is_an_error_at_startup(tmp_path: Path):
    template = tmp_path / "no_tools.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    config = Config(
        data=Data(generator=lambda index, seed: {"prompt": "1 + 3?"}, size=1),
        env=Sums,
        model=Model(chat_template=str(template)),
        output_dir=str(tmp_path),
    )
    with pytest.raises(ValueError, match="the env has 3 tools, but the chat template does not show them"):
        build_run(config)
