"""The part of the audit that compares rows with the trajectories they come from, token by token and image by image.

It computes each turn's prompt independently of the walk in `types.py` that made the rows, so that it finds faults there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from vlmrl.types import ResponseSpan, Sample, Trajectory, Turn

TOLERANCE = 1e-6


class AuditError(ValueError):
    """A batch that must not be trained on."""


def check_origin(samples: Sequence[Sample], trajectories: Sequence[Trajectory]) -> Counter[str]:
    """Every sampled token is trained once, after the prompt that the model saw; the rewards add up. Returns what is left out."""
    by_id = {trajectory.id: trajectory for trajectory in trajectories}
    left_out = Counter[str]()
    for name, group in groupby(samples, lambda s: s.trajectory_id):
        rows = list(group)
        trajectory = by_id.pop(name, None)
        if trajectory is None:
            raise AuditError(f"trajectory {name} is in the batch, but it was never played.")
        if trajectory.failed:
            raise AuditError(f"trajectory {name} failed ({trajectory.error}) and must not be trained on.")
        groups = {row.group_id for row in rows}
        if groups != {trajectory.group_id}:
            other = min(groups - {trajectory.group_id})
            raise AuditError(f"trajectory {name} is of group {trajectory.group_id}, but a row says {other}.")
        _check_received(trajectory)
        if all(row.rollout_logprobs is not None for row in rows):
            _TrajectoryCheck(trajectory, rows, left_out).check()
        else:
            trained = sum(sum(row.loss_mask) for row in rows)
            left_out["re_rendered"] += max(0, trajectory.num_sampled - trained)
        reward = sum(row.reward for row in rows)
        parts = (*trajectory.turn_rewards, trajectory.final_reward, trajectory.group_reward)
        most = max([1.0, *(abs(part) for part in parts if part)])  # 1e15 - 1e15 + 0.5 depends on the order
        if trajectory.reward is None or not abs(reward - trajectory.reward) <= TOLERANCE * most:
            raise AuditError(
                f"trajectory {name}: the rows' rewards add up to {reward}, but the trajectory's is {trajectory.reward}."
            )
    missing = sorted(trajectory.id for trajectory in by_id.values() if not trajectory.failed)
    if missing:
        raise AuditError(f"trajectories {missing} were played, but are not in the batch.")
    return left_out


def _prompts(trajectory: Trajectory) -> Iterator[tuple[list[int], list[str]]]:
    """For each turn, its whole prompt and the prompt's images, built from the first turn on, without the code that made the rows.

    Both lists may be extended in place from turn to turn: copy what you keep.
    """
    last = {turn.parent: number for number, turn in enumerate(trajectory.turns)}
    contexts: dict[int, tuple[list[int], list[str]]] = {}  # of turns that later ones continue
    for number, turn in enumerate(trajectory.turns):
        ids, images = list[int](), list[str]()
        if turn.parent is not None:
            if turn.parent not in contexts:
                raise AuditError(
                    f"trajectory {trajectory.id}, turn {number}: its parent must be an earlier turn, but it is {turn.parent}."
                )
            ids, images = contexts[turn.parent]
            if last[turn.parent] == number:
                del contexts[turn.parent]
            else:
                ids, images = ids[: turn.kept], images[: turn.kept_media]
        for name, kept, held in (("kept", turn.kept, ids), ("kept_media", turn.kept_media, images)):
            if not 0 <= kept <= len(held):
                raise AuditError(
                    f"trajectory {trajectory.id}, turn {number}: {name} must be at most {len(held)}, what turn {turn.parent} has, but "
                    f"it is {kept}."
                )
            del held[kept:]
        ids += turn.prompt_ids
        images += [item.id for item in turn.media]
        yield ids, images
        if number in last:
            contexts[number] = (ids, images)
            ids += turn.response_ids


def _check_received(trajectory: Trajectory) -> None:
    """The prompt of an agent's request shows the images that were received, and begins with all of the response that it continues."""
    turns = trajectory.turns
    for number, (turn, (_, shown)) in enumerate(zip(turns, _prompts(trajectory), strict=True)):
        if turn.received is None:
            continue
        where = f"trajectory {trajectory.id}, turn {number}"
        received, above = list(turn.received.image_ids), turn.received.continues
        if shown != received:
            at = _first_difference(shown, received)
            raise AuditError(
                f"{where}, image {at}: the request had {_at(received, at)} ({len(received)} images), but its prompt shows "
                f"{_at(shown, at)} ({len(shown)} images)."
            )
        if above is not None and (turn.parent != above or turn.kept != _context_length(turns[above])):
            raise AuditError(
                f"{where}: it continues the response of turn {above}, but its prompt keeps {turn.kept} tokens of turn {turn.parent}."
            )


def _context_length(turn: Turn) -> int:
    return turn.kept + len(turn.prompt_ids) + len(turn.response_ids)


class _TrajectoryCheck:
    """Compares a trajectory's rows with its turns, in order. A row is a prompt, then responses with the observations between them."""

    def __init__(self, trajectory: Trajectory, rows: Sequence[Sample], left_out: Counter[str]) -> None:
        self.trajectory = trajectory
        self.rows = rows
        self.left_out = left_out
        self.turn = 0  # the turn that is compared now
        self.images = 0  # how many of the row's images were compared
        self.found: list[list[ResponseSpan]] = []  # the responses that were compared, by row

    def check(self) -> None:
        turns = self.trajectory.turns
        prompts = _prompts(self.trajectory)
        for row in self.rows:
            if self.turn == len(turns):
                raise AuditError(
                    f"trajectory {self.trajectory.id}: {sum(row.loss_mask)} tokens have mask 1 in a row after the last turn, "
                    "but were never sampled."
                )
            self._check_prompt(row, *next(prompts))
            self.found.append([])
            index = self._check_response(row, 0)
            self.turn += 1
            while index < len(row.response_ids) and self.turn < len(turns):
                next(prompts)
                index = self._check_response(row, self._check_between(row, index))
                self.turn += 1
            self._check_tail(row, index)
        if self.turn < len(turns):
            rest = sum(len(turn.response_ids) for turn in turns[self.turn :])
            raise AuditError(
                f"trajectory {self.trajectory.id}, turn {self.turn}: {rest} tokens were sampled from here on, but no row holds them."
            )
        self._check_spans()

    def _check_prompt(self, row: Sample, ids: list[int], images: list[str]) -> None:
        if row.prompt_token_ids != ids:
            index = _first_difference(row.prompt_token_ids, ids)
            raise AuditError(
                f"{self._where}, prompt token {index}: the model saw {_at(ids, index)} ({len(ids)} tokens), but the row "
                f"has {_at(row.prompt_token_ids, index)} ({len(row.prompt_token_ids)} tokens)."
            )
        self.images = 0
        self._check_images(row, images)

    def _check_between(self, row: Sample, index: int) -> int:
        """Compare the observation before this turn's response, inside the row, at ``index``. Returns where it ends."""
        turn = self.trajectory.turns[self.turn]
        if self._dropped(self.turn - 1) is None:
            raise AuditError(
                f"{self._where}: its prompt was re-rendered, so the row must end before it, but it goes on at response token "
                f"{index}."
            )
        self._check_images(row, [item.id for item in turn.media])
        end = index + len(turn.prompt_ids)
        held = row.response_ids[index:end]
        if held != turn.prompt_ids or any(row.loss_mask[index:end]):
            at = _first_difference(held, turn.prompt_ids)
            if at == len(turn.prompt_ids):
                at = row.loss_mask.index(1, index, end) - index
            mask = f"mask {_at(row.loss_mask, index + at)}"
            raise AuditError(
                f"{self._where}, observation token {at} (response token {index + at}): the env showed "
                f"{_at(turn.prompt_ids, at)}, which has mask 0, but the row has {_at(held, at)} with {mask}."
            )
        return end

    def _check_response(self, row: Sample, index: int) -> int:
        """Compare this turn's response at ``index``: ids, logprobs, policy versions and mask. Returns where it ends."""
        turn = self.trajectory.turns[self.turn]
        length = len(turn.response_ids)
        # The last row holds all turns that are left: a response that another follows there lacks what was dropped before it. The ids
        # alone are ambiguous if the observation is empty and the next response starts with the dropped id.
        followed = row is self.rows[-1] and self.turn + 1 < len(self.trajectory.turns)
        dropped = self._dropped(self.turn) or 0
        if dropped and (followed or row.response_ids[index : index + length] != turn.response_ids):
            length -= dropped
            self.left_out["inline_end_of_turn"] += dropped
        assert row.rollout_logprobs is not None
        end = index + length
        sampled: list[list[Any]] = [turn.response_ids, turn.logprobs, turn.policy_versions, [1] * length]
        trained: list[list[Any]] = [row.response_ids, row.rollout_logprobs, row.policy_versions, row.loss_mask]
        wanted, held = [values[:length] for values in sampled], [values[index:end] for values in trained]
        if held == wanted:
            self.found[-1].append(ResponseSpan(self.turn, index, end))
            return end
        at = min(_first_difference(old, new) for old, new in zip(wanted, held, strict=True))
        names = ("id", "logprob", "policy version", "mask")
        shown = [", ".join(f"{n} {_at(v, at)}" for n, v in zip(names, lists, strict=True)) for lists in (wanted, held)]
        raise AuditError(
            f"{self._where}, token {at} of the response (response token {index + at}) must be {shown[0]}, as sampled, but it is "
            f"{shown[1]}; the response has {len(turn.response_ids)} tokens, the row {sum(row.loss_mask)} with mask 1."
        )

    def _check_tail(self, row: Sample, index: int) -> None:
        if len(row.media) != self.images:
            raise AuditError(
                f"trajectory {self.trajectory.id}, turn {self.turn - 1}, image {self.images}: the env showed {self.images} "
                f"images up to here, but the row holds {len(row.media)}."
            )
        rest = row.response_ids[index:]
        allowed = self.trajectory.tail_ids if self.turn == len(self.trajectory.turns) else []
        if any(row.loss_mask[index:]) or (rest and rest != allowed):
            raise AuditError(
                f"trajectory {self.trajectory.id}: the row ends with {len(rest)} tokens from response token {index} on, "
                f"{sum(row.loss_mask[index:])} of them with mask 1, that no turn has."
            )

    def _check_images(self, row: Sample, wanted: list[str]) -> None:
        """Compare the row's next images with ``wanted``."""
        start = self.images
        self.images += len(wanted)
        held = [item.id for item in row.media[start : self.images]]
        if held != wanted:
            at = _first_difference(held, wanted)
            raise AuditError(
                f"{self._where}, image {start + at}: the env showed {_at(wanted, at)}, but the row holds {_at(held, at)} "
                f"({len(row.media)} images in the row)."
            )

    def _dropped(self, number: int) -> int | None:
        """How many tokens of turn ``number``'s response the next turn leaves out: none, or an end-of-turn token. ``None``: it does not
        follow that response."""
        turns = self.trajectory.turns
        if number + 1 == len(turns) or turns[number + 1].parent != number:
            return None
        turn, following = turns[number], turns[number + 1]
        dropped = _context_length(turn) - following.kept
        fits = 0 <= dropped <= min(1, len(turn.response_ids))
        return dropped if fits and following.kept_media == turn.kept_media + len(turn.media) else None

    def _check_spans(self) -> None:
        """The rows say where the responses are that were found in them."""
        for row, found in zip(self.rows, self.found, strict=True):
            if row.responses and row.responses != found:
                raise AuditError(
                    f"trajectory {self.trajectory.id}: its responses are at {found} of the row, but the row says {row.responses}."
                )

    @property
    def _where(self) -> str:
        return f"trajectory {self.trajectory.id}, turn {self.turn}"


def _first_difference(a: Sequence[object], b: Sequence[object]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((index for index, (x, y) in pairs if x != y), min(len(a), len(b)))


def _at(values: Sequence[object], index: int) -> object:
    return values[index] if index < len(values) else "nothing"
