"""Shared prefixes are computed once, and nothing else changes: logprobs, gradients, positions, pictures."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes import PAD, make_item
from PIL import Image

from vlmrl.config import Algo, Model, Optim
from vlmrl.model.families import rope_positions
from vlmrl.model.loading import load_model
from vlmrl.model.policy import tree_mask
from vlmrl.train import prefix_tree
from vlmrl.train.packing import Sharing, pack, split
from vlmrl.train.trainer import Trainer
from vlmrl.types import Sample


def row(ids, media=(), name="t", group="g", prompt=1, mask=None):
    response = ids[prompt:]
    size = len(response)
    mask = [1] * size if mask is None else mask
    lists = (ids[:prompt], response, mask, [-1.0] * size, [0.0] * size, [0] * size)
    return Sample(*lists, group, name, True, "stop", list(media), 1.0)


def tree_of(*rows):
    atoms = prefix_tree.atoms_of(rows, PAD)
    return prefix_tree.build(rows, atoms, prefix_tree.in_order(atoms, range(len(rows))), PAD, 2)


# The layout


def test_rows_that_begin_alike_are_laid_out_depth_first():
    tree = tree_of(row([1, 2, 5]), row([1, 2, 3, 4]))
    assert tree.rows == [1, 0]  # in the order of their tokens
    assert tree.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert [path.tolist() for path in tree.paths] == [[0, 1, 2, 3], [0, 1, 4]]
    assert tree.ends.tolist() == [5, 5, 4, 4, 5]
    assert tree.parents.tolist() == [-1, 0, 1, 2, 1]
    assert tree.position_ids[0].tolist() == [0, 1, 2, 3, 2]  # a branch goes on from where it left


def test_a_row_that_another_begins_with_costs_nothing():
    tree = tree_of(row([1, 2]), row([1, 2, 3]), row([1, 2]))
    assert tree.token_ids.tolist() == [1, 2, 3] and tree.ends.tolist() == [3, 3, 3]
    assert [tree.paths[tree.rows.index(index)].tolist() for index in range(3)] == [[0, 1], [0, 1, 2], [0, 1]]


def test_a_token_sees_its_ancestors_and_itself():
    tree = tree_of(row([1, 2, 5]), row([1, 2, 3, 4]))
    mask = tree_mask(torch.from_numpy(tree.ends)[None])[0, 0].int().tolist()
    assert mask == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 0, 0, 1]]


def test_pictures_count_by_content_not_by_placeholder():
    red, blue = make_item("red", 2), make_item("blue", 2)
    same = tree_of(row([1, PAD, PAD, 5], [red]), row([1, PAD, PAD, 6], [red]))
    assert same.token_ids.tolist() == [1, PAD, PAD, 5, 6] and same.media == [red]
    other = tree_of(row([1, PAD, PAD, 5], [red]), row([1, PAD, PAD, 5], [blue]))
    assert len(other) == 7 and sorted(item.id for item in other.media) == ["blue", "red"]


def test_a_tree_that_is_too_large_is_cut_where_least_is_repeated():
    rows = [row([1, 2, 3, 4, branch, *range(10, 16)]) for branch in (5, 6)] + [row([1, 7, *range(20, 29)])]
    atoms = prefix_tree.atoms_of(rows, None)
    assert prefix_tree.cut(atoms, [0, 1, 2], 28) == [([0, 1, 2], 4 + 2 * 7 + 10)]
    assert prefix_tree.cut(atoms, [0, 1, 2], 27) == [([0, 1], 18), ([2], 11)]  # one token is repeated, not four
    assert prefix_tree.cut(atoms, [0, 1, 2], 5) == [([0], 11), ([1], 11), ([2], 11)]


# Against rows of their own


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl"])
def model(request, tmp_path_factory):
    return load_model(Model(path=f"tiny:{request.param}", device="cpu"), None, tmp_path_factory.mktemp("m"), seed=0)


def random_rows(model, seed):
    """Two groups of 2 to 8 rows that branch anywhere; pictures in prompts and in the middle, some of them twice."""
    dice, store = random.Random(seed), model.new_store()
    gallery = [store.load(Image.effect_noise((32 * w, 32 * h), 90).convert("RGB")) for w, h in ((1, 2), (2, 2), (3, 1))]

    def piece():
        if dice.random() < 0.3:
            item = dice.choice(gallery)
            return [7, *[model.policy.image_token_id] * item.num_tokens, 8], [item]
        return [dice.randrange(200) for _ in range(dice.randint(1, 6))], []

    rows = []
    for group in ("a", "b"):
        branches = [[piece(), piece()]]
        for _ in range(dice.randint(1, 7)):
            grown = dice.choice(branches)
            branches.append(grown[: dice.randint(1, len(grown))] + [piece() for _ in range(dice.randint(1, 3))])
        for number, branch in enumerate(branches):
            ids = [1, *(id for part, _ in branch for id in part)]
            mask = [int(id != model.policy.image_token_id and dice.random() < 0.7) for id in ids[1:-1]] + [1]
            media = [item for _, shown in branch for item in shown]
            new = row([*ids, dice.randrange(200)], media, f"{group}{number}", group, 2, mask)
            rows.append(replace(new, advantage=dice.uniform(-1, 1)))
    return rows


class Watched(Trainer):
    """Keeps the gradient, and throws it away."""

    def _apply_gradient(self):
        self.gradient = {n: p.grad.clone() for n, p in self.policy.named_parameters() if p.grad is not None}
        self.policy.zero_grad()
        return {}


def train(model, rows, budget, share):
    options = {"tokens_per_micro_batch": budget, "share_prefixes": share}
    trainer = Watched(model.policy, Algo(loss="reinforce"), Optim(), total_steps=1, **options)
    metrics = trainer.step(rows)
    return trainer, metrics


@pytest.mark.parametrize("budget", [10**6, 60])
@pytest.mark.parametrize("seed", range(3))
def test_logprobs_and_gradients_are_those_of_single_rows(model, monkeypatch, seed, budget):
    monkeypatch.setattr("vlmrl.train.packing.MASKED", -1e9)  # trees for all
    rows = random_rows(model, seed)
    plain, plain_metrics = train(model, rows, 1, share=False)
    shared, shared_metrics = train(model, rows, budget, share=True)
    for one, other in zip(plain.scored, shared.scored, strict=True):
        assert np.abs(one - other).max() < 1e-5
    assert shared_metrics["entropy"] == pytest.approx(plain_metrics["entropy"], rel=1e-5)
    for name, gradient in plain.gradient.items():
        assert (gradient - shared.gradient[name]).norm() <= 1e-5 * gradient.norm() + 1e-9, name


@pytest.mark.parametrize("seed", range(3))
def test_positions_are_those_the_row_has_alone_and_pictures_are_encoded_once(model, seed):
    rows = random_rows(model, seed)
    policy = model.policy
    atoms = prefix_tree.atoms_of(rows, policy.image_token_id)
    ordered = prefix_tree.in_order(atoms, range(len(rows)))
    tree = prefix_tree.build(rows, atoms, ordered, policy.image_token_id, policy.merge_size)
    for index, path in zip(tree.rows, tree.paths, strict=True):
        grids = [tuple((item.mm_inputs["image_grid_thw"][0, 1:] // 2).tolist()) for item in rows[index].media]
        wanted, _ = rope_positions(rows[index].token_ids, grids, policy.image_token_id)
        assert torch.equal(tree.position_ids[:, path], wanted)
        assert tree.token_ids[path].tolist() == rows[index].token_ids
    for part in split(rows, 10**6, Sharing(policy.image_token_id, 2, policy.attention_balance)):
        packed = pack(rows, part, policy.image_token_id, 2)
        pictures = {item.id for index in part.rows for item in rows[index].media}
        assert len(packed.batch.mm_inputs.get("image_grid_thw", [])) == len(pictures)
        shown = int((packed.batch.token_ids == policy.image_token_id).sum())
        assert shown == sum(item.num_tokens for tree in part.trees for item in tree.media) or not part.trees


def test_a_tree_is_built_where_it_is_cheaper_than_rows():
    sharing = Sharing(None, 1, balance=1000.0)
    little = [row([1, *range(start, start + 20)], name=str(start)) for start in (10, 40, 70)]
    (part,) = split(little, 10**6, sharing)
    assert part.trees == [] and part.rows == [0, 1, 2]
    much = [row([1, *range(20), last], name=str(last)) for last in (5, 6, 7)]
    (part,) = split(much, 10**6, sharing)
    assert [len(tree) for tree in part.trees] == [24]


def test_branches_that_are_long_share_in_smaller_trees():
    rows = [row([*range(500), *range(1000 * n, 1000 * n + 400)], name=str(n)) for n in range(1, 9)]
    parts = split(rows, 10**6, Sharing(None, 1, balance=3000.0))
    sizes = [len(tree.rows) for part in parts for tree in part.trees]
    assert sum(sizes) == 8 and 1 < max(sizes) < 8
