"""Compiles the decoder layers of one width for sm_90, and prints the graphs and a layer's elementwise kernels as JSON.

Arguments: the model type, its text config as JSON, and the lengths in tokens.
"""

from __future__ import annotations

import json
import sys

import torch
from testing.gpu_sim import device_counts
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForCausalLM

from vlmrl.model import tree_attention
from vlmrl.model.policy import Policy

kind, fields, lengths = sys.argv[1], json.loads(sys.argv[2]), [*map(int, sys.argv[3:])]
config = AutoConfig.for_model(kind, **fields, num_hidden_layers=3, vocab_size=1000)
with torch.device("cuda"):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
policy = Policy(model).train()
layers = model.model.layers
GEMMS = sum(isinstance(module, torch.nn.Linear) for module in layers[0].modules())
FLEX = 1  # kernels of flex attention in a forward pass, and two in a backward pass


def run(depth: int, tokens: int, training: bool = True) -> dict[str, int]:
    """Launches of a forward and a backward pass through ``depth`` layers, and the peak of its activations."""
    model.model.layers = layers[:depth]
    model.config.num_hidden_layers = depth
    torch.cuda.reset_peak_memory_stats()
    ids, before = torch.zeros(1, tokens, dtype=torch.long, device="cuda"), device_counts()["launches"]
    held = torch.cuda.memory_allocated()
    tree = tree_attention.plan(torch.full((tokens,), tokens, device="cuda"))
    with torch.set_grad_enabled(training):
        hidden = policy.hidden(ids, torch.arange(tokens, device="cuda").expand(3, 1, -1), tree=tree)
    forward = device_counts()["launches"] - before
    if training:
        hidden.backward(torch.zeros_like(hidden))
    backward, peak = device_counts()["launches"] - before - forward, torch.cuda.max_memory_allocated() - held
    policy.zero_grad()
    return {
        "forward": forward - depth * (GEMMS + FLEX),
        "backward": backward - 2 * depth * (GEMMS + FLEX),
        "peak": peak,
    }


def of_a_layer() -> dict[str, float]:
    """By the difference between three layers and one."""
    for depth in (3, 1):
        run(depth, 4096)  # whatever happens at a first call
    most, one = run(3, 4096), run(1, 4096)
    return {name: (most[name] - one[name]) / 2 for name in most}


result = {"eager": of_a_layer()}
model.model.layers = layers
policy.compile_layers()
before = counters["stats"]["unique_graphs"]
result["compiled"] = of_a_layer()
made = [counters["stats"]["unique_graphs"] - before]
for tokens in lengths:
    for training in (True, False):
        run(2, tokens, training)
    made.append(counters["stats"]["unique_graphs"] - before)
print(json.dumps(result | {"graphs": made}))
