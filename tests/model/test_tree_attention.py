"""The attention of trees against a dense mask: on a CPU span by span, and flex attention's blocks."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from vlmrl.model import tree_attention
from vlmrl.model.tree_attention import BLOCK, Span, attend, block_mask, plan, spans


def random_ends(seed, tokens, branching):
    """The ends of random trees side by side, laid out depth-first."""
    dice = random.Random(seed)
    path, paths = [], []
    for place in range(tokens):
        if dice.random() < branching:
            path = path[: dice.randint(0, len(path))]
        path = [*path, place]
        paths.append(path)
    ends = np.arange(1, tokens + 1)
    for place, path in enumerate(paths):
        ends[path] = place + 1
    return torch.from_numpy(ends)


def seen(ends):
    """The mask ``[queries, keys]`` by its definition: a token attends to its ancestors and itself."""
    places = torch.arange(len(ends))
    return (places[None, :] <= places[:, None]) & (places[:, None] < ends[None, :])


def test_spans_are_cut_where_a_tree_branches_and_where_the_next_begins():
    """[1 2 3 4], [1 2 5], and [6 7] beside them."""
    assert spans(np.array([5, 5, 4, 4, 5, 7, 7])) == [
        Span(0, 2, 5, True),
        Span(2, 4, 4, False),
        Span(4, 5, 5, False),
        Span(5, 7, 7, True),
    ]


@pytest.mark.parametrize("branching", [0.0, 0.02, 0.3])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_spans_give_what_a_dense_mask_gives_with_its_gradients(branching, heads):
    ends = random_ends(0, 200, branching)
    torch.manual_seed(0)
    ours = [torch.randn(1, 200, n, 16).transpose(1, 2).requires_grad_() for n in (heads[0], heads[1], heads[1])]
    theirs = [tensor.detach().clone().requires_grad_() for tensor in ours]
    got, _ = attend(torch.nn.Module(), *ours, None, scaling=0.3, tree=plan(ends))
    wanted = scaled_dot_product_attention(*theirs, attn_mask=seen(ends), scale=0.3, enable_gqa=True).transpose(1, 2)
    assert torch.allclose(got, wanted, atol=2e-6)
    grad = torch.randn_like(got)
    got.backward(grad)
    wanted.backward(grad)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one.grad, other.grad, atol=5e-6)


def test_spans_work_in_bfloat16():
    ends = random_ends(1, 150, 0.05)
    torch.manual_seed(0)
    operands = [torch.randn(1, 4, 150, 16, dtype=torch.bfloat16) for _ in range(3)]
    got, _ = attend(torch.nn.Module(), *operands, None, tree=plan(ends))
    wanted = scaled_dot_product_attention(*(t.float() for t in operands), attn_mask=seen(ends)).transpose(1, 2)
    assert got.dtype == torch.bfloat16 and torch.allclose(got.float(), wanted, atol=2e-2)


def test_gradients_of_queries_deep_in_a_bfloat16_tree_are_as_exact_as_those_of_a_row():
    """Before each of 64 spans a branch of its own: the last queries have 64 pieces, whose gradients are added in float32."""
    ends = torch.tensor(
        [512] * 4 + [end for start in range(4, 508, 8) for end in [start + 4] * 4 + [512] * 4] + [512] * 4
    )
    path = (ends == 512).nonzero().squeeze(1)
    torch.manual_seed(0)
    *operands, grad = torch.randn(4, 1, 2, 512, 32).bfloat16()

    def last_gradients(attended, places, dtype):
        query, key, value = (tensor[:, :, places].to(dtype).requires_grad_() for tensor in operands)
        [found] = torch.autograd.grad(attended(query, key, value), query, grad[:, :, places].to(dtype))
        return found[:, :, -8:].double()

    def single_row(query, key, value):
        return scaled_dot_product_attention(query, key, value, is_causal=True)

    def tree(query, key, value):
        return attend(torch.nn.Module(), query, key, value, None, tree=plan(ends))[0].transpose(1, 2)

    exact = last_gradients(single_row, path, torch.float64)
    row = last_gradients(single_row, path, torch.bfloat16)
    deep = last_gradients(tree, slice(None), torch.bfloat16)
    assert (deep - exact).norm() < 1.5 * (row - exact).norm()


def blocks(counts, indices):
    """Flex attention's lists as a set of (block of queries, block of keys)."""
    return {(row, int(i)) for row, n in enumerate(counts[0, 0].tolist()) for i in indices[0, 0, row, :n]}


@pytest.mark.parametrize("branching", [0.0, 0.003, 0.02])
@pytest.mark.parametrize("tokens", [4 * BLOCK, 5 * BLOCK + 17])
def test_blocks_are_those_of_the_dense_mask(tokens, branching):
    ends = random_ends(2, tokens, branching)
    ours = block_mask(ends)
    theirs = create_block_mask(ours.mask_mod, None, None, tokens, tokens, device="cpu", BLOCK_SIZE=BLOCK)
    whole = blocks(ours.full_kv_num_blocks, ours.full_kv_indices)
    assert whole == blocks(theirs.full_kv_num_blocks, theirs.full_kv_indices)
    partly = blocks(ours.kv_num_blocks, ours.kv_indices)
    assert partly == blocks(theirs.kv_num_blocks, theirs.kv_indices)
    assert len(partly) + len(whole) < (tokens / BLOCK + 1) ** 2 / 1.5  # or every block would be computed


@pytest.mark.parametrize("heads", [(4, 2), (6, 2)])
@pytest.mark.parametrize("tokens", [100, 300])
def test_flex_attention_gives_what_a_dense_mask_gives(heads, tokens, monkeypatch):
    """Uncompiled, and without its gradient, which flex attention has on a GPU only; `tests/gpu_sim/test_flex.py` compiles it."""
    monkeypatch.setattr(tree_attention, "_compiled_flex", lambda: flex_attention)
    torch.manual_seed(0)
    ends = random_ends(2, tokens, 0.02)
    operands = [torch.randn(1, count, tokens, 32) for count in (heads[0], heads[1], heads[1])]
    with torch.no_grad():
        got, _ = attend(torch.nn.Module(), *operands, None, scaling=0.3, tree=block_mask(ends))
    wanted = scaled_dot_product_attention(*operands, attn_mask=seen(ends), scale=0.3, enable_gqa=True)
    assert torch.allclose(got, wanted.transpose(1, 2), atol=5e-6)


@pytest.mark.parametrize("made", ["by another user", "as another user's link", "by us"])
def test_the_compiler_runs_no_code_from_a_folder_that_another_user_has_made(made, tmp_path, monkeypatch):
    """It runs what it finds in /tmp/torchinductor_NAME: whoever made that folder first could run code as NAME."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("LOGNAME", "somebody")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    usual = Path(default_cache_dir())
    if made == "by us":
        for _ in range(2):
            tree_attention._compiled_flex.__wrapped__()
            assert usual.parent == tmp_path and usual.stat().st_mode & 0o777 == 0o700
        return
    usual.mkdir() if made == "by another user" else usual.symlink_to(tmp_path)
    monkeypatch.setattr("os.getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ValueError, match=r"torchinductor_somebody, .* belongs to another user: set .* TMPDIR"):
        tree_attention._compiled_flex.__wrapped__()
