"""A model with its tokenizer and processor, from a hub name, a folder, or built on the spot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.core_model_loading import revert_weight_conversion

from vlmrl.config import Model
from vlmrl.config.code import resolve_path
from vlmrl.model import tiny
from vlmrl.model.families.base import family_of
from vlmrl.model.lora import add_lora, freeze, named_weights
from vlmrl.model.policy import Policy
from vlmrl.multimodal.images import blank
from vlmrl.multimodal.renderer import Renderer
from vlmrl.multimodal.store import MediaStore

TEMPLATES = Path(__file__).parents[1] / "multimodal/templates"


@dataclass(frozen=True)
class Reader:
    """How a model reads: its tokenizer and chat template, its image processor (``None`` for a text model); no weights.

    ``path`` is where it came from: a folder, or a hub name.
    """

    renderer: Renderer
    tokenizer: Any
    image_processor: Any
    max_image_pixels: int | None
    path: str

    def new_store(self, blank_images: bool = False) -> MediaStore | None:
        if self.image_processor is None:
            return None
        transform = blank if blank_images else None
        return MediaStore(self.image_processor, max_pixels=self.max_image_pixels, transform=transform)


@dataclass(frozen=True)
class LoadedModel(Reader):
    """All that comes out of one model folder."""

    policy: Policy

    @property
    def is_on_meta(self) -> bool:
        """Whether the weights are elsewhere, and only their shapes here."""
        return self.policy.device.type == "meta"

    def save(self, folder: Path, weights: Iterable[tuple[str, torch.Tensor]] | None = None) -> None:
        """Weights (by default its own, adapters merged in), tokenizer and processor in Hugging Face form."""
        model = self.policy.model
        published = dict(as_saved(model, named_weights(model) if weights is None else weights))
        model.save_pretrained(folder, state_dict=published, save_original_format=False)  # in which it is already
        self.tokenizer.chat_template = self.renderer.chat_template  # the one it was trained with
        self.tokenizer.save_pretrained(folder)
        if self.image_processor is not None:
            self.image_processor.save_pretrained(folder)


def as_saved(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights under the names and in the form that checkpoints have, and servers expect: not every ``model``'s own are the same.

    Qwen2.5-VL's ``model.visual.patch_embed.proj.weight`` is ``visual.patch_embed.proj.weight`` in its checkpoints.
    """
    family = family_of(model.config)
    for name, weight in weights:
        for saved, value in revert_weight_conversion(model, {name: weight}).items():
            yield saved, family.published(saved, value)


def load_model(config: Model, cache_dir: Path, seed: int) -> LoadedModel:
    """Load what ``config`` names. ``cache_dir`` holds models built on the spot; ``seed`` draws random weights.

    On the device ``meta`` nothing but the weights' shapes is there, and nothing of them is read.
    """
    transformers.utils.logging.disable_progress_bar()  # the run shows its own
    model = _build(config, _found(config.path, cache_dir), seed)
    reader = load_reader(config, cache_dir)
    return LoadedModel(**vars(reader), policy=Policy(model).eval())


def shapes_of(config: Model, cache_dir: Path) -> Any:
    """The model that ``config`` names, adapters and frozen parts included, on the device ``meta``."""
    return _build(replace(config, device="meta"), _found(config.path, cache_dir), seed=0)


def _build(config: Model, path: str, seed: int) -> Any:
    hf_config = AutoConfig.from_pretrained(path)
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    auto: Any = AutoModelForImageTextToText if family_of(hf_config).vision else AutoModelForCausalLM
    if config.random_weights or device.type == "meta":
        torch.manual_seed(seed)
        with torch.device(device):
            model = auto.from_config(hf_config, dtype=dtype, attn_implementation="sdpa")
    else:
        model = auto.from_pretrained(path, dtype=dtype, attn_implementation="sdpa").to(device)
    freeze(model, config.freeze)
    if config.lora.rank:
        with torch.random.fork_rng():
            torch.manual_seed(seed)  # every rank draws the same
            add_lora(model, config.lora)
    return model


def load_reader(config: Model, cache_dir: Path) -> Reader:
    """What ``config`` names, without its weights."""
    path = _found(config.path, cache_dir)
    hf_config = AutoConfig.from_pretrained(path)
    vision = family_of(hf_config).vision
    tokenizer = AutoTokenizer.from_pretrained(path)
    renderer = Renderer(
        tokenizer,
        image_token=str(tokenizer.convert_ids_to_tokens(hf_config.image_token_id)) if vision else None,
        chat_template=_chat_template(config.chat_template),
        stop_ids=_stop_ids(path),
    )
    image_processor = AutoImageProcessor.from_pretrained(path) if vision else None
    return Reader(renderer, tokenizer, image_processor, config.max_image_pixels, path)


def _found(path: str, cache_dir: Path) -> str:
    """A model's folder, absolute if it is local, or its name on the Hub; a tiny model is built on first use."""
    path = tiny.resolve(path, cache_dir)
    return str(Path(path).absolute()) if Path(path).is_dir() else path


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return torch.device(name)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, name)


def _chat_template(name: str | None) -> str | None:
    """A template of ours by name, or a file's text."""
    if name is None:
        return None
    ours = TEMPLATES / f"{name}.jinja"
    return (ours if ours.is_file() else resolve_path(name)).read_text()


def _stop_ids(path: str) -> list[int]:
    """The ids at which the model's own generation settings end a reply."""
    try:
        ids = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        return []
    return [ids] if isinstance(ids, int) else list(ids or [])
