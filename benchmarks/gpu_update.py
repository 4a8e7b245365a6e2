"""One update of a real Qwen3-VL shape on a GPU: tokens per second, utilisation and memory, shared and packed, beside TRL's.

    python benchmarks/gpu_update.py                         # Qwen3-VL-2B's shape with random weights, bfloat16
    python benchmarks/gpu_update.py --config config.json    # another model's shape
    python benchmarks/gpu_update.py --tiny                  # a smoke test on the CPU

All variants get the same samples: groups of 8 responses to a prompt with an image, in micro-batches of 16,384 tokens. ``shared``
computes each prompt once, ``packed`` concatenates rows, and TRL's GRPOTrainer, if trl is installed, pads them. Utilisation is the
floating point operations of a variant's own tokens, without recomputation, divided by the device's peak.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from PIL import Image
from shapes import qwen3_vl_2b
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    TrainerCallback,
)

from vlmrl.config import Algo, Optim
from vlmrl.families import family_of
from vlmrl.model import tiny
from vlmrl.model.loading import pick_checkpointing
from vlmrl.model.policy import Policy
from vlmrl.multimodal.store import MediaStore
from vlmrl.train.packing import Layout, pack, split
from vlmrl.train.trainer import Trainer, TrainerSpec
from vlmrl.types import MicroBatch, Sample

MEMBERS = 8
LR = 1e-9


@dataclass(frozen=True)
class Settings:
    config: Path | None = None
    """A model's config.json. Unset: Qwen3-VL-2B's shape."""
    tiny: bool = False
    """A tiny model and few tokens, on the CPU."""
    groups: int = 8
    prompt: int = 1200
    side: int = 1024
    """Of the image in pixels; 32 x 32 make a visual token."""
    response: int = 256
    budget: int = 16_384
    """Tokens in a micro-batch."""
    steps: int = 5
    """Measured, after two that are not."""
    peak_tflops: float = 989.0
    """Of the device, dense, in the type that is computed in: an H200 has 989 in bfloat16."""
    gradient_checkpointing: bool | None = None
    """Of both trainers. Unset: on a GPU, as in a run."""

    def __post_init__(self) -> None:
        if self.tiny and self.config is not None:
            raise ValueError("--config must be unset with --tiny, which has a shape of its own.")


SMALL = {"groups": 2, "prompt": 60, "side": 128, "response": 12, "budget": 400, "steps": 1}


@dataclass(frozen=True)
class Result:
    """Of one variant: seconds of a step, tokens it computes, multiplications and additions they need, peak GiB."""

    seconds: float
    tokens: int
    flops: float
    gib: float


class Shape:
    """The model's shape, its processor, and the samples."""

    def __init__(self, settings: Settings, scratch: Path) -> None:
        self.device = torch.device("cpu" if settings.tiny else "cuda")
        self.dtype = torch.float32 if settings.tiny else torch.bfloat16
        self.checkpointing = pick_checkpointing(settings.gradient_checkpointing, self.device)
        self.folder = tiny.build(scratch / "tiny", max_pixels=settings.side**2)
        if settings.tiny or settings.config is not None:
            self.config = AutoConfig.from_pretrained(str(settings.config or self.folder))
        else:
            self.config = qwen3_vl_2b(AutoTokenizer.from_pretrained(self.folder).get_vocab())
        self.processor = AutoImageProcessor.from_pretrained(self.folder)
        self.samples = samples_of(settings, self.config, MediaStore(family_of(self.config), self.processor))

    def model(self) -> Any:
        torch.manual_seed(0)
        with torch.device(self.device):
            return AutoModelForImageTextToText.from_config(self.config, dtype=self.dtype, attn_implementation="sdpa")


def samples_of(settings: Settings, config: Any, store: MediaStore) -> list[Sample]:
    dice, samples = random.Random(0), []
    for group in range(settings.groups):
        noise = np.random.default_rng(group).integers(0, 256, (settings.side, settings.side, 3), dtype=np.uint8)
        item = store.load(Image.fromarray(noise))
        text = [dice.randrange(200) for _ in range(settings.prompt - item.num_tokens - 2)]
        image = [config.image_token_id] * item.num_tokens
        prompt = [config.vision_start_token_id, *image, config.vision_end_token_id, *text]
        for member in range(MEMBERS):
            response = [dice.randrange(200) for _ in range(settings.response)]
            size = len(response)
            lists = (prompt, response, [1] * size, [-5.0] * size, [0] * size)
            place = (f"g{group}", f"g{group}/{member}", True, "stop", [item], dice.uniform(-1, 1))
            samples.append(Sample(*lists, *place))
    return samples


def flops_of(model: Any, batches: list[MicroBatch]) -> float:
    """Of a forward and a backward pass: 6 for each weight and token, and 12 for each channel of each pair of tokens that attend.

    Source: PaLM, arXiv 2204.02311, appendix B. The head counts for the tokens that a loss needs; images attend within themselves.
    """
    text, vision = model.config.get_text_config(), model.config.vision_config
    layers = sum(p.numel() for p in model.model.language_model.layers.parameters())
    tower = sum(p.numel() for p in model.model.visual.parameters())
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    width = head_dim * text.num_attention_heads * text.num_hidden_layers
    total = 0.0
    for batch in batches:
        assert batch.ends is not None
        tokens = batch.ends.shape[1]
        pairs = int((batch.ends[0] - torch.arange(tokens)).sum())
        patches = [int(item.sizes["image_grid_thw"].prod()) for item in batch.images]
        total += 6 * layers * tokens + 12 * width * pairs + 6 * model.lm_head.weight.numel() * int(batch.targets.sum())
        total += 6 * tower * sum(patches) + 12 * vision.hidden_size * vision.depth * sum(n * n for n in patches)
    return total


def measured(shape: Shape, settings: Settings, step: Callable[[], Any]) -> tuple[float, float]:
    """The median seconds of a step, and the peak GiB of the GPU's memory (0 on a CPU)."""
    gpu, seconds = shape.device.type == "cuda", []
    for number in range(settings.steps + 2):
        if gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        step()
        if gpu:
            torch.cuda.synchronize()
        if number >= 2:
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds), torch.cuda.max_memory_allocated() / 2**30 if gpu else 0.0


def run_ours(shape: Shape, settings: Settings, layout: Layout) -> Result:
    policy = Policy(shape.model(), shape.processor)
    if shape.checkpointing:
        policy.enable_gradient_checkpointing()
    sizes = {"total_steps": 100, "tokens_per_micro_batch": settings.budget}
    trainer = Trainer(policy, TrainerSpec(Algo(), Optim(lr=LR), share_prefixes=layout == "tree", **sizes))
    trainer._layout = layout  # on a CPU, too, where the trainer would pad
    seconds, gib = measured(shape, settings, lambda: trainer.step(shape.samples))
    trainer.close()
    parts = split(shape.samples, settings.budget, layout, policy.image_token_id)
    batches = [pack(shape.samples, part, policy.family).batch for part in parts]
    tokens = sum(batch.token_ids.numel() for batch in batches)
    return Result(seconds, tokens, flops_of(policy.model, batches), gib)


class StepTimes(TrainerCallback):
    """The seconds of each optimizer step of a transformers trainer."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.began)


def run_trl(shape: Shape, settings: Settings, packed: Result, scratch: Path) -> Result:
    """TRL's update: its own trainer, to which our samples come as if it had generated them. Needs what ``packed`` needs."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    class Given(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            return as_trl(shape, inputs)

    length = settings.prompt + settings.response
    rows = max(
        n for n in range(1, len(shape.samples) + 1) if len(shape.samples) % n == 0 and n * length <= settings.budget
    )
    clock, gpu = StepTimes(), shape.device.type == "cuda"
    options = GRPOConfig(
        output_dir=str(scratch / "trl"),
        use_cpu=not gpu,
        bf16=gpu,
        gradient_checkpointing=shape.checkpointing,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=len(shape.samples) // rows,
        num_generations=MEMBERS,
        max_completion_length=settings.response,
        learning_rate=LR,
        max_steps=settings.steps + 2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    prompts = Dataset.from_list([{"prompt": "-", "row": n} for n in range(settings.groups * (settings.steps + 2))])
    trainer = Given(
        model=shape.model(),
        reward_funcs=lambda completions, **columns: [0.0] * len(completions),
        processing_class=AutoProcessor.from_pretrained(shape.folder),
        train_dataset=prompts,
        args=options,
        callbacks=[clock],
    )
    trainer.train()
    gib = torch.cuda.max_memory_allocated() / 2**30 if gpu else 0.0
    return replace(packed, seconds=statistics.median(clock.seconds[2:]), gib=gib)


def as_trl(shape: Shape, inputs: Any) -> dict[str, Any]:
    """The samples as the tensors of TRL's generation step, an image's for each row that shows it."""
    samples, device = shape.samples, shape.device
    assert len(inputs) == len(samples)
    prompts = torch.tensor([sample.prompt_token_ids for sample in samples], device=device)
    responses = torch.tensor([sample.response_ids for sample in samples], device=device)
    images = shape.processor(images=[sample.media[0].image for sample in samples], return_tensors="pt").to(device)
    visual = (torch.cat([prompts, responses], 1) == shape.config.image_token_id).int()
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": responses,
        "completion_mask": torch.ones_like(responses),
        "advantages": torch.tensor([sample.advantage for sample in samples], device=device),
        "num_items_in_batch": torch.tensor(responses.numel(), device=device),
        "pixel_values": images["pixel_values"],
        "image_grid_thw": images["image_grid_thw"],
        "num_images": [1] * len(samples),
        "mm_token_type_ids": visual,
    }


def has_trl() -> bool:
    try:
        import trl  # noqa: F401
    except ImportError:
        return False
    return True


def show(settings: Settings, name: str, result: Result, samples: int) -> None:
    """The variant's row of the table, as soon as it is measured."""
    used = result.flops / result.seconds / (settings.peak_tflops * 1e12)
    rates = f"{samples / result.seconds:.2f} | {result.tokens / result.seconds:.0f}"
    print(f"| {name} | {result.seconds:.3f} | {rates} | {used:.1%} | {result.gib:.1f} |", flush=True)


def main(settings: Settings) -> None:
    if settings.tiny:
        settings = replace(settings, **SMALL)
    elif not torch.cuda.is_available():
        raise SystemExit("this needs a CUDA GPU; with --tiny it runs on the CPU, to see that it works.")
    with tempfile.TemporaryDirectory() as scratch:
        shape = Shape(settings, Path(scratch))
        layouts: dict[str, Layout] = {"shared": "tree", "packed": "packed"}
        results: dict[str, Result] = {}
        print(
            "| | seconds | samples/s | tokens computed/s | utilisation | peak GiB |\n" + "| --- " * 6 + "|", flush=True
        )
        for name, layout in layouts.items():
            results[name] = run_ours(shape, settings, layout)
            show(settings, name, results[name], len(shape.samples))
        if has_trl():
            results["TRL"] = run_trl(shape, settings, results["packed"], Path(scratch))
            show(settings, "TRL", results["TRL"], len(shape.samples))
        else:
            print("trl is not installed: its update is left out.")
        for name in ("packed", "TRL"):
            if name in results:
                print(f"samples per second, shared / {name}: {results[name].seconds / results['shared'].seconds:.2f}")


if __name__ == "__main__":
    main(tyro.cli(Settings))
