"""A teacher on servers: they score the rows before the step, so the trainer runs no forward pass of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vlmrl.algos.distillation import divergence_of
from vlmrl.config import Teacher
from vlmrl.engine.server_scores import TeacherScores
from vlmrl.model.divergence import Listed
from vlmrl.train.teacher import Taught, TeacherTerms, placed_rows, trained_grid, turn_grid, weight_grid
from vlmrl.types import Sample, to_device


class ServedTeacher(TeacherTerms):
    """Puts the scores of rows at the places of the policy's tokens."""

    def __init__(self, settings: Teacher, device: torch.device) -> None:
        super().__init__(settings)
        self._device = device

    def next(self, rows: Sequence[Sample]) -> Taught:
        trained = trained_grid(rows)
        count = 0 if self._settings.loss == "sampled" else self._settings.top_k or 0
        logprobs, known = np.zeros((2, *trained.shape), np.float32)
        # Where the teacher says nothing, its divergence is multiplied by 0: any distribution will do.
        ids = np.broadcast_to(np.arange(count, dtype=np.int32), (*trained.shape, count)).copy()
        likely = np.full(ids.shape, -np.log(2.0 * max(count, 1)), np.float32)
        placed = placed_rows(rows)
        for row, start, sample in placed:
            if sample.teacher_scores is None:
                raise ValueError(f"trajectory {sample.trajectory_id}: no teacher server has scored this row.")
            scores = TeacherScores(*sample.teacher_scores)
            places = np.flatnonzero(sample.loss_mask)
            logprobs[row, start + places] = scores.logprobs[places]
            known[row, start + places] = 1
            if count:
                ids[row, start + places] = scores.top_ids[places]
                likely[row, start + places] = scores.top_logprobs[places]
        listed = None
        if count:
            divergence = divergence_of(self._settings.loss, self._settings.js_weight)
            wide = self._on_device(ids[trained].astype(np.int64))
            listed = Listed(wide, self._on_device(likely[trained]), torch.empty(0), divergence)
        turns, weights = turn_grid(rows, trained.shape[1]), weight_grid(placed, trained.shape)
        return Taught(
            self._on_device(logprobs),
            self._on_device(known),
            to_device(turns, self._device),
            to_device(weights, self._device),
            listed,
        )

    def _on_device(self, values: np.ndarray) -> torch.Tensor:
        return to_device(torch.from_numpy(values), self._device)
