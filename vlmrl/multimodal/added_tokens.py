"""The added tokens of a tokenizer, such as ``<|im_end|>`` and ``<tool_call>``; in untrusted text they stay plain text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from vlmrl.multimodal.messages import map_texts

GROUNDING_TOKENS = re.compile(r"<\|((object_ref|box|quad)_(start|end)|(begin|end)_of_box)\|>")
"""The tokens around names and places in an image, such as ``<|box_start|>``: models write them, as UI-TARS its clicks."""
# A private-use character. Followed by a second one, it stands for an added token in a text, or for itself.
ESCAPE = "\U00100000"


class AddedTokens:
    """Escapes added tokens in texts: each is replaced by a stand-in, which no template and no tokenizer takes for a token."""

    def __init__(self, tokenizer: Any) -> None:
        longest_first = sorted(tokenizer.added_tokens_decoder.items(), key=lambda item: -len(item[1].content))
        self.ids = {token.content: index for index, token in longest_first}
        self.special = [
            token.content
            for _, token in longest_first
            if token.special and not GROUNDING_TOKENS.fullmatch(token.content)
        ]
        """Special tokens that stay text in an assistant's message, too."""
        self._stand_ins = {  # the character itself first: the others contain it
            text: ESCAPE + chr(ord(ESCAPE) + i) for i, text in enumerate([ESCAPE, *self.ids], start=1)
        }
        self._nothing = ESCAPE + chr(ord(ESCAPE) + len(self._stand_ins) + 1)
        self._originals = {stand_in: text for text, stand_in in self._stand_ins.items()} | {self._nothing: ""}
        between = [text for text in self.ids if text[:1] + text[-1:] == "<>"]
        self._tags = {text[1:-1] for text in between}  # what tags make tokens of
        self._beginnings = tuple({text[:end] for text in between for end in range(1, len(text))})
        self._ends = tuple({text[start:] for text in between for start in range(1, len(text))})
        self._in_json = [json.dumps(text, ensure_ascii=False)[1:-1] for text in self._stand_ins]
        self._in_json += [json.dumps({tag: 0}, ensure_ascii=False)[1:-2] for tag in self._tags]

    def escape(self, text: str, tokens: Iterable[str] | None = None) -> str:
        """``text`` with ``tokens`` (all added ones if None) replaced by their stand-ins."""
        for token in (ESCAPE, *(self.ids if tokens is None else tokens)):
            if token in text:
                text = text.replace(token, self._stand_ins[token])
        return text

    def escape_tools(self, tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
        """The schemas with all texts escaped; the same ones if they hold no token, which takes a tenth of the time to find out.

        Some templates, such as Qwen3-Coder's, write a name as a tag: ``|im_end|`` must not become ``<|im_end|>``.
        """
        if not tools:
            return None
        written = json.dumps(list(tools), ensure_ascii=False)
        holds_any = "<" in written or ">" in written or any(token in written for token in self._in_json)
        return map_texts(list(tools), self._escape_field) if holds_any else list(tools)

    def _escape_field(self, text: str) -> str:
        return self._nothing + text if text in self._tags else self.escape_name(text)

    def escape_name(self, text: str) -> str:
        """As :meth:`escape`, for a text that a template may write as a part of a tag, such as ``<parameter=NAME>``.

        What it begins or ends with becomes no token with the template's ``<`` and ``>``, either: ``x<|im_end|``.
        """
        text = self.escape(text)
        before = self._nothing if text.startswith(self._ends) else ""
        after = self._nothing if text.endswith(self._beginnings) else ""
        return before + text + after

    def restored(self, text: str) -> str:
        """``text`` with the tokens in place of their stand-ins."""
        return re.sub(f"{ESCAPE}.", lambda match: self._originals[match[0]], text)

    def split(self, text: str) -> list[str | int]:
        """The text cut at its added tokens, each as its id. A regular expression would hold the interpreter lock for long."""
        pieces: list[str | int] = [text]
        for token, index in self.ids.items():
            if token in text:
                cut = [piece.split(token) if isinstance(piece, str) else [piece] for piece in pieces]
                pieces = [part for parts in cut for part in _joined(parts, index)]
        return pieces


def _joined(parts: Sequence[str | int], index: int) -> list[str | int]:
    """``["a", "b"]`` around the token 7: ``["a", 7, "b"]``."""
    return [item for part in parts for item in (index, part)][1:]


def cuts_cleanly(tokenizer: Any, token_id: int) -> bool:
    """Whether the ids of a text are those of what is up to a token of this id, and of what is after it."""
    token = tokenizer.added_tokens_decoder.get(token_id)
    return token is not None and not (token.lstrip or token.rstrip or token.single_word or token.normalized)
