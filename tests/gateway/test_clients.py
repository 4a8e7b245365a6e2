"""Real client libraries play episodes with tools and images through the HTTP server, and every row passes the audit."""

from __future__ import annotations

import asyncio
import json
import ssl
from typing import Any

import pytest
from PIL import Image
from testing.client_episodes import need, play_client, prompts_are_full_renders
from testing.episodes import new_store
from testing.templates import real_renderer

from vlmrl import data_uri
from vlmrl.gateway.agent_client import AgentClient
from vlmrl.multimodal.renderer import Renderer

pytestmark = pytest.mark.slow

# Arguments that a client which parses and writes them again might change.
NOTE = {"text": 'Größe «5» \n\\ "x" 🙂', "ratio": 1.0, "tags": {"b": [], "a": {"z": None, "y": [True, 1e-7, 10.50]}}}


def call(name: str, arguments: Any) -> str:
    """A call as Qwen3-VL's template writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'


RESPONSES = [
    call("zoom", {"quarter": "top left"}),
    "Two calls.\n" + call("note", NOTE) + "\n" + call("zoom", {"quarter": "bottom right"}),
    call("nothing", {}),
    "It is red.",
]
NEVER_CANONICAL = [  # calls that no serializer writes like this
    '<tool_call>{"arguments":{"ratio":1.0,"text":"\\u00e9\\n","tags":{}},   "name":"note"}</tool_call>',
    '<tool_call>\n{"name":"zoom","arguments":{"quarter" :"top left"}}\n\n</tool_call>\n',
    "It is red.",
]


def schema(name: str, **parameters: Any) -> dict[str, Any]:
    kinds = {key: {"type": kind} for key, kind in parameters.items()}
    shape = {"type": "object", "properties": kinds, "required": list(kinds)}
    return {
        "type": "function",
        "function": {"name": name, "description": f"Does {name}.", "parameters": shape, "strict": True},
    }


TOOLS = [
    schema("zoom", quarter="string"),
    schema("note", text="string", ratio="number", tags="object"),
    schema("nothing"),
]


@pytest.fixture(scope="module")
def renderer(shared) -> Renderer:
    return real_renderer(shared, "qwen3-vl", "qwen3_vl")


def crop(color: str = "red") -> Image.Image:
    return Image.new("RGB", (32, 32), color)


def image_part(color: str = "red") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_uri(crop(color))}}


def question() -> dict[str, Any]:
    return {"role": "user", "content": [image_part("blue"), {"type": "text", "text": "What color is it?"}]}


def results(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A tool message for each call: an image for `zoom`, its own arguments for `note`."""
    messages = []
    for each in calls:
        name, arguments = each["function"]["name"], each["function"]["arguments"]
        shown = [image_part(), {"type": "text", "text": "Closer:"}] if name == "zoom" else f"{name} {arguments}"
        messages.append({"role": "tool", "tool_call_id": each["id"], "content": shown})
    return messages


def answered_arguments(played) -> list[Any]:
    """The arguments of the calls as the last request has them."""
    request, _ = played.exchanges[-1]
    calls = [each for message in request.messages for each in message.get("tool_calls") or []]
    return [each["function"]["arguments"] for each in calls]


def as_dict(message: Any) -> dict[str, Any]:
    return message.model_dump(exclude_none=True)


def openai_sync(client) -> str:
    messages, openai = [question()], client.openai()
    while True:
        choice = openai.chat.completions.create(model=client.model, messages=messages, tools=TOOLS).choices[0]
        if choice.finish_reason != "tool_calls":
            return choice.message.content
        message = as_dict(choice.message)
        messages += [message, *results(message["tool_calls"])]


async def openai_async(client) -> str:
    messages, openai = [question()], client.async_openai()
    while True:
        completion = await openai.chat.completions.create(model=client.model, messages=messages, tools=TOOLS)
        message = as_dict(completion.choices[0].message)
        if "tool_calls" not in message:
            return message["content"]
        messages += [message, *results(message["tool_calls"])]


def openai_streaming(client) -> str:
    """The deltas are joined by hand, as agents that show text while it comes do it."""
    messages, openai = [question()], client.openai()
    while True:
        content, calls = "", {}
        for chunk in openai.chat.completions.create(
            model=client.model, messages=messages, tools=TOOLS, stream=True, stream_options={"include_usage": True}
        ):
            for choice in chunk.choices:
                content += choice.delta.content or ""
                for part in choice.delta.tool_calls or []:
                    made = calls.setdefault(part.index, {"id": "", "type": "function", "function": {}})
                    made["id"] = part.id or made["id"]
                    for key in ("name", "arguments"):
                        text = getattr(part.function, key) or ""
                        made["function"][key] = made["function"].get(key, "") + text
        if not calls:
            return content
        message = {"role": "assistant", "content": content or None, "tool_calls": list(calls.values())}
        messages += [message, *results(message["tool_calls"])]


def openai_stream_helper(client) -> str:
    """The SDK's own accumulation of a stream."""
    messages, openai = [question()], client.openai()
    while True:
        with openai.chat.completions.stream(model=client.model, messages=messages, tools=TOOLS) as stream:
            message = as_dict(stream.get_final_completion().choices[0].message)
        if not message.get("tool_calls"):
            return message["content"]
        for each in message["tool_calls"]:
            each["function"].pop("parsed_arguments", None)
        message.pop("parsed", None)
        messages += [message, *results(message["tool_calls"])]


def as_responses_tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", **tool["function"]}


def responses_loop(client, send) -> str:
    """OpenAI's Responses API, with the whole conversation in each request."""
    asked = [{"type": "input_image", "image_url": data_uri(crop("blue"))}]
    asked.append({"type": "input_text", "text": "What color is it?"})
    items: list[Any] = [{"role": "user", "content": asked}]
    tools = [as_responses_tool(tool) for tool in TOOLS]
    while True:
        response = send(model=client.model, input=items, tools=tools, store=False)
        assert response.status == "completed", response
        items += response.output
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        shown = [{"type": "input_image", "image_url": data_uri(crop())}, {"type": "input_text", "text": "Closer:"}]
        items += [
            {
                "type": "function_call_output",
                "call_id": each.call_id,
                "output": shown if each.name == "zoom" else f"{each.name} {each.arguments}",
            }
            for each in calls
        ]


def openai_responses(client) -> str:
    return responses_loop(client, client.openai().responses.create)


def openai_responses_streaming(client) -> str:
    """The SDK's own accumulation of a stream."""
    openai = client.openai()

    def send(**request: Any):
        with openai.responses.stream(**request) as stream:
            return stream.get_final_response()

    return responses_loop(client, send)


def openai_responses_items(client) -> str:
    """The items of a stream, as agents that show each when it is done read them."""
    openai = client.openai()

    def send(**request: Any):
        events = list(openai.responses.create(**request, stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        whole = events[-1].response
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert [item.to_dict() for item in done] == [item.to_dict() for item in whole.output]
        return whole.model_copy(update={"output": done})

    return responses_loop(client, send)


def litellm_sync(client) -> str:
    import litellm

    messages = [question()]
    options = {"model": "openai/" + client.model, "api_base": client.base_url, "api_key": client.api_key}
    while True:
        message = litellm.completion(messages=messages, tools=TOOLS, **options).choices[0].message
        if not message.tool_calls:
            return message.content
        messages += [message, *results([each.model_dump() for each in message.tool_calls])]


def openai_agents(client) -> str:
    from agents import OpenAIChatCompletionsModel

    return openai_agent(OpenAIChatCompletionsModel(client.model, client.async_openai()))


def openai_agents_responses(client) -> str:
    """The SDK's default."""
    from agents import OpenAIResponsesModel

    return openai_agent(OpenAIResponsesModel(client.model, client.async_openai()))


def openai_agent(model) -> str:
    from agents import Agent, Runner, ToolOutputImage, ToolOutputText, function_tool, set_tracing_disabled

    set_tracing_disabled(True)

    @function_tool
    def zoom(quarter: str) -> list[Any]:
        """Does zoom."""
        return [ToolOutputImage(image_url=data_uri(crop())), ToolOutputText(text="Closer:")]

    @function_tool(strict_mode=False)
    def note(text: str, ratio: float, tags: dict[str, Any]) -> str:
        """Does note."""
        return json.dumps({"text": text, "ratio": ratio, "tags": tags})

    @function_tool
    def nothing() -> str:
        """Does nothing."""
        return "nothing"

    agent = Agent("seer", instructions="Look.", tools=[zoom, note, nothing], model=model)
    parts = [{"type": "input_image", "image_url": data_uri(crop("blue")), "detail": "auto"}]
    parts.append({"type": "input_text", "text": "What color is it?"})
    return asyncio.run(Runner.run(agent, [{"role": "user", "content": parts}])).final_output


def langgraph_responses(client) -> str:
    return langgraph(client, use_responses_api=True)[0]["text"]


def langgraph(client, **options: Any) -> Any:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    @tool
    def zoom(quarter: str) -> list:
        """Does zoom."""
        return [image_part(), {"type": "text", "text": "Closer:"}]

    @tool
    def note(text: str, ratio: float, tags: dict) -> str:
        """Does note."""
        return json.dumps({"text": text, "ratio": ratio, "tags": tags})

    @tool
    def nothing() -> str:
        """Does nothing."""
        return "nothing"

    tools = [zoom, note, nothing]
    model = ChatOpenAI(model=client.model, base_url=client.base_url, api_key=client.api_key, **options)
    model = model.bind_tools(tools)
    graph = StateGraph(MessagesState).add_node("ask", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode(tools)).add_edge(START, "ask").add_edge("tools", "ask")
    graph.add_conditional_edges("ask", tools_condition)
    return graph.compile().invoke({"messages": [question()]})["messages"][-1].content


ANTHROPIC_TOOLS = [
    {
        "name": each["function"]["name"],
        "description": each["function"]["description"],
        "input_schema": each["function"]["parameters"],
    }
    for each in TOOLS
]


def anthropic_image(color: str) -> dict[str, Any]:
    content = data_uri(crop(color)).partition(",")[2]
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": content}}


def anthropic_loop(client, send) -> str:
    asked = {"role": "user", "content": [anthropic_image("blue"), {"type": "text", "text": "What color is it?"}]}
    messages = [asked]
    while True:
        message = send(model=client.model, max_tokens=200, messages=messages, tools=ANTHROPIC_TOOLS)
        if message.stop_reason != "tool_use":
            return message.content[0].text
        answers = []
        for block in message.content:
            if block.type == "tool_use":
                shown = [anthropic_image("red"), {"type": "text", "text": "Closer:"}]
                content = shown if block.name == "zoom" else f"{block.name} {json.dumps(block.input)}"
                answers.append({"type": "tool_result", "tool_use_id": block.id, "content": content})
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": answers}]


def anthropic_sync(client) -> str:
    return anthropic_loop(client, client.anthropic().messages.create)


def anthropic_streaming(client) -> str:
    anthropic = client.anthropic()

    def send(**request: Any):
        with anthropic.messages.stream(**request) as stream:
            return stream.get_final_message()

    return anthropic_loop(client, send)


def anthropic_tool_runner(client) -> str:
    """The SDK's own loop, which leaves the conversation to the server (`thread`) unless the server refuses that."""
    from anthropic import beta_tool

    @beta_tool
    def zoom(quarter: str) -> list:
        """Does zoom."""
        return [anthropic_image("red"), {"type": "text", "text": "Closer:"}]

    @beta_tool
    def note(text: str, ratio: float, tags: dict) -> str:
        """Does note."""
        return json.dumps({"text": text, "ratio": ratio, "tags": tags})

    @beta_tool
    def nothing() -> str:
        """Does nothing."""
        return "nothing"

    asked = {"role": "user", "content": [anthropic_image("blue"), {"type": "text", "text": "What color is it?"}]}
    messages = client.anthropic().beta.messages
    tools = [zoom, note, nothing]
    runner = messages.tool_runner(model=client.model, max_tokens=200, messages=[asked], tools=tools)
    return runner.until_done().content[0].text


ARGUMENTS = [{"quarter": "top left"}, NOTE, {"quarter": "bottom right"}, {}]
IMAGES = {"sampled": [1, 1, 1, 0], "odd": [1, 0, 1]}
# Over chat completions openai-agents leaves out images of tool results, so only the question has one.
LOST = {
    "sampled": [1, 0, 0, 0],
    "odd": [1, 0, 0],
}


@pytest.mark.parametrize("calls", ["sampled", "odd"])
@pytest.mark.parametrize(
    ("package", "agent", "images"),
    [
        ("openai", openai_sync, IMAGES),
        ("openai", openai_async, IMAGES),
        ("openai", openai_streaming, IMAGES),
        ("openai", openai_stream_helper, IMAGES),
        ("openai", openai_responses, IMAGES),
        ("openai", openai_responses_streaming, IMAGES),
        ("openai", openai_responses_items, IMAGES),
        ("litellm", litellm_sync, IMAGES),
        ("anthropic", anthropic_sync, IMAGES),
        ("anthropic", anthropic_streaming, IMAGES),
        ("anthropic", anthropic_tool_runner, IMAGES),
        ("agents", openai_agents, LOST),
        ("agents", openai_agents_responses, IMAGES),
        ("langgraph", langgraph, IMAGES),
        ("langgraph", langgraph_responses, IMAGES),
    ],
)
def test_a_clients_requests_are_one_row_as_sampled(package, agent, images, calls, renderer, monkeypatch):
    """Each request continues the one before, in one row of training, whose prompts are full renders."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    need(package), package == "langgraph" and need("langchain_openai")
    responses = RESPONSES if calls == "sampled" else NEVER_CANONICAL
    played = play_client(agent, responses, renderer)
    assert played.result == "It is red."
    assert played.continued == [False] + [True] * (len(responses) - 1)
    assert len(played.rows) == 1
    assert [len(turn.media) for turn in played.trajectory.turns] == images[calls]
    assert prompts_are_full_renders(played, renderer, new_store())
    assert calls == "odd" or answered_arguments(played) == ARGUMENTS


def smolagents_model(client):
    from smolagents import OpenAIModel

    return OpenAIModel(client.model, api_base=client.base_url, api_key=client.api_key)


def smolagents_zoom():
    from smolagents import tool

    @tool
    def zoom(quarter: str) -> str:
        """Does zoom.

        Args:
            quarter: Which one.
        """
        return f"closer: {quarter}"

    return zoom


def smolagents_tools(client) -> str:
    from smolagents import LogLevel, ToolCallingAgent

    def show(step, agent):
        step.observations_images = [crop()]

    agent = ToolCallingAgent(
        [smolagents_zoom()], smolagents_model(client), step_callbacks=[show], verbosity_level=LogLevel.OFF
    )
    return agent.run("What color is it?", images=[crop("blue")])


def smolagents_code(client) -> str:
    from smolagents import CodeAgent, LogLevel

    agent = CodeAgent([smolagents_zoom()], smolagents_model(client), verbosity_level=LogLevel.OFF)
    return agent.run("What color is it?", images=[crop("blue")])


@pytest.mark.parametrize(
    ("agent", "responses"),
    [
        (smolagents_tools, [call("zoom", {"quarter": "top left"}), call("final_answer", {"answer": "red"})]),
        (
            smolagents_code,
            [
                "Thought: look.\n<code>\nprint(zoom('top left'))\n</code>",
                "Thought: answer.\n<code>\nfinal_answer('red')\n</code>",
            ],
        ),
    ],
)
def test_a_smolagents_agent_rewrites_its_history(agent, responses, renderer):
    """Calls are written back as text, and `</code>` of the stop string: each request is a branch, and both are trained."""
    need("smolagents")
    played = play_client(agent, responses, renderer)
    assert played.result == "red"
    assert played.continued == [False, False]
    assert prompts_are_full_renders(played, renderer, new_store())
    first, second = (row.image_ids for row in played.rows)
    assert len(first) == 1 and len(second) == 2 and second[0] == first[0]


def test_clients_share_the_certificates_of_the_machine(monkeypatch):
    """Reading them takes 20 ms, for each episode of a run."""
    need("openai"), need("anthropic")
    client = AgentClient("http://127.0.0.1:1/t/x", "key")
    client.openai()
    read = []
    monkeypatch.setattr(ssl, "create_default_context", lambda *args, **options: read.append(args))
    for make in (client.openai, client.async_openai, client.anthropic, client.async_anthropic):
        assert make().api_key == "key"
    assert not read
