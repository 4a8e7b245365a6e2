"""The backends of a fast tokenizer, which release the interpreter lock while they encode."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers

JOINED_BY_NFC = 4  # the longest canonical decomposition of a character
BEGINNING = 16  # characters of a text for each token that it may have: ordinary texts have three to five for each


def backends_of(tokenizer: Any) -> tuple[Tokenizer, Tokenizer]:
    """The tokenizer's own backend, and a copy without added tokens, which encodes any text as plain text.

    Raises ValueError for a tokenizer that is not a fast one.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise ValueError(
            f"the tokenizer must be a fast one (with a tokenizer.json), but it is a {type(tokenizer).__name__}."
        )
    backend.no_truncation()
    backend.no_padding()
    settings = json.loads(backend.to_str())
    return backend, Tokenizer.from_str(json.dumps(settings | {"added_tokens": [], "post_processor": None}))


def ids_of_text(backend: Tokenizer, text: str) -> list[int]:
    """The text's ids, without those that a post-processor adds."""
    ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def most_characters(backend: Tokenizer) -> int | None:
    """The most characters of a text that become one token of a byte-level BPE. ``None`` for others, which may drop any number.

    No text is normalized for it, which would hold the interpreter lock: NFC makes one character of at most :data:`JOINED_BY_NFC`.
    """
    is_bytewise = isinstance(backend.model, models.BPE) and isinstance(backend.decoder, decoders.ByteLevel)
    if not is_bytewise or not isinstance(backend.normalizer, normalizers.NFC | None):
        return None
    return max(map(len, backend.get_vocab())) * (1 if backend.normalizer is None else JOINED_BY_NFC)


def least_tokens(encode: Callable[[str], list[int]], text: str, limit: float) -> int:
    """A number of tokens above ``limit`` that a text certainly has, or 0 if it may have fewer.

    Of a long text the beginning is encoded first: the whole, such as the log of a server, takes 240 times its size in memory.
    """
    size = BEGINNING * limit
    while size < len(text):
        least = len(encode(text[: int(size)])) // 2  # the words at the cut may be joined to fewer tokens
        if least > limit:
            return least
        size *= 4
    return 0
