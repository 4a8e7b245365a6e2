"""Which model is trained, and how much of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from vlmrl.config.fields import positive, require


@dataclass(frozen=True)
class Lora:
    rank: int = 0
    """Of the low-rank adapters that are trained in place of the weights; 0: no adapters. Needs `pip install 'vlmrl[lora]'`."""
    alpha: int = 32
    """What the adapters add is scaled by `alpha / rank`."""
    dropout: float = 0.0
    """Of what goes into the adapters, while they are trained."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """The linear layers that get adapters, by the last part of their names."""
    vision: bool = False
    """Adapt the vision tower's layers of these names, too."""

    def __post_init__(self) -> None:
        require(self.rank >= 0, "model.lora.rank", "0 (off) or more", self.rank)
        require(0 <= self.dropout < 1, "model.lora.dropout", "at least 0 and less than 1", self.dropout)
        require(bool(self.targets), "model.lora.targets", "names of linear layers", self.targets)
        positive("model.lora", self, "alpha")


@dataclass(frozen=True)
class Model:
    path: str = "tiny:qwen3_vl"
    """A hub name, a folder in Hugging Face form, or `tiny:FAMILY`, such as `tiny:qwen3_vl`, which is built on the spot."""
    device: str = "auto"
    """`auto` (the first CUDA GPU, otherwise the CPU), or a torch device such as `cuda:1`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto`: bfloat16 on a GPU, float32 on a CPU. The optimizer's own copy is float32 either way."""
    chat_template: str | None = None
    """A Jinja file, or the name of one in `vlmrl/multimodal/templates`; unset: the model's own."""
    random_weights: bool = False
    """Take only the configuration, the tokenizer and the processor from `path`, and draw the weights."""
    max_image_pixels: int | None = None
    """Shrink images to at most this many pixels; unset: the processor's own limit."""
    freeze: tuple[str, ...] = ()
    """What is not trained: `vision_tower`, `projector`, `language_model`, or patterns of parameter names."""
    lora: Lora = field(default_factory=Lora)

    def __post_init__(self) -> None:
        require(bool(self.path), "model.path", "a hub name, a folder or tiny:FAMILY", self.path)
        positive("model", self, "max_image_pixels")
