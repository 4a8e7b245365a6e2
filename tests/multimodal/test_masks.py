"""The tokens of a conversation that have a loss are those that the policy would sample, after what it would be sampled from."""

import random
from itertools import accumulate

import pytest
from testing.conversations import ZOOM, compared, conversation
from testing.templates import DROP_THINKING, PAD, TEMPLATES, real_renderer, user

from vlmrl.model import tiny
from vlmrl.model.loading import TEMPLATES as OURS
from vlmrl.multimodal.masks import RowError, check_masks, masked_rows
from vlmrl.multimodal.renderer import Renderer

CALLS = [
    user("Go"),
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "zoom", "arguments": {}}}]},
]


def answer(text: str) -> dict:
    return {"role": "assistant", "content": text}


def ours(template: str | None = None) -> Renderer:
    return Renderer(tiny.tokenizer(), image_token=PAD, chat_template=template or (OURS / "chatml.jinja").read_text())


def assert_masked_as_compared(renderer: Renderer, messages, tools) -> None:
    shown = renderer.adapt_tool_messages(messages)
    wanted = dict(enumerate(compared(renderer, shown, tools)))
    for row in masked_rows(renderer, messages, tools):
        ends = list(accumulate((len(ids) for ids, _ in row.pieces), initial=0))
        whole = [token for ids, _ in row.pieces for token in ids]
        trained = [(whole[:start], ids) for (ids, trained), start in zip(row.pieces, ends, strict=False) if trained]
        assert list(row.responses.values()) == [ids for _, ids in trained]
        for number, (context, ids) in zip(row.responses, trained, strict=True):
            assert (renderer.decode(context), ids) == wanted.pop(number)
    assert not wanted


@pytest.mark.parametrize("template", TEMPLATES)
def test_masks_of_published_templates_are_those_of_compared_renderings(template, shared, how_many):
    images = template in ("qwen2_5_vl", "qwen3_vl", *DROP_THINKING[1:])
    renderer = real_renderer(shared, "qwen3-vl", template, PAD if images else None)
    thinks, calls = template in ("qwen3", "qwen3_5_think", "qwen3_6"), template != "qwen2_5_vl"
    for seed in range(how_many(20)):
        dice = random.Random(f"{template} {seed}")
        messages = conversation(dice, images=images, thinks=thinks, calls=calls)
        assert_masked_as_compared(renderer, messages, [ZOOM] * (calls and dice.randrange(2)))


def test_masks_of_our_template_are_those_of_compared_renderings_and_of_its_own_markers(how_many):
    renderer = ours()
    for seed in range(how_many(20)):
        messages = conversation(random.Random(seed), images=True, thinks=True, calls=True)
        assert_masked_as_compared(renderer, messages, [ZOOM])
        (row,) = masked_rows(renderer, messages, [ZOOM])
        rendered, mask = renderer.conversation(messages, [ZOOM])
        ids = [token for ids, _ in row.pieces for token in ids]
        assert [int(trained) for ids, trained in row.pieces for _ in ids] == mask[: len(ids)]
        assert ids == rendered.token_ids[: len(ids)] and not any(mask[len(ids) :])


def test_a_template_that_drops_thinking_gives_a_row_for_each_context():
    renderer = ours((OURS / "chatml_drop_thinking.jinja").read_text())
    messages = [user("a"), answer("<think>b</think>c"), user("d"), answer("e"), user("f"), answer("g")]
    first, second = masked_rows(renderer, messages)
    assert [renderer.decode(ids) for ids in first.responses.values()] == ["<think>b</think>c<|im_end|>"]
    context = renderer.decode([token for ids, _ in second.pieces for token in ids])
    assert "<think>" not in context and [*second.responses] == [1, 2]


@pytest.mark.parametrize("template", ["qwen3", "qwen3_5_think", "qwen3_6"])
def test_reasoning_content_is_trained_where_the_template_writes_it(template, shared):
    renderer = real_renderer(shared, "qwen3-vl", template)
    (row,) = masked_rows(renderer, [user("a"), answer("b") | {"reasoning_content": "\nIt is b.\n"}])
    assert "It is b.\n</think>\n\nb<|im_end|>" in renderer.decode(row.responses[0])


def test_only_the_chosen_responses_have_a_loss():
    messages = [user("a"), answer("b"), user("c"), answer("d"), user("e"), answer("f"), user("later")]
    (row,) = masked_rows(ours(), messages, trained=[False, True, False])
    assert [*row.responses] == [1] and [trained for _, trained in row.pieces] == [False, False, False, True]


def test_text_of_special_tokens_in_a_message_is_never_a_token_nor_the_end_of_a_response():
    renderer = ours()
    (row,) = masked_rows(renderer, [user("<|im_end|>"), answer("a<|im_end|>b")])
    ids = row.responses[0]
    assert ids.count(renderer.end_of_turn_id) == 1 and ids[-1] == renderer.end_of_turn_id
    assert renderer.decode(ids) == "a<|im_end|>b<|im_end|>"


@pytest.mark.parametrize("template", ["qwen2_5_vl", "qwen3_vl"])
def test_marks_of_places_in_a_response_are_the_models_own_tokens(template, shared):
    """As the clicks of UI-TARS: the model was trained to write them as text, unsaid. In all other texts they stay text."""
    renderer = real_renderer(shared, "qwen3-vl", template)
    text = "<|object_ref_start|>a<|object_ref_end|> click('<|box_start|>(1,2)<|box_end|>') <|quad_start|>3<|quad_end|>"
    own = renderer.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert set(range(151646, 151652)) <= set(own)
    (row,) = masked_rows(renderer, [user(text), answer(text), user("b"), answer("c<|im_start|>d")])
    assert row.responses[0] == [*own, renderer.end_of_turn_id] == [*renderer.encode(text), renderer.end_of_turn_id]
    assert set(row.pieces[0][0]).isdisjoint(own[:1]) and text in renderer.decode(row.pieces[0][0])
    assert renderer.tokenizer.convert_tokens_to_ids("<|im_start|>") not in row.responses[1]


IMAGE = {"type": "image", "image": "a.png"}


@pytest.mark.parametrize(
    ("messages", "reason", "said"),
    [
        ([user("a"), {"role": "assistant", "content": [IMAGE]}], "roles", "a response shows an image"),
        ([*CALLS, {"role": "unknown", "content": "a"}, answer("b")], None, ""),
        ([user([{"type": "video"}]), answer("b")], "template", "the type text or image"),
    ],
)
def test_what_cannot_be_trained_on_has_a_reason(messages, reason, said):
    if reason is None:
        assert masked_rows(ours(), messages)
        return
    with pytest.raises(RowError, match=said) as error:
        masked_rows(ours(), messages)
    assert error.value.reason == reason


@pytest.mark.parametrize("template", ["qwen2_5_vl", "qwen3_vl", "qwen3_5_think", "qwen3_6"])
@pytest.mark.parametrize("parts", [[IMAGE], ["I crop it: ", IMAGE, "It is a cat."]])
def test_a_response_with_an_image_is_a_bad_row_with_every_template(template, parts, shared):
    """Qwen3-VL's template writes a response without its images: the text alone was trained, unsaid."""
    renderer = real_renderer(shared, "qwen3-vl", template, PAD)
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    messages = [user([IMAGE, {"type": "text", "text": "What is it?"}]), {"role": "assistant", "content": content}]
    with pytest.raises(RowError, match="a response shows an image") as error:
        masked_rows(renderer, messages)
    assert error.value.reason == "roles"


def test_a_template_that_hides_calls_or_loses_images_is_an_error_of_the_row():
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content if m.content is string }}<|im_end|>\n{% endfor %}"
    plain += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    renderer = ours(plain)
    with pytest.raises(RowError, match="does not show the call of 'zoom'"):
        masked_rows(renderer, CALLS)
    for name in ("reasoning", "thinking", "reasoning_content"):
        reasoned = [user("a"), {"role": "assistant", "content": "b", name: " So it is b.\n"}]
        with pytest.raises(RowError, match=f"message 1: the chat template does not show its {name}: "):
            masked_rows(renderer, reasoned)
    assert masked_rows(renderer, [*reasoned, user("c"), answer("d")], trained=[False, True])
    with pytest.raises(RowError, match="hold 1 images, but the chat template shows 0"):
        masked_rows(renderer, [user([IMAGE]), answer("b")])


@pytest.mark.parametrize("template", ["qwen3", "qwen3_5_think", "qwen3_6"])
@pytest.mark.parametrize(
    "text",
    [
        "<think>a</think><search>b</search><information>c</information><think>d</think>e",
        "First this. <think>a</think>e",
        [{"type": "text", "text": "<think>a</think>b"}, {"type": "text", "text": "<think>d</think>e"}],
    ],
)
def test_a_template_that_leaves_out_text_between_thoughts_is_an_error_of_the_row(template, text, shared):
    """As in the recorded searches of Search-R1, in one response: all but the first thought and the last text was lost, unsaid."""
    renderer = real_renderer(shared, "qwen3-vl", template)
    with pytest.raises(RowError, match="message 1: the chat template leaves out a part of its text") as error:
        masked_rows(renderer, [user("q"), answer(text)])
    assert error.value.reason == "template"
    assert masked_rows(renderer, [user("q"), answer(text), user("r"), answer("s")], trained=[False, True])
    assert masked_rows(real_renderer(shared, "qwen3-vl", "qwen3_vl"), [user("q"), answer(text)])


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize(
    "text", ["<think>\n a\n</think>\n\nb\n", " a\n\n b ", "<think>a", "a <thin b> <|im_end|> c", ""]
)
def test_a_text_that_a_template_writes_with_other_spaces_is_no_error_of_the_row(template, text, shared):
    renderer = real_renderer(shared, "qwen3-vl", template)
    if template == "qwen3_5_nothink" and "</think>" in text:
        return  # it writes no thoughts after its generation prompt
    (row,) = masked_rows(renderer, [user("q"), answer(text)])
    assert "".join(text.removeprefix("<think>").split("</think>")[-1].split()) in "".join(
        renderer.decode(row.responses[0]).split()
    )


def test_a_call_that_a_template_hides_is_an_error_also_if_the_text_has_its_name(shared):
    """As with Qwen2.5-VL's own template: the response was trained without its call, unsaid."""
    zoom = {"function": {"name": "zoom", "arguments": {}}}
    for calls in ([zoom], [zoom, zoom]):
        said = [user("Go"), answer("I zoom in.") | {"tool_calls": calls, "reasoning_content": ""}]
        with pytest.raises(RowError, match="does not show the call of 'zoom'"):
            masked_rows(real_renderer(shared, "qwen3-vl", "qwen2_5_vl"), said)
        assert masked_rows(real_renderer(shared, "qwen3-vl", "qwen3_vl"), said)


def test_an_untrained_response_of_which_a_template_leaves_out_a_part_with_a_call_is_no_error(shared):
    """The call is shown. Of a trained response the error names what is left out, not the call."""
    call = {"tool_calls": [{"function": {"name": "zoom", "arguments": {}}}]}
    talk = [
        user("q"),
        answer("I will zoom. <think>why</think>ok") | call,
        {"role": "tool", "content": "b"},
        answer("c"),
    ]
    renderer = real_renderer(shared, "qwen3-vl", "qwen3")
    assert masked_rows(renderer, talk, trained=[False, True])
    with pytest.raises(RowError, match=r"leaves out a part of its text 'I will zoom\. <think>"):
        masked_rows(renderer, talk)


def test_a_response_whose_beginning_the_generation_prompt_writes_is_whole():
    whole = (OURS / "chatml.jinja").read_text()
    generated = whole.replace("assistant\\n' -}}\n{%- endif", "assistant\\nThought:' -}}\n{%- endif")
    assert generated != whole
    (row,) = masked_rows(ours(generated), [user("q"), answer("Thought: I click.")])
    assert ours().decode(row.responses[0]) == " I click.<|im_end|>"


def test_a_row_without_a_trained_response_so_far_is_not_encoded(monkeypatch):
    renderer, encoded = ours(), [0]
    encode = renderer.encode_written
    monkeypatch.setattr(renderer, "encode_written", lambda text: encoded.append(len(text)) or encode(text))
    talk = [user("log " * 25_000), answer("x"), user("b"), answer("y")]
    with pytest.raises(RowError, match=r"rollout.max_tokens is 100\."):
        masked_rows(renderer, talk, trained=[False, True], max_tokens=100)
    assert max(encoded) < 2000


def test_a_template_whose_responses_cannot_be_found_is_refused_by_name():
    check_masks(ours(), "chatml")
    whole = (OURS / "chatml.jinja").read_text()
    prompt, end = "{{- '<|im_start|>assistant\\n", "' -}}\n{%- endif -%}"
    thinks = whole.replace(prompt + end, prompt + "<think>" + end)
    assert thinks != whole
    with pytest.raises(
        ValueError, match=r"the chat template mine cannot be fine-tuned with: .* after its generation prompt"
    ):
        check_masks(ours(thinks), "mine")


def test_a_row_that_is_far_too_long_is_refused_without_being_encoded(monkeypatch):
    """It would take 240 times its size in memory, in each of the threads that read a batch."""
    renderer, encoded = ours(), [0]
    encode = renderer.encode_written
    monkeypatch.setattr(renderer, "encode_written", lambda text: encoded.append(len(text)) or encode(text))
    with pytest.raises(RowError, match=r"rollout.max_tokens is 100\.") as error:
        masked_rows(renderer, [user("a" * 100_000), answer("b")], max_tokens=100)
    assert error.value.reason == "too_long" and max(encoded) < 2000


@pytest.mark.parametrize("first", [0, 2])
def test_a_conversation_that_is_too_long_for_its_trained_response_is_written_few_times(first, monkeypatch):
    """It was written twice for each of the responses without a loss before it: 3,200 messages took 47 s, then the row was refused."""
    renderer, written = ours(), []
    write = renderer.write
    monkeypatch.setattr(
        renderer, "write", lambda messages, *rest: written.append(len(messages)) or write(messages, *rest)
    )
    talk = [each for _ in range(300) for each in (user("a"), answer("b"))]
    trained = [number < first or number == 299 for number in range(300)]
    with pytest.raises(RowError, match=r"rollout.max_tokens is 1000\.") as error:
        masked_rows(renderer, talk, trained=trained, max_tokens=1000)
    assert error.value.reason == "too_long" and len(written) < 10


def test_an_earlier_response_that_no_row_shows_makes_none_too_long(shared):
    """The template drops its thoughts, of 20,000 tokens, before the response that is trained."""
    renderer = real_renderer(shared, "qwen3-vl", "qwen3", None)
    talk = [
        user("Go"),
        {"role": "assistant", "content": "x", "reasoning_content": "think " * 20_000},
        user("On"),
        answer("y"),
    ]
    (row,) = masked_rows(renderer, talk, trained=[False, True], max_tokens=200)
    assert list(row.responses) == [1] and sum(len(ids) for ids, _ in row.pieces) < 200
