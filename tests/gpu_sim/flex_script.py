"""Compiles tree attention for sm_90 at one model's shape and prints the number of graphs and the kernels' shared memory as JSON.

Arguments: query heads, key heads, head width, and the lengths in tokens.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch._dynamo.utils import counters

from vlmrl.model.tree_attention import attend, plan

heads, key_heads, width, *lengths = map(int, sys.argv[1:])


def tree_of(tokens: int) -> torch.Tensor:
    """The ends of a prompt of half the tokens, and two responses of a quarter each."""
    first = tokens // 2 + tokens // 4
    ends = torch.full((tokens,), tokens)
    ends[tokens // 2 : first] = first
    return ends


def run(tokens: int, training: bool) -> None:
    module = torch.nn.Module().train(training)
    query, key, value = (
        torch.zeros(1, count, tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=training)
        for count in (heads, key_heads, key_heads)
    )
    with torch.set_grad_enabled(training):
        out, _ = attend(module, query, key, value, None, scaling=width**-0.5, tree=plan(tree_of(tokens).cuda()))
    assert out.shape == (1, tokens, heads, width)
    if training:
        out.backward(torch.zeros_like(out))
        assert query.grad is not None and key.grad is not None and key.grad.shape == key.shape


for tokens in lengths:
    for training in (True, False, True):  # as a step: it is scored and trained by turns
        run(tokens, training)
compiled = [
    json.loads(path.read_text()) for path in Path(os.environ["TRITON_CACHE_DIR"]).rglob("*flex_attention*.json")
]
kernels = [kernel for kernel in compiled if "shared" in kernel]
print(
    json.dumps(
        {
            "graphs": counters["stats"]["unique_graphs"],
            "shared": [kernel["shared"] for kernel in kernels],
            "architectures": sorted({kernel["target"]["arch"] for kernel in kernels}),
            "backward": any("backward" in kernel["name"] for kernel in kernels),
        }
    )
)
