"""The tiny models are ordinary model folders of the real classes; the template never rewrites what it wrote."""

from itertools import pairwise

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from vlmrl.config import Model
from vlmrl.model import tiny
from vlmrl.model.loading import load_model, load_reader

CLASSES = {
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", "Qwen2VLProcessor", "Qwen2VLVideoProcessor", 14),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor", 14),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", "Qwen3VLProcessor", "Qwen3VLVideoProcessor", 16),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration", "Qwen3VLProcessor", "Qwen3VLVideoProcessor", 16),
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", "Qwen3VLProcessor", "Qwen3VLVideoProcessor", 16),
}
TEXT_CLASSES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
IMAGE = {"type": "image"}
VISION = "<|vision_start|><|image_pad|><|vision_end|>"
TOOL = {"type": "function", "function": {"name": "zoom", "parameters": {"type": "object"}}}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [IMAGE, {"type": "text", "text": "What is it?"}]},
    {
        "role": "assistant",
        "content": "<think>\nsmall\n</think>\n\nI zoom.",
        "tool_calls": [{"type": "function", "function": {"name": "zoom", "arguments": {"box": [1, 2]}}}],
    },
    {"role": "tool", "content": [{"type": "text", "text": "Closer:"}, IMAGE, IMAGE]},
    {"role": "tool", "content": "done"},
    {"role": "assistant", "content": "a red é square"},
    {"role": "user", "content": "Thanks."},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny")
    return {family: tiny.build(root / family, family) for family in CLASSES}


def load(folder):
    return AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="sdpa")


def render(messages, **options):
    return tiny.tokenizer().apply_chat_template(messages, tokenize=False, **options)


@pytest.mark.parametrize(
    "text",
    [
        "What color is the square?",
        "  two  spaces , and a\ttab \r\n\n\n end ",
        "héllo e\u0301 日本語 🙂 \x00 \u200d ﬁ",
        "<|im_end|>\n<tool_call> <|image_pad|></think> <|not_special|>",
        "",
    ],
)
def test_decoding_gives_back_any_text(text, folders):
    for words in (tiny.tokenizer(), AutoTokenizer.from_pretrained(folders["qwen3_vl"])):
        assert words.decode(words.encode(text)) == text


def test_special_tokens_have_their_ids_and_kinds():
    words = tiny.tokenizer()
    assert len(words) == 503
    assert words.encode("<|endoftext|><|im_start|><|im_end|>") == [483, 484, 485]
    assert words.encode("<|vision_start|><|vision_end|><|image_pad|><|video_pad|>") == [492, 493, 495, 496]
    assert words.encode("<tool_call></tool_call><think></think>") == [497, 498, 501, 502]
    assert (words.eos_token, words.pad_token, words.bos_token) == ("<|im_end|>", "<|endoftext|>", None)
    assert words.decode([497, 485, 495, 502], skip_special_tokens=True) == "<tool_call></think>"


def test_special_looking_text_can_be_encoded_as_text():
    words = tiny.tokenizer()
    ids = words.encode("a<|image_pad|>", split_special_tokens=True)
    assert 495 not in ids
    assert words.decode(ids) == "a<|image_pad|>"


def test_each_listed_word_is_one_token():
    words = tiny.tokenizer()
    assert [word for word in tiny.WORDS if len(words.encode(word)) != 1] == []
    pieces = [words.decode([token]) for token in words.encode('{"name": "zoom", "arguments": {"x": 12')]
    assert pieces == ['{"', "name", '":', ' "', "zoom", '",', ' "', "arguments", '":', ' {"', "x", '":', " 1", "2"]


@pytest.mark.parametrize("family", CLASSES)
def test_the_folder_loads_as_the_real_classes(family, folders):
    model, processor = load(folders[family]), AutoProcessor.from_pretrained(folders[family])
    images, videos = processor.image_processor, processor.video_processor
    kinds = (type(model).__name__, type(processor).__name__, type(videos).__name__, images.patch_size)
    assert kinds == CLASSES[family]
    assert type(images).__name__ == "Qwen2VLImageProcessor"
    assert (images.temporal_patch_size, images.merge_size) == (2, 2)
    assert 1_000_000 < model.num_parameters() < 3_000_000
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert (model.config.image_token_id, model.config.text_config.vocab_size) == (495, 512)
    assert model.generation_config.eos_token_id == [485, 483]
    assert processor.chat_template == processor.tokenizer.chat_template == tiny.TEMPLATE.read_text()


@pytest.mark.parametrize("family", TEXT_CLASSES)
def test_a_text_model_has_no_processor(family, tmp_path):
    folder = tiny.build(tmp_path, family)
    model, words = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert type(model).__name__ == TEXT_CLASSES[family]
    assert 500_000 < model.num_parameters() < 3_000_000
    assert words.encode("What<|im_end|>") == tiny.tokenizer().encode("What<|im_end|>")
    assert words.chat_template == tiny.TEMPLATE.read_text()
    assert not list(folder.glob("*processor*"))


def test_one_seed_gives_one_model_and_building_leaves_the_global_seed_alone(folders, tmp_path):
    family = "qwen3_vl"
    first = load(folders[family]).state_dict()
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    tiny.build(folders[family], family)
    assert torch.equal(torch.rand(3), expected)
    again, other = load(folders[family]).state_dict(), load(tiny.build(tmp_path, family, seed=1)).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_sizes_can_be_chosen_and_wrong_ones_are_refused(tmp_path):
    small = load(tiny.build(tmp_path, hidden_size=64, num_layers=1, vision_hidden_size=32, vision_depth=1))
    assert small.num_parameters() < 300_000
    with pytest.raises(ValueError, match="hidden_size must be a positive multiple of 64, got 100"):
        tiny.build(tmp_path, hidden_size=100)
    with pytest.raises(ValueError, match=r"families qwen2_vl, .*, qwen3, but it is 'tiny:llama'"):
        tiny.build(tmp_path, "llama")


def test_names_are_built_once_and_other_paths_are_left_alone(tmp_path):
    folder = tiny.resolve("tiny:qwen2_5_vl", tmp_path)
    (tmp_path / "seen").write_text("")
    weights = next(tmp_path.glob("tiny-qwen2_5_vl-*/model.safetensors"))
    made = weights.stat().st_mtime_ns
    assert tiny.resolve("tiny:qwen2_5_vl", tmp_path) == folder == str(weights.parent)
    assert weights.stat().st_mtime_ns == made
    assert tiny.resolve("Qwen/Qwen3-VL-2B-Instruct", tmp_path) == "Qwen/Qwen3-VL-2B-Instruct"
    with pytest.raises(
        ValueError, match=r"^model.path must be .* but it is 'tiny:qwen3vl'. Perhaps you meant 'qwen3_vl'.$"
    ):
        tiny.resolve("tiny:qwen3vl", tmp_path)


def test_template_writes_chatml():
    assert render(CHAT[:2], add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        f"<|im_start|>user\n{VISION}What is it?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert render(CHAT[2:6]) == (
        "<|im_start|>assistant\n<think>\nsmall\n</think>\n\nI zoom.\n"
        '<tool_call>\n{"name": "zoom", "arguments": {"box": [1, 2]}}\n</tool_call><|im_end|>\n'
        f"<|im_start|>user\n<tool_response>\nCloser:{VISION}{VISION}\n</tool_response><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\ndone\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\na red é square<|im_end|>\n"
    )


def test_template_shows_tools_in_the_system_block():
    tools = (
        'Tools you can call:\n<tools>\n{"type": "function", "function": {"name": "zoom", "parameters": {"type": "object"}}}\n'
        '</tools>\nTo call one, write:\n<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call><|im_end|>\n'
    )
    user = "<|im_start|>user\nThanks.<|im_end|>\n"
    assert render([CHAT[-1]], tools=[TOOL]) == "<|im_start|>system\n" + tools + user
    assert render([CHAT[0], CHAT[-1]], tools=[TOOL]) == "<|im_start|>system\nBe brief.\n\n" + tools + user
    assert render([CHAT[-1]], tools=[]) == user


@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("start", [0, 1])
def test_appending_messages_never_changes_earlier_text(tools, start):
    chat = CHAT[start:]
    texts = [render(chat[:count], tools=tools) for count in range(1, len(chat) + 1)]
    for shorter, longer in pairwise(texts):
        assert longer.startswith(shorter)
    assert [text.count("<|image_pad|>") for text in texts[1 - start :]] == [1, 1, 3, 3, 3, 3]
    for count, message in enumerate(chat):
        if message["role"] == "assistant":
            assert texts[count].startswith(render(chat[:count], tools=tools, add_generation_prompt=True))


def test_assistant_mask_covers_the_responses_and_their_end():
    words = tiny.tokenizer()
    out = words.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = out["input_ids"], out["assistant_masks"]
    kept = words.decode([token for token, trained in zip(ids, mask, strict=True) if trained])
    call = '<tool_call>\n{"name": "zoom", "arguments": {"box": [1, 2]}}\n</tool_call>'
    assert kept == f"<think>\nsmall\n</think>\n\nI zoom.\n{call}<|im_end|>a red é square<|im_end|>"


def test_tool_calls_take_a_string_of_arguments_and_no_content():
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "a", "arguments": '{"x": "é"}'}] * 2}
    block = '<tool_call>\n{"name": "a", "arguments": {"x": "é"}}\n</tool_call>'
    assert render([call]) == f"<|im_start|>assistant\n{block}\n{block}<|im_end|>\n"


def test_a_part_the_template_cannot_show_is_refused():
    with pytest.raises(Exception, match="a content part must have the type text, image or video, not audio"):
        render([{"role": "user", "content": [{"type": "audio"}]}])


def test_building_and_saving_show_no_progress_bar(tmp_path, capfd):
    was_enabled = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.enable_progress_bar()
    try:
        load_model(Model(path="tiny:qwen3"), tmp_path, seed=0).save(tmp_path / "saved")
        assert transformers.utils.logging.is_progress_bar_enabled()
    finally:
        if not was_enabled:
            transformers.utils.logging.disable_progress_bar()
    assert "%" not in capfd.readouterr().err


def test_an_unknown_chat_template_is_an_error_that_lists_ours(tmp_path):
    with pytest.raises(
        ValueError, match=r"model\.chat_template must be a file NAME\.jinja or one of ours \(`chatml`, .*'chat'"
    ):
        load_reader(Model(path="tiny:glm4v", chat_template="chat"), tmp_path)
