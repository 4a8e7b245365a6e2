"""The trainer's real step on a simulated GPU, and its peak memory by phase and by part.

Runs in a process that `testing.gpu_sim` started: tensors have their true sizes in torch's own allocator, and nothing is computed.

    simulated_gpu.run(Path("tests/testing/simulated_step.py"), "recipes/geo3k.py", 1, "--model.lora.rank", 32, memory=2**37)

gives the recipe, the number of ranks and options of the recipe, whose model is one of `vlmrl.plan.published_models`. It prints one
JSON object: for each of two optimizer steps the peak of each phase in bytes, in all and by part. The model, the trainer and
``Trainer.step`` are those of a run, except for :data:`REPLACED`. The allocator counts tensors in blocks of 512 bytes; it does not
count the CUDA context, nor the workspaces of cuBLAS and NCCL, for which the memory plan has a reserve.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import tyro
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AttentionInterface

from testing.known_numbers import KnownNumbers
from vlmrl.cli.recipe import Recipe
from vlmrl.cli.train import TrainOptions
from vlmrl.config import Config
from vlmrl.model import loading, tiny, tree_attention
from vlmrl.model import policy as policy_module
from vlmrl.model.loading import load_model, pick_checkpointing
from vlmrl.multimodal.pixels import ArrayPixels
from vlmrl.plan.published_models import PUBLISHED
from vlmrl.run.loop import new_trainer
from vlmrl.train.packing import pack
from vlmrl.train.rank import Rank
from vlmrl.train.ranks import Ranks
from vlmrl.train.trainer import Trainer
from vlmrl.types import MediaItem, Sample

REPLACED = {
    "numbers that are read back": "float(), tolist(), nonzero() and masks as indices: KnownNumbers computes what follows from token "
    "ids, masks and grids; any other number, such as the gradient norm, is 1",
    "random weights": "_without_values allocates them on the host and writes nothing there, which would take 4 bytes a parameter",
    "flex attention": "_Attention allocates what the compiled kernel does; the kernel itself is compiled in other tests",
}


class _Attention(torch.autograd.Function):
    """The memory of flex attention: it saves its inputs, its output and a float32 log-sum-exp, and returns three gradients.

    Source: torch/_higher_order_ops/flex_attention.py, FlexAttentionAutogradOp.
    """

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(query)
        lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value, _, lse = ctx.saved_tensors
        delta = torch.empty_like(lse)  # row sums of grad * out, less the log-sum-exp's gradient
        grads = tuple(torch.empty_like(tensor) for tensor in (query, key, value))
        del delta
        return grads


def _attend(module: Any, query: Any, key: Any, value: Any, mask: Any, tree: Any = None, **options: Any) -> Any:
    if tree is None:
        return tree_attention.attend(module, query, key, value, mask, **options)
    return _Attention.apply(query, key, value).transpose(1, 2).contiguous(), None


def _without_values(auto: Any, hf_config: Any, dtype: torch.dtype) -> Any:
    """As `vlmrl.model.loading._random`, without any number: the system gives memory only to pages that are written."""
    with torch.device("meta"):
        model = auto.from_config(hf_config, dtype=dtype, attn_implementation="sdpa")
    model.to_empty(device="cpu").tie_weights()
    return model


def folder_of(config: dict[str, Any], scratch: Path) -> Path:
    """A model folder with this ``config.json``, without weights: tokenizer and processor are a tiny model's."""
    small = Path(tiny.resolve(f"tiny:{config['model_type']}", scratch / "tiny"))
    folder = scratch / "model"
    folder.mkdir()
    for file in small.iterdir():
        if file.name != "config.json" and file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def samples_at_limits(config: Config, hf_config: Any, micro_batches: int) -> list[Sample]:
    """One group of the recipe's longest trajectories, so long that they fill ``micro_batches``.

    The prompt has one image of 512 x 512 pixels, if the model reads images, and so has each observation between the turns; responses
    fill the rest.
    """
    rollout, has_images = config.rollout, hasattr(hf_config, "vision_config")
    length = config.data.max_prompt_tokens or rollout.max_tokens // 4
    first = _image(hf_config, "prompt", 512) if has_images else None
    prompt = _tokens(hf_config, first, length, 7)
    budget = config.train.tokens_per_micro_batch - length
    rows = -(-budget // (rollout.max_tokens - length))
    responses = budget // rows
    samples = []
    for member in range(micro_batches * rows):
        media, response, mask = [first] if first else [], [], []
        for turn in range(rollout.max_turns):
            seen = _image(hf_config, f"{member}/{turn}", 512) if has_images and turn else None
            observation = _tokens(hf_config, seen, seen.num_tokens if seen else 0, member)
            own = responses // rollout.max_turns - len(observation)
            response += observation + _tokens(hf_config, None, own, member + 3)
            mask += [0] * len(observation) + [1] * own
            media += [seen] if seen else []
        samples.append(
            Sample(
                prompt_token_ids=prompt,
                response_ids=response,
                loss_mask=mask,
                rollout_logprobs=[-1.0] * len(mask),
                policy_versions=[0] * len(mask),
                group_id="0",
                trajectory_id=f"0/{member}",
                is_last_step=True,
                stop_reason="stop",
                media=media,
                advantage=1.0 if member % 2 else -1.0,
            )
        )
    return samples


def _tokens(hf_config: Any, image: MediaItem | None, count: int, salt: int) -> list[int]:
    """``count`` ids that begin with an image's placeholders."""
    ids = [hf_config.image_token_id] * image.num_tokens if image else []
    return ids + [(index * salt + salt) % 997 for index in range(count - len(ids))]


def _image(hf_config: Any, name: str, side: int) -> MediaItem:
    vision = hf_config.vision_config
    patches = side // (vision.patch_size * vision.spatial_merge_size) * vision.spatial_merge_size
    length = patches * vision.patch_size
    sizes = {"image_grid_thw": torch.tensor([[1, patches, patches]])}
    pixels = ArrayPixels(np.zeros((length, length, 3), np.uint8))
    return MediaItem(name, (length, length), sizes, patches * patches // vision.spatial_merge_size**2, {}, pixels)


def parts_of(trainer: Trainer) -> dict[str, int]:
    """The bytes of the tensors that stay from step to step, and of the gradients, by part of the memory plan."""
    weights = list(trainer.policy.parameters())
    trained = [*weights, *trainer._weights.parameters]
    reference = trainer.reference.parameters() if isinstance(trainer.reference, torch.nn.Module) else ()
    tensors = {
        "weights": weights,
        "masters": trainer._weights.parameters,
        "gradients": [tensor.grad for tensor in trained if tensor.grad is not None],
        "optimizer state": [v for s in trainer.optimizer.state.values() for v in s.values() if torch.is_tensor(v)],
        "reference": reference,
    }
    seen: set[int] = set()
    sizes = {}
    for name, group in tensors.items():
        own = [each.to_local() if isinstance(each, DTensor) else each for each in group]
        storages = {each.untyped_storage()._cdata: each.untyped_storage() for each in own if each.device.type == "cuda"}
        sizes[name] = sum(storage.nbytes() for key, storage in storages.items() if key not in seen)
        seen |= storages.keys()
    return sizes


class Phases:
    """The peak of the allocator within each phase of a step."""

    def __init__(self, trainer: Trainer) -> None:
        self.peaks: dict[str, dict[str, int]] = {}
        self._trainer = trainer
        self._open: list[list[Any]] = []  # name and peak so far; an inner phase interrupts the outer one
        self._wrapped = [
            (torch.Tensor, "backward", "backward"),
            (torch.nn.utils, "clip_grad_norm_", "clip"),
            (trainer.optimizer, "step", "optimizer"),
            (trainer._weights, "publish", "publish"),
            (trainer, "_score", "forward"),
            (policy_module, "score_tokens", "logits"),
        ]

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Within the context, calls of the trainer's parts are phases."""
        originals = [(owner, name, getattr(owner, name)) for owner, name, _ in self._wrapped]
        for owner, name, phase in self._wrapped:
            setattr(owner, name, self._within(phase, getattr(owner, name)))
        try:
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)

    def _within(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._save()
            self._open.append([phase, 0])
            try:
                return function(*args, **kwargs)
            finally:
                self._save()
                name, total = self._open.pop()
                if total > self.peaks.get(name, {"total": 0})["total"]:
                    parts = parts_of(self._trainer)
                    rest = total - sum(parts.values())
                    self.peaks[name] = {"total": total, **parts, "activations": rest}

        return call

    def _save(self) -> None:
        """Add the allocator's peak so far to the open phases, and begin again."""
        peak = torch.cuda.max_memory_allocated()
        for each in self._open:
            each[1] = max(each[1], peak)
        torch.cuda.reset_peak_memory_stats()


def simulate(
    config: Config, samples_of: Callable[[Any], Sequence[Sample]], ranks: int = 1, steps: int = 2
) -> dict[str, Any]:
    """Optimizer steps of the trainer of rank 0. ``samples_of`` makes the samples from the Hugging Face config.

    The other ranks do not exist: collectives of torch's `fake` process group return at once and leave their output as it was.
    """
    config = replace(config, model=replace(config.model, path=f"random:{config.model.source}", device="cuda:0"))
    loading._random = _without_values
    loaded = None
    if ranks > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    else:
        loaded = load_model(config.model, config.models_dir, config.seed)
        if pick_checkpointing(config.train.gradient_checkpointing, loaded.policy.device):
            loaded.policy.enable_gradient_checkpointing()
    builder: Any = SimpleNamespace(config=config, trainer=SimpleNamespace(start=lambda spec: spec))
    spec: Any = new_trainer(builder)
    trainer = Rank(config, Ranks(0, ranks), loaded).start(spec)
    samples = samples_of(trainer.policy.config)
    result: dict[str, Any] = {"loaded": parts_of(trainer), "steps": []}
    AttentionInterface.register(tree_attention.NAME, _attend)
    with KnownNumbers():
        for _ in range(steps):
            phases = Phases(trainer)
            with phases.measured():
                trainer.step(samples)
            result["steps"].append({"peaks": phases.peaks, "after": torch.cuda.memory_allocated()})
    return result | {"reserved": torch.cuda.max_memory_reserved(), "largest": _largest(trainer, samples)}


def _largest(trainer: Trainer, samples: Sequence[Sample]) -> dict[str, int]:
    """The size of the largest micro-batch: its tokens, targets and image patches."""
    batch = pack(samples, trainer._split(list(samples))[0], trainer.policy.family).batch
    patches = sum(int(item.sizes["image_grid_thw"].prod()) for item in batch.images)
    return {"tokens": batch.token_ids.numel(), "targets": int(batch.targets.sum()), "patches": patches}


def main(arguments: Sequence[str]) -> None:
    recipe, ranks = Recipe.load(arguments[0]), int(arguments[1])
    options = tyro.cli(TrainOptions, default=TrainOptions(recipe.config()), args=list(arguments[2:]))
    config = options.config
    with tempfile.TemporaryDirectory() as scratch:
        folder = folder_of(PUBLISHED[config.model.path], Path(scratch))
        config = replace(config, output_dir=scratch, model=replace(config.model, path=str(folder)))
        result = simulate(config, lambda hf: samples_at_limits(config, hf, 2 * ranks), ranks)
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
