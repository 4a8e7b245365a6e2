"""The trainer's real step on a simulated GPU, and its peak memory by phase and by part.

Runs under the simulated CUDA runtime (tests/gpu_sim), on fake tensors: every shape and dtype is real, and nothing is computed.

    python tests/testing/simulated_step.py recipes/geo3k.py --train.gradient-checkpointing     # any option of the recipe

prints one JSON object: for each of two optimizer steps the peak of each phase in bytes, in all and by part. ``Trainer.step`` runs as
it is, except for what fake tensors cannot do; :data:`REPLACED` lists it.
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

import torch
import tyro
from PIL import Image
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AttentionInterface

sys.path.insert(0, str(Path(__file__).parents[1]))
from testing.simulated_memory import KnownNumbers, Memory

from vlmrl.cli.recipe import Recipe
from vlmrl.cli.train import TrainOptions
from vlmrl.config import Config
from vlmrl.model import tiny, tree_attention
from vlmrl.model.loading import LoadedModel, load_model
from vlmrl.run.loop import new_trainer
from vlmrl.train import trainer as trainer_module
from vlmrl.train.make_trainer import Trainers
from vlmrl.train.ranks import Ranks
from vlmrl.train.trainer import Trainer
from vlmrl.types import MediaItem, Sample

REPLACED = {
    "numbers that are read back": "float(), tolist(), nonzero() and masks as indices: KnownNumbers computes what follows from token "
    "ids, masks and grids; any other number, such as the gradient norm, is 1",
    "flex attention": "its compiled kernel needs values; _Attention has its saved tensors and gradients",
    "packing": "`split`, `pack` and `per_token` run on real tensors of the host, as they do in a run",
    "Tensor.numpy": "logprobs that leave the GPU are zeros",
    "foreach": "torch chooses its optimizer kernels by the type of the tensors, which here is another: the choice is made for it",
}
GPU = torch.device("cuda", 0)


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
        query, key, value, out, lse = ctx.saved_tensors
        delta = torch.empty_like(lse)  # row sums of grad * out, less the log-sum-exp's gradient
        grads = tuple(torch.empty_like(tensor) for tensor in (query, key, value))
        del delta
        return grads


def _attend(module: Any, query: Any, key: Any, value: Any, mask: Any, tree: Any = None, **options: Any) -> Any:
    if tree is None:
        return tree_attention.attend(module, query, key, value, mask, **options)
    return _Attention.apply(query, key, value).transpose(1, 2).contiguous(), None


def _on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


@contextmanager
def replacing(numbers: KnownNumbers) -> Iterator[None]:
    """Within the context, what :data:`REPLACED` names is replaced."""

    def to_numpy(tensor: torch.Tensor, **_: Any) -> Any:
        value = numbers.of(tensor)
        with _disable_current_modes():
            return numpy(torch.zeros(tensor.shape, dtype=tensor.dtype) if value is None else value)

    def to_list(tensor: torch.Tensor) -> Any:
        value = numbers.of(tensor)
        with _disable_current_modes():
            return listed(torch.ones(tensor.shape, dtype=tensor.dtype) if value is None else value)

    numpy, listed = torch.Tensor.numpy, torch.Tensor.tolist
    kept = {name: getattr(trainer_module, name) for name in ("split", "pack", "per_token")}
    torch.Tensor.numpy, torch.Tensor.tolist = to_numpy, to_list  # type: ignore[method-assign, assignment]
    AttentionInterface.register(tree_attention.NAME, _attend)
    for name, function in kept.items():
        setattr(trainer_module, name, _on_host(function))
    try:
        yield
    finally:
        torch.Tensor.numpy, torch.Tensor.tolist = numpy, listed  # type: ignore[method-assign]
        AttentionInterface.register(tree_attention.NAME, tree_attention.attend)
        for name, function in kept.items():
            setattr(trainer_module, name, function)


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


def samples_at_limits(config: Config, hf_config: Any) -> list[Sample]:
    """One group of the recipe's longest trajectories, so long that they fill two micro-batches.

    The prompt has one image of 512 x 512 pixels, if the model reads images, and so has each observation between the turns; replies
    fill the rest.
    """
    rollout, has_images = config.rollout, hasattr(hf_config, "vision_config")
    length = config.data.max_prompt_tokens or rollout.max_tokens // 4
    first = _image(hf_config, "prompt", 512) if has_images else None
    prompt = _tokens(hf_config, first, length, 7)
    budget = config.train.tokens_per_micro_batch - length
    rows = -(-budget // (rollout.max_tokens - length))
    replies = budget // rows
    samples = []
    for member in range(2 * rows):
        media, response, mask = [first] if first else [], [], []
        for turn in range(rollout.max_turns):
            seen = _image(hf_config, f"{member}/{turn}", 512) if has_images and turn else None
            observation = _tokens(hf_config, seen, seen.num_tokens if seen else 0, member)
            own = replies // rollout.max_turns - len(observation)
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
    patches = side // vision.patch_size
    channels = getattr(vision, "in_channels", None) or vision.in_chans
    width = channels * vision.temporal_patch_size * vision.patch_size**2
    inputs = {
        "pixel_values": torch.zeros(patches * patches, width),
        "image_grid_thw": torch.tensor([[1, patches, patches]]),
    }
    return MediaItem(name, Image.new("RGB", (1, 1)), inputs, patches * patches // vision.spatial_merge_size**2)


def parts_of(trainer: Trainer) -> dict[str, list[torch.Tensor]]:
    """The tensors that stay from step to step, and the gradients, by part of the memory plan."""
    weights = list(trainer.policy.parameters())
    masters = [master for master in trainer._weights.parameters if all(master is not weight for weight in weights)]
    trained = [*weights, *masters]
    reference = trainer.reference
    return {
        "weights": weights,
        "masters": masters,
        "gradients": [tensor.grad for tensor in trained if tensor.grad is not None],
        "optimizer state": [v for s in trainer.optimizer.state.values() for v in s.values() if torch.is_tensor(v)],
        "reference": list(reference.parameters()) if isinstance(reference, torch.nn.Module) else [],
    }


@contextmanager
def phases(memory: Memory, trainer: Trainer) -> Iterator[None]:
    """Names the phases of a step: forward, backward, clip, optimizer, publish, and between them the loss."""

    def named(owner: Any, method: str, phase: str) -> tuple[Any, str, Any]:
        original = getattr(owner, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            with memory.during(phase):
                return original(*args, **kwargs)

        setattr(owner, method, call)
        return owner, method, original

    changed = [
        named(torch.Tensor, "backward", "backward"),
        named(torch.nn.utils, "clip_grad_norm_", "clip"),
        named(trainer.optimizer, "step", "optimizer"),
        named(trainer._weights, "publish", "publish"),
        named(trainer, "_score", "forward"),
    ]
    try:
        yield
    finally:
        for owner, method, original in changed:
            setattr(owner, method, original)


def simulate(config: Config, samples_of: Callable[[Any], Sequence[Sample]], steps: int = 2) -> dict[str, Any]:
    """Two optimizer steps of a run's trainer on one simulated GPU. ``samples_of`` makes the samples from the Hugging Face config."""
    numbers = KnownNumbers()
    parts: Callable[[], dict[str, list[torch.Tensor]]] = dict
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = replace(config.model, random_weights=True, device="cuda:0")
        config = replace(config, model=model)
        loaded: LoadedModel = load_model(model, config.models_dir, config.seed)
        memory = Memory(lambda: parts(), loaded.policy.config.get_text_config().vocab_size)
        with memory:
            for weight in [*loaded.policy.parameters(), *loaded.policy.buffers()]:
                memory._see(weight)
            if config.train.gradient_checkpointing:
                loaded.policy.enable_gradient_checkpointing()
            spec: Any = new_trainer(SimpleNamespace(config=config, trainers=SimpleNamespace(start=lambda spec: spec)))  # type: ignore[arg-type]
            trainer = Trainers.of(config, Ranks(), loaded).make(spec)
            for group in trainer.optimizer.param_groups:
                group["foreach"] = not group["fused"]
            parts = lambda: parts_of(trainer)  # noqa: E731
            kept = memory.by_part()
            with _disable_current_modes():
                samples = samples_of(loaded.policy.config)
            each = []
            with numbers, replacing(numbers), phases(memory, trainer):
                for _ in range(steps):
                    memory.peaks.clear()
                    with memory.during("loss"):
                        trainer.step(samples)
                    each.append({"peaks": memory.peaks.copy(), "after": memory.by_part()})
    return {"loaded": kept, "steps": each}


def main(arguments: Sequence[str]) -> None:
    recipe = Recipe.load(arguments[0])
    options = tyro.cli(TrainOptions, default=TrainOptions(recipe.config()), args=list(arguments[1:]))
    config = options.config
    with tempfile.TemporaryDirectory() as scratch:
        folder = folder_of(json.loads((Path(config.model.path) / "config.json").read_text()), Path(scratch))
        config = replace(config, output_dir=scratch, model=replace(config.model, path=str(folder)))
        result = simulate(config, lambda hf: samples_at_limits(config, hf))
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
