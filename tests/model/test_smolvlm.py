"""SmolVLM2's tiles: an image is several runs of placeholders, resized once; its own chat template, and ours with tools."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from family_conformance import load, photo
from PIL import Image
from testing.fakes import item_of
from testing.templates import episode_ids, full_text, user
from testing.trees import random_rows, train, worst_gradient
from transformers import AutoImageProcessor
from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE

from vlmrl.config import Lora, Model
from vlmrl.model.loading import LoadedModel, load_model
from vlmrl.model.tiny import TEMPLATE, build
from vlmrl.multimodal.mm_inputs import merge_mm_inputs
from vlmrl.multimodal.placeholders import collapse, expand, image_spans
from vlmrl.multimodal.renderer import Renderer
from vlmrl.multimodal.store import MediaStore

CPU = torch.device("cpu")
TOOL = {"type": "function", "function": {"name": "zoom", "parameters": {"type": "object"}}}
SHOWN = {"type": "image", "image": Image.new("RGB", (8, 8))}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> LoadedModel:
    return load("smolvlm", tmp_path_factory.mktemp("smolvlm"))


def changed(folder: Path, **settings: Any) -> Path:
    """A tiny model whose image processor has other settings."""
    build(folder, "smolvlm")
    processor = AutoImageProcessor.from_pretrained(folder)
    for name, value in settings.items():
        setattr(processor, name, value)
    processor.save_pretrained(folder)
    return folder


def store_and_processor(model: LoadedModel, max_pixels: int | None = None) -> tuple[MediaStore, Any]:
    store = replace(model, max_image_pixels=max_pixels).new_store()
    assert store is not None
    return store, AutoImageProcessor.from_pretrained(model.path)


def test_a_wide_image_is_two_tiles_and_a_copy_with_marks_between_them(model):
    item = store_and_processor(model)[0].load(photo((90, 40), 0))
    assert (item.size, item.num_tokens, item.sizes["num_tiles"].tolist()) == ((256, 128), 20, [3])
    ids = expand([7, model.policy.image_token_id, 8], model.policy.image_token_id, [item])
    tile = "<image>" * 4
    first, second = f"<fake_token_around_image><row_1_col_1>{tile}", f"<fake_token_around_image><row_1_col_2>{tile}"
    whole = f"<fake_token_around_image><global-img>{tile}<fake_token_around_image>"
    assert model.renderer.decode(ids[1:-1]) == f"{first}{second}\n\n{whole}"
    assert (len(ids), ids[0], ids[-1]) == (22, 7, 8)


def test_images_are_spans_wherever_separators_stand():
    item = item_of("a", Image.new("RGB", (8, 8)), 4, {0: 7, 3: 8})
    assert expand([1, 9, 7], 9, [item]) == [1, 7, 9, 9, 8, 7]
    assert image_spans([1, 7, 9, 9, 8, 7], 9, [item]) == [(1, 5)]
    assert collapse([1, 7, 9, 9, 8, 7], 9, [item]) == [1, 9, 7]


@pytest.mark.parametrize("max_pixels", [None, 256 * 256, 255 * 256, 1])
@pytest.mark.parametrize("size", [(90, 40), (31, 33), (256, 256), (128, 128), (3000, 1), (1, 400), (301, 299)])
def test_a_resized_image_is_not_resized_again(model, size, max_pixels):
    """A server's processor makes of the resized image what it makes of the image itself."""
    store, processor = store_and_processor(model, max_pixels)
    longest = 256 if max_pixels in (None, 256 * 256) else 128
    image = photo(size, 1)
    item = store.load(image)
    wanted = processor(images=[image], size={"longest_edge": longest}, return_tensors="pt")
    again = processor(images=[item.image], size={"longest_edge": longest}, return_tensors="pt")
    ours = merge_mm_inputs([item], model.family, model.image_processor, CPU)
    assert max(item.size) == longest
    assert torch.equal(wanted["pixel_values"][0], ours["pixel_values"])
    assert torch.equal(wanted["pixel_values"], again["pixel_values"])
    assert wanted["pixel_attention_mask"].all()  # so the model needs none


def test_without_splitting_an_image_is_one_tile(tmp_path):
    model = load_model(Model(path=str(changed(tmp_path, do_image_splitting=False)), device="cpu"), tmp_path, seed=0)
    store, processor = store_and_processor(model)
    item = store.load(photo((90, 40), 0))
    assert (item.size, item.num_tokens, item.sizes["num_tiles"].tolist()) == ((128, 128), 7, [1])
    wanted = processor(images=[photo((90, 40), 0)], return_tensors="pt")["pixel_values"][0]
    assert torch.equal(merge_mm_inputs([item], model.family, model.image_processor, CPU)["pixel_values"], wanted)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"size": {"longest_edge": 300}}, "300, 128 and True"),
        ({"size": {"longest_edge": 128 * 40}}, "5120, 128 and True"),
        ({"do_resize": False}, "256, 128 and False"),
    ],
)
def test_settings_under_which_an_image_would_change_again_are_refused(tmp_path, settings, found):
    folder = changed(tmp_path, **settings)
    with pytest.raises(ValueError, match=rf"must be a multiple of .* but they are {found}: change them in {folder}"):
        load_model(Model(path=str(folder), device="cpu"), tmp_path, seed=0)


@pytest.mark.parametrize("vision", [True, False])
def test_features_reach_frozen_embeddings_whose_layers_are_checkpointed(tmp_path, vision):
    loaded = load("smolvlm", tmp_path, lora=Lora(rank=4, vision=vision))
    rows = random_rows(loaded, 0)
    kept = train(loaded, rows, 10**6, share=True)
    loaded.policy.enable_gradient_checkpointing()
    recomputed = train(loaded, rows, 10**6, share=True)
    assert worst_gradient(kept, recomputed) < (1e-5, "")
    assert any("vision_model" in name for name in kept.gradient) == vision


# Chat templates


def published(model: LoadedModel) -> Renderer:
    return Renderer(model.tokenizer, image_token="<image>", chat_template=DEFAULT_CHAT_TEMPLATE)


CHAT = [
    {"role": "system", "content": "Be brief."},
    user([SHOWN, {"type": "text", "text": "What?"}]),
    {"role": "assistant", "content": "a red square"},
    user([{"type": "text", "text": "And"}, SHOWN]),
]


def test_the_published_template_and_ours_write_the_same(model):
    """Before transformers 5.24 the published one silently dropped contents that are strings, so it gets none."""
    wanted = (
        "<|im_start|>System: Be brief.<end_of_utterance>\nUser:<image>What?<end_of_utterance>\n"
        "Assistant: a red square<end_of_utterance>\nUser: And<image><end_of_utterance>\nAssistant:"
    )
    for renderer in (published(model), model.renderer):
        assert renderer.decode(renderer.prompt(CHAT).token_ids) == wanted


def test_appended_turns_equal_the_full_render(model):
    turns = [(" a red square", [CHAT[3]]), (" Yes.", [user("More")]), (" no", None)]
    full = [*CHAT, {"role": "assistant", "content": " Yes."}, user("More"), {"role": "assistant", "content": " no"}]
    text = full_text(model.renderer, full, [TOOL], generate=False)
    ids = episode_ids(model.renderer, CHAT[:2], turns, [TOOL])
    assert model.renderer.decode(ids) + "\n" == text
    mask = model.renderer.conversation(full, [TOOL])[1]
    kept = [
        token
        for token, trained in zip(model.renderer.conversation(full, [TOOL])[0].token_ids, mask, strict=True)
        if trained
    ]
    assert model.renderer.decode(kept) == " a red square<end_of_utterance> Yes.<end_of_utterance> no<end_of_utterance>"


def test_ours_shows_tools_their_calls_and_their_answers(model):
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "zoom", "arguments": {"x": 1}}]}
    messages = [user("What?"), call, {"role": "tool", "content": [{"type": "text", "text": "Closer:"}, SHOWN]}]
    text = model.renderer.decode(model.renderer.prompt(messages, [TOOL]).token_ids)
    assert text.startswith("<|im_start|>System: Tools you can call:\n<tools>\n{")
    assert text.endswith(
        'User: What?<end_of_utterance>\nAssistant: <tool_call>\n{"name": "zoom", "arguments": {"x": 1}}\n</tool_call>'
        "<end_of_utterance>\nUser: <tool_response>\nCloser:<image>\n</tool_response><end_of_utterance>\nAssistant:"
    )


def test_templates_that_do_not_fit_are_refused(model):
    with pytest.raises(
        ValueError,
        match=re.escape("set model.chat_template (ours do: `chatml`, `smolvlm` for SmolVLM, `glm` for GLM-V)"),
    ):
        published(model).check_tools([TOOL])
    with pytest.raises(
        ValueError, match=r"never writes the end-of-turn token '<end_of_utterance>'.*ours: .*`smolvlm` for SmolVLM"
    ):
        Renderer(model.tokenizer, image_token="<image>", chat_template=TEMPLATE.read_text())


def test_an_older_torchvision_whose_images_are_resized_by_pil_is_refused(model, monkeypatch):
    of = AutoImageProcessor.from_pretrained
    monkeypatch.setattr(
        AutoImageProcessor, "from_pretrained", lambda path, **options: of(path, backend="pil", **options)
    )
    with pytest.raises(
        ValueError, match=r"smolvlm needs torchvision 0\.27 or newer, but [\d.+a-z]+ is installed: install"
    ):
        model.policy.family.load_processor(model.path)
