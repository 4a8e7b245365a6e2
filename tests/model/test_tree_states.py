"""Recurrent layers over trees: the sequences of a layout, and Qwen3.5's layer against its own forward, row by row."""

from __future__ import annotations

import random
import sys
from functools import wraps
from types import ModuleType

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize
from transformers import Qwen3_5TextConfig
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from vlmrl.families.qwen3_5 import Qwen35
from vlmrl.model.tree_states import CHUNK, forks

CPU = torch.device("cpu")


def laid_out(rows):
    """The ends of rows laid out depth-first, and each row's places.

    ``[(0, 4), (2, 1)]``: a row of four tokens, and one that shares two of them with the row before and has one of its own.
    """
    paths, size = [], 0
    for shared, own in rows:
        paths.append([*(paths[-1][:shared] if shared else []), *range(size, size + own)])
        size += own
    ends = np.arange(1, size + 1)
    for path in paths:
        ends[path] = path[-1] + 1
    return torch.from_numpy(ends), paths


def random_layout(seed, rows, longest):
    dice = random.Random(seed)
    found = [(0, dice.randint(1, longest))]
    for _ in range(rows - 1):
        before = sum(found[-1])
        found.append((dice.choice([0, dice.randint(1, before)]), dice.randint(1, longest)))
    return laid_out(found)


def test_sequences_end_at_branches_and_begin_with_their_parents_last_tokens():
    """[1 2 3 4], [1 2 5], and [6] beside them."""
    ends, _ = laid_out([(0, 4), (2, 1), (0, 1)])
    assert ends.tolist() == [5, 5, 4, 4, 5, 6]
    found = forks(ends, 3, CPU)
    (first,), (second,) = found.levels
    assert first.tokens.tolist() == [[0, 1], [5, 6]] and first.parents is None
    assert second.tokens.tolist() == [[2, 3], [4, 6]] and second.parents.tolist() == [0, 0]
    assert found.places.tolist() == [0, 1, 4, 5, 6, 2]
    assert found.windows.tolist() == [6, 6, 6, 0, 1, 6, 0, 1, 2, 3, 6, 0, 1, 4, 6, 6, 6, 5]


def test_padding_at_most_doubles_the_chunks():
    lengths = [1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, 4 * CHUNK, 9 * CHUNK]
    ends, _ = laid_out([(0, length) for length in lengths])
    (level,) = forks(ends, 3, CPU).levels
    assert [list(batch.tokens.shape) for batch in level] == [
        [2, CHUNK],
        [2, 2 * CHUNK],
        [2, 4 * CHUNK],
        [1, 9 * CHUNK],
    ]


@pytest.mark.parametrize("seed", range(3))
def test_a_scan_over_a_tree_is_one_over_each_row(seed):
    """A recurrence that sums: integers, so that the sums are exact."""
    ends, paths = random_layout(seed, rows=12, longest=90)
    inputs = torch.randint(1, 9, (len(ends), 2))

    def summed(values, state):
        sums = values.cumsum(1) + (0 if state is None else state[:, None])
        return sums, sums[:, -1]

    found = forks(ends, 0, CPU).scan(summed, inputs)
    assert len(paths) == 12
    for path in paths:
        assert torch.equal(found[path], inputs[path].cumsum(0))


@pytest.mark.parametrize("seed", range(3))
def test_a_convolution_over_a_tree_is_one_over_each_row(seed):
    ends, paths = random_layout(seed, rows=12, longest=5)
    convolution = torch.nn.Conv1d(2, 2, 4, groups=2, padding=3, bias=False)
    inputs = torch.randn(len(ends), 2)
    found = forks(ends, 3, CPU).convolve(inputs, convolution)
    for path in paths:
        wanted = convolution(inputs[path].T[None])[0, :, : len(path)].T
        assert torch.allclose(found[path], wanted, atol=1e-6)


def a_layer(seed=0):
    """One of Qwen3.5's, whose heads remember 2 to 100 tokens."""
    torch.manual_seed(seed)
    config = Qwen3_5TextConfig(
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        layer_types=["linear_attention"],
    )
    layer = Qwen3_5GatedDeltaNet(config, 0)
    with torch.no_grad():
        layer.A_log.copy_(torch.linspace(-5, -1, 4))
    return layer


LAYOUTS = {
    "one row": [(0, 150)],
    "rows of one token": [(0, 1), (0, 1), (0, 70), (0, 1)],
    "a branch in the middle of a chunk": [(0, 200), (100, 30), (100, 64), (37, 100)],
    "a branch between chunks": [(0, 128), (64, 64), (64, 10)],
    "nodes of one token": [(0, 3), (2, 1), (2, 1), (1, 2), (1, 1)],
    "a deep chain of branches": [(0, 5), *((3 + 2 * i, 4) for i in range(30))],
    "packed rows of all lengths": [(0, length) for length in (5, 64, 1, 65, 200, 130, 3)],
}


def over_tree(layer, layout, inputs, weights):
    """Each row's outputs, and the gradients of inputs and parameters, with a different weight for each token of each row."""
    ends, paths = layout
    hidden = inputs.clone().requires_grad_()
    output = Qwen35(None).run_forked(layer, hidden, forks(ends, 3, CPU))
    return backward(layer, hidden, [output[path] for path in paths], weights)


def row_by_row(layer, layout, inputs, weights):
    """The same by the layer's own forward."""
    hidden = inputs.clone().requires_grad_()
    return backward(layer, hidden, [layer(hidden[path][None])[0] for path in layout[1]], weights)


def backward(layer, hidden, rows, weights):
    layer.zero_grad()
    sum((row * weight).sum() for row, weight in zip(rows, weights, strict=True)).backward()
    return rows, [hidden.grad, *(each.grad.clone() for each in layer.parameters())]


def assert_equal(results, wanted, gradients=1e-5):
    for ours, theirs in zip(results[0], wanted[0], strict=True):
        assert float((ours - theirs).detach().abs().max()) < 1e-5
    for ours, theirs in zip(results[1], wanted[1], strict=True):
        assert (ours - theirs).norm() < gradients * theirs.norm()


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layer_over_a_tree_is_its_own_forward_over_each_row(name):
    layer, layout = a_layer(), laid_out(LAYOUTS[name])
    inputs, weights = torch.randn(len(layout[0]), 64), [torch.randn(len(path), 64) for path in layout[1]]
    assert_equal(over_tree(layer, layout, inputs, weights), row_by_row(layer, layout, inputs, weights))


def written_rule(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
    **kwargs,
):
    """With the signature, the shapes and the dtypes of flash-linear-attention's kernel, token by token."""
    shape = (len(v), v.shape[2], k.shape[3], v.shape[3])
    assert q.shape == k.shape and k.shape[:2] == v.shape[:2] and v.shape[2] % k.shape[2] == 0
    assert g.shape == beta.shape == v.shape[:3] and g.dtype == torch.float32 and q.dtype == k.dtype == v.dtype
    assert initial_state is None or (initial_state.shape == shape and initial_state.dtype == torch.float32)
    assert output_final_state and use_qk_l2norm_in_kernel and cu_seqlens is None and not kwargs
    q, k = (normalize(each, dim=-1).repeat_interleave(v.shape[2] // k.shape[2], dim=2) for each in (q, k))
    state, outputs = torch.zeros(shape) if initial_state is None else initial_state, []
    for token in range(v.shape[1]):
        state = state * g[:, token, :, None, None].exp()
        known = torch.einsum("rhkv,rhk->rhv", state, k[:, token])
        written = (v[:, token] - known) * beta[:, token, :, None]
        state = state + torch.einsum("rhk,rhv->rhkv", k[:, token], written)
        outputs.append(torch.einsum("rhkv,rhk->rhv", state, q[:, token]) * (scale or k.shape[3] ** -0.5))
    return torch.stack(outputs, 1), state


@pytest.mark.parametrize("name", LAYOUTS)
def test_flash_linear_attention_gets_what_it_takes(name, monkeypatch):
    """transformers takes its kernel where the package is found; here a module in its place."""
    layer, layout = a_layer(), laid_out(LAYOUTS[name])
    inputs, weights = torch.randn(len(layout[0]), 64), [torch.randn(len(path), 64) for path in layout[1]]
    wanted, calls = row_by_row(layer, layout, inputs, weights), []

    @wraps(written_rule)
    def counted(*args, **options):
        calls.append(options["initial_state"])
        return written_rule(*args, **options)

    path = ["fla", "ops", "gated_delta_rule"]
    modules = [ModuleType(".".join(path[: level + 1])) for level in range(3)]
    modules[2].chunk_gated_delta_rule = counted
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    found = use_kernel_func_from_hub_with_fallback("chunk_gated_delta_rule", "fla")(lambda *args, **options: None)
    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", found)
    assert_equal(over_tree(layer, layout, inputs, weights), wanted, gradients=1e-4)  # another order of sums
    levels = forks(layout[0], 3, CPU).levels
    assert [state is None for state in calls] == [batch.parents is None for level in levels for batch in level]
