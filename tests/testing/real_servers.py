"""A run with a real SGLang server on the CPU, and what tests do with it: play, change weights, compare logprobs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from testing.episodes import COLORS, image
from vlmrl.checks.server_parity import ParityReport
from vlmrl.config import Config, Data, Model, Rollout, ServerSettings, Train
from vlmrl.engine.base import Request, SamplingParams, paused
from vlmrl.engine.server import Server
from vlmrl.env.base import Env, obs
from vlmrl.multimodal.placeholders import expand
from vlmrl.run.build import Run, build_run
from vlmrl.samples import audit, concat
from vlmrl.train.packing import response_logprobs
from vlmrl.types import Completion, Sample, Trajectory

TOLERANCES = {"bfloat16": 0.03, "float32": 1e-3}  # largest logprob difference of server and trainer, in nats
SHIM = Path(__file__).parents[1] / "sglang/shim"
TRIES = 20  # of what an engine may have ended before a test interrupts it


class Peek(Env):
    """Shows an image at each of three turns, whatever the response."""

    def step(self, response_text: str):
        color = COLORS[(self.task.seed + self.turn) % len(COLORS)]
        shown = image(color, (96 + 32 * self.turn, 64))
        return obs("Look:", images=[shown]), self.turn == 2, {"reward": float(len(response_text) % 2)}

    def finish(self, ending: str) -> float:
        return 0.0


def a_row(index: int, seed: int) -> dict[str, Any]:
    return {"prompt": "<image>What color?", "images": [image("red" if index % 2 else "blue", (64, 64))]}


def config_of(model: Path, folder: Path, dtype: str = "bfloat16", **server: Any) -> Config:
    env = {"PYTHONPATH": str(SHIM), "OMP_NUM_THREADS": "1"}  # several servers share a few cores
    settings = {"args": {"max-total-tokens": 16384, "skip-server-warmup": True}, "env": env}
    return Config(
        name=model.name,
        output_dir=str(folder),
        model=Model(path=str(model), device="cpu", dtype=dtype),  # type: ignore[arg-type]
        data=Data(generator=a_row, size=8),
        env=Peek,
        rollout=Rollout(group_size=4, max_turns=3, max_tokens=512, max_response_tokens=100, stop=("e", "o", "<")),
        engine="sglang",
        server=ServerSettings(**(settings | server)),
        train=Train(steps=2, groups_per_batch=2),
    )


@dataclass
class Served:
    """A run whose only server serves; ``first`` are its initial weights."""

    run: Run
    reports: dict[str, ParityReport]
    first: dict[str, torch.Tensor]

    @property
    def server(self) -> Server:
        return self.run.engine.servers.all[0]

    @property
    def sync(self):
        return self.run.serving.sync

    @property
    def version(self) -> int:
        return self.run.engine.policy_version

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.run.config.model.dtype]

    def episodes(self, label: str, groups: int = 2) -> list[Trajectory]:
        """So many groups, played and audited."""
        run = self.run
        rollouts = asyncio.run(run.runner().play((run.tasks[i] for i in range(groups)), groups, label))
        rows = [sample for trajectory in rollouts.trajectories for sample in concat(trajectory)]
        policy = run.model.policy
        ids = {"image_token_id": policy.image_token_id, "banned_ids": policy.banned_ids}
        audit(rows, rollouts.trajectories, **ids, routing=policy.routing)
        return rollouts.trajectories

    def differences(self, played: Sequence[Trajectory]) -> np.ndarray:
        """The difference between the server's logprob and the trainer's, for each sampled token."""
        rows = [sample for trajectory in played for sample in concat(trajectory)]
        pairs = zip(self.scores(rows), rows, strict=True)
        return np.concatenate(
            [np.abs(scores - row.rollout_logprobs)[np.array(row.loss_mask, bool)] for scores, row in pairs]
        )

    def largest_difference(self, played: Sequence[Trajectory]) -> float:
        return float(self.differences(played).max())

    def scores(self, rows: Sequence[Sample]) -> list[np.ndarray]:
        return response_logprobs(self.run.model.policy, rows, 1.0)

    def change(self, seed: int) -> None:
        """Change the weights in all parts of the model, more than training would."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, weight in self.run.model.policy.model.named_parameters():
                noise = 1 + 0.3 * torch.randn(weight.shape, generator=generator)
                weight.copy_(self.first[name] * noise.to(weight.dtype))

    async def push(self) -> None:
        """Send the current weights as the next policy version."""
        version = self.version + 1
        async with paused(self.run.engine):
            await self.sync.push(self.run.serving.send, version)
            self.run.engine.weights_changed(version)

    def weights(self) -> dict[str, torch.Tensor]:
        return copied(self.run)

    def set_weights(self, weights: dict[str, torch.Tensor]) -> None:
        self.run.model.policy.load_weights(weights.items())

    def checksums(self) -> dict[str, str]:
        [sums] = asyncio.run(self.sync.checksums()).values()
        return sums

    async def load(self) -> dict[str, Any]:
        """What the server reports about its load."""
        response = await self.run.engine.thread.run(self.run.engine.servers.call(self.server, "/v1/loads"))
        return response["loads"][0]

    async def in_flight(self, requests: Sequence[Request], tokens: int) -> list[asyncio.Task[Completion]]:
        """Send the requests until the server holds more than ``tokens`` tokens. Requests that end before are sent again."""
        tasks: list[asyncio.Task[Completion]] = []
        async with asyncio.timeout(600):
            while (await self.load())["num_used_tokens"] <= tokens:
                _ = [task.result() for task in tasks if task.done()]  # raises their errors
                if all(task.done() for task in tasks):
                    tasks = [asyncio.create_task(self.run.engine.generate(request)) for request in requests]
                await asyncio.sleep(0.1)
        return tasks

    def requests(self) -> int:
        """Number of requests that the server has answered so far."""
        return self.server.process.launch.log.read_text().count("POST /generate")

    def question(self, name: str, tokens: int, routing_from: int = 0) -> Request:
        """About an image, whatever the answer."""
        rendered = self.run.model.renderer.prompt(self.run.tasks[0].prompt)
        media = [self.run.store.load(image) for image in rendered.images]
        return Request(name, rendered.token_ids, media, SamplingParams(tokens), routing_from)

    def ask(self, request: Request) -> float:
        """The largest difference between the server's logprobs of a response and the trainer's."""
        row = self.row_of(request, asyncio.run(self.run.engine.generate(request)))
        return float(np.abs(self.scores([row])[0] - row.rollout_logprobs).max())

    def row_of(self, request: Request, completion: Completion) -> Sample:
        size = len(completion.token_ids)
        prompt = expand(request.prompt_ids, self.run.model.policy.image_token_id, request.media)
        response = (completion.token_ids, [1] * size, completion.logprobs, completion.policy_versions)
        return Sample(prompt, *response, "g", "t", True, completion.stop_reason, list(request.media))


def served(*configs: Config) -> Iterator[list[Served]]:
    """For a fixture: starts a server for each config, and checks that none of their processes is left at the end."""
    runs = [build_run(config) for config in configs]

    async def connect() -> list[dict[str, ParityReport]]:
        return await asyncio.gather(*(run.serving.connect(run.store) for run in runs))

    try:
        reports = asyncio.run(connect())
        yield [Served(run, report, copied(run)) for run, report in zip(runs, reports, strict=True)]
        groups = [run.engine.servers.all[0].process.group for run in runs]
        assert all(map(processes_of, groups))
    finally:
        for run in runs:
            run.engine.close()
    assert left_of(groups) == []


def servers_of(path: Path) -> list[int]:
    """The processes that have a log open in the run's folder ``path``, or the log ``path`` itself."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            opened = [each.readlink() for each in (process / "fd").iterdir()]
        except OSError:
            continue
        if any(log == path or (path / "servers") in log.parents for log in opened):
            found.append(int(process.name))
    return found


def copied(run: Run) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in run.model.policy.model.named_parameters()}


def versions(played: Sequence[Trajectory]) -> set[int]:
    """The policy versions that were sampled from."""
    return {version for trajectory in played for turn in trajectory.turns for version in turn.policy_versions}


def processes_of(group: int) -> list[int]:
    """The processes of a process group that still run."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            state, own = process.joinpath("stat").read_text().rpartition(")")[2].split()[:3:2]
        except OSError:  # it has ended
            continue
        if int(own) == group and state != "Z":
            found.append(int(process.name))
    return found


def left_of(groups: Iterable[int]) -> list[int]:
    """The processes of these groups that still run after a while. A process that was killed ends when it is scheduled."""
    end = time.monotonic() + 120
    while (left := [process for group in groups for process in processes_of(group)]) and time.monotonic() < end:
        time.sleep(0.05)
    return left
