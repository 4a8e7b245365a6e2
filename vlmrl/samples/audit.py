"""The audit: checks every batch against the trajectories it came from, before it is trained on.

The first broken rule raises :class:`AuditError` with the trajectory, the turn, the image and the numbers. The training loop calls
:func:`audit` on each batch; call it yourself on samples that you build by hand.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby, pairwise

import numpy as np

from vlmrl.model.expert_routing import ExpertRouters, indices_from_routing
from vlmrl.multimodal.placeholders import image_ids, image_spans
from vlmrl.samples.audit_origin import TOLERANCE, AuditError, check_origin
from vlmrl.types import Sample, Trajectory


@dataclass(frozen=True)
class AuditReport:
    """The counts of a batch that passed: ``AuditReport(8, 312, {"inline_end_of_turn": 5})``."""

    samples: int
    trained_tokens: int
    """Tokens with mask 1."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Sampled tokens that no sample trains, by reason."""


def audit(
    samples: Sequence[Sample],
    trajectories: Sequence[Trajectory] | None = None,
    *,
    image_token_id: int | None = None,
    banned_ids: Collection[int] = (),
    routing: ExpertRouters | None = None,
) -> AuditReport:
    """Check the rules of a batch. With ``trajectories``, also check that its tokens are those that were shown and sampled.

    Args:
        samples: all rows of the batch, each trajectory's together and in order.
        trajectories: all trajectories of the batch; failed ones have no rows.
        image_token_id: the model's image placeholder; ``None`` for a text model.
        banned_ids: token ids that the engine cannot have sampled.
        routing: the model's experts; ``None`` if it has none.

    Raises:
        AuditError: a rule is broken.
    """
    if not samples:
        raise AuditError("the batch holds no samples.")
    banned = list(banned_ids)
    for row, sample in enumerate(samples):
        _check_lengths(sample)
        _check_tokens(samples, row, banned)
        _check_rewards(samples, row)
        _check_images(samples, row, image_token_id)
        _check_expert_routing(sample, routing)
    _check_order(samples)
    left_out = check_origin(samples, trajectories) if trajectories is not None else Counter[str]()
    return AuditReport(len(samples), sum(sum(sample.loss_mask) for sample in samples), dict(left_out))


def audit_teacher(
    samples: Sequence[Sample], trajectories: Sequence[Trajectory], *, image_token_id: int | None = None
) -> None:
    """Check what a teacher sees of each sample: the sampled tokens of each turn, none changed or moved, and whole images.

    Raises:
        AuditError: a rule is broken.
    """
    turns = {trajectory.id: trajectory.turns for trajectory in trajectories}
    for sample in samples:
        if len(sample.teacher_rows) not in (0, len(sample.responses)):
            raise AuditError(
                f"trajectory {sample.trajectory_id}: {len(sample.teacher_rows)} rows of a teacher for {len(sample.responses)} "
                "responses."
            )
        for span, row in zip(sample.responses, sample.teacher_rows, strict=bool(sample.teacher_rows)):
            if row is None:
                continue
            where = f"trajectory {sample.trajectory_id}, turn {span.turn}: the teacher's row"
            sampled = turns[sample.trajectory_id][span.turn].response_ids[: span.end - span.start]
            wrong = [
                index for index, pair in enumerate(zip(row.response_ids, sampled, strict=False)) if len(set(pair)) > 1
            ]
            if wrong or len(row.response_ids) != len(sampled):
                index = wrong[0] if wrong else min(len(sampled), len(row.response_ids))
                raise AuditError(
                    f"{where} has {row.response_ids[index : index + 1]} at response token {index}, where the policy sampled "
                    f"{sampled[index : index + 1]}, of {len(row.response_ids)} and {len(sampled)} tokens."
                )
            if row.loss_mask != sample.loss_mask[span.start : span.end]:
                raise AuditError(f"{where} has another loss_mask than the policy's row.")
            _check_images([row], 0, image_token_id)


def _check_lengths(sample: Sample) -> None:
    size = len(sample.response_ids)
    for name in ("loss_mask", "rollout_logprobs", "policy_versions"):
        if name == "rollout_logprobs" and sample.rollout_logprobs is None:
            continue
        length = len(getattr(sample, name))
        if length != size:
            raise AuditError(
                f"trajectory {sample.trajectory_id}: {name} has {length} entries, but response_ids has {size}."
            )
    if not sample.prompt_token_ids or not size:
        raise AuditError(
            f"trajectory {sample.trajectory_id}: prompt and response must not be empty, but have "
            f"{len(sample.prompt_token_ids)} and {size} tokens."
        )


def _check_tokens(samples: Sequence[Sample], row: int, banned_ids: list[int]) -> None:
    """Mask and logprobs are possible values, and no banned id was sampled."""
    sample = samples[row]
    name = sample.trajectory_id
    if not set(sample.loss_mask) <= {0, 1}:
        raise AuditError(
            f"trajectory {name}: loss_mask must hold 0 and 1 only, but it holds {sorted(set(sample.loss_mask))}."
        )
    sampled = np.array(sample.loss_mask, dtype=bool)
    if not sampled.any():
        raise AuditError(f"trajectory {name}: no token has mask 1, so there is nothing to train on.")
    given = sample.rollout_logprobs if sample.rollout_logprobs is not None else [0.0] * len(sampled)
    logprobs = np.array(given, dtype=float)
    rules = (
        (
            ~np.isfinite(logprobs) | (logprobs > TOLERANCE),
            "rollout_logprobs must be finite and at most 0, but it is {logprob}.",
        ),
        (~sampled & (logprobs != 0), "it was not sampled (mask 0), so its logprob must be 0, but it is {logprob}."),
        (
            sampled & np.isin(sample.response_ids, banned_ids),
            "the banned id {token}, a media placeholder, was sampled.",
        ),
    )
    for broken, message in rules:
        if broken.any():
            index = int(broken.argmax())
            problem = message.format(logprob=given[index], token=sample.response_ids[index])
            raise AuditError(
                f"trajectory {name}, turn {_turn_of(samples, row, index)}, response token {index}: {problem}"
            )


def _check_rewards(samples: Sequence[Sample], row: int) -> None:
    """Rewards are finite and on sampled tokens; the final reward may be on a last token that was not sampled."""
    sample = samples[row]
    size = len(sample.response_ids)
    for index, reward in sample.rewards.items():
        if not 0 <= index < size:
            problem = f"it has the reward {reward}, but the response has {size} tokens."
        elif not math.isfinite(reward):
            problem = f"rewards must be finite, but it is {reward}."
        elif reward and not sample.loss_mask[index] and index != size - 1:
            problem = f"it was not sampled (mask 0), so its reward must be 0, but it is {reward}."
        else:
            continue
        turn = _turn_of(samples, row, index)
        raise AuditError(f"trajectory {sample.trajectory_id}, turn {turn}, response token {index}: {problem}")


def _check_images(samples: Sequence[Sample], row: int, image_token_id: int | None) -> None:
    """The runs of placeholders are those that the row's images expand to, in order, with their separators between them."""
    sample = samples[row]
    name = sample.trajectory_id
    if image_token_id is None:
        if sample.media:
            raise AuditError(f"trajectory {name}: {len(sample.media)} images in a batch for a text model.")
        return
    token_ids = sample.token_ids
    runs = _placeholder_runs(token_ids, image_token_id)
    wanted = [
        (index, item, size)
        for index, item in enumerate(sample.media)
        for _, size in _placeholder_runs(image_ids(item, image_token_id), image_token_id)
    ]
    if len(runs) != len(wanted):
        raise AuditError(
            f"trajectory {name}: the row has {len(runs)} runs of placeholder tokens, of lengths {[size for _, size in runs]}, "
            f"but its {len(sample.media)} images ({', '.join(sample.image_ids) or 'none'}) take {len(wanted)}."
        )
    for (start, size), (index, item, length) in zip(runs, wanted, strict=True):
        if size != length:
            turn = _turn_of(samples, row, start - len(sample.prompt_token_ids))
            raise AuditError(
                f"trajectory {name}, turn {turn}, image {index} ({item.id}): {size} placeholder tokens stand in the "
                f"row, but the image of {item.size[0]}x{item.size[1]} pixels takes {length}."
            )
    for index, (item, (start, end)) in enumerate(
        zip(sample.media, image_spans(token_ids, image_token_id, sample.media), strict=True)
    ):
        if token_ids[start:end] != image_ids(item, image_token_id):
            turn = _turn_of(samples, row, start - len(sample.prompt_token_ids))
            raise AuditError(
                f"trajectory {name}, turn {turn}, image {index} ({item.id}): tokens {start} to {end} of the row are not those of "
                f"the image, whose ids between the placeholders are {item.separators}."
            )


def _placeholder_runs(token_ids: Sequence[int], image_token_id: int) -> list[tuple[int, int]]:
    """The first token and the length of each run of placeholders."""
    marked = np.zeros(len(token_ids) + 2, dtype=bool)  # none before the first token and after the last
    marked[1:-1] = np.array(token_ids) == image_token_id
    edges = np.flatnonzero(marked[1:] != marked[:-1]).tolist()
    return [(start, end - start) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def _check_expert_routing(sample: Sample, routing: ExpertRouters | None) -> None:
    """One entry per token of the row; a known entry names ``top_k`` different experts of the model in each layer."""
    where, entries = f"trajectory {sample.trajectory_id}", sample.expert_routing
    if not entries:
        return
    if routing is None:
        raise AuditError(f"{where}: expert_routing has {len(entries)} entries, but the model has no experts.")
    if len(entries) != len(sample):
        raise AuditError(f"{where}: expert_routing has {len(entries)} entries, but the row has {len(sample)} tokens.")
    for index, entry in enumerate(entries):
        if entry is not None and (entry.layers, entry.top_k) != (routing.layers, routing.top_k):
            raise AuditError(
                f"{where}, token {index}: it was sent to {entry.top_k} experts in each of {entry.layers} layers, but the model sends "
                f"to {routing.top_k} in each of {routing.layers}."
            )
    indices = np.sort(indices_from_routing(entries), axis=-1)
    wrong = (indices >= routing.num_experts).any(-1) | ((np.diff(indices) == 0) & (indices[..., 1:] >= 0)).any(-1)
    if wrong.any():
        index, layer = map(int, np.argwhere(wrong)[0])
        raise AuditError(
            f"{where}, token {index}, layer {layer}: it was sent to experts {indices[index, layer].tolist()}, which must be "
            f"different ones of {routing.num_experts}."
        )


def _check_order(samples: Sequence[Sample]) -> None:
    """A trajectory's rows are contiguous, and ``is_last_step`` is set on the last of them only."""
    runs = [(name, [s.is_last_step for s in rows]) for name, rows in groupby(samples, lambda s: s.trajectory_id)]
    for name, count in Counter(name for name, _ in runs).items():
        if count > 1:
            raise AuditError(f"trajectory {name}: its rows are not contiguous in the batch.")
    for name, flags in runs:
        if flags != [False] * (len(flags) - 1) + [True]:
            raise AuditError(f"trajectory {name}: is_last_step must be set on its last row alone, but it is {flags}.")


def _turn_of(samples: Sequence[Sample], row: int, index: int) -> int:
    """The turn of a response token: the number of responses that end before it, in this row and the trajectory's earlier ones.

    With the mask ``[1, 1, 0, 1]``, tokens 0 and 1 belong to turn 0, the observation and the next response to turn 1. A prompt token
    (``index < 0``) belongs to the row's first turn.
    """
    before = [s.loss_mask for s in samples[:row] if s.trajectory_id == samples[row].trajectory_id]
    mask = [*chain.from_iterable([*earlier, 0] for earlier in before), *samples[row].loss_mask[: max(index, 0) + 1]]
    return sum(a > b for a, b in pairwise(mask))
