"""Memory and time of logprobs, entropies and their gradients over a whole vocabulary, above the head and the hidden states.

    python benchmarks/head_memory.py --tokens 8192 --hidden 128
    python benchmarks/head_memory.py --tokens 8192 --hidden 2048

Runs in a fresh process on the CPU and prints the peak resident memory that Linux reports, gradients included.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from vlmrl.model.head import score_tokens


@dataclass(frozen=True)
class Settings:
    tokens: int = 8192
    hidden: int = 128
    vocabulary: int = 151_936


def peak_gib(settings: Settings) -> tuple[float, float]:
    """GiB above the model, and seconds."""
    torch.manual_seed(0)
    head = torch.randn(settings.vocabulary, settings.hidden).mul_(settings.hidden**-0.5).requires_grad_()
    hidden = torch.randn(settings.tokens, settings.hidden, requires_grad=True)
    labels = torch.randint(settings.vocabulary, (settings.tokens,))
    before = _memory("VmRSS")
    began = time.perf_counter()
    logprobs, entropy = score_tokens(hidden, head, None, labels, 1.0, [151_655])
    (logprobs - 0.01 * entropy).mean().backward()
    seconds = time.perf_counter() - began
    return (_memory("VmHWM") - before) / 2**20, seconds


def _memory(name: str) -> int:
    """KiB. (getrusage's peak would be that of the process which started this one, where that was higher.)"""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith(name + ":"))


if __name__ == "__main__":
    settings = tyro.cli(Settings)
    peak, seconds = peak_gib(settings)
    gradient = settings.vocabulary * settings.hidden * 4 / 2**30
    print(f"{settings}: {peak:.2f} GiB above the model, of which {gradient:.2f} the head's gradient; {seconds:.1f} s")
