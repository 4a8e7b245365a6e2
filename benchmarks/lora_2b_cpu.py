"""One LoRA step of Qwen3-VL-2B's true shape in bfloat16 on a CPU: time, memory, logprob mismatch, and the direction of the update.

    python benchmarks/lora_2b_cpu.py            # random weights, nothing is downloaded; needs 7 GB of memory
    python benchmarks/lora_2b_cpu.py --tiny     # a tiny model, to see that it works

The embedded engine samples a group of responses to an image; half of them get advantage 1, the others -1. The trainer scores them in
one tree and row by row, takes one step, and scores them again: the mean logprob of the half with advantage 1 must go up, that of the
other half down. Both changes are compared with what the gradient predicts to first order, for the whole step and for a tenth of it.
In bfloat16 a small change of a layer's output is lost when it is added to that output; ``--dtype float32`` shows the exact one.
"""

from __future__ import annotations

import asyncio
import resource
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from PIL import Image
from shapes import load_random, write_2b

from vlmrl.config import Algo, Lora, Optim
from vlmrl.engine.base import Request, SamplingParams
from vlmrl.engine.hf.engine import HFEngine
from vlmrl.model import tiny
from vlmrl.model.loading import LoadedModel
from vlmrl.multimodal.placeholders import expand
from vlmrl.train.packing import pack, per_token, split
from vlmrl.train.trainer import Trainer, TrainerSpec
from vlmrl.types import Sample


@dataclass(frozen=True)
class Settings:
    tiny: bool = False
    """A tiny model instead of the 2B."""
    members: int = 4
    """Answers the one prompt."""
    response: int = 12
    """Tokens of a response."""
    side: int = 128
    """Side of the image in pixels."""
    rank: int = 16
    """LoRA's rank."""
    lr: float = 1e-4
    dtype: Literal["bfloat16", "float32"] = "bfloat16"


@dataclass(frozen=True)
class Moved:
    """The change of the mean logprob of some responses by a part of a step, in nats: measured, and predicted by the gradient."""

    share: float
    """Of the step; 1 is the whole step."""
    measured: float
    predicted: float


def load(settings: Settings, scratch: Path) -> LoadedModel:
    folder = tiny.build(scratch / "tiny") if settings.tiny else write_2b(scratch / "2b")
    lora = Lora(rank=settings.rank, alpha=2 * settings.rank)
    return load_random(folder, torch.device("cpu"), getattr(torch, settings.dtype), lora)


def sample(loaded: LoadedModel, settings: Settings) -> list[Sample]:
    """A group of responses from the embedded engine, with its logprobs. Every second one has advantage 1, the others -1."""
    noise = np.random.default_rng(0).integers(0, 256, (settings.side, settings.side, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    store = loaded.new_store()
    assert store is not None
    item = store.load(image)
    content = [{"type": "image", "image": image}, {"type": "text", "text": "What is the answer?"}]
    rendered = loaded.renderer.prompt([{"role": "user", "content": content}])
    requests = [
        Request(f"g/{number}", rendered.token_ids, [item], SamplingParams(settings.response, seed=number))
        for number in range(settings.members)
    ]
    engine = HFEngine(loaded.policy, loaded.renderer)
    try:
        completions = asyncio.run(engine.generate_batch(requests))
    finally:
        engine.close()
    prompt = expand(rendered.token_ids, loaded.renderer.image_token_id, [item])
    rows = []
    for number, response in enumerate(completions):
        size = len(response.token_ids)
        lists = (prompt, response.token_ids, [1] * size, response.logprobs, response.policy_versions)
        rows.append(Sample(*lists, "g", f"g/{number}", True, "stop", [item], 1.0 if number % 2 else -1.0))
    return rows


def mean_logprob_gradient(loaded: LoadedModel, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """The gradient of the mean logprob of these samples' response tokens, by trained parameter."""
    policy = loaded.policy.train()
    (plan,) = split(samples, 10**6, "tree", policy.image_token_id)
    packed = pack(samples, plan, policy.family)
    mask = per_token([samples[row] for row in plan.rows], lambda row: row.loss_mask)
    scores = packed.by_sample(policy(packed.batch))
    ((scores.logprobs * mask).sum() / mask.sum()).backward()
    trained = [(name, weight) for name, weight in policy.named_parameters() if weight.requires_grad]
    found = {name: weight.grad.float().clone() for name, weight in trained if weight.grad is not None}
    policy.zero_grad()
    policy.eval()
    return found


def difference(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> tuple[float, float]:
    """Mean and maximum of |one - other|."""
    distances = np.abs(np.concatenate(one) - np.concatenate(other))
    return float(distances.mean()), float(distances.max())


def directions(
    loaded: LoadedModel,
    samples: list[Sample],
    gradients: dict[str, dict[str, torch.Tensor]],
    trainer: Trainer,
    before: list[np.ndarray],
) -> tuple[dict[str, float], dict[str, list[Moved]]]:
    """The metrics of one step on ``samples``, and how it and parts of it moved each half, whose ``gradients`` were taken before."""
    weights = {name: weight for name, weight in loaded.policy.named_parameters() if weight.requires_grad}
    old = {name: weight.detach().clone() for name, weight in weights.items()}
    metrics = trainer.step(samples).metrics
    step = {name: weight.detach() - old[name] for name, weight in weights.items()}
    found: dict[str, list[Moved]] = {name: [] for name in gradients}
    for share in (1.0, 0.1):
        for name, weight in weights.items():
            weight.data.copy_(old[name] + share * step[name])
        after = trainer.score(samples)
        for name, half in halves(samples).items():
            measured = np.concatenate([after[i] - before[i] for i in half]).mean()
            slopes = [
                gradients[name][key].double() * (weights[key].detach().double() - old[key].double()) for key in old
            ]
            found[name].append(Moved(share, float(measured), float(sum(slope.sum() for slope in slopes))))
    return metrics, found


def halves(samples: Sequence[Sample]) -> dict[str, list[int]]:
    """The samples with advantage 1 (``up``), and those with -1 (``down``)."""
    return {
        name: [index for index, row in enumerate(samples) if row.advantage == advantage]
        for name, advantage in (("up", 1.0), ("down", -1.0))
    }


@contextmanager
def timed(title: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{title:<32}{time.perf_counter() - began:8.1f} s, peak RSS {peak:.2f} GiB", flush=True)


def main(settings: Settings) -> dict[str, list[Moved]]:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        with timed("load"):
            loaded = load(settings, Path(scratch))
        loaded.policy.enable_gradient_checkpointing()
        count = sum(weight.numel() for weight in loaded.policy.parameters())
        trained = sum(weight.numel() for weight in loaded.policy.parameters() if weight.requires_grad)
        print(
            f"{count / 1e6:.1f} M parameters, of which {trained / 1e6:.1f} M are trained; {settings.dtype}", flush=True
        )
        with timed(f"sample {settings.members} x {settings.response} tokens"):
            samples = sample(loaded, settings)
        with timed("2 gradients"):  # before there is a trainer, whose hooks would take them
            gradients = {
                name: mean_logprob_gradient(loaded, [samples[i] for i in half])
                for name, half in halves(samples).items()
            }
        spec = TrainerSpec(Algo(), Optim(lr=settings.lr), total_steps=1, tokens_per_micro_batch=16384)
        trainer = Trainer(loaded.policy, spec)
        with timed("score, one tree"):
            tree = trainer.score(samples)
        with timed("score, row by row"):
            single = [trainer.score([row])[0] for row in samples]
        rollout = [np.array(row.rollout_logprobs) for row in samples]
        for title, pair in {
            "tree - single rows": (tree, single),
            "trainer - rollout": (tree, rollout),
        }.items():
            print("logprob mismatch, {}: mean {:.2e}, max {:.2e} nats".format(title, *difference(*pair)), flush=True)
        with timed("step, and scores after it"):
            metrics, found = directions(loaded, samples, gradients, trainer, tree)
        print(f"gradient norm {metrics['grad_norm']:.3g}, entropy {metrics['entropy']:.3f} nats")
        for name, parts in found.items():
            for each in parts:
                print(
                    f"mean logprob, {name}, {each.share:g} of the step: {each.measured:+.4f}, predicted {each.predicted:+.4f} nats"
                )
    return found


if __name__ == "__main__":
    results = main(tyro.cli(Settings))
    if not (results["up"][0].measured > 0 > results["down"][0].measured):
        raise SystemExit("the step did not move the logprobs in the direction of their advantages.")
