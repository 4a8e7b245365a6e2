"""SmolVLM2: an image is square tiles in rows and a small copy of the whole; positions are 1-D."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import isqrt
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torchvision
import transformers
from PIL import Image
from tokenizers import AddedToken
from torchvision.transforms.v2 import functional as tv
from transformers.image_processing_backends import PilBackend
from transformers.image_utils import SizeDict
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from vlmrl.families.base import TINY_HEAD_DIM, Family, ImageFeatures, LargestImage, Size, VisionShape, tiny_rope
from vlmrl.types import to_device

TINY_TILE, TINY_PATCH, TINY_SCALE = 128, 16, 4
TINY_TOKENS = "<image> <fake_token_around_image> <global-img> <end_of_utterance>"
TEMPLATE = Path(__file__).parents[1] / "multimodal/templates/smolvlm.jinja"


class TileProcessor:
    """transformers' image processor ``images``, and the tokenizer's backend, which encodes the marks between an image's tiles."""

    def __init__(self, images: Any, backend: Any, tokens_per_tile: int) -> None:
        self.images = images
        self.tokens_per_tile = tokens_per_tile
        self._backend = backend
        self._marked: dict[tuple[int, int], tuple[int, dict[int, int]]] = {}

    @property
    def side(self) -> int:
        """Pixels of a tile's side."""
        return int(self.images.max_image_size["longest_edge"])

    def tiles(self, size: Size) -> tuple[int, int]:
        """Rows and columns of the tiles of an image of this size; ``(0, 0)`` for one that is a single tile."""
        width, height = size
        return (0, 0) if max(size) <= self.side else (height // self.side, width // self.side)

    def marked(self, size: Size, image_token_id: int) -> tuple[int, dict[int, int]]:
        """The tokens of an image, and those among them that are no placeholders, by offset: ``(7, {0: 504, 1: 505, 6: 504})``."""
        grid = self.tiles(size)
        if grid not in self._marked:
            image, fake, whole, _ = TINY_TOKENS.split()
            text = get_image_prompt_string(*grid, self.tokens_per_tile, fake, image, whole)
            ids = self._backend.encode(text, add_special_tokens=False).ids
            self._marked[grid] = len(ids), {at: id for at, id in enumerate(ids) if id != image_token_id}
        return self._marked[grid]

    def save_pretrained(self, folder: str | Path) -> None:
        self.images.save_pretrained(folder)
        # transformers' processor reads from here how many placeholders it writes.
        settings = {"processor_class": "SmolVLMProcessor", "image_seq_len": self.tokens_per_tile}
        (Path(folder) / "processor_config.json").write_text(json.dumps(settings, indent=2) + "\n")


class SmolVLM(Family):
    """An image is scaled up or down to whole tiles; marks of their row and column stand between the tiles' placeholders."""

    vision = True
    processor_reads_tokenizer = True
    parts: ClassVar[dict[str, str]] = {
        "vision_tower": r"vision_model\.",
        "projector": r"connector\.",
        "language_model": r"^(?!.*(vision_model|connector)\.)",
    }
    tiny_config_class = "SmolVLMConfig"
    tiny_model_class = "SmolVLMForConditionalGeneration"
    tiny_text: ClassVar[dict[str, Any]] = {"model_type": "llama", "head_dim": TINY_HEAD_DIM, **tiny_rope()}

    @property
    def vision_shape(self) -> VisionShape:
        vision, scale = self.config.vision_config, self.config.scale_factor
        return VisionShape(
            depth=vision.num_hidden_layers,
            hidden=vision.hidden_size,
            intermediate=vision.intermediate_size,
            pixels=vision.num_channels * vision.patch_size**2,
            outputs=1,
            patches_per_token=scale**2,
        )

    def largest_image(self, path: str, max_pixels: int | None) -> LargestImage:
        """A square one: the processor scales every image to the longest edge, and a square has the most tiles."""
        processor = self.load_processor(path)
        size = self.resized(processor, (processor.side, processor.side), max_pixels)
        tiles = int(self.image_sizes(processor, size)["num_tiles"])
        patches = tiles * (processor.side // self.config.vision_config.patch_size) ** 2
        return LargestImage(size, self.num_tokens(processor, size), patches)

    def load_processor(self, path: str) -> TileProcessor:
        """Raises ValueError for settings under which another resize of a resized image would change it."""
        images = transformers.AutoImageProcessor.from_pretrained(path, trust_remote_code=False)
        if isinstance(images, PilBackend):  # transformers' choice for images that this torchvision resizes otherwise
            raise ValueError(
                f"smolvlm needs torchvision 0.27 or newer, but {torchvision.__version__} is installed: install a newer torch and "
                "torchvision, or choose another model."
            )
        longest, side = images.size["longest_edge"], images.max_image_size["longest_edge"]
        if not images.do_resize or not longest or longest % side or longest > 4096:
            raise ValueError(
                "the image processor's size.longest_edge must be a multiple of max_image_size.longest_edge up to 4096, and "
                f"do_resize True, but they are {longest}, {side} and {images.do_resize}: change them in {path}."
            )
        backend = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False).backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        patches = side // self.config.vision_config.patch_size
        return TileProcessor(images, backend, (patches // self.config.scale_factor) ** 2)

    def resized(self, processor: TileProcessor, size: Size, max_pixels: int | None) -> Size:
        """Whole tiles: the longest edge is the processor's, or as many tiles as ``max_pixels`` allow, but at least one."""
        images, side = processor.images, processor.side
        limit = isqrt(max_pixels or 2**62) // side * side
        longest = max(side, min(limit, images.size["longest_edge"]))
        width, height = size
        _, rows, columns = images.get_number_of_image_patches(height, width, {"size": {"longest_edge": longest}})
        return max(columns, 1) * side, max(rows, 1) * side

    def resize(self, processor: TileProcessor, image: Image.Image, size: Size) -> Image.Image:
        """As the processor: first to the longest edge, its aspect ratio kept, then to whole tiles."""
        images, (width, height) = processor.images, size
        longest = max(size) if images.do_image_splitting else images.size["longest_edge"]
        pixels = tv.pil_to_tensor(image)
        for step in (SizeDict(longest_edge=longest), SizeDict(height=height, width=width)):
            pixels = images.resize(pixels, step, resample=images.resample)
        return tv.to_pil_image(pixels)

    def num_tokens(self, processor: TileProcessor, size: Size) -> int:
        return processor.marked(size, self.config.image_token_id)[0]

    def separators(self, processor: TileProcessor, size: Size) -> dict[int, int]:
        return processor.marked(size, self.config.image_token_id)[1]

    def image_sizes(self, processor: TileProcessor, size: Size) -> dict[str, torch.Tensor]:
        rows, columns = processor.tiles(size)
        return {"num_tiles": torch.tensor([rows * columns + 1])}

    def image_inputs(self, processor: TileProcessor, images: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tiles ``[tiles, 3, side, side]``, row by row, and after those of each image its small copy."""
        tiles = torch.cat([_tiles_of(processor, image) for image in images])
        own = processor.images
        scaling = (own.do_rescale, own.rescale_factor, own.do_normalize)
        return {"pixel_values": own.rescale_and_normalize(tiles, *scaling, tuple(own.image_mean), tuple(own.image_std))}

    def blank_inputs(self, device: torch.device) -> dict[str, torch.Tensor]:
        side = self.config.vision_config.patch_size * self.config.scale_factor
        return {"pixel_values": torch.zeros(1, 3, side, side, device=device), "num_tiles": torch.tensor([1])}

    def encode_images(self, model: Any, mm_inputs: dict[str, torch.Tensor]) -> list[ImageFeatures]:
        """By the model's own tower and connector; its `get_image_features` reads from the GPU which tiles are padding."""
        inner = model.model
        hidden = inner.vision_model(mm_inputs["pixel_values"].to(inner.vision_model.dtype)).last_hidden_state
        features = inner.connector(hidden)
        return [ImageFeatures(tiles.flatten(0, 1)) for tiles in features.split(mm_inputs["num_tiles"].tolist())]

    @contextmanager
    def insert_features(self, model: Any, images: Sequence[ImageFeatures]) -> Iterator[dict[str, Any]]:
        """The features replace the placeholders' embeddings where the model looks these up, without counting them on a GPU.

        Their number is right: the renderer makes the placeholders from the images, and the audit compares them.
        """
        features = torch.cat([image.embeds for image in images])

        def insert(_: Any, inputs: tuple[torch.Tensor], embeds: torch.Tensor) -> torch.Tensor:
            places = (inputs[0] == self.config.image_token_id).flatten()
            indices = torch.nonzero_static(places, size=len(features))[:, 0]
            return embeds.flatten(0, 1).index_copy(0, indices, features.to(embeds.dtype)).view_as(embeds)

        hook = model.get_input_embeddings().register_forward_hook(insert)
        try:
            yield {}
        finally:
            hook.remove()

    @classmethod
    def tiny_tokenizer(cls, tokenizer: Any) -> Any:
        """With SmolVLM's tokens: those of images, of four tiles' places, and the end of a turn."""
        places = (f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2))
        tokens = [AddedToken(text, special=True, normalized=False) for text in (*TINY_TOKENS.split(), *places)]
        tokenizer.add_special_tokens({"additional_special_tokens": tokens, "eos_token": tokens[3]})
        tokenizer.chat_template = TEMPLATE.read_text()
        return tokenizer

    @classmethod
    def tiny_config(cls, text: dict[str, Any], vision_width: int, vision_depth: int, tokenizer: Any) -> Any:
        vision = {
            "hidden_size": vision_width,
            "intermediate_size": 4 * vision_width,
            "num_hidden_layers": vision_depth,
            "num_attention_heads": 4,
            "image_size": TINY_TILE,
            "patch_size": TINY_PATCH,
        }
        return transformers.SmolVLMConfig(
            text_config=text | cls.tiny_text | {"pad_token_id": tokenizer.pad_token_id},
            vision_config=vision,
            scale_factor=TINY_SCALE,
            image_token_id=tokenizer.get_vocab()["<image>"],
            tie_word_embeddings=True,
        )

    @classmethod
    def tiny_processor(cls, tokenizer: Any, max_pixels: int) -> Any:
        """Not transformers' processor, which cannot be made without the package num2words, but the files that it reads."""
        longest = max(TINY_TILE, min(isqrt(max_pixels), 2 * TINY_TILE) // TINY_TILE * TINY_TILE)
        sizes: dict[str, Any] = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": TINY_TILE}}
        per_tile = (TINY_TILE // TINY_PATCH // TINY_SCALE) ** 2
        images = TileProcessor(transformers.SmolVLMImageProcessor(**sizes), tokenizer.backend_tokenizer, per_tile)
        parts = (tokenizer, images, transformers.SmolVLMVideoProcessor(**sizes))
        return SimpleNamespace(save_pretrained=lambda folder: [part.save_pretrained(folder) for part in parts])


def _tiles_of(processor: TileProcessor, image: torch.Tensor) -> torch.Tensor:
    """The tiles ``[tiles, 3, side, side]`` of an image ``[3, height, width]``, uint8."""
    side, (rows, columns) = processor.side, processor.tiles((image.shape[2], image.shape[1]))
    if not rows:
        return image[None]
    tiles = image.unflatten(2, (columns, side)).unflatten(1, (rows, side)).permute(1, 3, 0, 2, 4).flatten(0, 1)
    # Scaled on the host: on a GPU the processor would take another filter, which no server takes.
    small = processor.images.resize(image.cpu(), SizeDict(height=side, width=side), resample=processor.images.resample)
    return torch.cat([tiles, to_device(small, image.device)[None]])
