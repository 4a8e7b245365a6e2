"""The base class of the Qwen-VL families, and of others with M-RoPE and grids of patches: positions, vision forward, tiny models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import isqrt, log
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
import transformers
from transformers import vision_utils
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from vlmrl.families.base import ASSUMED_IMAGE, Family, ImageFeatures, LargestImage, Size, VisionShape, class_of
from vlmrl.types import MediaItem, to_device

MAX_RATIO = 200
"""Of the sides of an image that the processors accept."""


class _UncountedPlaces:
    """Inserts image features where the placeholders are, without counting these, which would wait for the GPU.

    Their number is right: the renderer makes the placeholders from the images, and the audit compares them.
    """

    def __init__(self, image_token_id: int | None, embeds: torch.Tensor) -> None:
        assert image_token_id is not None
        self._token, self._embeds = image_token_id, embeds
        self._indices: torch.Tensor | None = None

    def insert_embeds(
        self, input_ids: torch.Tensor, inputs_embeds: torch.Tensor, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Insert the features, and return masks of image and video placeholders ``[rows, length, 1]`` that hold none.

        So the model inserts nothing by `masked_scatter`, whose gradient counts the placeholders.
        """
        places = (input_ids == self._token).flatten()
        self._indices = torch.nonzero_static(places, size=len(self._embeds))[:, 0]
        is_leaf = inputs_embeds.is_leaf and inputs_embeds.requires_grad
        if is_leaf:  # transformers makes it one where frozen embeddings are checkpointed; no leaf can be written to
            inputs_embeds.requires_grad_(False)
        inputs_embeds.flatten(0, 1).index_copy_(0, self._indices, self._embeds.to(inputs_embeds.dtype))
        if is_leaf and not inputs_embeds.requires_grad:  # the features have no gradient
            inputs_embeds.requires_grad_(True)
        nothing = torch.zeros_like(input_ids, dtype=torch.bool)[..., None]
        return nothing, nothing

    def add_level(self, hidden: torch.Tensor, _: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """``hidden`` ``[rows, length, width]`` plus a deepstack level's ``features`` ``[n, width]`` at the placeholders."""
        assert self._indices is not None
        return hidden.flatten(0, 1).index_add(0, self._indices, features.to(hidden.dtype)).view_as(hidden)


class QwenVL(Family):
    """An image is one run of placeholders, each for ``spatial_merge_size ** 2`` patches. Positions are M-RoPE."""

    vision = True
    joins_images = True
    mrope = True
    parts: ClassVar[dict[str, str]] = {
        "vision_tower": r"visual\.(?!.*merger)",
        "projector": r"visual\..*merger",
        "language_model": r"^(?!.*visual\.)",
    }
    tiny_processor_class: ClassVar[str | type] = ""
    tiny_image_processor_class: ClassVar[str | type] = "Qwen2VLImageProcessor"
    tiny_video_processor_class: ClassVar[str | type] = ""
    tiny_patch_size: ClassVar[int]
    tiny_media_ids: ClassVar[dict[str, str]] = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    """The config's ids of media tokens, each with its token in the tiny tokenizer."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._joined_deepstack = False

    @property
    def banned_ids(self) -> list[int]:
        return [self.config.image_token_id, self.config.video_token_id]

    def positions(
        self, token_ids: Sequence[int], media: Sequence[MediaItem], start: int = 0
    ) -> tuple[torch.Tensor, int]:
        merge = self.config.vision_config.spatial_merge_size if media else 1
        grids = [merged_grid(item.sizes["image_grid_thw"], merge) for item in media]
        return mrope_positions(token_ids, grids, self.image_token_id, start)

    @property
    def vision_shape(self) -> VisionShape:
        vision = self.config.vision_config
        width = getattr(vision, "embed_dim", None) or vision.hidden_size  # Qwen2-VL names its output width hidden_size
        inner = getattr(vision, "intermediate_size", None) or int(width * getattr(vision, "mlp_ratio", 4))
        channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", 3)
        return VisionShape(
            depth=vision.depth,
            hidden=width,
            intermediate=inner,
            pixels=channels * vision.temporal_patch_size * vision.patch_size**2,
            outputs=1 + len(getattr(vision, "deepstack_visual_indexes", None) or ()),
            patches_per_token=vision.spatial_merge_size**2,
        )

    def largest_image(self, path: str, max_pixels: int | None) -> LargestImage:
        """Of ``max_pixels``. It needs no processor, so that a published model is planned without its files."""
        vision, pixels = self.config.vision_config, max_pixels or ASSUMED_IMAGE
        tokens = -(-pixels // (vision.patch_size * vision.spatial_merge_size) ** 2)
        return LargestImage((round(pixels**0.5),) * 2, tokens, tokens * vision.spatial_merge_size**2)

    def load_processor(self, path: str) -> Any:
        return transformers.AutoImageProcessor.from_pretrained(path, trust_remote_code=False)

    def resized(self, processor: Any, size: Size, max_pixels: int | None) -> Size:
        width, height = size
        unit = processor.patch_size * processor.merge_size
        most = min(max_pixels or 2**62, processor.size["longest_edge"])
        limits = limits_that_agree(processor.size["shortest_edge"], most, unit)
        rows, columns = smart_resize(height, width, unit, *limits)
        return size_within(limits, unit, size, (columns, rows))

    def num_tokens(self, processor: Any, size: Size) -> int:
        return size[0] * size[1] // (processor.patch_size * processor.merge_size) ** 2

    def image_sizes(self, processor: Any, size: Size) -> dict[str, torch.Tensor]:
        columns, rows = (length // processor.patch_size for length in size)
        return {"image_grid_thw": torch.tensor([[1, rows, columns]])}

    def image_inputs(self, processor: Any, images: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Patches ``[rows, channels * frames * side * side]``, those of one visual token next to each other.

        They are written where they stay: a copy would take eight times the memory of the images again.
        """
        side, frames = processor.patch_size, processor.temporal_patch_size
        counts = [image.shape[1] * image.shape[2] // side**2 for image in images]
        patches = torch.empty(sum(counts), len(images[0]), frames, side, side, device=images[0].device)
        for own, image in zip(patches.split(counts), images, strict=True):
            self._write_patches(own, processor, image)
        return {"pixel_values": patches.flatten(1)}

    def _write_patches(self, patches: torch.Tensor, processor: Any, image: torch.Tensor) -> None:
        """Normalize the image and cut it into ``patches``."""
        scaling = (processor.do_rescale, processor.rescale_factor, processor.do_normalize)
        colors = (tuple(processor.image_mean), tuple(processor.image_std))
        (values,) = processor.rescale_and_normalize(image[None], *scaling, *colors)
        side, merge = processor.patch_size, processor.merge_size
        rows, columns = (length // (side * merge) for length in image.shape[1:])
        blocks = values.reshape(-1, rows, merge, side, columns, merge, side).permute(1, 4, 2, 5, 0, 3, 6)
        # A still image is a video of equal frames.
        patches.unflatten(0, (rows, columns, merge, merge)).copy_(blocks.unsqueeze(5))

    def blank_inputs(self, device: torch.device) -> dict[str, torch.Tensor]:
        vision = self.config.vision_config
        side = vision.spatial_merge_size
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        patches = torch.zeros(side * side, width, device=device)
        return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, side, side]])}

    def encode_images(self, model: Any, mm_inputs: dict[str, torch.Tensor]) -> list[ImageFeatures]:
        sizes = vision_inputs(model.model.visual, mm_inputs["image_grid_thw"], mm_inputs["pixel_values"].device)
        output = model.model.get_image_features(**mm_inputs, **sizes, return_dict=True)
        deepstack = getattr(output, "deepstack_features", None) or []
        if deepstack and isinstance(deepstack[0], torch.Tensor):  # transformers before 5.23 leaves the images joined
            self._joined_deepstack = True
            deepstack = [level.split([len(embeds) for embeds in output.pooler_output]) for level in deepstack]
        levels = zip(*deepstack, strict=True) if deepstack else ((),) * len(output.pooler_output)
        return [ImageFeatures(embeds, tuple(more)) for embeds, more in zip(output.pooler_output, levels, strict=True)]

    @contextmanager
    def insert_features(self, model: Any, images: Sequence[ImageFeatures]) -> Iterator[dict[str, Any]]:
        """The model's own forward inserts the features, deepstack included; its call of the vision tower is replaced.

        On a GPU, so are the steps that would count the placeholders there, forward and backward.
        """
        levels: list[Any] = list(zip(*(image.deepstack for image in images), strict=True))
        if self._joined_deepstack:
            levels = [torch.cat(level) for level in levels]
        embeds = tuple(image.embeds for image in images)
        replaced: list[tuple[Any, str, Any]] = []
        if waits_to_be_read(embeds[0].device):
            uncounted = _UncountedPlaces(self.image_token_id, torch.cat(embeds))
            embeds = tuple(each.detach() for each in embeds)  # not inserted by the model
            replaced.append((model.model, "get_placeholder_mask", uncounted.insert_embeds))
            if levels:
                replaced.append((model.model.language_model, "_deepstack_process", uncounted.add_level))
        output = SimpleNamespace(pooler_output=embeds, deepstack_features=levels)  # what the model's forward reads
        replaced.append((model.model, "get_image_features", lambda *args, **kwargs: output))
        for module, name, function in replaced:
            setattr(module, name, function)
        try:
            yield {"pixel_values": images[0].embeds, "image_grid_thw": None}  # stand-ins: the features are ready
        finally:
            for module, name, _ in replaced:
                delattr(module, name)  # uncovers the class's own method

    @classmethod
    def tiny_vision(cls, width: int, text_width: int) -> dict[str, Any]:
        """This family's fields of the vision config, from the vision tower's width and the language model's."""
        raise NotImplementedError

    @classmethod
    def tiny_config(cls, text: dict[str, Any], vision_width: int, vision_depth: int, tokenizer: Any) -> Any:
        ids = tokenizer.get_vocab()
        vision = {
            "depth": vision_depth,
            "num_heads": 4,
            "patch_size": cls.tiny_patch_size,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            **cls.tiny_vision(vision_width, text["hidden_size"]),
        }
        return class_of(cls.tiny_config_class)(
            text_config=text | cls.tiny_text,
            vision_config=vision,
            tie_word_embeddings=True,
            **{field: ids[token] for field, token in cls.tiny_media_ids.items()},
        )

    @classmethod
    def tiny_processor(cls, tokenizer: Any, max_pixels: int) -> Any:
        sizes: dict[str, Any] = {
            "patch_size": cls.tiny_patch_size,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "size": {"shortest_edge": (2 * cls.tiny_patch_size) ** 2, "longest_edge": max_pixels},
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
        }
        return class_of(cls.tiny_processor_class)(
            image_processor=class_of(cls.tiny_image_processor_class)(**sizes),
            tokenizer=tokenizer,
            video_processor=class_of(cls.tiny_video_processor_class)(**sizes),
            chat_template=tokenizer.chat_template,
        )


def limits_that_agree(least: int, most: int, unit: int) -> tuple[int, int]:
    """The limits of an image's pixels, in whole squares of ``unit``; the upper one alone if no image is within both::

    limits_that_agree(4096, 70000, 32) == (4096, 70000)
    limits_that_agree(4096, 3000, 32) == (1024, 3000)
    """
    most = max(most, unit**2)
    return (least, most) if -(-least // unit**2) <= most // unit**2 else (unit**2, most)


def size_within(limits: tuple[int, int], unit: int, size: Size, found: Size) -> Size:
    """The size ``found`` by a processor for an image of ``size``, or one near it that the processor leaves as it is.

    Such a size has sides of whole ``unit``, between the ``limits`` of pixels, and at most 200 times as long as each other. The
    processor cuts to its limits once, and no side below one unit, so that it finds others for long images and for limits close
    to each other. Of all sizes that fit, this is the one with the nearest aspect ratio, and of equal ones the largest. Where
    none fits, as none of just 211 squares does, the lower limit does not hold::

        size_within((1024, 16384), 32, size=(4000, 30), found=(1376, 32)) == (512, 32)

    ``limits`` are those of :func:`limits_that_agree`.
    """
    fewest, most = -(-limits[0] // unit**2), limits[1] // unit**2
    if fewest <= found[0] * found[1] // unit**2 <= most and max(found) <= MAX_RATIO * min(found):
        return found
    ratio = max(size) / min(size)
    fitting = _fitting(fewest, most, ratio) or _fitting(1, most, ratio)
    long, short = (side * unit for side in min(fitting)[2])
    return (long, short) if size[0] >= size[1] else (short, long)


def _fitting(fewest: int, most: int, ratio: float) -> list[tuple[float, int, Size]]:
    """For each short side the long one that is nearest to ``ratio``, in squares; before it, by what to choose among them."""
    fitting = []
    for short in range(1, isqrt(most) + 1):
        longest = min(MAX_RATIO * short, most // short)
        long = max(short, -(-fewest // short), min(longest, round(short * ratio)))
        if long <= longest:
            fitting.append((abs(log(long / short / ratio)), -short * long, (long, short)))
    return fitting


def waits_to_be_read(device: torch.device) -> bool:
    """Whether reading a number back from ``device`` waits until everything before it is computed."""
    return device.type != "cpu"


def vision_inputs(visual: Any, grids: torch.Tensor, device: torch.device) -> dict[str, torch.Tensor]:
    """What a vision tower computes from ``grids`` ``[images, 3]``, computed on the host, by the names of its arguments.

    On a GPU, each would wait for the device, and every block reads the lengths ``cu_seqlens`` back; these stay on the host.
    """
    merge = visual.spatial_merge_size
    lengths = {"cu_seqlens": vision_utils.get_vision_cu_seqlens(grids)}
    moved = {"position_ids": vision_utils.get_vision_position_ids(grids, merge)}
    if hasattr(visual, "num_grid_per_side"):  # learned positions, interpolated
        moved["interp_indices"], moved["interp_weights"] = vision_utils.get_vision_interpolation_indices_and_weights(
            grids,
            num_grid_per_side=visual.num_grid_per_side,
            mode=visual.interpolation_mode,
            align_corners=visual.interpolation_align_corners,
            spatial_merge_size=merge,
        )
    if hasattr(visual, "window_size"):
        moved["window_index"], lengths["cu_window_seqlens"] = vision_utils.get_vision_window_index(
            grids, spatial_merge_size=merge, window_size=visual.window_size, patch_size=visual.patch_size
        )
    return lengths | {name: to_device(values, device) for name, values in moved.items()}


def mrope_positions(
    token_ids: Sequence[int], grids: Sequence[tuple[int, int]], image_token_id: int | None, start: int = 0
) -> tuple[torch.Tensor, int]:
    """M-RoPE positions ``[3, tokens]`` (temporal, height, width) of a row or of its continuation, and the next free position.

    A text token takes the next position in all three. An image of ``grids`` (height, width in visual tokens, after merging) takes one
    temporal position and counts its rows and columns from there. The text goes on after the larger side::

        mrope_positions([7, 9, 9, 8], [(1, 2)], image_token_id=9) == [[0, 1, 1, 3], [0, 1, 1, 3], [0, 1, 2, 3]], 4

    Source: Qwen2-VL, arXiv 2409.12191, section 2.1; the tests compare it with each model's own rule.
    """
    ids, done, cursor = np.asarray(token_ids), 0, 0
    positions = np.empty((3, len(ids)), dtype=np.int64)
    visual = np.flatnonzero(ids == image_token_id).tolist() if grids else []
    for height, width in grids:
        first = visual[cursor]
        positions[:, done:first] = np.arange(start, start + first - done)
        start += first - done
        done, cursor = first + height * width, cursor + height * width
        positions[0, first:done] = start
        positions[1, first:done].reshape(height, width)[:] = np.arange(start, start + height)[:, None]
        positions[2, first:done].reshape(height, width)[:] = np.arange(start, start + width)
        start += max(height, width)
    end = start + len(ids) - done
    positions[:, done:] = np.arange(start, end)
    return torch.from_numpy(positions), end


def merged_grid(image_grid_thw: torch.Tensor, merge_size: int) -> tuple[int, int]:
    """An image's height and width in visual tokens, from its grid of patches ``[1, 3]``."""
    _, height, width = image_grid_thw[0].tolist()
    return height // merge_size, width // merge_size
