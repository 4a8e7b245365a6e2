"""Tiny models of each family, on the device and on the CPU in float32: vision features, logprobs, and the gradient of a tree."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from acceptance.models import sampled
from acceptance.report import CPU, NotTried, Report, mismatch, relative, within
from transformers.models.qwen3_5 import modeling_qwen3_5

from vlmrl.config import Algo, Model, Optim
from vlmrl.families import FAMILIES
from vlmrl.model.loading import LoadedModel, load_model
from vlmrl.train.packing import pack, split
from vlmrl.train.trainer import Trainer, TrainerSpec
from vlmrl.types import Sample


def run(report: Report) -> None:
    torch.backends.cudnn.allow_tf32 = False  # float32 is compared with float32
    for name, family in FAMILIES.items():
        if family.vision:
            report.check(name, lambda n=name: one_family(report, n))
    report.check("qwen3_vl with compiled layers", lambda: compiled(report))
    report.check("a step on cuda:1", lambda: second_gpu(report))


def one_family(report: Report, name: str) -> str:
    """On the CPU itself, a tree is compared with single rows: then the device has no other kernels."""
    try:
        ours, theirs = (load(report, name, device) for device in (report.device, CPU))
    except ValueError as error:
        if "needs torchvision" in str(error):
            raise NotTried(str(error)) from error
        raise
    with transformers_own_rules():
        rows = sampled(theirs, groups=2, members=3, response=12, side=96)
        for row in rows:
            row.expert_routing = []  # both use their own routers
        wanted, exact = scored(theirs, rows, single=True)
    with torch.no_grad():
        pair = [features(each, rows) for each in (ours, theirs)]
    logprobs, gradient = scored(ours, rows)
    apart, largest = mismatch(logprobs, wanted)
    joined = [torch.cat([each[key].flatten().to(CPU) for key in sorted(exact)]) for each in (gradient, exact)]
    return within(
        features=(relative(*pair), 2e-3),
        logprobs=(apart, 2e-3),
        largest=(largest, 2e-2),
        gradient=(relative(*joined), 2e-2),
    )


@contextmanager
def transformers_own_rules() -> Iterator[None]:
    """Qwen3.5 without flash-linear-attention and causal-conv1d: transformers takes their kernels on a CPU, too, and they fail."""
    names = (
        "torch_chunk_gated_delta_rule",
        "torch_recurrent_gated_delta_rule",
        "causal_conv1d_fn",
        "causal_conv1d_update",
    )
    taken = {name: getattr(modeling_qwen3_5, name) for name in names}
    for name, function in taken.items():
        setattr(modeling_qwen3_5, name, inspect.unwrap(function))
    try:
        yield
    finally:
        for name, function in taken.items():
            setattr(modeling_qwen3_5, name, function)


def compiled(report: Report) -> str:
    """`train.compile_layers` against the same layers eager, in float32 and in bfloat16, where an engine samples with eager ones."""
    report.need_gpu()
    found = {}
    for dtype, most in (("float32", 1e-5), ("bfloat16", 2e-2)):
        model = Model(path="tiny:qwen3_vl", device=str(report.device), dtype=dtype)
        loaded = load_model(model, report.scratch, seed=0)
        rows = sampled(loaded, groups=2, members=3, response=12, side=96)
        eager, exact = scored(loaded, rows)
        loaded.policy.zero_grad()
        loaded.policy.compile_layers()
        logprobs, gradient = scored(loaded, rows)
        joined = [torch.cat([each[key].flatten().float() for key in sorted(exact)]) for each in (gradient, exact)]
        found[f"logprobs in {dtype}"] = (mismatch(logprobs, eager)[0], most)
        found[f"gradient in {dtype}"] = (relative(*joined), 10 * most)
    return within(**found)


def load(report: Report, name: str, device: torch.device) -> LoadedModel:
    model = Model(path=f"tiny:{name}", device=str(device), dtype="float32")
    return load_model(model, report.scratch, seed=0)


def features(loaded: LoadedModel, rows: list[Sample]) -> torch.Tensor:
    """Of all distinct images."""
    distinct = {item.id: item for row in rows for item in row.media}
    images = loaded.policy.encode_images(list(distinct.values()))
    return torch.cat([part.to(CPU).flatten() for image in images for part in (image.embeds, *image.deepstack)])


def scored(
    loaded: LoadedModel, rows: list[Sample], single: bool = False
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """The logprobs of the rows' responses, and the gradient of their sum, in one tree (if the family allows it) or row by row."""
    policy = loaded.policy
    layout = "tree" if policy.family.may_share and not single else "padded"
    found, total = [None] * len(rows), torch.zeros((), device=policy.device)
    for plan in split(rows, 1 if single else 10**6, layout, policy.image_token_id):
        packed = pack(rows, plan, policy.family).to(policy.device)
        logprobs = packed.by_sample(policy(packed.batch)).logprobs
        total = total + logprobs.sum()
        for row, values in zip(plan.rows, logprobs.detach().to(CPU), strict=True):
            found[row] = values[: len(rows[row].response_ids)].numpy()
    total.backward()
    gradient = {name: weight.grad for name, weight in policy.named_parameters() if weight.grad is not None}
    return found, gradient  # type: ignore[return-value]


def second_gpu(report: Report) -> str:
    """A model on the second GPU leaves nothing on the first."""
    report.need_gpu()
    if torch.cuda.device_count() < 2:
        raise NotTried("needs two GPUs")
    before = torch.cuda.memory_reserved(0)
    loaded = load(report, "qwen3_vl", torch.device("cuda", 1))
    rows = sampled(loaded, groups=1, members=2, response=8, side=96)
    trainer = Trainer(loaded.policy, TrainerSpec(Algo(), Optim(), total_steps=1, tokens_per_micro_batch=4096))
    loss = trainer.step(rows).metrics["loss"]
    return within(bytes_on_the_first=(float(torch.cuda.memory_reserved(0) - before), 0.0)) + f", loss {loss:.3g}"
