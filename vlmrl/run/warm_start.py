"""The warm start's source of samples: episodes that a scripted function plays."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

from vlmrl.config import Optim
from vlmrl.config.code import load_code
from vlmrl.engine.base import Request
from vlmrl.engine.scripted import ScriptedEngine
from vlmrl.report.progress import RunProgress
from vlmrl.rollout.failures import list_reasons
from vlmrl.run.build import Run
from vlmrl.run.stages import audited_samples
from vlmrl.types import Sample, Task


class Demonstrations:
    """The responses that ``demonstrate(task, turn)`` gives. An agent's turns are its requests, in all branches of the trajectory.

    After ``begin({"warm000000/00000/00": task})``, the second request of that trajectory is answered with ``demonstrate(task, 1)``.
    """

    def __init__(self, demonstrate: Callable[[Task, int], str]) -> None:
        self._demonstrate = demonstrate
        self._tasks: dict[str, Task] = {}
        self._turns = Counter[str]()

    def begin(self, tasks: dict[str, Task]) -> None:
        """``tasks``, by the ids of their trajectories, are played from now on."""
        self._tasks = tasks
        self._turns.clear()

    def response(self, request: Request, _: int) -> str:
        trajectory_id = request.trajectory_id.partition("~")[0]  # an agent's branches have suffixes
        turn = self._turns[trajectory_id]
        self._turns[trajectory_id] += 1
        return self._demonstrate(self._tasks[trajectory_id.partition(".")[0]], turn)  # and so have refills


class Demonstrated:
    """Episodes of the run's tasks, which its own env or agent plays with scripted responses."""

    def __init__(self, run: Run, progress: RunProgress) -> None:
        config = run.config.warm_start
        self.steps = config.steps
        self.optim = Optim(lr=config.lr, warmup_steps=config.steps // 20)
        self._run, self._say = run, progress.say
        self._demonstrations = Demonstrations(load_code("warm_start.demonstrate", config.demonstrate))
        engine = ScriptedEngine(self._demonstrations.response, run.model.renderer)
        self._runner = run.runner(group_size=1, engine=engine)
        self._tasks = run.stream(run.tasks)
        self._failed = 0

    async def take(self, step: int) -> list[Sample]:
        label = f"warm{step - 1:06d}"
        batch = await self._tasks.take(self._run.config.warm_start.trajectories_per_step)
        played = [draw.task for draw in batch if draw.error is None]
        self._demonstrations.begin({f"{label}/{index:05d}/00": task for index, task in enumerate(played)})
        rollouts = await self._runner.play(iter(batch), len(batch), label)
        if rollouts.failed:
            self._failed += len(rollouts.failed)
            self._say(f"warm start {step}: {len(rollouts.failed)} failed:\n{list_reasons(rollouts.failed)}")
        samples, _ = audited_samples(self._run, rollouts.trajectories)
        for sample in samples:
            sample.advantage = 0.0  # the trainer requires one, cross entropy does not use it
        return samples

    async def held_out(self) -> AsyncIterator[list[Sample]]:
        """None: held-out tasks have a reward."""
        none: tuple[list[Sample], ...] = ()
        for samples in none:
            yield samples

    def counts(self) -> dict[str, float]:
        return {"sft/failed": float(self._failed)}

    def state(self) -> dict[str, Any]:
        return {"tasks": self._tasks.state(), "failed": self._failed}

    def restore(self, state: dict[str, Any]) -> None:
        self._tasks.restore(state["tasks"])
        self._failed = state["failed"]

    def close(self) -> None:
        self._tasks.close()
