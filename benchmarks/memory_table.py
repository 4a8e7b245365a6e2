"""How many GPUs each model needs: two tables in docs/scale.md, computed by the memory plan.

    python benchmarks/memory_table.py          # prints the tables; needs neither a GPU nor a network

The run that is planned has the limits of recipes/geo3k.py: trajectories of 5,120 tokens, micro-batches of 16,384, and an image of
512 x 512 pixels in each prompt and after each turn but the last. Rollouts are on the trainer's GPUs, by the embedded engine or by
SGLang, whichever fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from vlmrl.cli.plan import sizes_of
from vlmrl.config import Config, Data, Lora, Model, Rollout, ServerSettings, Train
from vlmrl.plan.advice import ATTENTION, on_gpus
from vlmrl.plan.gpus import GIB, KNOWN, Gpu
from vlmrl.plan.memory_plan import MemoryPlan, Sizes
from vlmrl.plan.published_models import PUBLISHED

MODELS = {
    "2B": "Qwen/Qwen3-VL-2B-Instruct",
    "4B": "Qwen/Qwen3-VL-4B-Instruct",
    "8B": "Qwen/Qwen3-VL-8B-Instruct",
    "32B": "Qwen/Qwen3-VL-32B-Instruct",
    "30B-A3B": "Qwen/Qwen3-VL-30B-A3B-Instruct",
}
LARGEST = {"235B-A22B": "Qwen/Qwen3-VL-235B-A22B-Instruct"}
PEAK_COUNTS = (1, 2, 8, 64)
GPUS = ("4090-24gb", "l40s-48gb", "h100-80gb", "h200-141gb")
COUNTS = (1, 2, 4, 8, 16, 32)


def base(model: str) -> Config:
    """The run with full training of ``model``."""
    return Config(
        model=Model(path=model, max_image_pixels=512 * 512),
        data=Data(max_prompt_tokens=1024),
        rollout=Rollout(group_size=8, max_turns=3, max_tokens=1024 + 4096, max_response_tokens=2048),
        train=Train(groups_per_batch=64),
    )


def with_lora(config: Config) -> Config:
    """The run with LoRA. Fused experts have no adapters."""
    targets = ATTENTION if PUBLISHED[config.model.path]["model_type"] == "qwen3_vl_moe" else ()
    return replace(config, model=replace(config.model, lora=Lora(rank=32, targets=targets)))


def with_less(config: Config) -> Config:
    """The run with the two settings that save memory and leave the result as it is."""
    train = replace(config.train, tokens_per_micro_batch=8192)
    return replace(config, train=train, optim=replace(config.optim, offload=True))


def placements(config: Config, gpus: int) -> Iterator[Config]:
    """The run on this many GPUs with each engine, SGLang with as few GPUs to a server as possible first."""
    placed = on_gpus(config, gpus) if gpus > 1 else config
    yield placed
    tp = 1
    while tp <= min(gpus, 8):
        yield replace(placed, engine="sglang", server=ServerSettings(tp=tp))
        tp *= 2


@lru_cache
def sizes(model: Model) -> Sizes:
    return sizes_of(Config(model=model))


def fewest(config: Config, gpu: Gpu) -> int | None:
    """The smallest number of GPUs on which the run fits."""
    for count in COUNTS:
        if any(MemoryPlan.of(each, sizes(each.model), 1, gpu).fits for each in placements(config, count)):
            return count
    return None


def cell(config: Config, gpu: Gpu) -> str:
    usual, less = fewest(config, gpu), fewest(with_less(config), gpu)
    if usual is None and less is None:
        return f"over {COUNTS[-1]}"
    if usual is None:
        return f"({less})"
    return f"{usual}" if less in (None, usual) else f"{usual} ({less})"


def table() -> str:
    lines = ["| Qwen3-VL | training | 24 GB | 48 GB | 80 GB | 141 GB |", "| --- | --- | --- | --- | --- | --- |"]
    for name, model in MODELS.items():
        for training, config in (("full", base(model)), ("LoRA", with_lora(base(model)))):
            cells = " | ".join(cell(config, KNOWN[gpu]) for gpu in GPUS)
            lines.append(f"| {name} | {training} | {cells} |")
    return "\n".join(lines)


def best_plan(config: Config, gpus: int) -> MemoryPlan:
    """Of the placements on so many H100s, the one that fits with the least memory outside the rollout."""
    plans = [MemoryPlan.of(each, sizes(each.model), 1, KNOWN["h100-80gb"]) for each in placements(config, gpus)]
    return min(plans, key=lambda plan: (not plan.fits, plan.training_peak))


def peak_cell(config: Config, gpus: int) -> str:
    """GiB of the first that fits: as it is, with offload (o), with half the micro-batches too (o, m), with LoRA."""
    offloaded = replace(config, optim=replace(config.optim, offload=True))
    for each, mark in ((config, ""), (offloaded, " o"), (with_less(config), " o, m"), (with_lora(config), " LoRA")):
        plan = best_plan(each, gpus)
        if plan.fits:
            return f"{plan.training_peak / GIB:.0f}{mark}{', tight' if plan.is_tight else ''}"
    return f"no: {best_plan(with_less(config), gpus).training_peak / GIB:.0f}"


def peaks() -> str:
    """A line for each model: GiB on the fullest of 1, 2, 8 and 64 GPUs."""
    lines = ["| Qwen3-VL | 1 | 2 | 8 | 64 |", "| --- | --- | --- | --- | --- |"]
    for name, model in (MODELS | LARGEST).items():
        lines.append(f"| {name} | " + " | ".join(peak_cell(base(model), gpus) for gpus in PEAK_COUNTS) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
    print(peaks())
