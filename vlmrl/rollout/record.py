"""The record of an episode: the only code that makes turns.

The turn loop, a user's generator and the gateway say what a response is sampled from as a :class:`Prompt`, sample it
(`rollout/sampler.py`), and add it. Each turn names the turn whose context it continues, so that an episode is a tree (`types.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vlmrl.multimodal.placeholders import image_spans
from vlmrl.types import Completion, Context, ExpertRouting, MediaItem, Message, ReceivedRequest, Trajectory, Turn


@dataclass(frozen=True)
class Prompt:
    """What a response is sampled from: ``kept`` tokens and ``kept_media`` images of the context of turn ``parent``, then these."""

    token_ids: list[int]  # images expanded
    media: list[MediaItem]
    messages: list[Message] = field(default_factory=list)  # what token_ids render
    parent: int | None = None  # None: of no turn
    kept: int = 0
    kept_media: int = 0
    rewritten: list[Message] | None = None  # all messages of the prompt, if they were rendered again as a whole

    @property
    def length(self) -> int:
        """The tokens of the whole prompt."""
        return self.kept + len(self.token_ids)


class TurnRecorder:
    """Adds turns to ``trajectory`` in the order in which they are sampled, each with its ``number``: that of its request.

    :meth:`ordered` and :meth:`selected` give the turns of the finished episode.
    """

    def __init__(self, trajectory: Trajectory, image_token_id: int | None) -> None:
        self.trajectory = trajectory
        self.image_token_id = image_token_id
        self.left_out: set[int] = set()  # places of turns in the trajectory: their responses were never received
        self._numbers: list[int] = []

    @property
    def turns(self) -> list[Turn]:
        return self.trajectory.turns

    @property
    def count(self) -> int:
        """How many turns the episode has had, without those that a history policy asked for."""
        return len(self.turns) - len(self.left_out) - sum(turn.asked for turn in self.turns)

    def following(
        self, parent: int, token_ids: list[int], media: list[MediaItem], messages: list[Message], dropped: int = 0
    ) -> Prompt:
        """The prompt that keeps all of turn ``parent``'s context but its last ``dropped`` tokens, and adds these."""
        above = self.turns[parent]
        return Prompt(token_ids, media, messages, parent, above.length - dropped, above.num_images)

    def branching(self, parent: int | None, whole: Prompt) -> Prompt:
        """A ``whole`` prompt, of which turn ``parent``'s context has the first tokens. At least one token is new."""
        if parent is None:
            return whole
        beginning = replace(whole, token_ids=whole.token_ids[:-1])
        kept, kept_media = _common_prefix(self.trajectory.context(parent), beginning, self.image_token_id)
        new_ids, new_media = whole.token_ids[kept:], whole.media[kept_media:]
        parent = parent if kept else None
        return Prompt(new_ids, new_media, whole.messages, parent, kept, kept_media, whole.rewritten)

    def continuing(self, whole: Prompt) -> Prompt:
        """A ``whole`` prompt that continues the newest turn whose context it begins with, or none."""
        ids, images = whole.token_ids, [item.id for item in whole.media]
        for parent in reversed(range(len(self.turns))):
            turn = self.turns[parent]
            if ids[turn.prompt_length : turn.length] != turn.response_ids:
                continue
            context = self.trajectory.context(parent)
            shown = [item.id for item in context.media]
            if ids[: turn.length] == context.token_ids and images[: len(shown)] == shown:
                return self.following(parent, ids[turn.length :], whole.media[len(shown) :], whole.messages)
        return whole

    def whole(self, prompt: Prompt) -> Context:
        """All tokens and images of the prompt."""
        context = Context()
        if prompt.parent is not None:
            context = self.trajectory.context(prompt.parent, prompt.kept, prompt.kept_media)
        context.token_ids += prompt.token_ids
        context.media += prompt.media
        return context

    def add(
        self,
        prompt: Prompt,
        completion: Completion,
        text: str,
        *,
        seconds: float = 0.0,
        number: int | None = None,
        received: ReceivedRequest | None = None,
    ) -> Turn:
        """Add the turn of a response. ``number`` is by default the count of those before it."""
        turn = Turn(
            prompt_ids=prompt.token_ids,
            media=prompt.media,
            response_ids=completion.token_ids,
            logprobs=completion.logprobs,
            policy_versions=completion.policy_versions,
            stop_reason=completion.stop_reason,
            text=text,
            messages=prompt.messages,
            rewritten=prompt.rewritten,
            engine_seconds=seconds,
            parent=prompt.parent,
            kept=prompt.kept,
            kept_media=prompt.kept_media,
            received=received,
        )
        self._record_experts(turn, completion.expert_routing)
        self._numbers.append(len(self.turns) if number is None else number)
        self.turns.append(turn)
        return turn

    def _record_experts(self, turn: Turn, routing: Sequence[ExpertRouting | None]) -> None:
        """Store the experts of the turn's tokens, and those of its parent's last token if they are not known yet.

        ``routing`` covers at least the turn's new tokens and the token before them: a response's last token is only run as part of
        the next prompt. It is empty if the engine reports none.
        """
        if not routing:
            return
        start = len(routing) - len(turn.prompt_ids) - len(turn.response_ids)
        turn.expert_routing = list(routing[start:])
        above = None if turn.parent is None else self.turns[turn.parent]
        if above is not None and above.expert_routing and self._keeps_all(turn) and above.expert_routing[-1] is None:
            above.expert_routing[-1] = routing[start - 1]

    def ordered(self) -> list[int]:
        """The places of the turns that are part of the episode, depth-first, so that each chain of turns is contiguous.

        Among several continuations of a turn, and among several roots, the one that went on last comes last: the last place is that
        of the last request. Responses 1 and 2, which continue 0, and 3, which continues 1, have the order 0, 2, 1, 3.
        """
        for place in reversed(range(len(self.turns))):
            turn = self.turns[place]
            if place not in self.left_out and turn.parent is not None and self._keeps_all(turn):
                self.left_out.discard(turn.parent)  # it was received, since this request continues it
        places = [place for place in range(len(self.turns)) if place not in self.left_out]
        above = {place: self.turns[place].parent for place in places if self._keeps_all(self.turns[place])}
        latest = {place: self._numbers[place] for place in places}
        for place in reversed(places):
            if (parent := above.get(place)) is not None:
                latest[parent] = max(latest[parent], latest[place])
        following: dict[int | None, list[int]] = {}
        for place in sorted(places, key=latest.__getitem__, reverse=True):
            following.setdefault(above.get(place), []).append(place)
        order, waiting = list[int](), following.get(None, [])
        while waiting:
            order.append(waiting.pop())
            waiting += following.get(order[-1], [])
        return order

    def selected(self, places: Sequence[int]) -> list[Turn]:
        """Copies of the turns at these places, in this order. What they keep of other turns becomes part of their own prompts."""
        moved: dict[int, int] = {}
        turns = []
        for place in places:
            turns.append(self._moved(self.turns[place], moved))
            moved[place] = len(moved)
        return turns

    def _moved(self, turn: Turn, moved: Mapping[int, int]) -> Turn:
        """A copy of the turn among those that were ``moved``: the new places by the old ones."""
        parent, kept, kept_media = turn.parent, turn.kept, turn.kept_media
        while parent is not None and parent not in moved:
            above = self.turns[parent]
            parent, kept, kept_media = above.parent, min(kept, above.kept), min(kept_media, above.kept_media)
        copy = replace(turn, parent=None if parent is None else moved[parent], kept=kept, kept_media=kept_media)
        if turn.parent is not None and parent != turn.parent:
            lost = self.trajectory.context(turn.parent, turn.kept, turn.kept_media)
            copy.prompt_ids = lost.token_ids[kept:] + turn.prompt_ids
            copy.media = lost.media[kept_media:] + turn.media
            copy.expert_routing = turn.expert_routing and lost.expert_routing[kept:] + turn.expert_routing
            copy.messages = (turn.rewritten if parent is None else None) or turn.messages
        if turn.received is not None and turn.received.continues is not None:
            copy.received = replace(turn.received, continues=moved[turn.received.continues])
        return copy

    def _keeps_all(self, turn: Turn) -> bool:
        return turn.parent is not None and turn.kept == self.turns[turn.parent].length


def _common_prefix(context: Context, prompt: Prompt, image_token_id: int | None) -> tuple[int, int]:
    """How many tokens and images both begin with. Images are compared by content, and none is cut."""
    same = common_start(context.token_ids, prompt.token_ids)
    images = 0
    for start, end in image_spans(prompt.token_ids, image_token_id, prompt.media):
        if start >= same:
            break
        known = images < len(context.media) and context.media[images].id == prompt.media[images].id
        if end > same or not known:
            return start, images
        images += 1
    return same, images


def common_start(a: Sequence[Any], b: Sequence[Any]) -> int:
    """The length of the common prefix of two lists, or of two strings, by comparing halves: slices are compared at once."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
