"""The teacher of a run: its checks before anything is sampled, and its rows in each batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from vlmrl.checks.teacher_check import check_teacher_images
from vlmrl.config.code import resolve_function
from vlmrl.rollout.teacher_rows import TeacherRows
from vlmrl.run.build import Run
from vlmrl.samples.audit import audit_teacher
from vlmrl.train.controller import RunTrainer
from vlmrl.types import Sample, Trajectory


def teach(run: Run, trainer: RunTrainer, samples: Sequence[Sample], trajectories: Sequence[Trajectory]) -> None:
    """Give the samples the rows that the teacher sees, and audit them. Before the first update the teacher's images are checked."""
    config, policy = run.config, run.model.policy
    if config.teacher.model is None:
        return
    if config.teacher.sees is not None:
        sees = resolve_function("teacher.sees", config.teacher.sees, ["task", "trajectory", "turn"])
        TeacherRows(sees, run.model.renderer, run.store).attach(samples, trajectories)
        audit_teacher(samples, trajectories, image_token_id=policy.image_token_id)
    if config.train.image_check and run.store is not None and not trainer.steps_done:
        check_teacher_images(partial(trainer.score, by_teacher=True), run.store, samples, policy.image_token_id)
