"""Settings of the model: weights, dtype, chat template, frozen parameters and LoRA."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from vlmrl.config.fields import Settings, positive
from vlmrl.utils.require import require

RANDOM = "random:"
"""Prefix of a ``model.path`` whose weights are initialized at random."""


@dataclass(frozen=True)
class Lora(Settings):
    """LoRA: train low-rank adapters instead of the model's own weights."""

    section = "model.lora"
    rank: int = 0
    """Rank of the LoRA adapters. 0 trains the full weights. Requires `pip install 'vlmrl[lora]'`."""
    alpha: int = 32
    """LoRA alpha: the adapters' output is scaled by `alpha / rank`."""
    targets: tuple[str, ...] = ()
    """Linear layers with adapters, by the last component of their module names. Unset: all but the head.
    Layers that `model.freeze` names get no adapters. The fused experts of a mixture of experts cannot have any."""
    vision: bool = False
    """Also adapt the target layers of the vision tower and the projector, not only the decoder's."""

    def __post_init__(self) -> None:
        require(self.rank >= 0, "model.lora.rank", "0 (off) or more", self.rank)
        for name in ("vision", "targets"):
            value = getattr(self, name)
            require(
                self.rank > 0 or not value, f"model.lora.{name}", "unset with model.lora.rank 0 (no adapters)", value
            )
        positive("model.lora", self, "alpha")


@dataclass(frozen=True)
class Model(Settings):
    """The policy: the model to load, its device and dtype, and its frozen and trained parameters."""

    section = "model"
    path: str = "tiny:qwen3_vl"
    """Model: a name on the Hugging Face Hub or a local folder.
    `tiny:FAMILY`, for example `tiny:qwen3_vl`, builds a tiny model with random weights.
    `random:PATH`: random weights; only config, tokenizer and image processor are those of the model."""
    device: str = "auto"
    """Torch device, such as `cuda:1`. `auto`: the first CUDA GPU, or the CPU if there is none."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype. `auto`: bfloat16 on a GPU, float32 on a CPU. The optimizer's master weights are always float32."""
    chat_template: str | None = None
    """Chat template: a file `NAME.jinja`, or the name of a template in `vlmrl/multimodal/templates`. Unset: the model's own."""
    max_image_pixels: int | None = None
    """Maximum pixels per image; larger images are scaled down. Unset: the limit of the model's image processor."""
    freeze: tuple[str, ...] = ()
    """Parameters to freeze: `vision_tower`, `projector`, `language_model`, or glob patterns of parameter names."""
    lora: Lora = field(default_factory=Lora)

    @property
    def random_weights(self) -> bool:
        """Whether the weights are initialized at random."""
        return self.path.startswith(RANDOM)

    @property
    def source(self) -> str:
        """The hub name, folder or tiny model of ``path``."""
        return self.path.removeprefix(RANDOM)

    def __post_init__(self) -> None:
        require(bool(self.source), "model.path", "a hub name, a folder or tiny:FAMILY", self.path)
        positive("model", self, "max_image_pixels")
