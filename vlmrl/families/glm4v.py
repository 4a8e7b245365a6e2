"""GLM-4.1V: M-RoPE and grids of patches as in Qwen-VL, with a vision tower, media tokens and image sizes of its own."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.models.glm4v.image_processing_glm4v import smart_resize

from vlmrl.families.base import ImageFeatures, Size, tiny_rope
from vlmrl.families.qwen_vl import QwenVL, limits_that_agree, size_within
from vlmrl.types import to_device

TEMPLATE = Path(__file__).parents[1] / "multimodal/templates/glm.jinja"
RENAMED = {  # of the tiny tokenizer's tokens, to those for which processors, servers and GLM's chat templates look
    "<|image_pad|>": "<|image|>",
    "<|video_pad|>": "<|video|>",
    "<|vision_start|>": "<|begin_of_image|>",
    "<|vision_end|>": "<|end_of_image|>",
    "<|quad_start|>": "<|begin_of_video|>",
    "<|quad_end|>": "<|end_of_video|>",
    "<|im_start|>": "<|user|>",
    "<|im_end|>": "<|observation|>",
    "<|object_ref_start|>": "<|system|>",
    "<|object_ref_end|>": "<|assistant|>",
    "<|box_start|>": "[gMASK]",
    "<|box_end|>": "<sop>",
}
PLAIN_TOKENS = "<arg_key> </arg_key> <arg_value> </arg_value>"


class Glm4V(QwenVL):
    parts: ClassVar[dict[str, str]] = {
        "vision_tower": r"visual\.(?!merger|downsample)",
        "projector": r"visual\.(merger|downsample)",
        "language_model": r"^(?!.*visual\.)",
    }
    tiny_config_class = "Glm4vConfig"
    tiny_model_class = "Glm4vForConditionalGeneration"
    tiny_processor_class = "Glm4vProcessor"
    tiny_image_processor_class = "Glm4vImageProcessor"
    tiny_video_processor_class = "Glm4vVideoProcessor"
    tiny_patch_size = 14
    tiny_text: ClassVar[dict[str, Any]] = tiny_rope(mrope_section=[2, 3, 3], partial_rotary_factor=0.5)
    tiny_stop_tokens = ("<|user|>", "<|observation|>")
    tiny_media_ids: ClassVar[dict[str, str]] = {
        "image_token_id": "<|image|>",
        "video_token_id": "<|video|>",
        "image_start_token_id": "<|begin_of_image|>",
        "image_end_token_id": "<|end_of_image|>",
        "video_start_token_id": "<|begin_of_video|>",
        "video_end_token_id": "<|end_of_video|>",
    }

    @property
    def banned_ids(self) -> list[int]:
        """Those of all media: between the start and the end of a video, a placeholder of images stands for a frame."""
        return [getattr(self.config, name) for name in self.tiny_media_ids]

    def resized(self, processor: Any, size: Size, max_pixels: int | None) -> Size:
        width, height = size
        frames = processor.temporal_patch_size  # the processor's limits count the pixels of that many equal frames
        most = min(max_pixels or 2**62, processor.size["longest_edge"] // frames)
        unit = processor.patch_size * processor.merge_size
        limits = limits_that_agree(-(-processor.size["shortest_edge"] // frames), most, unit)
        rows, columns = smart_resize(frames, height, width, frames, unit, *(frames * limit for limit in limits))
        return size_within(limits, unit, size, (columns, rows))

    def encode_images(self, model: Any, mm_inputs: dict[str, torch.Tensor]) -> list[ImageFeatures]:
        """The learned positions are interpolated on the device, and need there the sizes that the other parts need on the host."""
        embeddings = model.model.visual.embeddings
        embeddings.forward = partial(_with_sizes_on_device, embeddings)
        try:
            return super().encode_images(model, mm_inputs)
        finally:
            del embeddings.forward  # uncovers the class's own method

    @classmethod
    def tiny_vision(cls, width: int, text_width: int) -> dict[str, Any]:
        return {"hidden_size": width, "intermediate_size": 4 * width, "out_hidden_size": text_width}

    @classmethod
    def tiny_tokenizer(cls, tokenizer: Any) -> Any:
        """With GLM's tokens and our chat template of its form. As in the published models, ``<|endoftext|>`` ends a sequence."""
        backend = tokenizer.backend_tokenizer.to_str()
        for ours, name in RENAMED.items():
            backend = backend.replace(ours, name)
        settings = {"eos_token": tokenizer.pad_token, "chat_template": TEMPLATE.read_text()}
        renamed = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(backend), **tokenizer.init_kwargs | settings
        )
        renamed.add_tokens([AddedToken(token, special=False, normalized=False) for token in PLAIN_TOKENS.split()])
        return renamed

    @classmethod
    def tiny_processor(cls, tokenizer: Any, max_pixels: int) -> Any:
        return super().tiny_processor(tokenizer, 2 * max_pixels)  # of two equal frames


class Glm46V(Glm4V):
    """The same model behind a config and processors of other classes."""

    tiny_config_class = "Glm46VConfig"
    tiny_model_class = "Glm46VForConditionalGeneration"
    tiny_processor_class = "Glm46VProcessor"
    tiny_image_processor_class = "Glm46VImageProcessor"
    tiny_video_processor_class = "Glm46VVideoProcessor"


def _with_sizes_on_device(
    embeddings: Any, hidden: torch.Tensor, lengths: torch.Tensor, shapes: torch.Tensor, *coordinates: torch.Tensor
) -> Any:
    lengths, shapes = (to_device(sizes, hidden.device) for sizes in (lengths, shapes))
    return type(embeddings).forward(embeddings, hidden, lengths, shapes, *coordinates)
