"""Messages to tokens: deltas equal full renders, text stays text, images are counted.

Always with the tiny tokenizer and our own template; with the shared material also with the real Qwen tokenizers and the
eight chat templates of their families.
"""

from __future__ import annotations

import copy
import functools
import threading
import time
import unicodedata
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testing.fakes import make_item
from testing.hostile import ADDED_TOKENS
from testing.templates import (
    PAD,
    STABLE,
    TEMPLATES,
    full_text,
    ids_of,
    real_renderer,
    tool,
    user,
)
from testing.templates import episode_ids as play
from tokenizers import AddedToken, processors

from vlmrl.model import tiny
from vlmrl.multimodal import renderer as renderer_module
from vlmrl.multimodal.placeholders import expand
from vlmrl.multimodal.renderer import Renderer, TooLongError
from vlmrl.multimodal.tokenizer_backends import JOINED_BY_NFC

VISION = f"<|vision_start|>{PAD}<|vision_end|>"
IMAGE = {"type": "image", "image": "a.png"}
TOOLS = [{"type": "function", "function": {"name": "zoom", "parameters": {"type": "object", "properties": {"x": {}}}}}]

SHOW_IMAGES = ["qwen2_5_vl", "qwen3_vl", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6"]
SHOW_TOOLS = [name for name in TEMPLATES if name != "qwen2_5_vl"]
PAIRS = [
    *(("qwen3-vl", name) for name in TEMPLATES),
    *(("qwen2.5-vl", name) for name in ("qwen2_5", "qwen2_5_vl", "qwen3")),
]


@functools.cache
def tiny_renderer() -> Renderer:
    return Renderer(tiny.tokenizer(), image_token=PAD)


@pytest.fixture(params=["tiny", *TEMPLATES])
def any_renderer(request) -> Renderer:
    """The tiny renderer, then the real tokenizer with each template."""
    if request.param == "tiny":
        return tiny_renderer()
    return real_renderer(request.getfixturevalue("shared"), "qwen3-vl", request.param)


@pytest.fixture(params=["tiny", *SHOW_IMAGES])
def image_renderer(request) -> Renderer:
    if request.param == "tiny":
        return tiny_renderer()
    return real_renderer(request.getfixturevalue("shared"), "qwen3-vl", request.param)


@pytest.fixture(params=["tiny", *SHOW_TOOLS])
def tools_renderer(request) -> Renderer:
    if request.param == "tiny":
        return tiny_renderer()
    return real_renderer(request.getfixturevalue("shared"), "qwen3-vl", request.param)


def assistant(content) -> dict:
    return {"role": "assistant", "content": content}


SYSTEM = {"role": "system", "content": "Be brief."}


# An episode equals the full render


def assert_equals_full_render(renderer: Renderer, prompt, turns, tools=()) -> None:
    conversation = list(prompt)
    for response, messages in turns:
        conversation += [assistant(response), *(messages or [])]
    ends_with_response = turns and turns[-1][1] is None
    full = full_text(renderer, conversation, tools, generate=not ends_with_response)
    if ends_with_response:
        assert full.endswith("<|im_end|>\n")
        full = full[:-1]
    ours = play(renderer, prompt, turns, tools)
    wanted = ids_of(renderer, full)
    assert renderer.decode(ours) == renderer.decode(wanted)
    if not any("\n" in response[: len(response) - len(response.lstrip())] for response, _ in turns):
        assert ours == wanted


PIECES = [
    "a",
    " red",
    "Zoom in",
    "é",
    "日本",
    "🙂",
    "\n",
    "\n\n",
    "  ",
    "\t",
    "<",
    "|>",
    "{",
    '"',
]
PIECES += ["assistant\n", "\U00100000", "\U00100001", "0.5", "<|im"]
RESPONSE_PIECES = [*PIECES, "<think>", "</think>", "<tool_call>", "</tool_response>"]
texts = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
responses = st.lists(st.sampled_from(RESPONSE_PIECES), max_size=6).map("".join)
images = st.lists(
    st.one_of(st.just(IMAGE), texts.map(lambda text: {"type": "text", "text": text})), min_size=1, max_size=4
)


def conversations(contents):
    """A prompt, responses with observations of one or more messages, and perhaps a last response."""
    messages = st.builds(
        lambda role, content: {"role": role, "content": content}, st.sampled_from(["user", "tool"]), contents
    )
    prompts = st.builds(
        lambda system, content: [*([SYSTEM | {"content": system}] if system else []), user(content)],
        st.none() | texts,
        contents,
    )
    turns = st.lists(st.tuples(responses, st.lists(messages, min_size=1, max_size=3)), max_size=3)
    last = st.lists(st.tuples(responses, st.none()), max_size=1)
    return st.tuples(prompts, st.builds(lambda turns, last: turns + last, turns, last))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(conversations(texts | images), st.booleans())
def test_tiny_episodes_equal_the_full_render(conversation, with_tools):
    assert_equals_full_render(tiny_renderer(), *conversation, tools=TOOLS if with_tools else ())


@pytest.mark.parametrize(("tokenizer", "template"), [pair for pair in PAIRS if pair[1] in STABLE])
def test_real_episodes_equal_the_full_render(tokenizer, template, shared):
    renderer = real_renderer(shared, tokenizer, template)
    contents = texts | images if template in SHOW_IMAGES else texts

    @settings(max_examples=20, deadline=None, derandomize=True)
    @given(conversations(contents), st.booleans())
    def check(conversation, with_tools):
        assert_equals_full_render(renderer, *conversation, tools=TOOLS if with_tools and template in SHOW_TOOLS else ())

    check()


@pytest.mark.parametrize(("tokenizer", "template"), PAIRS)
@pytest.mark.parametrize("system", [[SYSTEM], []], ids=["system", "no system"])
@pytest.mark.parametrize("with_tools", [True, False])
def test_all_templates_are_stable_when_tools_answer(tokenizer, template, system, with_tools, shared):
    """Responses think where the template wants it; what it opened is not sampled, but is in the full render's response."""
    renderer = real_renderer(shared, tokenizer, template)
    thought = {"qwen3_5_nothink": "", "qwen3_5_think": "why\n</think>\n\n", "qwen3_6": "why\n</think>\n\n"}
    response = thought.get(template, "<think>\nwhy\n</think>\n\n") + "because"
    tools = TOOLS if with_tools and template in SHOW_TOOLS else ()
    observations = [[tool("one")], [tool("two"), tool("three")]]
    prompt = [*system, user("Look.")]
    conversation = list(prompt)
    for messages in observations:
        conversation += [assistant(renderer.opening + response), *messages]
    full = full_text(renderer, conversation, tools)
    assert play(renderer, prompt, [(response, messages) for messages in observations], tools) == ids_of(renderer, full)


def test_a_response_that_begins_with_a_newline_keeps_the_sampled_ids():
    renderer = tiny_renderer()
    ids = play(renderer, [user("q")], [("\nyes", None)])
    assert renderer.decode(ids) == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n\nyes<|im_end|>"
    newline = ids_of(renderer, "\n")
    assert ids[-4:-2] == newline * 2  # a full render has one token here
    assert ids_of(renderer, "\n\n") != newline * 2


# A delta


def test_a_delta_begins_with_the_newline_after_the_end_of_turn(any_renderer):
    newline = ids_of(any_renderer, "\n")
    for messages in ([user("Look.")], [tool("Look.")], [tool("a"), tool("b")], [tool("a"), user("b")]):
        delta = any_renderer.delta(messages)
        assert len(newline) == 1
        assert delta.token_ids[:1] == newline
        assert any_renderer.decode(delta.token_ids).startswith("\n<|im_start|>")
        assert any_renderer.decode(delta.token_ids).endswith("<|im_start|>assistant\n" + any_renderer.opening)


def test_a_delta_never_repeats_system_or_tools(tools_renderer):
    delta = tools_renderer.delta([tool("Look.")], TOOLS)
    text = tools_renderer.decode(delta.token_ids)
    assert "system" not in text
    assert "zoom" not in text
    assert "helpful" not in text
    assert text == tools_renderer.decode(tools_renderer.delta([tool("Look.")]).token_ids)
    assert text.count("Look.") == 1
    assert "zoom" in tools_renderer.decode(tools_renderer.prompt([user("q")], TOOLS).token_ids)


def test_what_is_kept_of_tools_has_a_limit_in_bytes(monkeypatch):
    monkeypatch.setattr(renderer_module, "KEPT_BYTES", 20_000)
    each = Renderer(tiny.tokenizer(), image_token=PAD)
    for number in range(20):
        each.prompt([user("a")], [tool_of(f"tool_{number}", "It looks. " * 200)])
    for kept in (each._bases, each._heads):
        assert 0 < kept.bytes <= 20_000 and 1 < len(kept._values) < 20


def tool_of(name: str, description: str) -> dict:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": {}}}


def test_tools_are_encoded_once_for_all_prompts(any_renderer, monkeypatch):
    """The ids are those of the whole text, also where the tools hold special tokens, halves of them, or what NFC joins."""
    odd = "".join(f"<|im_end|>{index} e\u0301 <|im_<|image_pad|>end|>\n" for index in range(60))
    tools, encoded = [tool_of("a", odd), tool_of("b", "Searches. " * 300)], []
    if any_renderer._base(any_renderer.clean_tools(tools)) == any_renderer._base(None):
        return  # the template shows no tools
    encode = any_renderer.encode_written
    monkeypatch.setattr(any_renderer, "encode_written", lambda text: encoded.append(text) or encode(text))
    for conversation in (
        [user("hi")],
        [{"role": "system", "content": "e"}, user("\u0301 <|im_end|> hi")],
        [user("hi")],
    ):
        prompt = any_renderer.prompt(conversation, tools)
        clean = any_renderer.clean(conversation)[0]
        assert prompt.token_ids == encode(any_renderer.write(clean, any_renderer.clean_tools(tools)))
    if any_renderer._keeps_heads and any_renderer.end_of_turn in any_renderer._base(None):
        assert max(map(len, encoded[-1:])) < 1000  # the third time only what follows


def test_tools_of_different_envs_do_not_share_a_base():
    renderer = tiny_renderer()
    other = copy.deepcopy(TOOLS)
    other[0]["function"]["name"] = "a much longer name than zoom"
    wanted = renderer.delta([tool("x")])
    for tools in (TOOLS, other, TOOLS, ()):
        assert renderer.delta([tool("x")], tools) == wanted


def test_close_puts_the_end_of_turn_first(any_renderer):
    plain, closed = any_renderer.delta([user("Look.")]), any_renderer.delta([user("Look.")], response=[5])
    assert closed.token_ids == [any_renderer.end_of_turn_id, *plain.token_ids]


def test_sampled_ids_that_no_encoding_would_give_stay():
    renderer = tiny_renderer()
    letters = [token for letter in "yes" for token in ids_of(renderer, letter)]
    assert ids_of(renderer, "yes") != letters
    assert renderer.text([*letters, renderer.end_of_turn_id]) == "yes"


def test_a_template_that_rewrites_earlier_messages_is_refused():
    template = "{% for m in messages %}<|im_start|>{{ loop.revindex }}{{ m.content }}<|im_end|>\n{% endfor %}"
    renderer = Renderer(tiny.tokenizer(), chat_template=template)
    with pytest.raises(
        ValueError, match=r"rewrites earlier messages .* rendered '<\|im_start\|>3\..* had '<\|im_start\|>2\."
    ):
        renderer.delta([user("x")])


@pytest.mark.parametrize("template", ["qwen3_vl", "qwen2_5_vl"])
def test_an_image_is_not_appended_where_the_template_numbers_images(template, shared):
    """After `Picture 1: `, one of an observation would be `Picture 1: ` again: `add_vision_id` of Qwen's own templates."""
    text = (shared / f"data/qwen/chat_templates/{template}.jinja").read_text()
    with_numbers = "{%- set add_vision_id = true %}" + text
    renderer = Renderer(
        real_renderer(shared, "qwen3-vl", template).tokenizer, image_token=PAD, chat_template=with_numbers
    )
    look = [user([IMAGE, {"type": "text", "text": "Look."}])]
    whole = renderer.prompt([*look, {"role": "assistant", "content": "red"}, *look])
    assert "Picture 2: " in renderer.decode(whole.token_ids)
    for append in (renderer.delta, renderer.inline):
        with pytest.raises(ValueError, match="numbers images"):
            append(look)
    assert renderer.delta([user("Look.")]) == real_renderer(shared, "qwen3-vl", template).delta([user("Look.")])


def test_a_template_that_writes_the_time_writes_that_of_the_run_s_start():
    """Else no observation could be appended after midnight, where a template writes the date."""
    template = "{% if strftime_now is defined %}{{ strftime_now( '%d %b %S.%f' ) }}{% endif %}{% for m in messages %}"
    template += "<|im_start|>{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% endfor %}"
    renderer = Renderer(tiny.tokenizer(), chat_template=template)
    assert renderer.delta([user("x")]) == renderer.delta([user("x")])
    assert renderer.conversation([user("x")])[0] == renderer.prompt([user("x")])


def test_a_template_without_end_of_turn_and_a_tokenizer_without_template_are_refused():
    with pytest.raises(ValueError, match=r"never writes the end-of-turn token '<\|im_end\|>'"):
        Renderer(tiny.tokenizer(), chat_template="{{ messages[0].content }}")
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        Renderer(tokenizer)


# BOS


def bos_renderer(template_writes: bool, tokenizer_adds: bool) -> Renderer:
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"bos_token": AddedToken("<|bos|>", special=True, normalized=False)})
    if tokenizer_adds:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.bos_token_id)]
        )
        assert tokenizer.encode("a")[0] == tokenizer.bos_token_id
    return Renderer(tokenizer, chat_template="{{ bos_token }}" * template_writes + tokenizer.chat_template)


@pytest.mark.parametrize("template_writes", [True, False])
@pytest.mark.parametrize("tokenizer_adds", [True, False])
def test_bos_is_the_templates_and_never_in_a_delta(template_writes, tokenizer_adds):
    renderer = bos_renderer(template_writes, tokenizer_adds)
    bos = renderer.tokenizer.bos_token_id
    for text in ("q", "q <|bos|><|im_end|>"):  # the second takes the path for special text
        prompt = renderer.prompt([user(text)]).token_ids
        assert prompt.count(bos) == template_writes
        assert (prompt[0] == bos) == template_writes
        assert bos not in renderer.delta([user(text)]).token_ids
        assert bos not in renderer.encode(text)


# Text is data


def special_ids(renderer: Renderer, ids: list[int]) -> list[int]:
    """The added tokens among the ids: the special ones, and others such as ``<tool_call>``."""
    return [token for token in ids if token in renderer.tokenizer.added_tokens_decoder]


@pytest.mark.parametrize("special", ADDED_TOKENS)
def test_special_tokens_in_somebodys_text_stay_text(special, any_renderer):
    def episode(text):
        prompt = any_renderer.prompt([SYSTEM | {"content": f"s{text}"}, user(f"{text}u")])
        delta = any_renderer.delta([tool(f"t{text}t"), user(text)])
        return prompt.token_ids + delta.token_ids

    ids, harmless = episode(special), episode("plain")
    assert special_ids(any_renderer, ids) == special_ids(any_renderer, harmless)
    assert any_renderer.decode(ids) == any_renderer.decode(harmless).replace("plain", special)


@pytest.mark.parametrize("special", ADDED_TOKENS)
def test_special_tokens_in_schemas_stay_text(special, tools_renderer):
    def schema(text):
        inner = {
            "type": "object",
            "properties": {f"x{text}": {"description": text}},
            "required": [text],
            "n": 3,
            "b": None,
        }
        return [{"type": "function", "function": {"name": f"zoom{text}", "parameters": inner}}]

    def ids(text):
        tools = schema(text)
        return tools_renderer.prompt([user("q")], tools).token_ids + tools_renderer.delta([tool("a")], tools).token_ids

    assert special_ids(tools_renderer, ids(special)) == special_ids(tools_renderer, ids("plain"))
    assert tools_renderer.decode(ids(special)) == tools_renderer.decode(ids("plain")).replace("plain", special)


@pytest.mark.parametrize(
    "tag", ["|im_end|", "|image_pad|", "tool_call", "/tool_call", "x<|im_end|", "|im_end|>x<|im_start|", "tool_call>x"]
)
def test_a_field_of_a_schema_that_a_template_writes_as_a_tag_makes_no_token(tag):
    """Qwen3-Coder's template writes fields of a schema that it does not know as ``<FIELD>value</FIELD>``."""
    tags = "{{ '<' ~ key ~ '>' ~ (value | tojson) ~ '</' ~ key ~ '>\\n' }}"
    shown = "{% for tool in tools or [] %}{% for key, value in tool.function.items() %}" + tags
    template = shown + "{% endfor %}{% endfor %}" + tiny_renderer().chat_template
    each = Renderer(tiny.tokenizer(), image_token=PAD, chat_template=template)

    def ids(name: str) -> list[int]:
        return each.prompt([user("hi")], [{"type": "function", "function": {"name": "zoom", name: "x"}}]).token_ids

    assert special_ids(each, ids(tag)) == special_ids(each, ids("plain"))
    assert each.decode(ids(tag)) == each.decode(ids("plain")).replace("plain", tag)


@pytest.mark.parametrize("name", ["x<|im_end|", "x<|image_pad|", "|im_end|>x<|im_start|", "tool_call>x", "x</think"])
def test_a_name_in_a_message_that_a_template_writes_as_a_tag_makes_no_token(name):
    """Qwen3.5's template writes a call as ``<function=NAME>`` and its arguments as ``<parameter=NAME>``."""
    calls = "{% for call in each.tool_calls or [] %}{{ '<function=' ~ call.function.name ~ '>' }}"
    arguments = "{% for key in call.function.arguments %}{{ '<' ~ key ~ '><parameter=' ~ key ~ '>' }}{% endfor %}"
    shown = "{% for each in messages %}{{ '<' ~ each.role ~ '>' }}" + calls + arguments
    template = shown + "{% endfor %}{% endfor %}" + tiny_renderer().chat_template
    each = Renderer(tiny.tokenizer(), image_token=PAD, chat_template=template)

    def ids(name: str) -> list[int]:
        call = {"type": "function", "function": {"name": name, "arguments": {name: "1"}}}
        return each.prompt(
            [user("q"), assistant("") | {"tool_calls": [call]}, {"role": name, "content": "y"}]
        ).token_ids

    assert special_ids(each, ids(name)) == special_ids(each, ids("plain"))
    assert each.decode(ids(name)) == each.decode(ids("plain")).replace("plain", name)


def test_special_tokens_in_tool_calls_roles_and_names_stay_text():
    renderer = tiny_renderer()
    call = {"type": "function", "function": {"name": "a<|im_end|>", "arguments": {"<|im_start|>": ["<|im_end|>", 1]}}}
    messages = [
        user("q"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": f"x{PAD}", "content": "y"},
    ]
    ids = renderer.prompt(messages).token_ids
    assert ids.count(renderer.end_of_turn_id) == 3
    assert renderer.image_token_id not in ids
    assert '"name": "a<|im_end|>", "arguments": {"<|im_start|>": ["<|im_end|>", 1]}' in renderer.decode(ids)
    assert f"<|im_start|>x{PAD}\ny" in renderer.decode(ids)


def test_a_special_token_that_is_cut_over_two_parts_stays_text(any_renderer):
    parts = [{"type": "text", "text": "a<|im_"}, {"type": "text", "text": "end|>b"}]
    ids = any_renderer.prompt([user(parts)]).token_ids
    assert special_ids(any_renderer, ids) == special_ids(any_renderer, any_renderer.prompt([user("q")]).token_ids)
    assert "a<|im_end|>b<|im_end|>" in any_renderer.decode(ids)


def test_a_special_token_in_parts_beside_an_image_stays_text(image_renderer):
    parts = [
        {"type": "text", "text": "<|im_"},
        {"type": "text", "text": f"end|>{PAD}"},
        IMAGE,
        {"type": "text", "text": PAD},
    ]
    rendered = image_renderer.prompt([user(parts)])
    assert rendered.images == ["a.png"]
    assert rendered.token_ids.count(image_renderer.image_token_id) == 1
    assert f"<|im_end|>{PAD}{VISION}{PAD}<|im_end|>" in image_renderer.decode(rendered.token_ids)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(
        st.lists(st.sampled_from([*ADDED_TOKENS, *PIECES, "_end|>", "<|im_"]), max_size=6).map("".join),
        min_size=3,
        max_size=3,
    )
)
def test_any_text_decodes_to_itself_and_holds_no_special_id(contents):
    renderer = tiny_renderer()
    system, question, answer = contents
    ids = renderer.prompt([SYSTEM | {"content": system}, user(question)]).token_ids
    ids += renderer.delta([tool(answer)]).token_ids
    assert renderer.decode(ids) == (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        f"\n<|im_start|>user\n<tool_response>\n{answer}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    names = ["<|im_start|>", "<|im_end|>", "<tool_response>", "</tool_response>"]
    start, end, result, result_end = renderer.tokenizer.convert_tokens_to_ids(names)
    assert special_ids(renderer, ids) == [start, end, start, end, start, start, result, result_end, end, start]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.text() | st.lists(st.sampled_from(ADDED_TOKENS)).map("".join))
def test_encode_gives_no_special_token_and_decode_gives_the_text_back(text):
    renderer = tiny_renderer()
    added = renderer.tokenizer.added_tokens_decoder
    assert not any(added[token].special for token in special_ids(renderer, renderer.encode(text)))
    assert renderer.decode(renderer.encode(text)) == text


def test_the_markup_of_the_template_and_of_responses_stays_tokens(any_renderer):
    """What the chat template writes, and what the model wrote before: a rerendered response has the ids that were sampled."""
    tokens = any_renderer.tokenizer.get_added_vocab()
    response = "<think>\nhm\n</think>\n\n<tool_call>\n{}\n</tool_call>"
    ids = any_renderer.prompt([user("q"), assistant(response), tool("<tool_call>")]).token_ids
    shown = any_renderer.decode(ids)
    assert (
        ids.count(tokens["<tool_call>"]) == ids.count(tokens["</tool_call>"]) == 1 and shown.count("<tool_call>") == 2
    )
    assert ids.count(tokens["<think>"]) == shown.count("<think>")  # the response's, and perhaps the generation prompt's
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": "</tool_call>"}}}
    messages = [user("q"), {"role": "assistant", "content": "", "tool_calls": [call]}, tool("y")]
    if "tool_calls" in any_renderer.chat_template:
        ids = any_renderer.prompt(messages).token_ids
        assert any_renderer.decode(ids).count("</tool_call>") == 2 and ids.count(tokens["</tool_call>"]) == 1


@pytest.mark.parametrize("special", ADDED_TOKENS)
def test_two_inline_messages_do_not_join_to_a_token(special, any_renderer):
    for cut in range(1, len(special)):
        ids = any_renderer.inline([user(special[:cut]), tool(special[cut:])]).token_ids
        assert special_ids(any_renderer, ids) == []
        assert any_renderer.decode(ids) == special


def test_inline_texts_around_an_image_do_not_join(image_renderer):
    rendered = image_renderer.inline([user([{"type": "text", "text": "<|im_"}, IMAGE]), user("end|>"), user([IMAGE])])
    assert image_renderer.decode(rendered.token_ids) == f"<|im_{VISION}end|>{VISION}"
    assert rendered.images == ["a.png", "a.png"]


# Long texts


def test_a_text_that_cannot_fit_is_not_encoded():
    """The tiny tokenizer's longest token has 16 bytes: 16,016 characters have more than 1,000 tokens."""
    renderer = tiny_renderer()
    longest = max(map(len, renderer.tokenizer.get_vocab()))
    for render in (renderer.prompt, renderer.delta, renderer.inline):
        with pytest.raises(TooLongError, match=r"the text has at least 1\d{3} tokens"):
            render([user("a" * longest * 1010)], limit=1000)
        assert render([user("a" * longest * 1010)]).token_ids


def test_a_long_text_is_refused_without_work_on_each_character(shared):
    """Normalizing it would hold the interpreter lock for 0.2 s or more, and no other episode would go on."""
    renderer = real_renderer(shared, "qwen2.5-vl", "qwen2_5")
    text = "the log of a server\n" * 200_000
    renderer.delta([user("warm")], limit=4096)
    began = time.thread_time()
    with pytest.raises(TooLongError):
        renderer.delta([user(text)], limit=4096)
    refused = time.thread_time()
    renderer._backend.normalizer.normalize_str(text)
    assert refused - began < (time.thread_time() - refused) / 2


def test_of_a_text_that_is_far_too_long_the_beginning_alone_is_encoded(shared, monkeypatch):
    """All of it takes 240 times its size in memory, in each thread: for a log of 12 MB, which a tool may answer, three GB."""
    renderer, encoded = real_renderer(shared, "qwen2.5-vl", "qwen2_5"), [0]
    encode = renderer.encode_written
    monkeypatch.setattr(renderer, "encode_written", lambda text: encoded.append(len(text)) or encode(text))
    for render in (renderer.prompt, renderer.delta, renderer.inline):
        with pytest.raises(TooLongError, match=r"the text has at least \d{4} tokens"):
            render([user("the log of a server\n" * 10_000)], limit=1000)
    assert max(encoded) <= 16_000
    with pytest.raises(TooLongError):  # a beginning of few tokens
        renderer.inline([user(" " * 20_000 + "the log of a server\n" * 20_000)], limit=1000)
    assert max(encoded) <= 64_000
    spaces = [user(" " * 100_000)]  # 128 of them are one token
    assert renderer.inline(spaces, limit=1000).token_ids == renderer.inline(spaces).token_ids


def test_nfc_joins_at_most_four_characters():
    lengths = (len(unicodedata.normalize("NFD", chr(code))) for code in range(0x110000) if not 0xD800 <= code < 0xE000)
    assert max(lengths) == JOINED_BY_NFC


@pytest.mark.parametrize("tokenizer", ["qwen2.5-vl", "qwen3-vl"])
@pytest.mark.parametrize("character", [" ", "-", "e\u0301", "\u1100\u1161\u11a8"])
def test_a_text_of_long_tokens_that_fits_is_encoded(tokenizer, character, shared):
    """Also if its characters are joined by the normalizer first: three letters of Hangul are one syllable."""
    renderer = real_renderer(shared, tokenizer, "qwen2_5")
    text = character * 12_800
    count = len(renderer.delta([user(text)]).token_ids)
    assert len(renderer.delta([user(text)], limit=count).token_ids) == count


def test_a_tokenizer_without_a_backend_is_refused():
    class Slow:
        chat_template, eos_token = "{{ messages }}", "</s>"
        added_tokens_decoder: dict = {}  # noqa: RUF012

        def convert_tokens_to_ids(self, token):
            return 0

    with pytest.raises(ValueError, match=r"the tokenizer must be a fast one .* but it is a Slow"):
        Renderer(Slow())


# Content lists and images


def test_lists_of_texts_are_flattened_for_every_template(any_renderer):
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert any_renderer.prompt([SYSTEM, user(parts)]) == any_renderer.prompt([SYSTEM, user("one two")])
    assert any_renderer.delta([tool(parts)]) == any_renderer.delta([tool("one two")])
    assert "one two" in any_renderer.decode(any_renderer.delta([tool(parts)]).token_ids)


def test_empty_content_is_an_empty_text():
    renderer = tiny_renderer()
    assert renderer.prompt([user([])]) == renderer.prompt([user("")]) == renderer.prompt([user(None)])


def test_images_keep_their_order_and_places(image_renderer):
    def image(name):
        return {"type": "image", "image": name}

    messages = [
        user([image("a"), {"type": "text", "text": "x"}, image("b"), image("c")]),
        assistant("y"),
        user([image("d")]),
    ]
    rendered = image_renderer.prompt(messages)
    assert rendered.images == ["a", "b", "c", "d"]
    assert rendered.token_ids.count(image_renderer.image_token_id) == 4
    assert f"{VISION}x{VISION}{VISION}" in image_renderer.decode(rendered.token_ids)
    delta = image_renderer.delta([tool([image("e"), {"type": "text", "text": "x"}]), tool([image("f")])])
    assert delta.images == ["e", "f"]
    assert f"{VISION}x" in image_renderer.decode(delta.token_ids)


@pytest.mark.parametrize("template", ["qwen2_5", "qwen3", "qwen3_instruct_2507"])
def test_images_of_tool_messages_are_refused_where_the_template_loses_them(template, shared):
    renderer = real_renderer(shared, "qwen3-vl", template)
    message = tool([IMAGE, {"type": "text", "text": "x"}, IMAGE])
    with pytest.raises(ValueError, match=r"messages hold 2 images, but the chat template shows 0 \(roles: tool\)"):
        renderer.delta([message])
    with pytest.raises(
        ValueError, match=r"messages hold 2 images, but the chat template shows 0 \(roles: tool, user\)"
    ):
        renderer.prompt([user("q"), message])


def test_a_text_model_refuses_images():
    renderer = Renderer(tiny.tokenizer())
    for render in (renderer.prompt, renderer.delta):
        with pytest.raises(ValueError, match="messages hold 1 images, but the model reads text only"):
            render([user([IMAGE])])
    assert renderer.prompt([user("q")]) == tiny_renderer().prompt([user("q")])


def test_other_parts_are_refused():
    with pytest.raises(ValueError, match="must have the type text or image, but it has 'video'"):
        tiny_renderer().prompt([user([{"type": "video", "video": "a.mp4"}])])


def test_tools_are_refused_where_the_template_does_not_show_them(shared):
    renderer = real_renderer(shared, "qwen2.5-vl", "qwen2_5_vl")
    with pytest.raises(ValueError, match="the env has 1 tools, but the chat template does not show them"):
        renderer.prompt([user("q")], TOOLS)


# Responses


OPENINGS = {"qwen3_5_think": "<think>\n", "qwen3_6": "<think>\n", "qwen3_5_nothink": "<think>\n\n</think>\n\n"}


@pytest.mark.parametrize("template", TEMPLATES)
def test_what_the_generation_prompt_opens_is_kept_beside_the_response(template, shared):
    renderer = real_renderer(shared, "qwen3-vl", template)
    assert renderer.opening == OPENINGS.get(template, "")
    response = ids_of(renderer, "why\n</think>\n\nyes")
    assert renderer.text([*response, renderer.end_of_turn_id]) == renderer.opening + "why\n</think>\n\nyes"
    assert renderer.decode(renderer.prompt([user("q")]).token_ids).endswith(f"assistant\n{renderer.opening}")


def test_text_excludes_the_end_of_turn_and_nothing_else():
    tokenizer = tiny.tokenizer()
    start, end, stop = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    renderer = Renderer(tokenizer, stop_ids=[stop])
    assert (renderer.opening, renderer.end_of_turn_id, renderer.stop_ids) == ("", end, {end, stop})
    yes = ids_of(renderer, "yes</answer>")
    assert renderer.text([*yes, end]) == "yes</answer>"
    assert renderer.text([*yes, stop]) == "yes</answer>"
    assert renderer.text(yes) == "yes</answer>"
    assert renderer.text([*yes, end, end]) == "yes</answer><|im_end|>"
    assert renderer.text([end, *yes, start]) == "<|im_end|>yes</answer><|im_start|>"
    assert renderer.text([end]) == renderer.text([]) == ""


# Expansion


def test_expand_writes_one_placeholder_per_visual_token():
    assert expand([1, 9, 2, 9], 9, [make_item("a", 3), make_item("b", 1, 2)]) == [1, 9, 9, 9, 2, 9, 9]
    assert expand([1, 9, 9], 9, [make_item("a", 1), make_item("b", 2)]) == [1, 9, 9, 9]
    ids = [1, 2]
    assert expand(ids, 9, []) == [1, 2] and expand(ids, 9, []) is not ids
    assert expand([1, 2], None, []) == [1, 2]


def test_a_long_rendering_in_a_thread_holds_up_no_other(monkeypatch):
    renderer, met = tiny_renderer(), threading.Barrier(2)
    render = renderer.tokenizer.apply_chat_template

    def waits_for_another(*args, **options):
        met.wait(600)
        return render(*args, **options)

    monkeypatch.setattr(renderer.tokenizer, "apply_chat_template", waits_for_another)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda _: renderer.prompt([user("a")]).token_ids, range(2))
    assert first == second


def test_renderings_with_marks_have_a_template_of_their_own_and_one_thread_at_a_time(monkeypatch):
    """The compiled template, which threads share, holds the marks of the rendering in progress."""
    renderer, render = tiny_renderer(), renderer_module.render_jinja_template
    assert renderer.marks_responses
    templates: list[str] = []

    def watched(*args, **options):
        assert renderer_module._MARKING.locked()
        templates.append(options["chat_template"])
        return render(*args, **options)

    monkeypatch.setattr(renderer_module, "render_jinja_template", watched)
    rendered, marks = renderer.conversation([user("a"), {"role": "assistant", "content": "b"}])
    assert renderer.chat_template not in templates and len(templates) == 1 and sum(marks) > 0
    assert renderer.decode(rendered.token_ids) == renderer.write(
        [user("a"), {"role": "assistant", "content": "b"}], None, generate=False
    )


@pytest.mark.parametrize(
    ("template", "role", "is_shown"),
    [
        ("qwen3_vl", "system", False),
        ("qwen3_vl", "developer", False),
        ("qwen3", "system", True),
        ("qwen3", "human", False),
        ("qwen2_5_vl", "developer", True),
    ],
)
def test_a_message_that_the_template_leaves_out_is_an_error(shared, template, role, is_shown):
    """Such as a second system message with Qwen3-VL's: the policy was sampled and trained without it, unsaid."""
    renderer = real_renderer(shared, "qwen3-vl", template)
    first, last = {"role": "system", "content": "Look."}, {"role": "user", "content": "What?"}
    left_out = {"role": role, "content": "Be brief."}
    for render, messages in ((renderer.prompt, [first, left_out, last]), (renderer.delta, [left_out, last])):
        if is_shown:
            assert "Be brief." in renderer.decode(render(messages).token_ids)
        else:
            with pytest.raises(ValueError, match=f"the chat template leaves out messages of the role '{role}'"):
                render(messages)
    assert "Look." in renderer.decode(renderer.prompt([first, last]).token_ids)


WRITES = """{% for m in messages %}
{% if m.role in ('user', 'assistant') or (m.role == 'developer' and loop.first) %}
<|im_start|>{{ m.role }}
{{ m.content | upper }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_a_role_is_left_out_only_where_its_content_changes_nothing():
    """This template shows `developer` in first place alone, no system message, and all texts in capitals."""
    renderer = Renderer(tiny.tokenizer(), chat_template=WRITES)
    developer = {"role": "developer", "content": "b"}
    assert "A" in renderer.decode(renderer.prompt([user("a"), user("a")]).token_ids)
    assert "B" in renderer.decode(renderer.prompt([developer, user("a")]).token_ids)
    with pytest.raises(ValueError, match="role 'developer' after the first message"):
        renderer.prompt([user("a"), developer])
    with pytest.raises(ValueError, match="role 'system' in first place"):
        renderer.prompt([{"role": "system", "content": "c"}, user("a")])
    with pytest.raises(ValueError, match="role 'None'"):
        renderer.prompt([{"content": "c"}])
