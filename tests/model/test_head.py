"""Logprobs and entropies in chunks: the numbers of autograd, without its memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vlmrl.model import head
from vlmrl.model.head import score_tokens

BANNED = [3, 7]


def plainly(hidden, weight, bias, labels, temperature):
    """By autograd, all logits at once."""
    logits = (hidden @ weight.T + bias) / temperature
    kept = [token for token in range(len(weight)) if token not in BANNED]
    logprobs = logits[:, kept].log_softmax(1)
    places = torch.tensor([kept.index(label) for label in labels.tolist()])
    return logprobs.gather(1, places[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(1)


def operands(tokens):
    torch.manual_seed(0)
    hidden, weight = torch.randn(tokens, 6, requires_grad=True), torch.randn(11, 6, requires_grad=True)
    return hidden, weight, torch.tensor([0, 1, 2, 4, 5, 6, 10] * 3)[:tokens]


@pytest.mark.parametrize("shares", [(1.0, 0.0), (0.0, 1.0), (0.7, -3.0)])
def test_chunks_have_the_values_and_gradients_of_the_whole(monkeypatch, shares):
    """Seven tokens, three at once; the loss takes logprobs, entropies, or both."""
    monkeypatch.setattr(head, "LOGITS_ON_CPU", 33)
    hidden, weight, labels = operands(7)
    bias = torch.linspace(-1, 1, 11, requires_grad=True)
    wanted = plainly(hidden, weight, bias, labels, 0.8)
    got = score_tokens(hidden, weight, bias, labels, 0.8, BANNED)
    for one, other in zip(got, wanted, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    factors = torch.linspace(-1, 2, 7)
    gradients = []
    for logprobs, entropy in (got, wanted):
        used = [
            (share * factors * part).sum() for share, part in zip(shares, (logprobs, entropy), strict=True) if share
        ]
        gradients.append(torch.autograd.grad(sum(used), [hidden, weight, bias]))
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    assert gradients[0][1][BANNED].abs().max() == 0


def test_a_head_in_bfloat16_has_its_gradient_summed_in_float32(monkeypatch):
    """One token a chunk, 500 chunks: a sum in bfloat16 stops growing, and was off by a quarter of the largest here."""
    monkeypatch.setattr(head, "LOGITS_ON_CPU", 11)
    hidden, weight, _ = operands(1)
    labels = torch.tensor([5] * 500)
    gradients = []
    for dtype in (torch.float64, torch.bfloat16):
        rows = hidden.detach().bfloat16().to(dtype).repeat(500, 1)
        wanted = weight.detach().bfloat16().to(dtype).requires_grad_()
        if dtype == torch.bfloat16:
            score_tokens(rows, wanted, None, labels, 1.0, [])[0].sum().backward()
        else:
            (rows @ wanted.T).log_softmax(1)[:, 5].sum().backward()
        gradients.append(wanted.grad.double())
    exact, summed = gradients
    assert (summed - exact).abs().max() < 0.02 * exact.abs().max()


@pytest.mark.parametrize("cast_at_once", [2**24, 12])
def test_logits_of_bfloat16_factors_are_exact(monkeypatch, cast_at_once):
    """Hidden states of 256 ones and heads of 1 + k/128: the logit 256 + 2 k needs more digits than bfloat16 has."""
    monkeypatch.setattr(head, "CAST_ON_CPU", cast_at_once)
    hidden = torch.ones(2, 256, dtype=torch.bfloat16)
    weight = (1 + torch.arange(5.0) / 128)[:, None].repeat(1, 256).bfloat16()
    bias = torch.tensor([0.0, 0.5, 0.25, 0.0, 1.0]).bfloat16()
    logits = head.logits_of(hidden, weight, bias, 2.0, [])
    assert logits.dtype == torch.float32
    assert logits.tolist() == [[128.0, 129.25, 130.125, 131.0, 132.5]] * 2


def test_a_frozen_head_gets_no_gradient():
    hidden, weight, labels = operands(3)
    logprobs, _ = score_tokens(hidden, weight.requires_grad_(False), None, labels, 1.0, [])
    logprobs.sum().backward()
    assert weight.grad is None and hidden.grad.abs().max() > 0


def test_no_targets_still_give_a_gradient_to_the_head():
    """As ranks need it that share the weights: every one takes part in every backward pass."""
    hidden, weight, labels = operands(0)
    logprobs, _ = score_tokens(hidden, weight, None, labels, 1.0, BANNED)
    logprobs.sum().backward()
    assert weight.grad.abs().max() == 0


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures resident memory from Linux's /proc")
@pytest.mark.slow
def test_the_logits_of_a_real_vocabulary_are_never_there_at_once():
    """1,024 tokens make 0.58 GiB of logits, and autograd keeps several copies; here 0.46 GiB are enough for any number."""
    script = Path(__file__).parents[2] / "benchmarks/head_memory.py"
    command = [sys.executable, str(script), "--tokens", "1024", "--hidden", "32"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    peak = float(done.stdout.split(": ")[1].split(" GiB")[0])
    assert 0.2 < peak < 0.75
