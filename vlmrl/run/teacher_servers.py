"""A run's teacher servers: connected and checked at its start, then they score each batch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from vlmrl.checks.server_parity import TOLERANCE, ParityError, parity_questions
from vlmrl.checks.teacher_server import check_teacher_servers
from vlmrl.config import Config
from vlmrl.engine.server import external_servers
from vlmrl.engine.server_backend import teacher_backend
from vlmrl.engine.server_pool import ServerPool
from vlmrl.engine.server_scores import ServerScorer, TeacherScores
from vlmrl.model.loading import Reader
from vlmrl.multimodal.store import MediaStore
from vlmrl.types import Sample

KNOWN = "It shows no more than noise."  # a response whose scores say whether a server has the model that it had


class TeacherServers:
    """The servers that ``teacher.model`` names. Nothing is called before :meth:`connect`."""

    def __init__(self, config: Config, model: Reader) -> None:
        teacher, self._config, self._model = config.teacher, config, model
        pool = ServerPool(teacher_backend(teacher), external_servers(teacher.servers[1]))
        most_likely = 0 if teacher.loss == "sampled" else teacher.top_k or 0
        limits = config.rollout.engine_timeout, config.rollout.max_concurrent
        self._known: dict[str, TeacherScores] = {}
        self.scorer = ServerScorer(pool, model.renderer, most_likely, *limits)

    async def connect(self, store: MediaStore | None) -> list[str]:
        """Wait for the servers, and check them. Returns a line for each."""
        await self.scorer.start()
        questions = await parity_questions(self._model.renderer, store, self._config.rollout)
        model, limit = self._model, self._config.rollout.engine_timeout
        found = await check_teacher_servers(self.scorer, questions, model.tokenizer, model.family.banned_ids, limit)
        await self.scorer.serve()
        known = model.tokenizer.encode(KNOWN, add_special_tokens=False)
        self._known_row = questions[0].row(known)
        self._known = await asyncio.to_thread(self.scorer.score_on_each, self._known_row)
        return [f"teacher   {url}: scores what it samples within {nats:.2g} nats" for url, nats in found.items()]

    def score(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Set the scores of all rows that the teacher sees. Returns metrics."""
        rows = [row for sample in samples for row in (sample.teacher_rows or [sample]) if row is not None]
        for row, scores in zip(rows, self.scorer.score(rows), strict=True):
            row.teacher_scores = scores
        self._check_models()
        return {"teacher/retried": float(self.scorer.retried)}

    def _check_models(self) -> None:
        """Raises ParityError if a server has another model than before, such as after a restart: the batch is not trained."""
        for url, scores in self.scorer.score_on_each(self._known_row).items():
            known = self._known.setdefault(url, scores)
            apart = float(np.abs(scores.logprobs - known.logprobs).mean())
            if not apart <= TOLERANCE:
                raise ParityError(
                    f"the teacher's server {url} serves another model than at the start of the run, or at its resume: its logprobs of "
                    f"the same tokens differ by {apart:.2g} nats, where at most {TOLERANCE:g} was expected. Serve the same model "
                    "there, and resume the run."
                )
