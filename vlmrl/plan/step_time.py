"""An estimate of a step's time: each part at a share of what the GPU's data sheet promises (the roofline model).

Source of the model: Williams et al. 2009, "Roofline: an insightful visual performance model". The shares are assumptions.
"""

from __future__ import annotations

from dataclasses import dataclass

from vlmrl.config import Config
from vlmrl.plan.activations import ModelShape
from vlmrl.plan.gpus import Gpu
from vlmrl.plan.memory_plan import MemoryPlan, placement_of
from vlmrl.plan.moments import gradients_of, micro_batch_size, prompt_tokens

COMPUTE = 0.4
"""Share of the GPU's bfloat16 arithmetic that training and prefill reach."""
BANDWIDTH = 0.6
"""Share of its memory bandwidth that decoding and the optimizer reach."""
HOST_LINK = 25e9
"""Bytes per second between GPU and host memory (PCIe 4.0 x16)."""
EMBEDDED_LAYER = 0.8e-3
"""Seconds in which the embedded engine, which launches each kernel from Python, decodes one layer of one token."""


@dataclass(frozen=True)
class StepWork:
    """A step's tokens, with every trajectory at its longest."""

    trajectories: int
    prompt: int
    replies: int
    """Tokens after the prompt, of one trajectory."""
    computed: int
    """Tokens that the trainer computes; prompts of a group once, if prefixes are shared."""
    patches: int

    @classmethod
    def of(cls, config: Config, shape: ModelShape) -> StepWork:
        rollout, train = config.rollout, config.train
        prompt = prompt_tokens(config)
        trajectories = train.groups_per_batch * rollout.group_size
        replies = rollout.max_tokens - prompt
        prompts = train.groups_per_batch if train.share_prefixes else trajectories
        largest = micro_batch_size(config, shape)
        computed = prompts * prompt + trajectories * replies
        return cls(trajectories, prompt, replies, computed, largest.patches * computed // largest.tokens)


def estimate_step(config: Config, plan: MemoryPlan, gpu: Gpu) -> dict[str, float]:
    """Seconds of one training step, by part."""
    sizes = plan.sizes
    shape = sizes.shape
    assert shape is not None
    work, algo = StepWork.of(config, shape), config.algo
    flops, bandwidth = gpu.flops * COMPUTE * plan.ranks, gpu.bandwidth * BANDWIDTH
    forward = forward_flops(shape, work) / flops
    parts = _rollout(config, plan, gpu, work)
    scores = (config.train.steps_per_batch > 1) + bool(algo.kl_coef)
    if scores:
        parts["logprobs before the step and of the reference"] = scores * forward
    again = float(gradients_of(config).checkpointed)
    backward = 1.0 if config.model.lora.rank else 2.0  # frozen weights need no gradient of their own
    parts["forward and backward"] = (1 + backward + again) * forward
    trained = sizes.trained / plan.ranks
    parts["optimizer step"] = config.train.steps_per_batch * (
        30 * trained / bandwidth + (16 * trained / HOST_LINK if config.optim.offload else 0.0)
    )
    parts |= _between(config, plan, gpu)
    return parts


def forward_flops(shape: ModelShape, work: StepWork) -> float:
    """Operations of one forward pass: 2 for each weight and token, and 4 for each query, key and channel of attention."""
    length = work.prompt + work.replies
    # On average half of the keys are before a query.
    attention = 2.0 * shape.layers * shape.queries * length * work.computed
    head = 2.0 * shape.hidden * shape.vocabulary * work.computed
    vision = 2.0 * shape.vision_parameters * work.patches
    return shape.flops_per_token * work.computed + attention + head + vision


def _rollout(config: Config, plan: MemoryPlan, gpu: Gpu, work: StepWork) -> dict[str, float]:
    """Prefill, bound by arithmetic, and decoding, bound by reading weights, keys and values for each token."""
    sizes, shape = plan.sizes, plan.sizes.shape
    assert shape is not None
    settings, cluster = config.server_settings, config.resolved_cluster
    engines = cluster.num_engines if cluster.on else settings.servers if settings else 1
    tp = settings.tp if settings else 1
    trajectories = work.trajectories / engines
    at_once = min(trajectories, config.rollout.max_concurrent / engines, _that_fit(config, plan, work, tp))
    weights = plan.dtype.itemsize * (sizes.parameters - shape.vision_parameters)
    context = work.prompt + work.replies / 2
    read = weights + at_once * context * sizes.cached * plan.dtype.itemsize
    each = read / (tp * gpu.bandwidth * BANDWIDTH)
    if config.engine == "embedded":
        each = max(each, shape.layers * EMBEDDED_LAYER)
    prefill = trajectories * work.prompt * shape.flops_per_token / (tp * gpu.flops * COMPUTE)
    return {"prefill": prefill, "decoding": each * work.replies * max(1.0, trajectories / at_once)}


def _that_fit(config: Config, plan: MemoryPlan, work: StepWork, tp: int) -> float:
    """Trajectories at full length in the planned KV cache."""
    each = (work.prompt + work.replies) * plan.sizes.cached * plan.dtype.itemsize / tp
    return max(1.0, plan.cache / each) if plan.cache else float("inf")


def _between(config: Config, plan: MemoryPlan, gpu: Gpu) -> dict[str, float]:
    """The transfer of weights, and of the memory that the trainer gives back and takes again."""
    parts: dict[str, float] = {}
    if "weight update" in plan.moments:
        link = gpu.link if plan.ranks > 1 else gpu.bandwidth / 2  # on the same GPU: read and written once
        parts["weight update"] = plan.dtype.itemsize * plan.sizes.parameters / link
    if placement_of(config, plan.ranks, copies=True).offloads:
        static = sum(size for name, size in plan.trainer.items() if name != "gradients")
        parts["offload and onload"] = 2 * static / HOST_LINK
    return parts


def describe_estimate(parts: dict[str, float], config: Config) -> list[str]:
    """The estimate as lines, with its assumptions."""
    embedded = (
        f", {1e3 * EMBEDDED_LAYER:g} ms a layer and token in the embedded engine" if config.engine == "embedded" else ""
    )
    each = ", ".join(
        f"{name} {seconds:.0f} s" if seconds >= 1 else f"{name} {seconds:.2f} s" for name, seconds in parts.items()
    )
    return [
        f"estimate  a step takes about {sum(parts.values()):.0f} s: {each}",
        f"          This is a roofline estimate, not a measurement: all trajectories at their longest, {COMPUTE:.0%} of the data "
        f"sheet's arithmetic, {BANDWIDTH:.0%} of its bandwidth{embedded}, no waiting for environments.",
    ]
