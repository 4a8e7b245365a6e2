"""A teacher's rows: for each response of a sample, a prompt from the recipe's messages, then the sampled tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from vlmrl.config import name_of
from vlmrl.multimodal.messages import copied, same_messages
from vlmrl.multimodal.placeholders import expand
from vlmrl.multimodal.renderer import Rendered, Renderer
from vlmrl.multimodal.store import MediaStore
from vlmrl.rollout.history import response_message
from vlmrl.types import MediaItem, Message, ResponseSpan, Sample, Task, Trajectory

Sees = Callable[[Task, Trajectory, int], list[Message] | None]
"""From a task, a trajectory and the number of one of its turns to the messages that the teacher sees before that turn's response."""


class TeacherPrompt(NamedTuple):
    """The messages that the teacher saw before a response, and their ids with the images expanded."""

    messages: list[Message]
    token_ids: list[int]
    media: list[MediaItem]


def seen_messages(trajectory: Trajectory, turn: int) -> list[Message]:
    """The messages that the policy saw before the response of ``turn``: to be changed by a function that ``teacher.sees`` names."""
    turns, pieces = trajectory.turns, []
    while (node := turns[turn]).rewritten is None and node.parent is not None:
        pieces.append([response_message(turns[node.parent]), *node.messages])
        turn = node.parent
    pieces.append(node.messages if node.rewritten is None else node.rewritten)
    return [copied(message) for piece in reversed(pieces) for message in piece]


class TeacherRows:
    """Makes the teacher's rows with the policy's renderer and image store."""

    def __init__(self, sees: Sees, renderer: Renderer, store: MediaStore | None) -> None:
        self._sees, self._renderer, self._store = sees, renderer, store

    def attach(self, samples: Sequence[Sample], trajectories: Sequence[Trajectory]) -> None:
        """Set the ``teacher_rows`` of all samples.

        Raises:
            ValueError: the function failed, its messages cannot be rendered, or a sample does not know its responses.
        """
        by_id = {trajectory.id: trajectory for trajectory in trajectories}
        for sample in samples:
            trajectory, prompts = by_id[sample.trajectory_id], dict[int, TeacherPrompt]()
            if not sample.responses:
                raise ValueError(
                    f"trajectory {trajectory.id}: teacher.sees needs rows that know their turns' responses, and the rollout made "
                    "this one without. Leave teacher.sees unset, or set rollout.samples step_wise."
                )
            sample.teacher_rows = [self._row(sample, span, trajectory, prompts) for span in sample.responses]

    def _row(
        self, sample: Sample, span: ResponseSpan, trajectory: Trajectory, prompts: dict[int, TeacherPrompt]
    ) -> Sample | None:
        where = f"trajectory {trajectory.id}, turn {span.turn}: teacher.sees {name_of(self._sees)}"
        part = slice(span.start, span.end)
        if not any(sample.loss_mask[part]):
            return None
        try:
            messages: Any = self._sees(trajectory.task, trajectory, span.turn)
            if messages is None:
                return None
            prompts[span.turn] = prompt = self._prompt(messages, trajectory, span.turn, prompts)
        except Exception as error:  # it is the user's code, or its messages
            raise ValueError(f"{where}: {type(error).__name__}: {error}") from error
        return replace(
            sample,
            prompt_token_ids=prompt.token_ids,
            response_ids=sample.response_ids[part],
            loss_mask=sample.loss_mask[part],
            rollout_logprobs=None,
            policy_versions=sample.policy_versions[part],
            media=prompt.media,
            expert_routing=[],
            rewards={},
            responses=[],
            teacher_rows=[],
        )

    def _prompt(
        self, messages: list[Message], trajectory: Trajectory, turn: int, prompts: dict[int, TeacherPrompt]
    ) -> TeacherPrompt:
        """Rendered as a whole, or after an earlier prompt and the ids of its response, so that the tree computes both once."""
        parent, received = trajectory.turns[turn].parent, trajectory.turns[turn].received
        tools = trajectory.tools if received is None or received.tools is None else received.tools
        if parent is not None and parent in prompts:
            above, size = prompts[parent], len(prompts[parent].messages)
            if same_messages(messages[: size + 1], [*above.messages, response_message(trajectory.turns[parent])]):
                sampled = trajectory.turns[parent].response_ids
                shown = self._renderer.adapt_tool_messages(messages[size + 1 :])
                with suppress(ValueError):  # a template may be unable to append them
                    added = self._expanded(self._renderer.delta(shown, tools, response=sampled), messages)
                    return TeacherPrompt(
                        messages, [*above.token_ids, *sampled, *added.token_ids], [*above.media, *added.media]
                    )
        shown = self._renderer.adapt_tool_messages(messages)
        return self._expanded(self._renderer.prompt(shown, tools), messages)

    def _expanded(self, rendered: Rendered, messages: list[Message]) -> TeacherPrompt:
        if rendered.images and self._store is None:
            raise ValueError("a text model's teacher must see no images.")
        media = [] if self._store is None else [self._store.load(image) for image in rendered.images]
        return TeacherPrompt(messages, expand(rendered.token_ids, self._renderer.image_token_id, media), media)
