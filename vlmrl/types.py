"""The nouns of vlmrl, one for each stage of the way data goes.

    dataset row -> Task -> (turn loop) -> Trajectory of Turns -> Sample -> MicroBatch

Every module passes these on and nothing else. They hold data; the verbs live in the modules that make them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from PIL import Image

Message = dict[str, Any]
"""A chat message in the plain Hugging Face form: ``{"role": "user", "content": "hi"}``, or with a list of parts as its
content: ``[{"type": "image", "image": pil}, {"type": "text", "text": "What is it?"}]``."""

ImageSource = Any
"""Anything an image can be loaded from: a PIL image, encoded bytes, a path, a URL, a data URI, or the Hugging Face
``datasets`` form ``{"bytes": ..., "path": ...}``."""

Ending = Literal["env_done", "max_turns", "max_tokens", "length", "aborted", "error"]
"""Why a trajectory ended: the env said so; the turn limit; the token budget of the whole trajectory; a reply hit its own
limit; it was stopped from outside; an env or engine error that retries did not mend."""

TRUNCATED: frozenset[str] = frozenset({"max_tokens", "length"})
"""The endings that cut an episode short of what the env would have made of it."""


@dataclass(frozen=True)
class Task:
    """One dataset row, ready to be played: ``Task("train/3", [{"role": "user", "content": "2+2?"}], answer="4")``.

    ``prompt`` holds its images inside the messages; ``images`` names the same sources again, in order. ``data`` has every
    column that was not mapped. ``seed`` is the same for all members of a group. ``source`` is what metrics are told apart by;
    ``part`` is the name of the part of a mixture that it belongs to, whose env plays it.
    """

    id: str
    prompt: list[Message]
    images: list[ImageSource] = field(default_factory=list)
    answer: Any = None
    data: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    seed: int = 0
    part: str = ""

    def copy(self) -> Task:
        """One for an env to change as it likes: all of it is copied, except its images.

        Raises ValueError where it holds something that cannot be copied, such as a connection.
        """
        try:
            return copy.deepcopy(self, {id(image): image for image in self.images})
        except Exception as error:
            raise ValueError(
                f"task {self.id} cannot be copied for each of its episodes ({error}): let the env make what is no data."
            ) from error


@dataclass(frozen=True, eq=False)
class MediaItem:
    """One distinct image, processed once: its content hash, its pixels at the model's size, its tensors.

    ``mm_inputs`` are the processor's outputs under the model's own keyword names, for this image alone, for example
    ``pixel_values`` ``[patches, channels * temporal * patch * patch]`` and ``image_grid_thw`` ``[1, 3]``.

    An expanded prompt holds ``num_tokens`` tokens for the image. They are placeholders, except where ``separators`` has another id
    by its offset: ``num_tokens=5, separators={2: 198}`` are two placeholders, id 198 and two placeholders.
    """

    id: str
    image: Image.Image
    mm_inputs: dict[str, torch.Tensor]
    num_tokens: int
    separators: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExpertRouting:
    """The experts of one token: ``ExpertRouting(bytes([3, 0, 7, 0]), top_k=1)`` is expert 3 in the first MoE layer, 7 in the second.

    ``experts`` holds ``[layers, top_k]`` as little-endian numbers of two bytes, so that a token's take as little room as they can.
    """

    experts: bytes
    top_k: int

    @property
    def layers(self) -> int:
        return len(self.experts) // (2 * self.top_k)


@dataclass(frozen=True)
class Completion:
    """What an engine sampled: ``Completion([101, 7], [-0.1, -2.3], "stop", [4, 4], prompt_tokens=212)``.

    ``logprobs`` are natural logs after temperature and the ban, before top-p and top-k. ``stop_reason`` is ``stop`` (an
    end-of-turn id, which is then the last of ``token_ids``, or a stop string), ``length`` or ``abort``.
    ``prompt_tokens`` counts the prompt as the engine saw it, images expanded. ``routes`` are the experts of the prompt's tokens and
    the reply's, ``None`` for the last, which was drawn and not run; they may begin only where the request's ``routes_from`` says, and
    are empty where there are none or the engine does not tell.
    """

    token_ids: list[int]
    logprobs: list[float]
    stop_reason: Literal["stop", "length", "abort"]
    policy_versions: list[int]
    prompt_tokens: int
    routes: Sequence[ExpertRouting | None] = ()


@dataclass
class Turn:
    """One model reply and the environment's answer to it.

    ``prompt_ids`` are only the tokens that are new before this reply: the whole prompt at the first turn, afterwards what
    closes the last reply and renders the observation. They are expanded: one placeholder per visual token.
    ``media`` are the images of ``prompt_ids``, in order. ``reward`` stays ``None`` until somebody gives one.

    They follow the first ``kept`` tokens and ``kept_media`` images of what the model had before it; ``None``: all of them. A
    history that is rendered anew keeps less. ``dropped`` counts the tokens at this reply's end that no later prompt holds.
    ``routes`` are the experts of ``prompt_ids`` and ``response_ids``, ``None`` where they are not known, or empty.
    ``logprob_mismatch`` is the largest difference, in nats, between the trainer's and the rollout's logprobs, once it was trained on.
    """

    prompt_ids: list[int]
    media: list[MediaItem]
    response_ids: list[int]
    logprobs: list[float]
    policy_versions: list[int]
    stop_reason: str
    text: str
    messages: list[Message] = field(default_factory=list)
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    engine_seconds: float = 0.0
    env_seconds: float = 0.0
    logprob_mismatch: float | None = None
    kept: int | None = None
    kept_media: int | None = None
    dropped: int = 0
    routes: list[ExpertRouting | None] = field(default_factory=list)


@dataclass
class Trajectory:
    """All turns of one episode of one task, with its ending.

    ``final_reward`` is what ``Env.finish`` returned, ``group_reward`` what a function of the whole group added. ``error`` says what
    happened where the ending is ``error``; ``non_retryable``, that playing the task once more would end the same way.
    ``tail_ids`` follow the last reply and are never trained. ``samples`` are the rows that were made while it was played; unset,
    they are emitted from the turns.
    """

    id: str
    group_id: str
    task: Task
    turns: list[Turn] = field(default_factory=list)
    ending: Ending | None = None
    final_reward: float | None = None
    group_reward: float | None = None
    error: str | None = None
    non_retryable: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    tail_ids: list[int] = field(default_factory=list)
    samples: list[Sample] | None = None

    def prompts(self) -> Iterator[tuple[list[int], list[MediaItem]]]:
        """For each turn, the whole prompt that its reply was sampled from, and the images in it.

        The two lists grow in place from turn to turn: copy what is to be kept.
        """
        token_ids: list[int] = []
        media: list[MediaItem] = []
        for turn in self.turns:
            if turn.kept is not None:
                del token_ids[turn.kept :]
                del media[turn.kept_media :]
            token_ids += turn.prompt_ids
            media += turn.media
            yield token_ids, media
            token_ids += turn.response_ids[: len(turn.response_ids) - turn.dropped]

    def routes(self) -> Iterator[list[ExpertRouting | None]]:
        """For each turn, the experts of its whole prompt and its reply. The list changes in place, as those of :meth:`prompts` do."""
        routes: list[ExpertRouting | None] = []
        for before, turn in zip([None, *self.turns], self.turns, strict=False):
            if turn.kept is not None:
                del routes[turn.kept :]
            elif before is not None and before.dropped:
                del routes[-before.dropped :]
            routes += turn.routes
            yield routes

    @property
    def turn_rewards(self) -> list[float | None]:
        return [turn.reward for turn in self.turns]

    @property
    def reward(self) -> float | None:
        """The sum of the turns' rewards, the final one and the group's; ``None`` where nobody gave any."""
        given = [r for r in (*self.turn_rewards, self.final_reward, self.group_reward) if r is not None]
        return float(sum(given)) if given else None

    @property
    def failed(self) -> bool:
        return self.ending in ("error", "aborted")

    @property
    def num_tokens(self) -> int:
        return sum(len(turn.prompt_ids) + len(turn.response_ids) for turn in self.turns)

    @property
    def num_sampled(self) -> int:
        return sum(len(turn.response_ids) for turn in self.turns)


@dataclass
class Sample:
    """One trainable row. The lists beside ``response_ids`` have its length.

    A reply ``[5, 6]``, an observation ``[7]`` and a reply ``[8]`` after the prompt ``[1, 2]``, with reward 1::

        Sample(prompt_token_ids=[1, 2], response_ids=[5, 6, 7, 8], loss_mask=[1, 1, 0, 1],
               rollout_logprobs=[-.1, -.2, 0., -.3], rewards=[0., 0., 0., 1.], policy_versions=[3, 3, 3, 3], ...)

    ``media`` are the row's images in token order, by reference: nothing is copied until a micro-batch is built.
    ``routes`` are the experts of all of the row's tokens, the prompt's too, ``None`` where they are not known, or empty.
    ``rollout_logprobs`` are ``None`` where the row's tokens are not the sampled ones (a conversation rendered anew as one row).
    ``advantage``, one number or one per response token, is ``None`` until the group's baseline is known.
    """

    prompt_token_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    rollout_logprobs: list[float] | None
    rewards: list[float]
    policy_versions: list[int]
    group_id: str
    trajectory_id: str
    is_last_step: bool
    stop_reason: str
    media: list[MediaItem] = field(default_factory=list)
    advantage: float | list[float] | None = None
    routes: list[ExpertRouting | None] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.response_ids

    @property
    def image_ids(self) -> list[str]:
        """The content hashes of the row's images, in token order."""
        return [item.id for item in self.media]

    @property
    def reward(self) -> float:
        return float(sum(self.rewards))

    def __len__(self) -> int:
        return len(self.prompt_token_ids) + len(self.response_ids)


@dataclass
class MicroBatch:
    """One micro-batch: rows padded on the right to one length, and each distinct image's tensors once.

    ``token_ids`` is ``[rows, length]``, ``position_ids`` ``[3, rows, length]`` (temporal, height, width). ``targets``
    ``[rows, length]`` marks the tokens whose logprobs a loss needs. ``mm_inputs`` are merged over the distinct images;
    ``image_order`` says, for each image occurrence in row order, which of the distinct ones it is.

    Or one row holds many samples, as trees of what they begin with in common (`train/prefix_tree.py`): then ``ends`` ``[1, length]``
    says where each token's subtree ends, and ``parents`` which token each one follows.

    ``experts`` ``[rows, length, layers, top_k]`` are those that tokens are sent to, -1 where the model's own routers choose.
    """

    token_ids: torch.Tensor
    position_ids: torch.Tensor
    targets: torch.Tensor
    mm_inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    image_order: Sequence[int] = ()
    ends: torch.Tensor | None = None
    parents: torch.Tensor | None = None
    experts: torch.Tensor | None = None

    def to(self, device: torch.device | str) -> MicroBatch:
        return MicroBatch(
            self.token_ids.to(device),
            self.position_ids.to(device),
            self.targets.to(device),
            {key: value.to(device) for key, value in self.mm_inputs.items()},
            self.image_order,
            None if self.ends is None else self.ends.to(device),
            None if self.parents is None else self.parents.to(device),
            None if self.experts is None else self.experts.to(device),
        )
