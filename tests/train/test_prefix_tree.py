"""Shared prefixes are computed once, and nothing else changes: logprobs, gradients, positions, images."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from testing.fakes import PAD, make_item, qwen_vl
from testing.trees import Watched, random_rows

from vlmrl.config import Algo, Model, Optim
from vlmrl.families.base import Family
from vlmrl.families.qwen_vl import mrope_positions
from vlmrl.model import tree_attention
from vlmrl.model.loading import load_model
from vlmrl.train import prefix_tree
from vlmrl.train.packing import MicroBatchPlan, pack, split
from vlmrl.train.trainer import Trainer, TrainerSpec
from vlmrl.types import Sample

FAMILY, TEXT = qwen_vl(), Family(None)


def row(ids, media=(), name="t", group="g", prompt=1, mask=None):
    response = ids[prompt:]
    size = len(response)
    mask = [1] * size if mask is None else mask
    lists = (ids[:prompt], response, mask, [-1.0] * size, [0] * size)
    return Sample(*lists, group, name, True, "stop", list(media), 1.0)


def tree_of(*rows):
    order = prefix_tree.PrefixOrder(prefix_tree.atoms_of(rows, PAD))
    ordered = order.sort(range(len(rows)))
    return prefix_tree.build_tree([rows[index] for index in ordered], order.shared_lengths(ordered), FAMILY)


# The layout


def test_rows_that_begin_alike_are_laid_out_depth_first():
    tree = tree_of(row([1, 2, 5]), row([1, 2, 3, 4]))
    assert tree.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert [path.tolist() for path in tree.paths] == [[0, 1, 2, 3], [0, 1, 4]]
    assert tree.ends.tolist() == [5, 5, 4, 4, 5]
    assert tree.parents.tolist() == [-1, 0, 1, 2, 1]
    assert tree.position_ids[0].tolist() == [0, 1, 2, 3, 2]  # a branch continues where it forked


def test_a_row_that_another_begins_with_costs_nothing():
    tree = tree_of(row([1, 2]), row([1, 2, 3]), row([1, 2]))
    assert tree.token_ids.tolist() == [1, 2, 3] and tree.ends.tolist() == [3, 3, 3]
    assert [path.tolist() for path in tree.paths] == [[0, 1], [0, 1], [0, 1, 2]]


def test_rows_with_nothing_in_common_stand_side_by_side():
    tree = tree_of(row([1, 2]), row([3, 4, 5]))
    assert tree.ends.tolist() == [2, 2, 5, 5, 5] and tree.parents.tolist() == [-1, 0, -1, 2, 3]
    assert tree.position_ids[0].tolist() == [0, 1, 0, 1, 2]


def test_images_count_by_content_not_by_placeholder():
    red, blue = make_item("red", 2), make_item("blue", 2)
    same = tree_of(row([1, PAD, PAD, 5], [red]), row([1, PAD, PAD, 6], [red]))
    assert same.token_ids.tolist() == [1, PAD, PAD, 5, 6] and same.media == [red]
    other = tree_of(row([1, PAD, PAD, 5], [red]), row([1, PAD, PAD, 5], [blue]))
    assert len(other) == 7 and sorted(item.id for item in other.media) == ["blue", "red"]


# Micro-batches


def alike(group, first, size, branches, length, prompt=1):
    """Rows of one group: ``size`` tokens in common, then ``length`` of their own."""
    rows = []
    for number in range(branches):
        own = range(first + size + number * length, first + size + (number + 1) * length)
        rows.append(row([*range(first, first + size), *own], name=f"{group}{number}", group=group, prompt=prompt))
    return rows


def test_a_group_that_is_too_large_is_cut_where_least_is_computed_twice():
    rows = [row([1, 2, 3, 4, branch, *range(10, 16)]) for branch in (5, 6)] + [row([1, 7, *range(20, 29)])]
    order = prefix_tree.PrefixOrder(prefix_tree.atoms_of(rows, None))
    assert prefix_tree.cut(order, [0, 1, 2], 28) == [([0, 1, 2], 4 + 2 * 7 + 10)]
    assert prefix_tree.cut(order, [0, 1, 2], 27) == [([0, 1], 18), ([2], 11)]  # one token is computed twice, not four
    assert prefix_tree.cut(order, [0, 1, 2], 5) == [([0], 11), ([1], 11), ([2], 11)]


def test_the_cheapest_cut_looks_ahead():
    """Filling the first part up would cut in the middle of the second pair."""
    rows = [row([1, 2, 3, 4, 5, last]) for last in (6, 7)] + [row([9, 8, 7, 6, 5, last]) for last in (1, 2)]
    order = prefix_tree.PrefixOrder(prefix_tree.atoms_of(rows, None))
    assert prefix_tree.cut(order, [0, 1, 2, 3], 13) == [([0, 1], 7), ([2, 3], 7)]


def test_groups_share_a_micro_batch_and_stay_together():
    rows = alike("a", 0, 10, 4, 5) + alike("b", 100, 10, 4, 5) + alike("c", 200, 10, 2, 5)  # trees of 30, 30, 20 tokens
    parts = split(rows, 60, "tree")
    assert [part.rows for part in parts] == [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9]]
    assert [sorted(part.rows) for part in split(rows, 50, "tree")] == [[0, 1, 2, 3, 8, 9], [4, 5, 6, 7]]


def test_groups_that_begin_alike_share_too():
    """A system prompt: 20 + 2 * 30 tokens instead of 2 * 50."""
    rows = alike("a", 0, 20, 3, 10) + [row([*range(20), *range(500 + n, 510 + n)], group="b") for n in (0, 100, 200)]
    (part,) = split(rows, 80, "tree")
    assert len(pack(rows, part, TEXT).batch.token_ids[0]) == 80
    assert len(split(rows, 79, "tree")) == 2


def test_a_trajectorys_turns_cost_what_its_last_row_costs():
    """Four step-wise rows of a linear history, each the beginning of the next."""
    rows = [row(list(range(length)), prompt=length - 3) for length in (10, 18, 26, 34)]
    (part,) = split(rows, 34, "tree")
    batch = pack(rows, part, TEXT).batch
    assert batch.token_ids[0].tolist() == list(range(34)) and int(batch.targets.sum()) == 12
    assert len(split(rows, 34, "packed")) > 1


def test_packed_rows_stand_end_to_end():
    rows = [row(list(range(length))) for length in (5, 3, 4)]
    assert [part.rows for part in split(rows, 9, "packed")] == [[0, 2], [1]]
    batch = pack(rows, MicroBatchPlan([0, 2], "packed"), TEXT).batch
    assert batch.token_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3]]
    assert batch.ends.tolist() == [[5] * 5 + [9] * 4]


# Against rows of their own


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl"])
def model(request, tmp_path_factory):
    return load_model(Model(path=f"tiny:{request.param}", device="cpu"), tmp_path_factory.mktemp("m"), seed=0)


def train(model, rows, budget, layout):
    spec = TrainerSpec(Algo(loss="reinforce"), Optim(), total_steps=1, tokens_per_micro_batch=budget)
    trainer = Watched(model.policy, spec)
    trainer._layout = layout
    return trainer, trainer.step(rows)


def assert_same(one, other):
    """Logprobs, entropies and gradients of two trainers' steps."""
    (trainer, output), (again, more) = one, other
    for logprobs, others in zip(output.logprobs, more.logprobs, strict=True):
        assert np.abs(logprobs - others).max() < 1e-5
    assert more.metrics["entropy"] == pytest.approx(output.metrics["entropy"], rel=1e-5)
    for name, gradient in trainer.gradient.items():
        assert (gradient - again.gradient[name]).norm() <= 1e-5 * gradient.norm() + 1e-9, name


@pytest.mark.parametrize(
    ("seed", "layout", "budget"),
    [(0, "tree", 10**6), (1, "tree", 60), (0, "packed", 100), (1, "packed", 100), (2, "packed", 100)],
)
def test_logprobs_and_gradients_are_those_of_single_rows(model, seed, layout, budget):
    rows = random_rows(model, seed, trained=0.7)
    assert_same(train(model, rows, 1, "padded"), train(model, rows, budget, layout))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.slow
def test_flex_attention_scores_as_the_cpu_does(model, monkeypatch):
    """Its forward only, and not compiled: it has no gradient on a CPU."""
    rows = random_rows(model, 0, trained=0.7)
    (part,) = split(rows, 10**6, "tree", model.policy.image_token_id)
    packed = pack(rows, part, model.policy.family)
    with torch.no_grad():
        wanted = model.policy(packed.batch)
        monkeypatch.setattr(tree_attention, "plan", tree_attention.block_mask)
        with torch.compiler.set_stance("force_eager"):
            got = model.policy(packed.batch)
    assert torch.allclose(got.logprobs, wanted.logprobs, atol=2e-6) and float(wanted.logprobs.min()) < -1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: flex attention has no gradient on a CPU")
@pytest.mark.parametrize("layout", ["tree", "packed"])
def test_a_gpu_gives_the_gradients_of_padded_rows(layout, tmp_path):
    model = load_model(Model(path="tiny:qwen3_vl", device="cuda", dtype="float32"), tmp_path, seed=0)
    rows = random_rows(model, 0, trained=0.7)
    (plain, padded), (other, laid_out) = train(model, rows, 1, "padded"), train(model, rows, 400, layout)
    for one, two in zip(padded.logprobs, laid_out.logprobs, strict=True):
        assert np.abs(one - two).max() < 1e-3
    for name, gradient in plain.gradient.items():
        assert (gradient - other.gradient[name]).norm() <= 1e-2 * gradient.norm() + 1e-6, name


def updated(model, rows, **options):
    """What a whole step adds to the weights; the model stays as it was.

    Adam divides by the gradient's own size, so by itself it would turn rounding of gradients near 0 into updates of either sign.
    """
    before = copy.deepcopy(model.policy.state_dict())
    trainer = Trainer(model.policy, TrainerSpec(Algo(), Optim(lr=1.0), total_steps=1, **options))
    trainer.optimizer.param_groups[0]["eps"] = 1e-2
    trainer.step(rows)
    after = {name: parameter.detach() - before[name] for name, parameter in model.policy.named_parameters()}
    model.policy.load_state_dict(before)
    return after


def test_a_step_updates_the_weights_alike_however_rows_are_laid_out(model):
    """Two groups that show the same images, in one tree and cut into many."""
    rows = random_rows(model, 4, trained=0.7)
    shown = [{item.id for each in rows if each.group_id == group for item in each.media} for group in ("a", "b")]
    assert shown[0] & shown[1]
    padded = updated(model, rows, tokens_per_micro_batch=200, share_prefixes=False)
    for budget in (10**6, 50):
        shared = updated(model, rows, tokens_per_micro_batch=budget)
        for name, update in padded.items():
            rounded = 1e-6  # of weights near 1, each by 6e-8
            assert (update - shared[name]).norm() <= 1e-4 * update.norm() + rounded, name


@pytest.mark.parametrize("layout", ["tree", "packed"])
@pytest.mark.parametrize("seed", range(3))
def test_positions_are_those_the_row_has_alone_and_images_are_encoded_once(model, seed, layout):
    rows = [replace(each, loss_mask=[1] * len(each.response_ids)) for each in random_rows(model, seed)]
    token = model.policy.image_token_id
    for part in split(rows, 100, layout, token):
        packed = pack(rows, part, model.policy.family)
        for index, indices in zip(part.rows, packed.indices, strict=True):
            grids = [tuple((item.sizes["image_grid_thw"][0, 1:] // 2).tolist()) for item in rows[index].media]
            wanted, _ = mrope_positions(rows[index].token_ids, grids, token)
            trained = indices >= 0
            assert int(trained.sum()) == len(rows[index].response_ids)
            assert torch.equal(packed.batch.position_ids[:, 0, indices[trained]], wanted[:, -int(trained.sum()) :])
            assert packed.batch.token_ids[0, indices[trained]].tolist() == rows[index].response_ids
        images = {item.id for index in part.rows for item in rows[index].media}
        assert len(packed.batch.images) == len(images)
