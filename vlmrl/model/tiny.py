"""Tiny real models, made on the spot: one of each family, of about 1 million parameters, with random weights.

    folder = build("/tmp/tiny", "qwen3_vl")                  # an ordinary Hugging Face model folder
    processor = AutoProcessor.from_pretrained(folder)        # a real Qwen3VLProcessor
    resolve("tiny:qwen3_vl", cache_dir="~/.cache/vlmrl")     # the same by name, built once

Nothing is downloaded. The classes, the special tokens and the processors are those of the large models, so what runs and is
tested with a tiny one is the code that runs with them.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from vlmrl.model.families.base import Family, family_of

PREFIX = "tiny:"
TEMPLATE = Path(__file__).parents[1] / "multimodal/templates/chatml.jinja"
HEAD_DIM = 32
VOCAB_SIZE = 512  # of the model; as in the real ones, the last few ids belong to no token

SPECIAL_TOKENS = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> <|quad_start|> "
    "<|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>"
)
PLAIN_TOKENS = "<tool_call> </tool_call> <tool_response> </tool_response> <think> </think>"
"""Qwen's added tokens: the special ones, which decoding may skip, and those which are ordinary text of one id."""

BARE = "system user assistant tool zoom bbox 500 answer name arguments What Which How The Answer Closer yes no red green blue yellow"
SPACED = (
    "red green blue yellow black white orange purple gray pink brown is the of in this that and to a you can at "
    "color colour shape square circle triangle picture image box letter number many there left right top bottom not with "
    "answer zoom call 0 500 1000"
)
JOINTS = ('{"', '":', '",', '"}', "}}", '"}}', "]}}", "],", " [", ' {"', ' "', "</", "\n\n")
WORDS = (*BARE.split(), *JOINTS, *(" " + word for word in SPACED.split()))
"""What the tokenizer writes as one token each; all other text is written in pieces of these, or in bytes."""


@dataclass(frozen=True)
class VisionSpec:
    """What a family sees with: its processors, the patch side in pixels, and its own fields of the vision config."""

    processor: type[ProcessorMixin]
    video_processor: type[Any]
    patch_size: int
    config: Callable[[int, int], dict[str, Any]]
    """From the vision tower's width and the language model's."""


@dataclass(frozen=True)
class Recipe:
    """What a family's tiny model is made of: its classes, its own fields of the text config, and its eyes, if it has any."""

    config: type[Any]
    model: type[PreTrainedModel]
    text: dict[str, Any]
    eyes: VisionSpec | None = None


def _qwen2_vision(width: int, text_width: int) -> dict[str, Any]:
    return {"embed_dim": width, "mlp_ratio": 4, "hidden_size": text_width}


def _qwen2_5_vision(width: int, text_width: int) -> dict[str, Any]:
    windows = {"window_size": 112, "fullatt_block_indexes": [1], "tokens_per_second": 2}
    return {"hidden_size": width, "intermediate_size": 4 * width, "out_hidden_size": text_width} | windows


def _qwen3_vision(width: int, text_width: int) -> dict[str, Any]:
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "out_hidden_size": text_width}
    return sizes | {"num_position_embeddings": 16 * 16, "deepstack_visual_indexes": [0]}


def _qwen3_moe_vision(width: int, text_width: int) -> dict[str, Any]:
    return _qwen3_vision(width, text_width) | {
        "deepstack_visual_indexes": [0, 1, 2]
    }  # servers count on three, as in the real ones


def _qwen3_5_vision(width: int, text_width: int) -> dict[str, Any]:
    fields = _qwen3_vision(width, text_width)
    del fields["deepstack_visual_indexes"]
    return fields


def _rope(**mrope: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **mrope}}


SECTIONS = [6, 5, 5]  # of half a head: temporal, height, width
HEADS = {"head_dim": HEAD_DIM}  # where a head's width does not follow from the others
INTERLEAVED = HEADS | _rope(mrope_section=SECTIONS, mrope_interleaved=True)
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
LINEAR = {
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": HEAD_DIM,
    "linear_value_head_dim": HEAD_DIM,
}
PARTIAL = HEADS | _rope(mrope_section=[2, 1, 1], mrope_interleaved=True, partial_rotary_factor=0.25)
QWEN3_MOE_EYES = VisionSpec(Qwen3VLProcessor, Qwen3VLVideoProcessor, 16, _qwen3_moe_vision)
QWEN3_EYES = VisionSpec(Qwen3VLProcessor, Qwen3VLVideoProcessor, 16, _qwen3_vision)

RECIPES: dict[str, Recipe] = {
    "qwen2_vl": Recipe(
        Qwen2VLConfig,
        Qwen2VLForConditionalGeneration,
        _rope(mrope_section=SECTIONS),
        VisionSpec(Qwen2VLProcessor, Qwen2VLVideoProcessor, 14, _qwen2_vision),
    ),
    "qwen2_5_vl": Recipe(
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        _rope(mrope_section=[4, 6, 6]),
        VisionSpec(Qwen2_5_VLProcessor, Qwen2VLVideoProcessor, 14, _qwen2_5_vision),
    ),
    "qwen3_vl": Recipe(Qwen3VLConfig, Qwen3VLForConditionalGeneration, INTERLEAVED, QWEN3_EYES),
    "qwen3_vl_moe": Recipe(Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration, INTERLEAVED | EXPERTS, QWEN3_MOE_EYES),
    "qwen3_5": Recipe(
        Qwen3_5Config,
        Qwen3_5ForConditionalGeneration,
        PARTIAL | LINEAR,
        VisionSpec(Qwen3VLProcessor, Qwen3VLVideoProcessor, 16, _qwen3_5_vision),
    ),
    "qwen2": Recipe(Qwen2Config, Qwen2ForCausalLM, _rope()),
    "qwen3": Recipe(Qwen3Config, Qwen3ForCausalLM, HEADS | _rope()),
}


def build(
    folder: str | Path,
    family: str = "qwen3_vl",
    *,
    seed: int = 0,
    hidden_size: int = 128,
    num_layers: int = 4,
    vision_hidden_size: int = 64,
    vision_depth: int = 3,
    max_pixels: int = 256 * 256,
) -> Path:
    """Write a tiny model into ``folder`` and return it: config, weights, tokenizer, chat template and, if it sees, processor.

    The same arguments give the same files. ``hidden_size`` is a multiple of 64, ``vision_hidden_size`` of 16. An image keeps its
    size, rounded to merged tokens (32 pixels, or 28 for qwen2_vl and qwen2_5_vl), up to ``max_pixels``; from there it is scaled down.

    Raises:
        ValueError: an unknown family, or a size that cannot be cut into heads.
    """
    recipe = _recipe(family)
    _check_multiple("hidden_size", hidden_size, 2 * HEAD_DIM)
    _check_multiple("vision_hidden_size", vision_hidden_size, 16)
    target = Path(folder).expanduser()
    target.mkdir(parents=True, exist_ok=True)
    words = tokenizer()
    config = _config(recipe, words, hidden_size, num_layers, vision_hidden_size, vision_depth)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        _model(recipe, config, words, seed).save_pretrained(scratch)
        _publish(Path(scratch) / "model.safetensors", family_of(config))
        (_processor(recipe.eyes, words, max_pixels) if recipe.eyes else words).save_pretrained(scratch)
        files = sorted(Path(scratch).iterdir(), key=lambda file: (file.name == "config.json", file.name))
        for file in files:  # config.json comes last: a folder that has it is complete
            os.replace(file, target / file.name)
    return target


def resolve(path: str, cache_dir: str | Path) -> str:
    """The folder of ``tiny:qwen3_vl`` or another of :data:`RECIPES`, built in ``cache_dir`` if it is not there; else ``path`` itself.

    The folder's name holds a hash of what the model is made from, so that a changed recipe is never served from the cache.
    """
    if not path.startswith(PREFIX):
        return path
    family = path.removeprefix(PREFIX)
    _recipe(family)
    made_from = Path(__file__).read_bytes() + TEMPLATE.read_bytes() + transformers.__version__.encode()
    folder = Path(cache_dir).expanduser() / f"tiny-{family}-{hashlib.sha256(made_from).hexdigest()[:8]}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
            built = build(Path(scratch) / folder.name, family)
            with suppress(OSError):  # another process was first
                built.rename(folder)
    return str(folder)


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of about 500 tokens with Qwen's special tokens; decoding gives back any text.

    ``tokenizer().encode('{"name": "zoom"')`` has six ids: each of :data:`WORDS` is one token.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = _merges([_in_byte_letters(word) for word in WORDS])
    vocab = {token: index for index, token in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS.split()])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in PLAIN_TOKENS.split()])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=32768,
        chat_template=TEMPLATE.read_text(),
    )


def _merges(words: list[str]) -> list[tuple[str, str]]:
    """BPE merges, by rank, that make each word one token: each word's leftover pieces are joined from the left.

    ``["ab", "cab"]`` gives ``[("a", "b"), ("c", "ab")]``. Merges ranked later never undo a word that came before.
    """
    ranks: dict[tuple[str, str], int] = {}
    for word in words:
        pieces = list(word)
        while len(pieces) > 1:
            known = [pair for pair in pairwise(pieces) if pair in ranks]
            pair = min(known, key=ranks.__getitem__) if known else (pieces[0], pieces[1])
            ranks.setdefault(pair, len(ranks))
            pieces = _join(pieces, pair)
    return list(ranks)


def _join(pieces: list[str], pair: tuple[str, str]) -> list[str]:
    joined: list[str] = []
    for piece in pieces:
        if joined and (joined[-1], piece) == pair:
            joined[-1] += piece
        else:
            joined.append(piece)
    return joined


def _in_byte_letters(text: str) -> str:
    """The text in byte-level BPE's alphabet of visible letters, ``" red"`` as ``"Ġred"``."""
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in whole.pre_tokenize_str(text))


def _config(
    recipe: Recipe, words: PreTrainedTokenizerFast, hidden: int, layers: int, vision_hidden: int, vision_depth: int
) -> Any:
    text = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // HEAD_DIM,
        "num_key_value_heads": hidden // HEAD_DIM // 2,
        "max_position_embeddings": 32768,
        "bos_token_id": None,
        "eos_token_id": words.eos_token_id,
        "tie_word_embeddings": True,
        **recipe.text,
    }
    if recipe.eyes is None:
        return recipe.config(**text)
    ids = words.get_vocab()
    vision = {
        "depth": vision_depth,
        "num_heads": 4,
        "patch_size": recipe.eyes.patch_size,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        **recipe.eyes.config(vision_hidden, hidden),
    }
    return recipe.config(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )


def _model(recipe: Recipe, config: Any, words: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = recipe.model(config)
    model.generation_config.eos_token_id = [words.eos_token_id, words.pad_token_id]
    model.generation_config.pad_token_id = words.pad_token_id
    return model


def _publish(file: Path, family: Family) -> None:
    """Bring the weights into the form of the large models' checkpoints."""
    if family.turned:
        weights = {name: family.published(name, weight) for name, weight in load_file(file).items()}
        save_file(weights, file, metadata={"format": "pt"})


def _processor(eyes: VisionSpec, words: PreTrainedTokenizerFast, max_pixels: int) -> ProcessorMixin:
    sizes: dict[str, Any] = {
        "patch_size": eyes.patch_size,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": (2 * eyes.patch_size) ** 2, "longest_edge": max_pixels},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    return eyes.processor(
        image_processor=Qwen2VLImageProcessor(**sizes),
        tokenizer=words,
        video_processor=eyes.video_processor(**sizes),
        chat_template=words.chat_template,
    )


def _recipe(family: str) -> Recipe:
    if family not in RECIPES:
        raise ValueError(f"tiny model family must be one of {', '.join(RECIPES)}, got {family!r}")
    return RECIPES[family]


def _check_multiple(name: str, value: int, of: int) -> None:
    if value < of or value % of:
        raise ValueError(f"{name} must be a positive multiple of {of}, got {value}")
