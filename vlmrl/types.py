"""The nouns of vlmrl, one for each stage of the data flow.

    dataset row -> Task -> (turn loop) -> Trajectory of Turns -> Sample -> MicroBatch

Modules pass these to each other. They hold data; the modules that make them hold the logic.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    import torch

Message = dict[str, Any]
"""A chat message in the plain Hugging Face form: ``{"role": "user", "content": "hi"}``, or with a list of parts as its
content: ``[{"type": "image", "image": pil}, {"type": "text", "text": "What is it?"}]``."""

ImageSource = Any
"""Anything an image can be loaded from: a PIL image, encoded bytes, a path, a URL, a data URI, the Hugging Face ``datasets`` form
``{"bytes": ..., "path": ...}``, or an image that was loaded before, as a :class:`MediaItem`."""

Ending = Literal["env_done", "max_turns", "max_tokens", "length", "aborted", "error"]
"""Why a trajectory ended: the env was done; the turn limit; the trajectory's token budget; the token limit of one response;
a stop from outside; an env or engine error that retries did not fix."""

TRUNCATED: frozenset[str] = frozenset({"max_tokens", "length"})
"""The endings that cut an episode off before the env was done with it."""
FAILED: frozenset[str] = frozenset({"aborted", "error"})
"""The endings of a trajectory that did not end by itself and is not trained on."""


@dataclass(frozen=True)
class Task:
    """One dataset row, ready to be played: ``Task("train/3", [{"role": "user", "content": "2+2?"}], answer="4")``."""

    id: str
    prompt: list[Message]  # its images are inside the messages
    images: list[ImageSource] = field(default_factory=list)  # the same image sources again, in order
    answer: Any = None
    data: dict[str, Any] = field(default_factory=dict)  # every column that has no field of its own
    source: str = ""  # metrics are grouped by it
    seed: int = 0  # the same for all members of a group
    part: str = ""  # the part of a mixture that the task belongs to, whose env plays it

    def copy(self, own_image: Callable[[ImageSource], ImageSource] = lambda image: image) -> Task:
        """A copy that an env may change. Everything is copied except the images, of which it has what ``own_image`` returns.

        Raises:
            ValueError: the task holds something that cannot be copied, such as a connection.
        """
        try:
            return copy.deepcopy(self, {id(image): own_image(image) for image in self.images})
        except Exception as error:
            raise ValueError(
                f"task {self.id} cannot be copied for each of its episodes ({error}): keep only data in the task, and create "
                "everything else in the env."
            ) from error


class Pixels(Protocol):
    """An image's pixels at the model's size, wherever they are: in memory, encoded, in a file or in an object store."""

    def read(self) -> np.ndarray:
        """``[height, width, 3]``, uint8, RGB. Not to be written to. It may decode: do not call it on an event loop."""


@dataclass(frozen=True, eq=False)
class MediaItem:
    """One distinct image, loaded and resized once: its content hash, its sizes and its pixels.

    What the model reads is made from the pixels on the policy's device (`multimodal/mm_inputs.py`). ``sizes`` are the inputs among it
    that follow from the size alone, in host memory, under the model's names: ``image_grid_thw`` ``[1, 3]``.

    An expanded prompt holds ``num_tokens`` tokens for the image: placeholders, except that ``separators`` gives the id at some
    offsets. ``num_tokens=5, separators={2: 198}`` are two placeholders, id 198 and two placeholders.
    """

    id: str  # the content hash of the decoded RGB image before the resize
    size: tuple[int, int]  # (width, height) at the model
    sizes: dict[str, torch.Tensor]
    num_tokens: int
    separators: dict[int, int]
    pixels: Pixels

    @property
    def image(self) -> Image.Image:
        """A new PIL image of the pixels, which takes 4 bytes a pixel: do not keep it."""
        return Image.fromarray(self.pixels.read())


@dataclass(frozen=True, slots=True)
class ExpertRouting:
    """The experts of one token: ``ExpertRouting(bytes([3, 0, 7, 0]), top_k=1)`` is expert 3 in MoE layer 0, expert 7 in layer 1."""

    experts: bytes  # [layers, top_k] as little-endian 16-bit numbers, the most compact form for millions of tokens
    top_k: int

    @property
    def layers(self) -> int:
        return len(self.experts) // (2 * self.top_k)


@dataclass(frozen=True)
class Completion:
    """One response of an engine: ``Completion([101, 7], [-0.1, -2.3], "stop", [4, 4], prompt_tokens=212)``.

    ``stop_reason`` is ``stop`` at a stop string or an end-of-turn id, which is then the last of ``token_ids``.
    """

    token_ids: list[int]
    logprobs: list[float]  # natural logs, after temperature and banned ids, before top-p and top-k
    stop_reason: Literal["stop", "length", "abort"]
    policy_versions: list[int]
    prompt_tokens: int  # the length of the prompt that the engine ran, images expanded
    expert_routing: Sequence[ExpertRouting | None] = ()
    """Of each prompt and response token from the request's ``routing_from`` on; ``None`` for the last token, which was sampled and not
    run. Empty if the model has no experts or the engine does not report them."""


@dataclass(frozen=True, eq=False)
class TrainedTokens:
    """What the trainer computed for the first tokens of a response; tokens that no sample contains are missing at the end."""

    logprobs: np.ndarray  # [tokens], in nats, before the update
    advantages: list[float]
    loss_mask: list[int]
    teacher_logprobs: np.ndarray | None = None  # [tokens], NaN where the teacher says nothing; None: no teacher


@dataclass(frozen=True)
class ReceivedRequest:
    """What the gateway received, before it rendered anything, for the audit: ``ReceivedRequest(("9f3a",), continues=0)``."""

    image_ids: tuple[str, ...]  # the content hashes of all images of the request, in the order of its messages
    continues: int | None  # the number of the turn whose sampled response the request continues; None: of no turn
    tools: list[dict[str, Any]] | None = None  # None: those of the trajectory


@dataclass(frozen=True)
class PointSet:
    """Where a response acted on an image: ``PointSet("drag", ((0.1, 0.5), (0.9, 0.5)))``, in fractions of its width and height."""

    label: str
    at: tuple[tuple[float, float], ...]


@dataclass
class Turn:
    """One model response and the environment's answer to it: a node of the episode's tree (:class:`Trajectory`).

    Its prompt is the first ``kept`` tokens of the context of turn ``parent``, then ``prompt_ids``. Its context is its prompt and its
    response. After the prompt ``[1, 2]``, the response ``[5, 6]`` is ``Turn([1, 2], [], [5, 6], [-.1, -.2], [3, 3], "stop", "four")``.
    After the observation ``[7]``, the next turn has ``prompt_ids=[7], parent=0, kept=4``, and the model sees ``[1, 2, 5, 6, 7]``.
    """

    prompt_ids: list[int]  # only the tokens that follow the kept ones, images expanded
    media: list[MediaItem]  # the images of prompt_ids, in order
    response_ids: list[int]
    logprobs: list[float]
    policy_versions: list[int]
    stop_reason: str
    text: str
    messages: list[Message] = field(default_factory=list)  # what prompt_ids render
    reward: float | None = None  # None: the env gave none
    metrics: dict[str, float] = field(default_factory=dict)
    points: list[PointSet] = field(default_factory=list)  # where the response acted on the last image before it
    next_state: str | None = None  # the env's name for the state after this turn, info["state"]; None: it gave none
    engine_seconds: float = 0.0
    env_seconds: float = 0.0
    logprob_mismatch: float | None = None  # the largest |trainer - rollout| in nats; None: not trained yet
    trained: TrainedTokens | None = None  # None: not trained yet
    parent: int | None = None  # the number of an earlier turn, whose context this one continues; None: of no turn
    kept: int = 0  # how many tokens of the parent's context stay before prompt_ids
    kept_media: int = 0  # and how many of its images
    expert_routing: list[ExpertRouting | None] = field(default_factory=list)  # of prompt_ids and response_ids; or empty
    received: ReceivedRequest | None = None  # of an agent's request; None: the turn loop or a generator played the turn
    rewritten: list[Message] | None = (
        None  # all messages of a prompt that was rendered as a whole; None: they were appended
    )
    asked: bool = False  # a history policy asked for the response, which the env did not get
    message: Message | None = None  # the response of a chat API, with its tool calls; None: the response is its text

    @property
    def prompt_length(self) -> int:
        """The tokens of the whole prompt."""
        return self.kept + len(self.prompt_ids)

    @property
    def length(self) -> int:
        """The tokens of the context."""
        return self.prompt_length + len(self.response_ids)

    @property
    def num_images(self) -> int:
        """The images of the context."""
        return self.kept_media + len(self.media)


@dataclass
class Context:
    """Tokens in the order in which the model sees them, with their images and their experts."""

    token_ids: list[int] = field(default_factory=list)
    media: list[MediaItem] = field(default_factory=list)
    expert_routing: list[ExpertRouting | None] = field(default_factory=list)  # of all tokens; or empty


@dataclass
class Trajectory:
    """All turns of one episode of one task, with its ending.

    The turns are a tree, in which each names an earlier turn as its ``parent``. A linear episode is a path; a re-rendered history,
    a subagent and an edited conversation are branches.

    Two turns with rewards 0.25 and ``None`` and a ``final_reward`` of 1.0 have the ``reward`` 1.25.
    """

    id: str
    group_id: str
    task: Task
    turns: list[Turn] = field(default_factory=list)
    ending: Ending | None = None
    final_reward: float | None = None  # from Env.finish
    group_reward: float | None = None  # from a reward function of the whole group
    error: str | None = None  # why it failed, if the ending is "error"
    non_retryable: bool = False  # playing the task again would fail the same way
    retried: bool = False  # it failed and was played again
    rejected: bool = False  # it failed because its env raised RetryTurn until no retry was left
    metrics: dict[str, float] = field(default_factory=dict)
    tools: list[dict[str, Any]] = field(default_factory=list)  # that its last prompt showed, as JSON schemas
    tail_ids: list[int] = field(default_factory=list)  # follow the last response, never trained
    samples: list[Sample] | None = None  # rows that the rollout already made; None: emitted from the turns

    def context(self, number: int, tokens: int | None = None, images: int | None = None) -> Context:
        """The first ``tokens`` tokens and ``images`` images of the context of turn ``number``; all of them by default."""
        turn, node = self.turns[number], number
        tokens = turn.length if tokens is None else tokens
        images = turn.num_images if images is None else images
        path: list[tuple[Turn, int, int]] = []  # from the turn to its root: how much of what it adds is kept
        while True:
            turn = self.turns[node]
            path.append((turn, max(0, tokens - turn.kept), max(0, images - turn.kept_media)))
            tokens, images = min(tokens, turn.kept), min(images, turn.kept_media)
            if turn.parent is None:
                break
            node = turn.parent
        context = Context()
        for turn, count, shown in reversed(path):
            context.token_ids += turn.prompt_ids[:count]
            context.token_ids += turn.response_ids[: max(0, count - len(turn.prompt_ids))]
            context.media += turn.media[:shown]
            context.expert_routing += turn.expert_routing[:count]
        if len(context.expert_routing) != len(context.token_ids):
            context.expert_routing = []
        return context

    def prompts(self) -> Iterator[tuple[list[int], list[MediaItem]]]:
        """For each turn, the whole prompt that its response was sampled from, and the prompt's images."""
        for number, turn in enumerate(self.turns):
            context = self.context(number, turn.prompt_length)
            yield context.token_ids, context.media

    def continues(self, number: int) -> bool:
        """Whether turn ``number`` continues the turn before it in this list, and keeps all of that turn's context."""
        turn = self.turns[number]
        return turn.parent is not None and turn.parent == number - 1 and turn.kept == self.turns[turn.parent].length

    @property
    def turn_rewards(self) -> list[float | None]:
        return [turn.reward for turn in self.turns]

    @property
    def reward(self) -> float | None:
        """The sum of the turns' rewards, the final reward and the group's; ``None`` if there is none of them."""
        given = [r for r in (*self.turn_rewards, self.final_reward, self.group_reward) if r is not None]
        return float(sum(given)) if given else None

    @property
    def failed(self) -> bool:
        return self.ending in FAILED

    @property
    def num_tokens(self) -> int:
        """The tokens of its longest context, a turn's whole prompt and its response: what ``rollout.max_tokens`` limits."""
        return max((turn.length for turn in self.turns), default=0)

    @property
    def num_sampled(self) -> int:
        return sum(len(turn.response_ids) for turn in self.turns)


@dataclass(frozen=True, slots=True)
class ResponseSpan:
    """The response of turn number ``turn`` is the row's ``response_ids[start:end]``."""

    turn: int
    start: int
    end: int


@dataclass
class Sample:
    """One trainable row.

    A response ``[5, 6]``, an observation ``[7]`` and a response ``[8]`` after the prompt ``[1, 2]``, with reward 1::

        Sample(prompt_token_ids=[1, 2], response_ids=[5, 6, 7, 8], loss_mask=[1, 1, 0, 1],
               rollout_logprobs=[-.1, -.2, 0., -.3], policy_versions=[3, 3, 3, 3], rewards={3: 1.0}, ...)
    """

    prompt_token_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]  # per response token: 1 where it was sampled
    rollout_logprobs: list[float] | None  # per response token; None: the tokens are re-rendered, not the sampled ones
    policy_versions: list[int]  # per response token
    group_id: str
    trajectory_id: str
    is_last_step: bool
    stop_reason: str
    media: list[MediaItem] = field(default_factory=list)  # the row's images in token order, by reference
    advantage: float | list[float] | None = None  # for all response tokens, or for each; None: not computed yet
    expert_routing: list[ExpertRouting | None] = field(default_factory=list)  # of all tokens of the row; or empty
    rewards: dict[int, float] = field(default_factory=dict)  # by index into response_ids, where not 0
    responses: list[ResponseSpan] = field(default_factory=list)  # where its turns' responses are; empty: not known
    # For each of them what a teacher sees; empty: this row.
    teacher_rows: list[Sample | None] = field(default_factory=list)
    teacher_scores: tuple[np.ndarray, ...] | None = None  # a teacher server's `TeacherScores` of this row
    teacher_weights: list[float] | None = None  # per response token, of the teacher's part; None: 1

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.response_ids

    @property
    def image_ids(self) -> list[str]:
        """The content hashes of the row's images, in token order."""
        return [item.id for item in self.media]

    @property
    def reward(self) -> float:
        return float(sum(self.rewards.values()))

    def __len__(self) -> int:
        return len(self.prompt_token_ids) + len(self.response_ids)


@dataclass
class MicroBatch:
    """The input of one forward pass: rows padded on the right to one length, and each distinct image once.

    Samples ``[1, 2, 3]`` and ``[4, 5]``, of which 3 and 5 are trained, have ``token_ids`` ``[[1, 2, 3], [4, 5, 0]]`` and ``targets``
    ``[[0, 0, 1], [0, 1, 0]]``. Or one row holds many samples as trees of their shared prefixes (`train/prefix_tree.py`).
    """

    token_ids: torch.Tensor  # [rows, length]
    position_ids: torch.Tensor  # [3, rows, length]: temporal, height, width
    targets: torch.Tensor  # [rows, length]: tokens whose logprobs the loss needs
    images: Sequence[MediaItem] = ()  # the distinct images; the policy makes their tensors on its device
    image_order: Sequence[int] = ()  # for each image occurrence in row order, its index among ``images``
    ends: torch.Tensor | None = None  # trees only, [1, length], in host memory: where each token's subtree ends
    parents: torch.Tensor | None = None  # trees only: the token that each token follows
    experts: torch.Tensor | None = None  # [rows, length, layers, top_k]; -1: the model's own routers choose
    blank_image: bool = False  # if it has no images, encode a blank one, since other ranks may encode images

    def to(self, device: torch.device | str) -> MicroBatch:
        """On ``device``, except ``targets`` and ``ends``, which the host must know, and the images, whose tensors the policy makes."""
        return replace(
            self,
            token_ids=to_device(self.token_ids, device),
            position_ids=to_device(self.position_ids, device),
            parents=None if self.parents is None else to_device(self.parents, device),
            experts=None if self.experts is None else to_device(self.experts, device),
        )


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """``tensor`` on ``device``. A copy from the host to a GPU goes through pinned memory, so that the host does not wait for it."""
    import torch

    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
