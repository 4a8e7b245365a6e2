"""Requests of chat completions and Anthropic as one form: exact messages, what is refused or overridden, images read once."""

from __future__ import annotations

import asyncio
import json
import re
from types import SimpleNamespace

import pytest
from testing.agent_episodes import ZOOM
from testing.episodes import new_store
from testing.gateway import png, uri

from vlmrl.config import Gateway
from vlmrl.engine.hf.batch import RunningBatch
from vlmrl.env.tool_calls import MAX_DEPTH
from vlmrl.gateway import request_images
from vlmrl.gateway.anthropic_api import anthropic_error, read_anthropic_request
from vlmrl.gateway.chat import ChatError
from vlmrl.gateway.openai_api import REFUSED, openai_error, read_openai_request
from vlmrl.gateway.request_body import (
    FORM_REMEDY,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    read_json,
    stop_field,
)
from vlmrl.gateway.request_images import MAX_NEW_IMAGES, NewImage, RequestImages
from vlmrl.utils import json_files
from vlmrl.utils.json_files import MAX_DIGITS, MAX_VALUES
from vlmrl.utils.output_files import open_regular

USER = {"role": "user", "content": "hello"}
CALL = {"id": "c1", "type": "function", "function": {"name": "zoom", "arguments": '{"k": 2}'}}


def images(**settings) -> RequestImages:
    return RequestImages(new_store(), Gateway(**settings))


def openai_chat(*messages, **fields):
    return read_openai_request({"messages": list(messages or (USER,)), **fields}, images()).chat


def anthropic_chat(*messages, **fields):
    return read_anthropic_request({"messages": list(messages or (USER,)), **fields}, images()).chat


def error_of(call, *args, **kwargs) -> ChatError:
    with pytest.raises(ChatError) as raised:
        call(*args, **kwargs)
    return raised.value


def test_messages_of_chat_completions_are_exact():
    chat = openai_chat(
        {"role": "developer", "content": "You look."},
        {"role": "user", "name": "Ann", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
        {"role": "assistant", "content": " four ", "reasoning_content": "hm", "refusal": None},
    )
    assert chat.messages == [
        {"role": "system", "content": "You look."},
        {"role": "user", "content": "a b"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "zoom", "arguments": {"k": 2}}}],
        },
        {"role": "tool", "content": "done", "tool_call_id": "c1"},
        {"role": "assistant", "content": " four ", "reasoning_content": "hm"},
    ]


def test_messages_of_anthropic_are_exact():
    use = {"type": "tool_use", "id": "c1", "name": "zoom", "input": {"k": 2}}
    result = {
        "type": "tool_result",
        "tool_use_id": "c1",
        "content": [{"type": "text", "text": "done"}],
        "is_error": True,
    }
    chat = anthropic_chat(
        USER,
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "So"}, use],
        },
        {
            "role": "user",
            "content": [result, {"type": "tool_result", "tool_use_id": "c2"}, {"type": "text", "text": "Now?"}],
        },
        system=[{"type": "text", "text": "You look.", "cache_control": {"type": "ephemeral"}}],
    )
    call = {"id": "c1", "type": "function", "function": {"name": "zoom", "arguments": {"k": 2}}}
    assert chat.messages == [
        {"role": "system", "content": "You look."},
        USER,
        {"role": "assistant", "content": "So", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "done", "tool_call_id": "c1"},
        {"role": "tool", "content": "", "tool_call_id": "c2"},
        {"role": "user", "content": "Now?"},
    ]


def test_the_tools_of_both_apis_are_one():
    function = ZOOM["function"]
    mine = {"name": function["name"], "description": function["description"], "input_schema": function["parameters"]}
    strict = {"type": "function", "function": {**function, "strict": True}}
    assert anthropic_chat(tools=[mine]).tools == openai_chat(tools=[strict]).tools == [ZOOM]


def test_options_are_read():
    chat = openai_chat(max_tokens=5, stop="a", seed=7, tool_choice="none", user="u", store=True)
    assert (chat.max_tokens, chat.stop, chat.seed, chat.reads_calls, chat.overridden) == (5, ("a",), 7, False, ())
    assert openai_chat(max_tokens=5, max_completion_tokens=6, stop=["a", "b"]).max_tokens == 6
    chat = anthropic_chat(max_tokens=5, stop_sequences=["a"], tool_choice={"type": "none"}, metadata={})
    assert (chat.max_tokens, chat.stop, chat.reads_calls, chat.overridden) == (5, ("a",), False, ())


def test_sampling_parameters_are_overridden_by_name():
    named = {"type": "function", "function": {"name": "zoom"}}
    chat = openai_chat(temperature=0.0, top_p=None, tool_choice=named, parallel_tool_calls=False, of_another_server=1)
    assert chat.overridden == ("temperature", "tool_choice", "parallel_tool_calls", "unknown") and chat.reads_calls
    choice = {"type": "any", "disable_parallel_tool_use": True}
    chat = anthropic_chat(top_k=1, thinking={"type": "enabled"}, tool_choice=choice, of_another_server=1)
    assert chat.overridden == ("top_k", "thinking", "tool_choice", "parallel_tool_calls", "unknown")


@pytest.mark.parametrize(
    "field", sorted({*REFUSED, "grammar", "structural_tag", "allowed_token_ids", "logits_processors"})
)
def test_what_a_run_cannot_follow_is_refused_by_name(field):
    harmless, remedy = REFUSED[field]
    for value in (None, *harmless):
        assert openai_chat(**{field: value}).overridden == ()
    error = error_of(openai_chat, **{field: "json"})
    assert error.status == 400 and error.code == field and remedy in error.message
    assert openai_error(error)["error"]["param"] == field


@pytest.mark.parametrize(
    ("read", "fields"),
    [
        (openai_chat, {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}}),
        (openai_chat, {"response_format": {"type": "json_object"}}),
        (anthropic_chat, {"output_config": {"format": {"type": "json_schema", "schema": {}}}}),
        (anthropic_chat, {"output_format": {"type": "json_schema", "schema": {}}}),
    ],
)
def test_a_form_for_responses_is_refused_alike_in_both_apis(read, fields):
    """Sampling under a schema has another distribution than the policy's, in which the trainer computes logprobs."""
    error = error_of(read, **fields)
    assert error.status == 400 and error.message.endswith(f": {FORM_REMEDY}.") and next(iter(fields)) in error.code


@pytest.mark.parametrize("kind", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
def test_a_conversation_that_the_server_would_keep_is_refused_so_that_anthropics_sdk_sends_it_whole(kind):
    """It was ignored, so that a request of `tool_runner` after the first had neither the task nor tools."""
    details = anthropic_error(error_of(anthropic_chat, thread=kind))["error"]["details"]
    assert details == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert anthropic_chat(thread=None).overridden == ()
    assert error_of(anthropic_chat, compaction={"type": "summary"}).code == "compaction"


def test_what_else_anthropics_output_config_sets_is_overridden():
    assert anthropic_chat(output_config={"effort": "low", "format": None}).overridden == ("output_config",)


WRONG = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [1]}, r"messages\[0\]"),
    ({"messages": [{}]}, "role"),
    ({"messages": [{"role": "function", "content": ""}]}, "role"),
    ({"messages": [{"role": "user"}]}, "content"),
    ({"messages": [{"role": "user", "content": 5}]}, "content"),
    ({"messages": [{"role": "user", "content": ["a"]}]}, r"content\[0\]"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "type"),
    ({"messages": [{"role": "system", "content": [{"type": "image_url", "image_url": ""}]}]}, "type"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "tool_call_id"),
    (
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": "c" * 257}]},
        "tool_call_id must be a string of at most 256",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [CALL | {"id": "c" * 257}]}]},
        "id must be a string of at most 256",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": {}}, USER], "tools": 1}, "tools"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "function"),
    ({"messages": [{"role": "assistant", "tool_calls": [{**CALL, "id": None}]}]}, "id"),
    ({"messages": [{"role": "assistant", "function_call": {}}]}, "tool_calls"),
    ({"tools": [{"type": "web_search"}]}, "function"),
    ({"tools": [{"type": "function", "function": {"name": 1}}]}, "name"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "parameters"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
    ({"seed": 2**70}, "seed"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": "x" * 257}, "stop must be up to 16 strings of 1 to 256 characters"),
    ({"stream": 1}, "stream"),
    ({"stream_options": 1}, "stream_options"),
    ({"model": 1}, "model"),
]


@pytest.mark.parametrize(("fields", "named"), WRONG)
def test_a_mistake_is_answered_with_the_field_and_the_value(fields, named):
    error = error_of(read_openai_request, {"messages": [USER], **fields}, images())
    assert error.status == 400 and re.search(named, error.message)


WRONG_FOR_ANTHROPIC = [
    ({"messages": []}, "messages"),
    ({"messages": [USER, {"role": "assistant", "content": "It is"}]}, "ends with the user"),
    ({"messages": [{"role": "tool", "content": ""}]}, "role"),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "tool_result"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]}, "base64"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c" * 257}]}]},
        "256 characters",
    ),
    ({"messages": [{"role": "assistant", "content": [{"type": "image"}]}, USER]}, "tool_use"),
    ({"system": 5}, "system"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "custom"),
    ({"tools": [{"name": "a"}]}, "input_schema"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"stop_sequences": ["x" * 257]}, "1 to 256 characters"),
    ({"output_config": 5}, "output_config"),
    ({"tool_choice": "auto"}, "tool_choice"),
]


@pytest.mark.parametrize(("fields", "named"), WRONG_FOR_ANTHROPIC)
def test_a_mistake_of_anthropics_form_is_answered(fields, named):
    error = error_of(read_anthropic_request, {"messages": [USER], **fields}, images())
    assert error.status == 400 and named in error.message
    assert anthropic_error(error)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a": "\xff"}',
        b'{"a": "\xed\xa0\x80"}',
        b'{"a": "\\ud800"}',
        b'{"a": "\\udc00\\ud800"}',
        b'\xef\xbb\xbf{"a": 1}',
        '{"a": 1}'.encode("utf-16"),
    ],
)
def test_a_body_that_is_no_json_is_answered(content):
    assert error_of(read_json, content).status == 400


def test_texts_that_follow_each_other_are_one_also_beside_an_image():
    """Empty ones have no tokens, so that no limit of those would hold for their number."""
    text, shown = {"type": "text", "text": ""}, {"type": "image_url", "image_url": {"url": uri(png())}}
    [message] = openai_chat(
        {"role": "user", "content": [text] * 1000 + [shown] + [text | {"text": "a"}] * 1000}
    ).messages
    assert [part["type"] for part in message["content"]] == ["text", "image", "text"]
    assert message["content"][2]["text"] == "a" * 1000


def test_a_body_of_json_is_read():
    # As everywhere: the last.
    assert read_json(b'{"a": "\\ud83d\\ude00", "b": 1, "b": 2}') == {
        "a": "\U0001f600",
        "b": 2,
    }


@pytest.mark.parametrize("piece", [b"[],", b"[[[[]]]],", b"{},", b"1,"])
def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(piece, monkeypatch):
    """64 MiB of `[],` would be 1.4 GiB of lists, and hold the interpreter's lock for a second."""
    content = b'{"messages": [' + piece * (MAX_VALUES + 1) + b"1]}"
    monkeypatch.setattr(json_files, "strict_json", lambda text: pytest.fail("it is parsed"))
    assert "commas and opening brackets" in error_of(read_json, content).message


def test_a_number_of_thousands_of_digits_is_refused():
    """Thousands of them hold the interpreter's lock for a second."""
    content = b'{"seed": ' + b"9" * (MAX_DIGITS + 1) + b"}"
    assert "has more than 400 digits" in error_of(read_json, content).message
    assert read_json(content.replace(b"9", b"", 1)) == {"seed": 10**MAX_DIGITS - 1}


def test_so_many_new_images_may_be_in_a_request():
    part = {"type": "image_url", "image_url": uri(png())}
    parsed = read_openai_request({"messages": [{"role": "user", "content": [part] * (MAX_NEW_IMAGES + 1)}]}, images())
    error = error_of(lambda: asyncio.run(images().load(parsed.chat.messages)))
    assert error.status == 400 and error.code == f"messages[0].content[{MAX_NEW_IMAGES}].image_url"


def test_nested_arguments_and_schemas_have_a_limit():
    def nested(levels: int) -> dict:
        return {} if levels == 0 else {"a": nested(levels - 1)}

    def call(levels: int) -> dict:
        return {
            "role": "assistant",
            "tool_calls": [{**CALL, "function": {"name": "a", "arguments": json.dumps(nested(levels))}}],
        }

    assert openai_chat(call(MAX_DEPTH - 1), USER)
    assert "levels deep" in error_of(openai_chat, call(MAX_DEPTH + 1), USER).message
    assert (
        "JSON object"
        in error_of(
            openai_chat,
            {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "a", "arguments": "[" * 10_000}}]},
        ).message
    )
    tool = {"type": "function", "function": {"name": "a", "parameters": nested(MAX_DEPTH)}}
    assert "levels deep" in error_of(openai_chat, tools=[tool]).message


@pytest.mark.parametrize("arguments", ['{"a": NaN}', '{"a": ' + "9" * 401 + "}"])
def test_arguments_have_the_rules_of_a_body(arguments: str):
    message = {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "a", "arguments": arguments}}]}
    error = error_of(openai_chat, message, USER)
    assert error.status == 400 and "must be a JSON object" in error.message


@pytest.mark.parametrize("piece", [rb"\u002c", rb"\u002C", rb"\u005b", rb"\u005B", rb"\u007b", rb"\u007B"])
def test_values_of_arguments_count_among_those_of_the_body(piece: bytes):
    """The arguments of a call are a text: 60 MiB of `\\u005b\\u005d\\u002c` stopped all threads for six seconds."""
    with pytest.raises(ChatError, match="must not have more than 1000000 commas"):
        read_json(b'{"arguments": "' + piece * (MAX_VALUES + 1) + b'"}')


def test_the_longest_stop_strings_cost_little_at_each_token():
    """The embedded engine decodes as many tokens as the longest one may have."""
    sizes: list[int] = []
    stops = stop_field(["\N{FIRECRACKER}" * MAX_STOP_LENGTH] * MAX_STOPS, "stop")
    renderer = SimpleNamespace(stop_ids=frozenset(), decode=lambda ids: sizes.append(len(ids)) or "")
    sampling = SimpleNamespace(stop=stops, max_tokens=10_000)
    row = SimpleNamespace(token_ids=[5] * 9000, request=SimpleNamespace(sampling=sampling))
    batch = SimpleNamespace(resources=SimpleNamespace(renderer=renderer))
    assert RunningBatch._stop_reason(batch, row) is None and sizes[0] <= 4 * MAX_STOP_LENGTH + 4


def show(address: str, reader: RequestImages | None = None):
    """The messages of a request with one image, loaded."""
    reader = reader or images()
    part = {"type": "image_url", "image_url": {"url": address, "detail": "high"}}
    parsed = read_openai_request({"messages": [{"role": "user", "content": [part]}]}, reader)
    return asyncio.run(reader.load(parsed.chat.messages))[0]["content"][0]["image"]


def test_an_image_is_decoded_and_loaded_once():
    reader = images()
    first = show(uri(png()), reader)
    store = reader._store
    assert (first.size, store.seen, store.processed) == ((64, 32), 1, 1)
    assert show(uri(png()), reader) is first and store.seen == 1
    other = uri(png()).replace("base64,", "base64,\n")  # another text, the same content
    assert show(other, reader) is first and store.seen == 2


@pytest.mark.parametrize(
    "address",
    ["data:image/png;base64,", "data:image/png;base64,%%%", "data:image/png,abc", uri(b"no image"), uri(png()[:60])],
)
def test_an_image_that_does_not_decode_is_named(address):
    error = error_of(show, address)
    assert error.status == 400 and error.code == "messages[0].content[0].image_url"
    assert len(error.message) < 600


def test_an_image_that_the_model_cannot_show_is_left_to_the_episode():
    content = png(size=(1000, 2))
    assert show(uri(content)) == content


def test_a_text_model_refuses_images():
    assert "text only" in error_of(show, uri(png()), RequestImages(None, Gateway())).message


def test_urls_and_files_need_a_setting(tmp_path):
    folder, secret = tmp_path / "allowed", tmp_path / "secret.png"
    folder.mkdir()
    for file in (folder / "a b.png", secret):
        file.write_bytes(png())
    (folder / "link.png").symlink_to(secret)
    for address in ("http://127.0.0.1:9/a.png", str(folder / "a b.png"), f"file://{folder}/a%20b.png", "ftp://x/a.png"):
        assert "gateway.images" in error_of(show, address).message
    reader = images(images=(str(folder),))
    assert show(str(folder / "a b.png"), reader).size == show(f"file://{folder}/a%20b.png", reader).size == (64, 32)
    outside = [
        str(secret),
        f"{folder}/../secret.png",
        f"file://{folder}/%2e%2e/secret.png",
        str(folder / "link.png"),
        "a b.png",
        "file://[",
        "\0",
        "x" * 9999,
    ]
    for address in outside:
        assert "gateway.images" in error_of(show, address, reader).message
    assert error_of(show, str(folder / "missing.png"), reader).status == 400


@pytest.mark.parametrize("prefix", ["/9j/", "iVBOR", "file:///9j/"])
def test_base64_without_its_header_is_refused_at_once(prefix, tmp_path, monkeypatch):
    """Its slashes were those of a path: for an image of 2 MB, a thread of all episodes looked for its links for 45 s."""
    readers = (images(), images(images=(str(tmp_path),)))
    monkeypatch.setattr("os.path.realpath", lambda *_, **__: pytest.fail("its links are looked for"))
    for reader in readers:
        error = error_of(show, prefix + "abcdefgh/" * 2**16, reader)
        assert error.status == 400 and "embed the image" in error.message


def test_links_in_circles_are_the_clients_mistake(tmp_path):
    """The endpoint's own error fails the trajectory: a policy whose files the agent sends could escape its reward."""
    (tmp_path / "a.png").symlink_to(tmp_path / "a.png")
    assert error_of(show, str(tmp_path / "a.png"), images(images=(str(tmp_path),))).status == 400


def test_a_link_that_takes_the_place_of_an_allowed_file_is_not_followed(tmp_path, monkeypatch):
    """An agent in a container, which shares the folder, has the model see no other image of the host."""
    folder, secret = tmp_path / "allowed", tmp_path / "secret"
    for each in (folder / "a", secret):
        each.mkdir(parents=True)
        (each / "a.png").write_bytes(png())
    reader = images(images=(str(folder),))
    for swapped, target in (("a/a.png", secret / "a.png"), ("a", secret)):

        def opened(*args, swapped=swapped, target=target):
            (folder / swapped).rename(folder / "moved")
            (folder / swapped).symlink_to(target)
            return open_regular(*args)

        with monkeypatch.context() as patched:
            patched.setattr(request_images, "open_regular", opened)
            error = error_of(show, str(folder / "a/a.png"), reader)
        assert error.status == 400 and "regular file" in error.message
        (folder / swapped).unlink()
        (folder / "moved").rename(folder / swapped)
    assert show(str(folder / "a/a.png"), reader).size == (64, 32)


def test_a_request_with_many_urls_fetches_a_few_at_once_and_none_after_it_is_refused(monkeypatch):
    running, begun = [], []

    async def fetched(url, seconds, hosts):
        begun.append(url)
        running.append(url)
        assert len(running) <= request_images.MOST_FETCHED
        try:
            await asyncio.sleep(0.01)
        finally:
            running.remove(url)
        return b"no image" if url.endswith("/20.png") else png()

    monkeypatch.setattr(request_images, "fetch", fetched)
    reader = images(images=("urls",))
    parts = [{"type": "image_url", "image_url": {"url": f"https://example.org/{i}.png"}} for i in range(200)]
    parsed = read_openai_request({"messages": [{"role": "user", "content": parts}]}, reader)

    async def refused():
        with pytest.raises(ChatError, match=r"content\[20\]\.image_url must be an image"):
            await reader.load(parsed.chat.messages)
        await asyncio.sleep(0.5)
        assert not running and 20 < len(begun) < 100

    asyncio.run(refused())


def test_an_invalid_url_is_the_clients_mistake():
    """The endpoint's own error fails the trajectory: a policy whose URLs the agent sends could escape its reward."""
    reader = images(images=("urls",))
    part = {"type": "image_url", "image_url": {"url": "http://[::1/a.png"}}
    parsed = read_openai_request({"messages": [{"role": "user", "content": [part]}]}, reader)
    error = error_of(lambda: asyncio.run(reader.load(parsed.chat.messages)))
    assert (error.status, error.code) == (400, "messages[0].content[0].image_url")


def test_a_url_is_read_where_it_is_allowed():
    part = {"type": "image_url", "image_url": "https://example.org/a.png"}
    parsed = read_openai_request({"messages": [{"role": "user", "content": [part]}]}, images(images=("urls",)))
    image = parsed.chat.messages[0]["content"][0]["image"]
    assert isinstance(image, NewImage) and image.source == "https://example.org/a.png"
