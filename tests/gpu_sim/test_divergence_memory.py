"""The memory of a divergence from a teacher over a whole vocabulary, on a simulated GPU."""

import json

import pytest

pytestmark = pytest.mark.slow

GIB = 2**30
PEAKS = """
import json, sys
import torch
from vlmrl.algos.distillation import divergence_of
from vlmrl.model.divergence import Against, Listed, divergence_from
from vlmrl.model.head import score_tokens

TOKENS, VOCABULARY, WIDTH, LISTED = 16_384, 151_936, 2560, 100
options = {"dtype": torch.bfloat16, "device": "cuda"}
head = torch.zeros(VOCABULARY, WIDTH, **options, requires_grad=True)
other = torch.zeros(VOCABULARY, WIDTH, **options)
labels = torch.zeros(TOKENS, dtype=torch.int64, device="cuda")
base = torch.cuda.memory_allocated()


def peak(kind):
    hidden = torch.zeros(TOKENS, WIDTH, **options, requires_grad=True)
    head.grad = None
    torch.cuda.reset_peak_memory_stats()
    logprobs, entropy = score_tokens(hidden, head, None, labels, 1.0, [])
    loss = logprobs.mean()
    if kind != "none":
        divergence = divergence_of("reverse_kl")
        if kind == "listed":
            ids = torch.zeros(TOKENS, LISTED, dtype=torch.int64, device="cuda")
            teacher = Listed(ids, torch.zeros(TOKENS, LISTED, device="cuda"), labels, divergence)
        else:
            teacher = Against(torch.zeros(TOKENS, WIDTH, **options), other, None, labels, divergence)
        values, _ = divergence_from(teacher, hidden, head, None, 1.0, [])
        loss = loss + values.mean()
    loss.backward()
    return torch.cuda.max_memory_allocated() - base


print(json.dumps({kind: peak(kind) for kind in ("none", "whole", "listed")}))
"""


def test_a_whole_vocabulary_of_150k_costs_less_than_1_5_gib_beside_the_loss(simulated_gpu):
    """16k tokens, the width of a 4B model, and a head of its own for the teacher, whose weights do not count."""
    done = simulated_gpu.run(PEAKS)
    found = {kind: peak / GIB for kind, peak in json.loads(done.stdout.splitlines()[-1]).items()}
    print(found)
    assert found["none"] > 1  # the head's gradient in float32
    assert found["whole"] - found["none"] < 1.5
    assert found["listed"] - found["none"] < 1.5
