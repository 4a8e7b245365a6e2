"""The interface of a model family: all that the package has to know about a ``model_type`` beyond its config."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import transformers
from PIL import Image
from torchvision.transforms.v2 import functional as tv

from vlmrl.families.forks import Forks
from vlmrl.types import MediaItem

WHY_NOT_PACKED = "some of its layers carry a state from token to token, which its family cannot branch or end"
TINY_HEAD_DIM = 32

Size = tuple[int, int]
"""Width and height in pixels."""
ASSUMED_IMAGE = 512 * 512
"""Pixels of the images for which memory is planned, where `model.max_image_pixels` does not say."""


@dataclass(frozen=True)
class ImageFeatures:
    """One image as the decoder reads it: ``embeds`` ``[visual tokens, hidden]``, and one such tensor for each deepstack layer."""

    embeds: torch.Tensor
    deepstack: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True)
class VisionShape:
    """A vision tower: ``depth`` blocks of ``hidden`` and ``intermediate`` width over patches of ``pixels`` numbers."""

    depth: int
    hidden: int
    intermediate: int
    pixels: int
    outputs: int
    """Projectors: the last one and those of deepstack levels."""
    patches_per_token: int


@dataclass(frozen=True)
class LargestImage:
    """What the largest image costs: its ``tokens``, separators included, and the ``patches`` that the vision tower encodes."""

    size: Size
    tokens: int
    patches: int


class Family:
    """A model family, bound to the config of one model. This base class describes a plain text model.

    A new family is a subclass in a file of its own and an entry in :data:`vlmrl.families.FAMILIES`. A family with images sets
    ``vision`` and overrides the methods from :meth:`load_processor` to :meth:`insert_features`; `qwen_vl.py` is an example.

    Model code is expected in Hugging Face's form: ``model.model`` is the decoder without its head, ``model.lm_head`` the head,
    ``config.get_text_config()`` the decoder's config.
    """

    vision: ClassVar[bool] = False
    """The model reads images."""
    processor_reads_tokenizer: ClassVar[bool] = False
    """:meth:`load_processor` loads the tokenizer, too."""
    joins_images: ClassVar[bool] = False
    """The vision tower reads the patches of all images as one sequence, and its attention gets ``cu_seqlens``."""
    mrope: ClassVar[bool] = False
    """The model takes position triples ``[3, rows, tokens]``; otherwise ``[rows, tokens]``."""
    recurrent: ClassVar[bool] = False
    """Some layers carry a state from token to token, as gated linear attention does."""
    forked_layers: ClassVar[str | None] = None
    """The class name of the recurrent layers, which :meth:`run_forked` runs over trees. None: rows are padded, never packed."""
    router: ClassVar[str | None] = None
    """The class name of the modules that choose a token's experts, in a mixture of experts."""
    transposed_weights: ClassVar[tuple[str, ...]] = ()
    """Suffixes of weight names whose last two dimensions are swapped in checkpoints. transformers swaps them on load, not on save."""
    float32_weights: ClassVar[tuple[str, ...]] = ()
    """Suffixes of weight names that are published in float32 beside bfloat16 ones. A trainer in bfloat16 rounds them."""
    parts: ClassVar[dict[str, str]] = {"language_model": ""}
    """Parts that `model.freeze` can name, each with a regular expression for parameter names. LoRA adapts ``language_model``,
    and with `model.lora.vision` all parts."""
    tiny_config_class: ClassVar[str | type] = ""
    """The class of the config that ``tiny:NAME`` is built from (`model/tiny.py`); a string names one in transformers."""
    tiny_model_class: ClassVar[str | type] = ""
    """The class of its model; a string names one in transformers."""
    tiny_text: ClassVar[dict[str, Any]] = {}
    """Fields of the text config that only this family has."""
    tiny_stop_tokens: ClassVar[tuple[str, ...]] = ()
    """Tokens that end a response, beside the tiny tokenizer's end-of-sequence and padding tokens."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @property
    def may_share(self) -> bool:
        """Whether rows with a common prefix may be computed as one tree, and unrelated rows be packed into one."""
        return not self.recurrent or self.forked_layers is not None

    @property
    def image_token_id(self) -> int | None:
        """The image placeholder; ``None`` for a text model."""
        return self.config.image_token_id if self.vision else None

    @property
    def banned_ids(self) -> list[int]:
        """Ids with probability 0 in sampling and training: media placeholders, which a processor would take for an image."""
        return [self.config.image_token_id] if self.vision else []

    def published(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """A weight in its checkpoint layout, for example ``mlp.experts.down_proj`` as ``[experts, in, out]``."""
        return weight.transpose(-1, -2).contiguous() if name.endswith(self.transposed_weights) else weight

    def positions(
        self, token_ids: Sequence[int], media: Sequence[MediaItem], start: int = 0
    ) -> tuple[torch.Tensor, int]:
        """Rotary positions ``[3, tokens]`` of a row or of its continuation from ``start``, and the next free position.

        ``token_ids`` are expanded and hold the images ``media``, in order. Here: 0, 1, 2, ... in all three dimensions.
        """
        stop = start + len(token_ids)
        return torch.arange(start, stop).expand(3, -1), stop

    def run_forked(self, layer: Any, hidden: torch.Tensor, forks: Forks) -> torch.Tensor:
        """One of the :attr:`forked_layers` over a tree: ``[tokens, hidden]`` in and out.

        It gives each row what the layer's own forward gives it, with ``forks`` for its convolution and its recurrence.
        """
        raise NotImplementedError

    # Images

    @property
    def vision_shape(self) -> VisionShape | None:
        """The vision tower's widths, by which memory is planned; ``None`` for a text model."""
        return None

    def largest_image(self, path: str, max_pixels: int | None) -> LargestImage | None:
        """What the largest image costs, for which memory is planned; ``None`` for a text model.

        ``path``: the model's folder or hub name, for families whose processor scales small images up, too. ``max_pixels``:
        `model.max_image_pixels`; without it, the images of other families are taken to have :data:`ASSUMED_IMAGE` pixels.
        """
        return None

    def load_processor(self, path: str) -> Any:
        """The image processor in a model's folder or under its hub name; ``None`` for a text model.

        It is passed to the methods below, and saved with the model by its ``save_pretrained``.
        """
        return None

    def resized(self, processor: Any, size: Size, max_pixels: int | None) -> Size:
        """The size to which an image of ``size`` is resized; ``max_pixels`` lowers the processor's limit.

        An image of this size keeps it, also without ``max_pixels``: servers resize the images that they receive, and do not know
        ``max_pixels``. One below the processor's minimum holds, too, and is refused with servers.
        Raises ValueError for a size that the processor refuses.
        """
        raise NotImplementedError

    def resize(self, processor: Any, image: Image.Image, size: Size) -> Image.Image:
        """The image at this :meth:`resized` size, with the processor's own filter. Here: bicubic, antialiased."""
        width, height = size
        pixels = tv.resize(tv.pil_to_tensor(image), [height, width], tv.InterpolationMode.BICUBIC, antialias=True)
        return tv.to_pil_image(pixels)

    def num_tokens(self, processor: Any, size: Size) -> int:
        """How many tokens an image of this :meth:`resized` size expands to, separators included."""
        raise NotImplementedError

    def separators(self, processor: Any, size: Size) -> dict[int, int]:
        """The tokens of an expanded image that are no placeholders, by offset: ``{4: 198}`` is id 198 after 4 placeholders.

        They separate tiles, rows or frames, so that one image has several runs of placeholders.
        """
        return {}

    def image_sizes(self, processor: Any, size: Size) -> dict[str, torch.Tensor]:
        """The model's inputs that follow from an image's :meth:`resized` size, such as a grid, in host memory.

        They stay there, since a GPU would have to be waited for to read them.
        """
        return {}

    def image_inputs(self, processor: Any, images: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The processor's other tensors of some images, by its own operations, on their device, concatenated along their rows.

        ``images``: ``[3, height, width]`` each, uint8, of :meth:`resized` sizes.
        """
        raise NotImplementedError

    def blank_inputs(self, device: torch.device) -> dict[str, torch.Tensor]:
        """The :meth:`image_inputs` and :meth:`image_sizes` of a small black image.

        A rank without images encodes it, to take part in FSDP's collectives.
        """
        raise NotImplementedError

    def encode_images(self, model: Any, mm_inputs: dict[str, torch.Tensor]) -> list[ImageFeatures]:
        """Run the vision tower and the projector: the features of each image in ``mm_inputs``."""
        raise NotImplementedError

    def insert_features(self, model: Any, images: Sequence[ImageFeatures]) -> AbstractContextManager[dict[str, Any]]:
        """Within the context, ``model.model``, called with the yielded arguments, replaces its placeholders by ``images``.

        ``images`` are the features of each image occurrence, in row order.
        """
        raise NotImplementedError

    # Tiny models (`model/tiny.py`)

    @classmethod
    def tiny_tokenizer(cls, tokenizer: Any) -> Any:
        """The tokenizer of a tiny model, from one with Qwen's special tokens and our chat template. Here: the same."""
        return tokenizer

    @classmethod
    def tiny_config(cls, text: dict[str, Any], vision_width: int, vision_depth: int, tokenizer: Any) -> Any:
        """The config of a tiny model; ``text`` are the fields that every text config has."""
        return class_of(cls.tiny_config_class)(**text | cls.tiny_text)

    @classmethod
    def tiny_model(cls, config: Any) -> Any:
        """A model with random weights drawn from torch's global generator."""
        return class_of(cls.tiny_model_class)(config)

    @classmethod
    def tiny_processor(cls, tokenizer: Any, max_pixels: int) -> Any:
        """The processor to save beside the weights, tokenizer included; ``None`` saves the tokenizer alone."""
        return None


def class_of(named: str | type) -> Any:
    """A class, or the one of this name in transformers."""
    return getattr(transformers, named) if isinstance(named, str) else named


def tiny_rope(**fields: Any) -> dict[str, Any]:
    """Rope fields of a tiny model's text config."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **fields}}
