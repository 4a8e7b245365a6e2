"""Rotary positions equal each model's own rule, for a row and for its continuation."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen2Config, Qwen2ForCausalLM

from vlmrl.model import tiny
from vlmrl.model.families import FAMILIES, family_of
from vlmrl.model.families.qwen_vl import QwenVL, merged_grid, mrope_positions
from vlmrl.model.policy import Policy

TEXT, PAD = 7, 9


def random_row(seed: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Text and up to six images; as every template has it, text stands between two images."""
    rng = random.Random(seed)
    ids, grids = [TEXT] * rng.randrange(4), []
    for _ in range(rng.randrange(7)):
        grids.append((rng.randint(1, 6), rng.randint(1, 6)))
        ids += [PAD] * (grids[-1][0] * grids[-1][1]) + [TEXT] * rng.randint(1, 5)
    return ids or [TEXT], grids


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """One of each Qwen-VL family."""
    root = tmp_path_factory.mktemp("vision")
    folders = [tiny.build(root / name, name) for name, family in FAMILIES.items() if issubclass(family, QwenVL)]
    return [AutoModelForImageTextToText.from_pretrained(folder) for folder in folders]


def own_rule(model, ids: list[int], grids: list[tuple[int, int]]) -> tuple[torch.Tensor, int]:
    """The positions ``[3, tokens]`` that the model itself computes, and the next free one."""
    row = torch.tensor([ids])
    patches = torch.tensor([[1, 2 * height, 2 * width] for height, width in grids]) if grids else None
    kinds = (row == PAD).int()
    positions, delta = model.model.get_rope_index(input_ids=row, mm_token_type_ids=kinds, image_grid_thw=patches)
    return positions[:, 0], int(delta) + len(ids)


def test_the_docstrings_example():
    positions, free = mrope_positions([7, 9, 9, 8], [(1, 2)], image_token_id=9)
    assert positions.tolist() == [[0, 1, 1, 3], [0, 1, 1, 3], [0, 1, 2, 3]]
    assert free == 4


def test_a_tall_image_and_a_start():
    positions, free = mrope_positions([9] * 6 + [7, 7], [(3, 2)], image_token_id=9, start=10)
    assert positions[0].tolist() == [10] * 6 + [13, 14]
    assert positions[1].tolist() == [10, 10, 11, 11, 12, 12, 13, 14]
    assert positions[2].tolist() == [10, 11, 10, 11, 10, 11, 13, 14]
    assert free == 15


def test_two_images_with_nothing_between_them():
    positions, free = mrope_positions([9, 9, 9, 9, 9], [(2, 2), (1, 1)], image_token_id=9)
    assert positions.tolist() == [[0, 0, 0, 0, 2], [0, 0, 1, 1, 2], [0, 1, 0, 1, 2]]
    assert free == 3


@pytest.mark.parametrize("image_token_id", [None, 9])
def test_text_alone_counts_on(image_token_id):
    positions, free = mrope_positions([5, 6, 7], [], image_token_id, start=4)
    assert positions.tolist() == [[4, 5, 6]] * 3
    assert free == 7


def test_positions_equal_the_models_own_rule(models):
    for seed in range(60):
        ids, grids = random_row(seed)
        positions, free = mrope_positions(ids, grids, PAD)
        for model in models:
            wanted, wanted_free = own_rule(model, ids, grids)
            assert torch.equal(positions, wanted), (type(model).__name__, seed)
            assert free == wanted_free


def test_positions_of_a_row_and_its_continuations_equal_the_whole():
    for seed in range(60):
        pieces = [random_row(3 * seed + turn) for turn in range(3)]
        whole, whole_free = mrope_positions(
            [token for ids, _ in pieces for token in ids], [grid for _, grids in pieces for grid in grids], PAD
        )
        parts, free = [], 0
        for ids, grids in pieces:
            positions, free = mrope_positions(ids, grids, PAD, start=free)
            parts.append(positions)
        assert torch.equal(torch.cat(parts, dim=1), whole), seed
        assert free == whole_free


def test_a_rows_positions_are_those_in_the_models_batch(models):
    """Rows of one padded batch keep the positions that each has alone."""
    rows = [random_row(seed) for seed in (1, 2, 3)]
    length = max(len(ids) for ids, _ in rows)
    batch = torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in rows])
    mask = torch.tensor([[1] * len(ids) + [0] * (length - len(ids)) for ids, _ in rows])
    patches = torch.tensor([[1, 2 * height, 2 * width] for _, grids in rows for height, width in grids])
    for model in models:
        wanted, _ = model.model.get_rope_index(
            input_ids=batch, mm_token_type_ids=(batch == PAD).int(), image_grid_thw=patches, attention_mask=mask
        )
        for index, (ids, grids) in enumerate(rows):
            assert torch.equal(mrope_positions(ids, grids, PAD)[0], wanted[:, index, : len(ids)])


def test_merged_grid_counts_visual_tokens():
    assert merged_grid(torch.tensor([[1, 12, 18]]), 2) == (6, 9)


def test_the_tiny_families_are_known_and_others_are_refused(tiny_folder):
    assert family_of(AutoConfig.from_pretrained(tiny_folder)).vision
    assert not family_of(SimpleNamespace(model_type="qwen3")).vision
    with pytest.raises(ValueError, match="model type 'gpt2' is not supported; supported are qwen2, qwen2_5_vl"):
        family_of(SimpleNamespace(model_type="gpt2"))


def test_only_a_model_with_recurrent_layers_may_not_share_or_pack_rows():
    bound = {name: family(None) for name, family in FAMILIES.items()}
    alone = [name for name, family in bound.items() if not (family.may_share and family.may_pack)]
    assert alone == ["qwen3_5"]
    assert [name for name, family in FAMILIES.items() if family.recurrent] == alone


def test_sliding_window_layers_are_refused():
    config = Qwen2Config(
        num_hidden_layers=2, hidden_size=64, intermediate_size=64, num_attention_heads=2, vocab_size=16
    )
    config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(ValueError, match=r"attend to the whole row, but .* hold \['sliding_attention'\]"):
        Policy(Qwen2ForCausalLM(config))
