"""The teacher of a run: its startup checks, and its rows in each batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from PIL import Image

from vlmrl.algos.distillation import image_weights
from vlmrl.checks.doctor_model import highest_id
from vlmrl.checks.image_swap import Score
from vlmrl.checks.teacher_check import check_teacher_images
from vlmrl.config.code import resolve_function
from vlmrl.config.training import OWN
from vlmrl.multimodal.store import MediaStore
from vlmrl.rollout.teacher_rows import TeacherRows
from vlmrl.run.build import Run
from vlmrl.samples.audit import audit_teacher
from vlmrl.train.controller import RunTrainer
from vlmrl.types import Sample, Trajectory

GREY = (128, 128, 128)


def teach(
    run: Run, trainer: RunTrainer, samples: Sequence[Sample], trajectories: Sequence[Trajectory]
) -> dict[str, float]:
    """Give the samples the rows that the teacher sees, audit them, and let servers score them. Returns metrics of the servers.

    Before the first update the teacher's images are checked.
    """
    config, policy, teachers = run.config, run.model.policy, run.teachers
    if config.teacher.model is None:
        return {}
    if config.teacher.sees is not None:
        sees = resolve_function("teacher.sees", config.teacher.sees, ["task", "trajectory", "turn"])
        TeacherRows(sees, run.model.renderer, run.store).attach(samples, trajectories)
        audit_teacher(samples, trajectories, image_token_id=policy.image_token_id)
    if config.teacher.model not in OWN:
        skip_padded(samples, highest_id(run.model.tokenizer))
    score = partial(trainer.score, by_teacher=True) if teachers is None else teachers.scorer.logprobs
    if config.train.image_check and run.store is not None and not trainer.steps_done:
        check_teacher_images(score, run.store, samples, policy.image_token_id)
    metrics = {} if teachers is None else teachers.score(samples)
    if config.teacher.image_share is not None:
        assert run.store is not None  # checked by `build_run`
        metrics |= weigh_by_images(samples, score, run.store, config.teacher.image_share)
    return metrics


def skip_padded(samples: Sequence[Sample], highest: int) -> None:
    """Let the teacher say nothing about rows with ids above ``highest``, the tokenizer's: of padded rows of the policy's head.

    The teacher may have fewer of them, so that a server refuses such a row, and a model in the trainer has no embedding for it.
    """
    for sample in samples:
        rows = sample.teacher_rows or [sample] * max(1, len(sample.responses))
        kept = [None if row is None or max(row.token_ids) > highest else row for row in rows]
        if not all(kept):
            sample.teacher_rows = kept


def weigh_by_images(samples: Sequence[Sample], score: Score, store: MediaStore, share: float) -> dict[str, float]:
    """Set the weights of the rows that the teacher sees, by what their images add to its logprobs. Returns metrics.

    The weights are over the whole batch, so that they do not depend on micro-batches. ``score`` is the teacher's.
    """
    rows = [row for sample in samples for row in (sample.teacher_rows or [sample]) if row is not None]
    if not rows:
        return {}
    plain = [replace(row, teacher_rows=[], teacher_scores=None, advantage=None) for row in rows]
    grey = [replace(row, media=[store.load(Image.new("RGB", item.size, GREY)) for item in row.media]) for row in plain]
    masks = [np.array(row.loss_mask, bool) for row in rows]
    gains = [(seen - blind)[mask] for seen, blind, mask in zip(score(plain), score(grey), masks, strict=True)]
    if not any(map(len, gains)):
        return {}
    together = np.concatenate(gains)
    weights = np.split(
        image_weights(torch.from_numpy(together), share).numpy(), np.cumsum([len(each) for each in gains])
    )
    for row, mask, part in zip(rows, masks, weights[:-1], strict=True):
        whole = np.zeros(len(mask))
        whole[mask] = part
        row.teacher_weights = whole.tolist()
    return {"teacher/image_gain": float(together.mean())}
