"""The conformance suite of model families: what each of them promises, checked on its tiny model against transformers' own code.

`test_families.py` runs it for all of ``FAMILIES``. For a family from outside the package it is one test::

    @pytest.mark.parametrize("check", checks_of(MyFamily))
    def test_my_family_conforms(check, tmp_path):
        check(load("my_vl", tmp_path), tmp_path)
"""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from testing.trees import largest_difference, random_rows, train, worst_gradient
from torch import nn
from transformers import AutoImageProcessor, AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor
from transformers.models.smolvlm import processing_smolvlm

from vlmrl.config import Lora, Model
from vlmrl.families.base import Family
from vlmrl.model.loading import LoadedModel, load_model, shapes_of
from vlmrl.multimodal.mm_inputs import merge_mm_inputs
from vlmrl.multimodal.pixel_memory import PixelMemory
from vlmrl.multimodal.placeholders import collapse, expand, image_ids, image_spans
from vlmrl.multimodal.store import MediaStore
from vlmrl.train.packing import Packed, response_logprobs
from vlmrl.types import MediaItem, Message, MicroBatch, Sample

Check = Callable[[LoadedModel, Path], None]

CPU = torch.device("cpu")
SIZES = [(90, 70), (33, 31), (20, 801), (640, 479), (32, 32), (90, 70), (1300, 950)]
ODD_SIZES = [(1, 1), (3, 500), (1, 199), (1, 202), (27, 29), (4000, 30), (1200, 1199)]


def checks_of(family: type[Family]) -> list[Check]:
    """The checks of what the family does; what it does not, such as packing, is checked to be refused."""
    checks: list[Check] = [check_positions, check_forward, check_parts, check_saved]
    checks += [check_tree, check_cut_trees] if family(None).may_share else [check_padded, check_tree_is_refused]
    if family.vision:
        checks += [check_processor, check_sizes, check_placeholders, check_features, check_blank_image]
    return checks


def load(family: str, folder: Path, **settings: Any) -> LoadedModel:
    """A tiny model that looks where it should, so that a wrong mask, position or image shows."""
    model = load_model(Model(path=f"tiny:{family}", device="cpu", dtype="float32", **settings), folder, seed=0)
    with torch.no_grad():
        for name, parameter in model.policy.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter.mul_(5)
    return model


# Positions


def check_positions(model: LoadedModel, tmp_path: Path) -> None:
    """Of rows, of their continuations, and of rows in a padded batch: those that the model computes itself."""
    family, items = model.family, gallery(model)
    for seed in range(30):
        pieces = [random_row(model, items, 3 * seed + turn) for turn in range(3)]
        ids = [token for part, _ in pieces for token in part]
        media = [item for _, shown in pieces for item in shown]
        wanted, wanted_next = own_positions(model, ids, media)
        positions, free = family.positions(ids, media)
        assert torch.equal(positions, wanted) and free == wanted_next, seed
        parts, free = [], 0
        for part, shown in pieces:
            positions, free = family.positions(part, shown, free)
            parts.append(positions)
        assert torch.equal(torch.cat(parts, dim=1), wanted) and free == wanted_next, seed


def gallery(model: LoadedModel) -> list[MediaItem]:
    """Images of one visual token and more, wide and tall; none for a text model."""
    store = model.new_store()
    sizes = [(32, 32), (64, 32), (33, 90), (90, 64), (40, 160)]
    return [] if store is None else [store.load(photo(size, seed)) for seed, size in enumerate(sizes)]


def random_row(model: LoadedModel, items: Sequence[MediaItem], seed: int) -> tuple[list[int], list[MediaItem]]:
    """Text and up to four images; as every template has it, text stands between two images."""
    dice = random.Random(seed)
    ids: list[int] = [dice.randrange(200) for _ in range(dice.randint(1, 4))]
    shown = [dice.choice(items) for _ in range(dice.randrange(5) if items else 0)]
    for item in shown:
        assert model.family.image_token_id is not None
        ids += [
            *image_ids(item, model.family.image_token_id),
            *(dice.randrange(200) for _ in range(dice.randint(1, 5))),
        ]
    return ids, shown


def own_positions(model: LoadedModel, ids: list[int], media: Sequence[MediaItem]) -> tuple[torch.Tensor, int]:
    """The positions ``[3, tokens]`` that the model itself computes, and the next free one."""
    if not model.family.mrope:
        return torch.arange(len(ids)).expand(3, -1), len(ids)
    row = torch.tensor([ids])
    positions, delta = model.policy.model.model.get_rope_index(
        input_ids=row,
        mm_token_type_ids=(row == model.family.image_token_id).int(),
        image_grid_thw=torch.cat([item.sizes["image_grid_thw"] for item in media]) if media else None,
    )
    return positions[:, 0], int(delta) + len(ids)


# Images


def photo(size: tuple[int, int], seed: int) -> Image.Image:
    """All values, in gradients and in noise."""
    width, height = size
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3))
    slope = np.linspace(0, 255, width * height).reshape(height, width, 1)
    return Image.fromarray(np.where(noise > 128, noise, slope).astype(np.uint8))


def check_processor(model: LoadedModel, tmp_path: Path) -> None:
    check_tensors(model.family, model.image_processor, model.path, tmp_path)


def check_tensors(family: Family, processor: Any, path: str | Path, folder: Path) -> None:
    """Tensors are those of the processor in ``path``, bit for bit, also after a way through compression and files."""
    images = [photo(size, seed) for seed, size in enumerate(SIZES)]
    theirs = AutoImageProcessor.from_pretrained(path)
    alone = [theirs(images=[image], return_tensors="pt") for image in images]
    for memory in (PixelMemory(2**30), PixelMemory(0, folder)):
        store = MediaStore(family, processor, memory=memory)
        made = merge_mm_inputs([store.load(image) for image in images], family, processor, CPU)
        assert "pixel_values" in made
        for key, values in made.items():
            if key in alone[0]:  # the number of an image's tiles is ours
                wanted = torch.cat([each[key].reshape(-1, *values.shape[1:]) for each in alone])
                assert torch.equal(values, wanted) and values.dtype == wanted.dtype, key


def check_sizes(model: LoadedModel, tmp_path: Path) -> None:
    """A resized image keeps its size, also at the processor; `model.max_image_pixels` holds; what the processor refuses is refused."""
    family, processor = model.family, model.image_processor
    theirs = AutoImageProcessor.from_pretrained(model.path)
    for size in [*SIZES, *ODD_SIZES]:
        try:
            numbers = _pixel_numbers(theirs, size)
        except ValueError as error:
            with pytest.raises(ValueError, match=re.escape(str(error))):
                family.resized(processor, size, None)
            continue
        resized = family.resized(processor, size, None)
        made = family.image_inputs(processor, [torch.zeros(3, resized[1], resized[0], dtype=torch.uint8)])
        assert made["pixel_values"].numel() == _pixel_numbers(theirs, resized), size
        # It may leave long ones above its limit.
        assert size not in SIZES or made["pixel_values"].numel() == numbers, size
        assert family.resized(processor, resized, None) == resized, size
        width, height = family.resized(processor, size, 130 * 130)
        assert width * height <= 130 * 130, size
        assert family.resized(processor, (width, height), 130 * 130) == (width, height), size


def _pixel_numbers(processor: Any, size: tuple[int, int]) -> int:
    """How many numbers transformers' processor makes of an image of ``size``."""
    return int(processor(images=[Image.new("RGB", size)], return_tensors="pt")["pixel_values"].numel())


def check_placeholders(model: LoadedModel, tmp_path: Path) -> None:
    """Each placeholder gets one row of features; rows expand and collapse."""
    pad, items = model.family.image_token_id, gallery(model)
    assert pad is not None and pad in model.family.banned_ids
    with torch.no_grad():
        features = model.policy.encode_images(items)
    for item, image in zip(items, features, strict=True):
        assert image_ids(item, pad).count(pad) == item.num_tokens - len(item.separators) == len(image.embeds)
    for seed in range(20):
        ids, media = random_row(model, items, seed)
        short = collapse(ids, pad, media)
        assert short.count(pad) == len(media) and expand(short, pad, media) == ids
        spans = image_spans(ids, pad, media)
        assert [ids[start:end] for start, end in spans] == [image_ids(item, pad) for item in media]


# Forward


def plain(model: LoadedModel, path: str | Path | None = None) -> Any:
    """The model as transformers alone loads it: with the same weights, or with those of a saved model."""
    auto: Any = AutoModelForImageTextToText if model.family.vision else AutoModelForCausalLM
    loaded, report = auto.from_pretrained(
        path or model.path, dtype=torch.float32, attn_implementation="sdpa", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    if path is None:
        loaded.load_state_dict(model.policy.model.state_dict())
    return loaded.eval()


def conversations(model: LoadedModel) -> Iterator[tuple[list[Message], list[Image.Image]]]:
    """With up to three images, in the first turn and in a later one; without any for a text model."""
    for shown in range(4) if model.family.vision else [0, 0]:
        images = [photo((40 + 30 * number, 90 - 20 * number), number) for number in range(shown)]
        parts = [{"type": "image", "image": image} for image in images]
        yield (
            [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [*parts[:2], {"type": "text", "text": "What color is it?"}]},
                {"role": "assistant", "content": "a red square"},
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "And"}, *parts[2:], {"type": "text", "text": "?"}],
                },
            ],
            images,
        )


def check_forward(model: LoadedModel, tmp_path: Path) -> None:
    """Ids and logprobs of a conversation are those of transformers' own processor, position rule and forward."""
    theirs = plain(model)
    for messages, images in conversations(model):
        row, inputs = as_sample(model, messages), own_inputs(model, messages, images)
        assert inputs["input_ids"][0].tolist() == row.token_ids
        with torch.no_grad():
            logits = theirs(**inputs).logits[0].float()
        assert_logprobs_are(response_logprobs(model.policy, [row], 1.0)[0], logits, row, model.family)


def as_sample(model: LoadedModel, messages: list[Message]) -> Sample:
    """A row whose response is everything but its first token."""
    rendered, store = model.renderer.prompt(messages), model.new_store()
    media = [] if store is None else [store.load(source) for source in rendered.images]
    first, *ids = expand(rendered.token_ids, model.family.image_token_id, media)
    size = len(ids)
    return Sample([first], ids, [1] * size, [-1.0] * size, [0] * size, "a", "a/0", True, "stop", media, 1.0)


def own_inputs(model: LoadedModel, messages: list[Message], images: list[Image.Image]) -> dict[str, Any]:
    """What transformers' processor (or tokenizer) makes of the conversation's text and images."""
    text = model.tokenizer.apply_chat_template(
        model.renderer.clean(messages)[0],
        chat_template=model.renderer.chat_template,
        tokenize=False,
        add_generation_prompt=True,
    )
    if not model.family.vision:
        return dict(model.tokenizer(text, return_tensors="pt", add_special_tokens=False))
    processing_smolvlm.num2words = processing_smolvlm.num2words or str  # a package that it needs for videos alone
    processor: Any = AutoProcessor.from_pretrained(model.path)
    return dict(processor(text=[text], images=images or None, return_tensors="pt"))


def assert_logprobs_are(ours: np.ndarray, logits: torch.Tensor, row: Sample, family: Family) -> None:
    logits[:, family.banned_ids] = torch.finfo(torch.float32).min
    ids = torch.tensor(row.token_ids)
    theirs = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    can_be_sampled = ~torch.isin(ids[1:], torch.tensor(family.banned_ids, dtype=torch.long))
    assert float((torch.from_numpy(ours) - theirs)[can_be_sampled].abs().max()) < 1e-5


def check_features(model: LoadedModel, tmp_path: Path) -> None:
    """Features are those that transformers' vision tower and projector compute from its processor's tensors."""
    store, theirs = model.new_store(), plain(model).model
    assert store is not None
    for size in [(40, 90), (64, 64), (300, 200)]:
        image = photo(size, 3)
        inputs = AutoImageProcessor.from_pretrained(model.path)(images=[image], return_tensors="pt")
        known = inspect.signature(theirs.get_image_features).parameters.keys()
        with torch.no_grad():
            (ours,) = model.policy.encode_images([store.load(image)])
            output = theirs.get_image_features(**{key: inputs[key] for key in inputs.keys() & known}, return_dict=True)
        wanted = torch.cat([each.flatten() for each in output.pooler_output])
        assert float((ours.embeds.flatten() - wanted).abs().max()) < 1e-5


def check_blank_image(model: LoadedModel, tmp_path: Path) -> None:
    """A rank without images runs all of the vision tower and the projector, for gradients of zero and unchanged logprobs."""
    ids = torch.tensor([[5, 6, 7, 8]])
    batch = MicroBatch(
        ids, torch.arange(4).expand(3, 1, -1), torch.ones(1, 4).bool().index_fill(1, torch.tensor(0), False)
    )
    with torch.no_grad():
        wanted = model.policy(batch).logprobs
    found = model.policy(replace(batch, blank_image=True)).logprobs
    assert torch.equal(found, wanted)
    found.sum().backward()
    parameters = [
        (name, weight) for name, weight in model.policy.model.named_parameters() if not is_decoder(model, name)
    ]
    assert parameters
    for name, weight in parameters:
        assert weight.grad is not None and not weight.grad.any(), name
    model.policy.zero_grad()


# Parts, adapters, saved models


def is_decoder(model: LoadedModel, name: str) -> bool:
    return re.search(model.family.parts["language_model"], name) is not None


def check_parts(model: LoadedModel, tmp_path: Path) -> None:
    """Each weight is in one part, frozen with it; LoRA adapts every linear layer of the decoder, and with `vision` of all parts."""
    names, parts = [name for name, _ in model.policy.model.named_parameters()], model.family.parts
    assert all(sum(re.search(pattern, name) is not None for pattern in parts.values()) == 1 for name in names)
    for part, pattern in parts.items() if len(parts) > 1 else ():
        shapes = shapes_of(Model(path=model.path, freeze=(part,)), tmp_path)
        frozen = {name for name, weight in shapes.named_parameters() if not weight.requires_grad}
        assert frozen == {name for name in names if re.search(pattern, name)} != set()
    head = model.policy.model.get_output_embeddings()
    linear = {
        name for name, layer in model.policy.model.named_modules() if isinstance(layer, nn.Linear) and layer is not head
    }
    decoder = {name for name in linear if is_decoder(model, name + ".")}
    assert decoder and (linear > decoder) == model.family.vision
    for vision, wanted in [(False, decoder), (True, linear)][: 1 + model.family.vision]:
        targets = tuple({name.rpartition(".")[2] for name in wanted}) if has_fused_experts(model) else ()
        adapted = shapes_of(Model(path=model.path, lora=Lora(rank=2, vision=vision, targets=targets)), tmp_path)
        trained = {name for name, weight in adapted.named_parameters() if weight.requires_grad}
        assert {name.partition(".lora_")[0] for name in trained} == wanted


def has_fused_experts(model: LoadedModel) -> bool:
    return any("experts" in name and weight.dim() == 3 for name, weight in model.policy.model.named_parameters())


def check_saved(model: LoadedModel, tmp_path: Path) -> None:
    """A saved model loads in plain transformers, which misses no weight and gives the same ids and logprobs."""
    before = {name: weight.detach().clone() for name, weight in model.policy.model.named_parameters()}
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for weight in model.policy.model.parameters():
            weight.add_(0.02 * torch.randn(weight.shape, generator=generator))
    try:
        model.save(tmp_path / "saved")
        theirs = plain(model, tmp_path / "saved")
        moved = replace(model, path=str(tmp_path / "saved"))
        for messages, images in conversations(model):
            row = as_sample(model, messages)
            with torch.no_grad():
                logits = theirs(**own_inputs(moved, messages, images)).logits[0].float()
            assert_logprobs_are(response_logprobs(model.policy, [row], 1.0)[0], logits, row, model.family)
    finally:
        with torch.no_grad():
            for name, weight in model.policy.model.named_parameters():
                weight.copy_(before[name])


# Rows that share prefixes


@contextmanager
def packed_rows() -> Iterator[list[tuple[list[Sample], Packed]]]:
    """Every micro-batch that a trainer packs within the context, with its samples."""
    from vlmrl.train import trainer

    found: list[tuple[list[Sample], Packed]] = []
    real = trainer.pack

    def spy(samples: Sequence[Sample], part: Any, *rest: Any) -> Packed:
        found.append(([samples[row] for row in part.rows], real(samples, part, *rest)))
        return found[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "pack", spy)
        yield found


def check_tree(model: LoadedModel, tmp_path: Path) -> None:
    """Rows laid out as trees have single rows' logprobs, gradients and positions."""
    packed = compare_with_single_rows(model, random_rows(model, 0), 10**6)
    assert_a_branch_that_saw_its_neighbour_would_show(model, packed)


def check_cut_trees(model: LoadedModel, tmp_path: Path) -> None:
    """So have rows of several micro-batches, each with trees of its own."""
    packed = compare_with_single_rows(model, random_rows(model, 1), 60)
    assert len(packed) > 1


def compare_with_single_rows(model: LoadedModel, rows: list[Sample], budget: int) -> list[tuple[list[Sample], Packed]]:
    """What was packed of ``rows`` in micro-batches of at most ``budget`` tokens."""
    with packed_rows() as single:
        alone = train(model, rows, 1, share=False)
    with packed_rows() as packed:
        shared = train(model, rows, budget, share=True)
    sizes = [sum(each.batch.token_ids.numel() for _, each in every) for every in (packed, single)]
    assert sizes[0] < 0.9 * sizes[1]
    assert largest_difference(alone, shared) < 1e-5
    assert worst_gradient(alone, shared) < (1e-5, "")
    assert_positions_are_the_rows_own(model, packed)
    return packed


def assert_positions_are_the_rows_own(model: LoadedModel, packed: list[tuple[list[Sample], Packed]]) -> None:
    for samples, each in packed:
        for sample, (line, path) in zip(samples, paths_of(samples, each), strict=True):
            wanted, _ = own_positions(model, sample.token_ids, sample.media)
            assert torch.equal(each.batch.position_ids[:, line, path], wanted)
            assert each.batch.token_ids[line, path].tolist() == sample.token_ids


def paths_of(samples: Sequence[Sample], each: Packed) -> list[tuple[int, list[int]]]:
    """For each sample its line of the batch and its places there: what leads to its last token."""
    if each.batch.parents is None:
        return [(line, list(range(len(sample)))) for line, sample in enumerate(samples)]
    found = []
    for sample, places in zip(samples, each.indices, strict=True):
        line, place = divmod(int(places[len(sample.response_ids) - 1]), each.batch.token_ids.shape[1])
        path = []
        while place >= 0:
            path.append(place)
            place = int(each.batch.parents[line, place])
        found.append((line, path[::-1]))
    return found


def assert_a_branch_that_saw_its_neighbour_would_show(
    model: LoadedModel, packed: list[tuple[list[Sample], Packed]]
) -> None:
    batch = next(each.batch for _, each in packed if each.batch.ends is not None)
    assert batch.ends is not None
    with torch.no_grad():
        right = model.policy(batch).logprobs
        wrong = model.policy(replace(batch, ends=torch.full_like(batch.ends, batch.ends.shape[1]))).logprobs
    assert (right - wrong).abs().max() > 1e-3


def check_padded(model: LoadedModel, tmp_path: Path) -> None:
    """Padded rows have single rows' logprobs and gradients.

    A decay's gradient is what is left of sums that cancel, 1e-5 in norm: float32 leaves 1e-9 of doubt.
    """
    rows = random_rows(model, 0)
    alone = train(model, rows, 1, share=False)
    with packed_rows() as packed:
        padded = train(model, rows, 10**6, share=True)  # which has no effect
    assert largest_difference(alone, padded) < 1e-5
    assert worst_gradient(alone, padded, slack=1e-8) < (1e-5, "")
    assert all(each.batch.ends is None for _, each in packed)


def check_tree_is_refused(model: LoadedModel, tmp_path: Path) -> None:
    ends = torch.tensor([[3, 3, 3]])
    batch = MicroBatch(torch.tensor([[5, 6, 7]]), torch.zeros(3, 1, 3, dtype=torch.long), torch.ones(1, 3), ends=ends)
    with pytest.raises(ValueError, match="must not be packed into one row: some of its layers carry a state"):
        model.policy(batch)
