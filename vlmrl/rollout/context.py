"""The tokens of one trajectory as the engine and the trainer count them, and the pieces that are appended turn by turn."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from vlmrl.types import MediaItem, Message


@dataclass(frozen=True)
class Piece:
    """New tokens for the context: rendered messages with their images loaded."""

    engine_ids: list[int]  # one placeholder per image
    token_ids: list[int]  # one placeholder per visual token
    media: list[MediaItem]
    messages: list[Message]
    kept: int | None = None  # as in a Turn
    kept_media: int | None = None


@dataclass
class Context:
    """The tokens that the next reply is sampled from."""

    engine_ids: list[int] = field(default_factory=list)  # one placeholder per image
    media: list[MediaItem] = field(default_factory=list)
    length: int = 0  # in tokens, images expanded

    def length_with(self, piece: Piece) -> int:
        return (self.length if piece.kept is None else piece.kept) + len(piece.token_ids)

    def append(self, piece: Piece) -> None:
        if piece.kept is not None:
            self._cut(piece.kept, piece.kept_media or 0)
        self.engine_ids += piece.engine_ids
        self.media += piece.media
        self.length += len(piece.token_ids)

    def append_reply(self, token_ids: list[int]) -> None:
        self.engine_ids += token_ids
        self.length += len(token_ids)

    def drop(self, count: int) -> None:
        """Remove the last ``count`` tokens, none of which belongs to an image."""
        del self.engine_ids[len(self.engine_ids) - count :]
        self.length -= count

    def without_common_prefix(self, whole: Piece, image_token_id: int | None) -> Piece:
        """The part of a whole prompt that follows its common prefix with this context. Images are compared by content."""
        pairs = enumerate(zip(self.engine_ids, whole.engine_ids[:-1], strict=False))
        shorter = min(len(self.engine_ids), len(whole.engine_ids) - 1)
        same = next((index for index, (old, new) in pairs if old != new), shorter)
        indices = [index for index in range(same) if whole.engine_ids[index] == image_token_id]
        for number, index in enumerate(indices):
            if self.media[number].id != whole.media[number].id:
                same, indices = index, indices[:number]
                break
        kept = same + sum(item.num_tokens - 1 for item in whole.media[: len(indices)])
        new = Piece(whole.engine_ids[same:], whole.token_ids[kept:], whole.media[len(indices) :], whole.messages)
        return new if kept == self.length else replace(new, kept=kept, kept_media=len(indices))

    def _cut(self, kept: int, kept_media: int) -> None:
        del self.media[kept_media:]
        del self.engine_ids[kept - sum(item.num_tokens - 1 for item in self.media) :]
        self.length = kept
