"""A whole model with recurrent layers: rows as trees, packed and padded score and learn as single rows; bfloat16; what is refused."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from family_conformance import check_padded, check_tree_is_refused
from PIL import Image
from testing.trees import Watched, largest_difference, worst_gradient

from vlmrl.config import Algo, Lora, Model, Optim
from vlmrl.families.qwen3_5 import Qwen35
from vlmrl.model.loading import LoadedModel, load_model
from vlmrl.model.policy import Policy
from vlmrl.multimodal.placeholders import image_ids
from vlmrl.train.packing import pack, split
from vlmrl.train.trainer import TrainerSpec
from vlmrl.types import Sample

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> LoadedModel:
    return load(tmp_path_factory.mktemp("models"))


def load(folder, **settings) -> LoadedModel:
    settings = {"device": "cpu", "dtype": "float32"} | settings
    return load_model(Model(path="tiny:qwen3_5", **settings), folder, seed=0)


def a_row(ids, media, group, number, advantage) -> Sample:
    size = len(ids) - 1
    lists = (ids[:1], ids[1:], [1] * size, [-1.0] * size, [0] * size)
    return Sample(*lists, group, f"{group}/{number}", True, "stop", media, advantage)


def long_rows(model: LoadedModel) -> list[Sample]:
    """Prompts of more than a chunk with an image, responses of 1 to 90 tokens, and a trajectory whose turns branch off one by one."""
    dice = random.Random(0)
    store, pad = model.new_store(), model.policy.image_token_id
    assert store is not None and pad is not None
    item = store.load(Image.effect_noise((64, 96), 90).convert("RGB"))

    def text(size):
        return [dice.randrange(200) for _ in range(size)]

    prompt = [*text(50), 7, *image_ids(item, pad), 8, *text(47)]
    rows = [[*prompt, *text(size)] for size in (1, 1, 37, 90)]
    rows += [[*prompt[:70], *text(size)] for size in (1, 70)]
    chain = text(30)
    for _ in range(6):
        rows.append([*chain, *text(9)])
        chain += text(20)
    rows += [text(2), text(64), text(65)]
    media = [[item] if pad in row else [] for row in rows]
    return [
        replace(a_row(row, shown, "ab"[number % 2], number, dice.uniform(-1, 1)), group_id="ab"[number % 2])
        for number, (row, shown) in enumerate(zip(rows, media, strict=True))
    ]


def train(model: LoadedModel, rows, budget, layout) -> Watched:
    spec = TrainerSpec(Algo(loss="reinforce"), Optim(), total_steps=1, tokens_per_micro_batch=budget)
    trainer = Watched(model.policy, spec)
    trainer._layout = layout
    trainer.logprobs = trainer.step(rows).logprobs
    return trainer


@pytest.mark.parametrize("layout", ["tree", "packed", "padded"])
def test_long_rows_score_and_learn_as_single_rows(model, layout):
    rows = long_rows(model)
    alone, together = train(model, rows, 1, "padded"), train(model, rows, 10**6, layout)
    assert largest_difference(alone, together) < 1e-5
    assert worst_gradient(alone, together) < (1e-5, "")


def test_recomputed_layers_fork_again(tmp_path):
    model = load(tmp_path)
    rows = long_rows(model)
    kept = train(model, rows, 10**6, "tree")
    model.policy.enable_gradient_checkpointing()
    recomputed = train(model, rows, 10**6, "tree")
    assert largest_difference(kept, recomputed) < 1e-6
    assert worst_gradient(kept, recomputed) < (1e-6, "")


def test_adapters_of_recurrent_layers_learn_as_in_single_rows(tmp_path):
    model = load(tmp_path, lora=Lora(rank=4))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in model.policy.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.02)
    rows = long_rows(model)
    alone, together = train(model, rows, 1, "padded"), train(model, rows, 10**6, "tree")
    assert any("in_proj_qkv.lora_A" in name for name in together.gradient)
    assert largest_difference(alone, together) < 1e-5
    assert worst_gradient(alone, together) < (1e-5, "")


def scored(model: LoadedModel, rows, layout, budget=10**6) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The rows' logprobs, and the gradient of their sum weighted by the advantages; without a trainer's float32 weights."""
    found = [torch.empty(0)] * len(rows)
    for plan in split(rows, budget, layout, model.policy.image_token_id):
        packed = pack(rows, plan, model.family)
        logprobs = packed.by_sample(model.policy(packed.batch)).logprobs
        (logprobs * torch.tensor([rows[row].advantage for row in plan.rows])[:, None]).sum().backward()
        for row, values in zip(plan.rows, logprobs.detach(), strict=True):
            found[row] = values[: len(rows[row].response_ids)]
    gradient = {
        name: weight.grad.float() for name, weight in model.policy.named_parameters() if weight.grad is not None
    }
    model.policy.zero_grad()
    return torch.cat(found), gradient


def relative(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    a, b = (torch.cat([each[name].flatten() for name in other]) for each in (one, other))
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("layout", ["tree", "packed"])
def test_in_bfloat16_they_are_as_exact_as_single_rows(tmp_path, layout):
    """Both are compared with single rows of the same weights in float32.

    The limit leaves room for other CPUs' kernels, which round other sums. A branch without its states is 8 to 27 times off.
    """
    model = load(tmp_path, dtype="bfloat16")
    rows = long_rows(model)
    single, together = scored(model, rows, "padded", budget=1), scored(model, rows, layout)
    model.policy.float()
    exact = scored(model, rows, "padded", budget=1)
    single_off, together_off = ((each[0] - exact[0]).abs().mean() for each in (single, together))
    assert together_off < 1.5 * single_off
    assert relative(together[1], exact[1]) < 1.5 * relative(single[1], exact[1])


def test_a_family_that_cannot_fork_states_refuses_packed_rows_and_pads(model, monkeypatch, tmp_path):
    monkeypatch.setattr(Qwen35, "forked_layers", None)
    policy = Policy(model.policy.model, model.image_processor)
    assert not policy.family.may_share
    alone = replace(model, policy=policy)
    check_tree_is_refused(alone, tmp_path)
    check_padded(alone, tmp_path)
