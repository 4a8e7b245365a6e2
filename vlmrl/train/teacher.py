"""The teacher of a trainer: its scores of each micro-batch's tokens, and the average of the policy's weights.

A teacher's rows have the policy's sampled tokens after other prompts, so they have micro-batches and prefix trees of their own. Their
hidden states and logprobs are put at the places of the policy's tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vlmrl.algos import LossInputs
from vlmrl.algos.distillation import add_sampled, clipped, coefficient, divergence_of
from vlmrl.config import Teacher
from vlmrl.model.divergence import Against, Listed
from vlmrl.model.policy import Policy, TokenScores
from vlmrl.train.master_weights import MasterWeights, move_module
from vlmrl.train.packing import Layout, MicroBatchPlan, Packed, pack, split
from vlmrl.train.ranks import Ranks
from vlmrl.types import Sample, to_device
from vlmrl.utils.host_memory import HostMemory

Metrics = dict[str, torch.Tensor]


class Placed(NamedTuple):
    """A teacher's row. Its first response token is token ``start`` of the response of the policy's row ``row`` of a micro-batch."""

    row: int
    start: int
    sample: Sample


@dataclass(frozen=True)
class Taught:
    """A teacher's scores of one micro-batch's rows. Tensors are ``[rows, length]``, 0 where it scores nothing."""

    logprobs: torch.Tensor
    known: torch.Tensor
    """1 where the teacher has scored the token."""
    turns: torch.Tensor
    """The number of each token's turn, -1 outside of responses."""
    weights: torch.Tensor
    """Of each token's part, by ``teacher.image_share``."""
    against: Against | Listed | None
    """For a divergence over the vocabulary; None for the loss ``sampled``."""


class TeacherTerms(ABC):
    """What a teacher adds to the loss. Its subclasses say where its logprobs come from."""

    model: Policy | None = None
    """The teacher, if it is in this process."""

    def __init__(self, settings: Teacher) -> None:
        self._settings = settings
        self._turns, self._coef = 0, settings.coef

    def begin(self, samples: Sequence[Sample], plans: Sequence[MicroBatchPlan], progress: float = 0.0) -> None:
        """Before an optimizer step on the micro-batches ``plans`` of all ranks, which :meth:`next` is called for in order.

        ``progress``: of the run, from 0 to 1.
        """
        self._coef = coefficient(self._settings.coef, self._settings.coef_end, progress)
        self._turns = 1 + max((span.turn for sample in samples for span in sample.responses), default=-1)

    @abstractmethod
    def next(self, rows: Sequence[Sample]) -> Taught:
        """What the teacher says about ``rows``, this rank's next micro-batch."""

    def apply(
        self, inputs: LossInputs, scores: TokenScores, taught: Taught
    ) -> tuple[LossInputs, torch.Tensor, Metrics]:
        """The loss's inputs with what the teacher adds, the penalty ``[rows, length]`` that it adds to the loss, and metrics."""
        settings, known = self._settings, taught.known
        inputs = replace(inputs, teacher_logprobs=taught.logprobs)
        kl = (inputs.logprobs.detach() - taught.logprobs) * known
        metrics = {"teacher/share": known, "teacher/kl": kl}
        for turn in range(self._turns):
            here = known * (taught.turns == turn)
            metrics |= {f"teacher/share_turn_{turn}": here, f"teacher/kl_turn_{turn}": kl * here}
        if scores.divergence is None or scores.agreement is None:
            inputs, more = add_sampled(inputs, known, self._coef * taught.weights, settings.clip)
            return inputs, torch.zeros_like(known), metrics | more
        divergence = scores.divergence * known
        limited, outside = clipped(divergence, settings.clip)
        metrics |= {"teacher/divergence": divergence, "teacher/agreement": scores.agreement * known}
        return inputs, self._coef * taught.weights * limited, metrics | {"teacher/clip_fraction": outside}

    def over_known(self, means: Mapping[str, float]) -> dict[str, float]:
        """Metrics that are means over all trained tokens as means over those that the teacher scored, of each turn or of all."""
        result = {name: mean for name, mean in means.items() if not name.startswith("teacher/")}
        result |= {"teacher/share": means["teacher/share"], "teacher/coef": self._coef}
        for name in [name for name in means if name.startswith("teacher/") and "share" not in name]:
            share = means["teacher/share" + (name.removeprefix("teacher/kl") if "_turn_" in name else "")]
            if share:
                result[name] = means[name] / share
        return result

    def follow(self, weights: Mapping[str, nn.Parameter]) -> None:
        """After an optimizer step that gave the policy these float32 ``weights``."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds of it."""
        return {}

    def restored(self) -> None:
        """After a checkpoint has filled :meth:`tensors`."""

    def to(self, device: torch.device, memory: HostMemory) -> None:
        """Move the teacher to ``device``; on the host it is in ``memory``."""


class TeacherModel(TeacherTerms):
    """The teacher ``model`` of ``policy``, the same object for the teacher ``self``.

    An average's float32 weights are kept apart from ``model`` where that computes in bfloat16: small updates would be lost there.
    """

    def __init__(
        self,
        settings: Teacher,
        policy: Policy,
        model: Policy,
        layout: Layout,
        tokens_per_micro_batch: int,
        temperature: float,
        ranks: Ranks,
    ) -> None:
        super().__init__(settings)
        self.model: Policy = model
        self._policy, self._ranks = policy, ranks
        self._layout, self._budget, self._temperature = layout, tokens_per_micro_batch, temperature
        self._average: MasterWeights | None = None
        if settings.model == "average":
            for mine, theirs in zip(model.parameters(), policy.parameters(), strict=True):
                mine.requires_grad_(theirs.requires_grad)
            self._average = MasterWeights(model)
        self._placed: list[list[Placed]] = []
        self._jobs: list[
            list[tuple[MicroBatchPlan, bool]]
        ] = []  # of each micro-batch: its plans, and whether they count
        self._done, self._shows_images = 0, False

    def begin(self, samples: Sequence[Sample], plans: Sequence[MicroBatchPlan], progress: float = 0.0) -> None:
        """Plan the teacher's micro-batches for those of all ranks."""
        super().begin(samples, plans, progress)
        self._placed = [placed_rows([samples[row] for row in plan.rows]) for plan in plans]
        self._jobs = [[(plan, True) for plan in self._split(rows)] for rows in self._placed]
        for number, (rows, jobs) in enumerate(zip(self._placed, self._jobs, strict=True)):
            # As many forward passes on every rank: FSDP gathers weights in each.
            first = number - number % self._ranks.size
            most = max(map(len, self._jobs[first : first + self._ranks.size]))
            if most and not jobs:
                rows.append(Placed(0, 0, samples[plans[number].rows[0]]))
                jobs.append((MicroBatchPlan([0], "padded"), False))
            jobs += [(plan, False) for plan, _ in jobs[-1:]] * (most - len(jobs))
        self._shows_images = any(each.sample.media for each in chain.from_iterable(self._placed))
        self._done = 0

    @torch.no_grad()
    def next(self, rows: Sequence[Sample]) -> Taught:
        index = min(self._done * self._ranks.size + self._ranks.rank, len(self._jobs) - 1)
        self._done += 1
        device, placed = self._policy.device, self._placed[index]
        trained = trained_grid(rows)
        numbers = np.cumsum(trained.ravel()) - 1  # of the trained tokens, in the order of `Packed.indices`
        logprobs, known = torch.zeros(2, trained.size, device=device)
        hidden = torch.zeros(int(trained.sum()), self._head.shape[1], dtype=self.model.dtype, device=device)
        for plan, counts in self._jobs[index]:
            packed = pack([each.sample for each in placed], plan, self._policy.family)
            scores = self._forward(packed)
            if not counts:
                continue
            assert scores.states is not None
            cells, indices = _places(placed, plan, packed, trained.shape[1])
            slots = (packed.batch.targets.flatten().cumsum(0) - 1)[indices]
            there = to_device(torch.from_numpy(cells), device)
            logprobs[there] = scores.logprobs.flatten()[to_device(indices, device)]
            known[there] = 1.0
            hidden = hidden.to(scores.states.dtype)  # of FSDP's float32 shards
            hidden[to_device(torch.from_numpy(numbers[cells]), device)] = scores.states[to_device(slots, device)]
        turns, shape = to_device(turn_grid(rows, trained.shape[1]), device), trained.shape
        weights = to_device(weight_grid(placed, trained.shape), device)
        return Taught(logprobs.view(shape), known.view(shape), turns, weights, self._against(hidden))

    @torch.no_grad()
    def follow(self, weights: Mapping[str, nn.Parameter]) -> None:
        """Move the average towards the weights."""
        if self._average is None:
            return
        for name, mine in self._average.named.items():
            mine.mul_(self._settings.decay).add_(weights[name], alpha=1 - self._settings.decay)
        self._average.publish()

    def tensors(self) -> dict[str, torch.Tensor]:
        """The average's weights."""
        named = {} if self._average is None else self._average.named
        return {f"teacher/{name}": weight.detach() for name, weight in named.items()}

    def restored(self) -> None:
        if self._average is not None:
            self._average.publish()

    def to(self, device: torch.device, memory: HostMemory) -> None:
        if self.model is not self._policy:
            move_module(self.model, device, memory)
        if self._average is not None:
            self._average.to(device, memory)

    def _split(self, rows: Sequence[Placed]) -> list[MicroBatchPlan]:
        samples = [each.sample for each in rows]
        return split(samples, self._budget, self._layout, self._policy.image_token_id) if samples else []

    def _forward(self, packed: Packed) -> TokenScores:
        blank_image = self._ranks.size > 1 and self._shows_images
        batch = replace(packed.batch.to(self._policy.device), blank_image=blank_image, experts=None)
        return self.model(batch, self._temperature)

    @property
    def _head(self) -> torch.Tensor:
        return self.model.model.lm_head.weight

    def _against(self, hidden: torch.Tensor) -> Against | None:
        """The teacher's side of a divergence. A sharded head is gathered from all ranks: they call this equally often."""
        settings, head, bias = self._settings, None, None
        if settings.loss == "sampled":
            return None
        if self.model is not self._policy:
            bias = self.model.model.lm_head.bias
            head, bias = (each.full_tensor() if isinstance(each, DTensor) else each for each in (self._head, bias))
            head = head.to(hidden.dtype)
        divergence = divergence_of(settings.loss, settings.js_weight, settings.top_k)
        return Against(hidden, head, bias, torch.empty(0), divergence)


def placed_rows(rows: Sequence[Sample]) -> list[Placed]:
    """The teacher's rows of a micro-batch's rows. A row without any is what the teacher sees itself."""
    found = []
    for number, row in enumerate(rows):
        if not row.teacher_rows:
            found.append(Placed(number, 0, row))
        for span, seen in zip(row.responses, row.teacher_rows, strict=any(row.teacher_rows)):
            if seen is not None:
                found.append(Placed(number, span.start, seen))
    return found


def trained_grid(rows: Sequence[Sample]) -> np.ndarray:
    """Which response tokens are trained, ``[rows, longest response]``."""
    trained = np.zeros((len(rows), max(len(row.response_ids) for row in rows)), dtype=bool)
    for number, row in enumerate(rows):
        trained[number, : len(row.response_ids)] = row.loss_mask
    return trained


def _places(
    placed: Sequence[Placed], plan: MicroBatchPlan, packed: Packed, length: int
) -> tuple[np.ndarray, torch.Tensor]:
    """For each trained token of the teacher's micro-batch: its index in the policy's rows of ``length``, and in the batch."""
    cells, indices = [], []
    for own, number in enumerate(plan.rows):
        row, start, sample = placed[number]
        trained = np.flatnonzero(sample.loss_mask)
        cells.append(row * length + start + trained)
        indices.append(packed.indices[own, trained])
    return np.concatenate(cells), torch.cat(indices)


def weight_grid(placed: Sequence[Placed], shape: tuple[int, ...]) -> torch.Tensor:
    """The weights of the teacher's part, 1 where none is given."""
    weights = torch.ones(shape)
    for row, start, sample in placed:
        if sample.teacher_weights is not None:
            weights[row, start : start + len(sample.teacher_weights)] = torch.tensor(sample.teacher_weights)
    return weights


def turn_grid(rows: Sequence[Sample], length: int) -> torch.Tensor:
    turns = torch.full((len(rows), length), -1)
    for number, row in enumerate(rows):
        for span in row.responses:
            turns[number, span.start : span.end] = span.turn
    return turns
