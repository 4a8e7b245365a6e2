"""Tiny models of the real classes, built locally: one of each family, of about 1 million parameters, with random weights.

    folder = build("/tmp/tiny", "qwen3_vl")                  # an ordinary Hugging Face model folder
    processor = AutoProcessor.from_pretrained(folder)        # a real Qwen3VLProcessor
    resolve("tiny:qwen3_vl", cache_dir="~/.cache/vlmrl")     # the same by name, built once

Nothing is downloaded. Classes, special tokens and processors are those of the large models, so a test with a tiny one runs the same
code. What differs between families is in `families/`.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from vlmrl import families
from vlmrl.config.fields import perhaps
from vlmrl.families import FAMILIES
from vlmrl.families.base import TINY_HEAD_DIM, Family
from vlmrl.model.progress_bars import one_at_a_time, without_progress_bars
from vlmrl.utils.folders import build_folder

PREFIX = "tiny:"
TEMPLATE = Path(__file__).parents[1] / "multimodal/templates/chatml.jinja"
VOCAB_SIZE = 512  # of the model; as in the real ones, the last few ids belong to no token

SPECIAL_TOKENS = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> <|quad_start|> "
    "<|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>"
)
PLAIN_TOKENS = "<tool_call> </tool_call> <tool_response> </tool_response> <think> </think>"
"""Qwen's added tokens: the special ones, which decoding may skip, and plain ones, which are text with an id of its own."""

BARE = "system user assistant tool zoom bbox 500 answer name arguments What Which How The Answer Closer yes no red green blue yellow"
SPACED = (  # the words stay as they are, " picture" too: any change renumbers the tokens, and with them every recorded result
    "red green blue yellow black white orange purple gray pink brown is the of in this that and to a you can at "
    "color colour shape square circle triangle picture image box letter number many there left right top bottom not with "
    "answer zoom call 0 500 1000"
)
JOINTS = ('{"', '":', '",', '"}', "}}", '"}}', "]}}", "],", " [", ' {"', ' "', "</", "\n\n")
WORDS = (*BARE.split(), *JOINTS, *(" " + word for word in SPACED.split()))
"""The texts with a token each; other text is encoded in pieces of these, or in bytes."""


@one_at_a_time()
@without_progress_bars()
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
    """Write a tiny model into ``folder`` and return the folder: config, weights, tokenizer, chat template, and a VLM's processor.

    The same arguments give the same files. ``hidden_size`` is a multiple of 64, ``vision_hidden_size`` of 16. An image keeps its
    size, rounded to whole visual tokens (32 pixels, or 28 for qwen2_vl, qwen2_5_vl and glm4v), and is scaled down to ``max_pixels``.

    Raises:
        ValueError: an unknown family, or a size that cannot be cut into heads.
    """
    kind = _family(family)
    _check_multiple("hidden_size", hidden_size, 2 * TINY_HEAD_DIM)
    _check_multiple("vision_hidden_size", vision_hidden_size, 16)
    target = Path(folder).expanduser()
    target.mkdir(parents=True, exist_ok=True)
    words = kind.tiny_tokenizer(tokenizer())
    text = _text_config(words, hidden_size, num_layers)
    config = kind.tiny_config(text, vision_hidden_size, vision_depth, words)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        _model(kind, config, words, seed).save_pretrained(scratch)
        _publish(Path(scratch) / "model.safetensors", kind(config))
        (kind.tiny_processor(words, max_pixels) or words).save_pretrained(scratch)
        files = sorted(Path(scratch).iterdir(), key=lambda file: (file.name == "config.json", file.name))
        for file in files:  # config.json comes last: a folder that has it is complete
            os.replace(file, target / file.name)
    return target


def resolve(path: str, cache_dir: str | Path) -> str:
    """The folder of ``tiny:qwen3_vl`` or another of :data:`FAMILIES`, built in ``cache_dir`` at its first use; else ``path`` itself.

    The folder's name holds a hash of what the model is made from, so that a changed family is built again.
    """
    if not path.startswith(PREFIX):
        return path
    family = path.removeprefix(PREFIX)
    source = Path(inspect.getfile(_family(family)))
    templates = sorted(TEMPLATE.parent.glob("*.jinja"))
    sources = [Path(__file__), *templates, source, *sorted(Path(families.__file__).parent.glob("*.py"))]
    made_from = b"".join(file.read_bytes() for file in sources) + transformers.__version__.encode()
    folder = Path(cache_dir).expanduser() / f"tiny-{family}-{hashlib.sha256(made_from).hexdigest()[:8]}"
    return str(build_folder(folder, lambda empty: build(empty, family)))


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


def _text_config(words: PreTrainedTokenizerFast, hidden_size: int, num_layers: int) -> dict[str, Any]:
    """The fields that the text configs of all families have."""
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": hidden_size // TINY_HEAD_DIM,
        "num_key_value_heads": hidden_size // TINY_HEAD_DIM // 2,
        "max_position_embeddings": 32768,
        "bos_token_id": None,
        "eos_token_id": words.eos_token_id,
        "tie_word_embeddings": True,
    }


def _model(kind: type[Family], config: Any, words: PreTrainedTokenizerFast, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind.tiny_model(config)
    stops = [words.eos_token, words.pad_token, *kind.tiny_stop_tokens]
    model.generation_config.eos_token_id = words.convert_tokens_to_ids(list(dict.fromkeys(stops)))
    model.generation_config.pad_token_id = words.pad_token_id
    return model


def _publish(file: Path, family: Family) -> None:
    """Rewrite the weights in the layout of the published checkpoints."""
    if family.transposed_weights:
        weights = {name: family.published(name, weight) for name, weight in load_file(file).items()}
        save_file(weights, file, metadata={"format": "pt"})


def _family(name: str) -> type[Family]:
    if name not in FAMILIES:
        rule = f"tiny:FAMILY with one of the families {', '.join(FAMILIES)}"
        raise ValueError(f"model.path must be {rule}, but it is {'tiny:' + name!r}.{perhaps(name, FAMILIES)}")
    return FAMILIES[name]


def _check_multiple(name: str, value: int, of: int) -> None:
    if value < of or value % of:
        raise ValueError(f"{name} must be a positive multiple of {of}, got {value}")
