"""A whole run whose server shares the trainer's GPU, on a model of the GPU's memory that refuses what does not fit.

Everything but the memory is real: the loop, the trainer, the pool of servers, the weight updates. The numbers are those of a model of
2.13 billion parameters in bfloat16, trained in full with gradient checkpointing, 16,384 tokens a micro-batch.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from testing.gpu_memory import GIB, GpuMemory, GpuServer

from vlmrl.config import Checkpoint, Config, Data, Eval, EvalData, Model, Rollout, ServerSettings, Train, WarmStart
from vlmrl.engine.server import Server
from vlmrl.engine.server_pool import Limits
from vlmrl.engine.sglang.backend import SGLangBackend
from vlmrl.model import tiny
from vlmrl.plan.memory_plan import Sizes, server_memory_fraction
from vlmrl.plan.phases import CONTEXT
from vlmrl.report.progress import RunProgress
from vlmrl.report.run_log import RunLog
from vlmrl.run import build, loop, serving
from vlmrl.run.serving import LocalServerHost
from vlmrl.train import controller
from vlmrl.train.rank import Rank
from vlmrl.train.trainer import Trainer

pytestmark = pytest.mark.slow

CARD = 80 * GIB
WEIGHTS = 2.13e9 * 2
MASTERS, OPTIMIZER = 2 * WEIGHTS, 4 * WEIGHTS
STEP = 38.0 * GIB - WEIGHTS - MASTERS - OPTIMIZER  # gradients, activations and logits
SCORING = 2 * GIB  # activations of a forward without gradient
BUCKET = GIB / 2
GRAPHS = SGLangBackend.graph_memory(CARD) + CONTEXT  # what a sleeping server keeps beside its weights
DEFAULT_FRACTION = 0.88  # about what SGLang chooses for 80 GiB
SHARED = ("trainer weights", "trainer masters", "trainer optimizer")


class Process:
    """The server's process, which takes memory when it starts."""

    def __init__(self, fake: GpuServer, fraction: float) -> None:
        self.fake, self.fraction = fake, fraction
        self.alive = False

    def start(self) -> None:
        self.alive = True
        self.fake.launch(self.fraction)

    def stop(self, graceful: bool = True) -> None:
        self.alive = False
        self.fake.stop()

    def log_tail(self) -> str:
        return ""


@pytest.fixture
def gpu(monkeypatch) -> GpuMemory:
    """The GPU. The run's trainer and server take their memory of it."""
    made = GpuMemory(CARD)
    made.take("context", CONTEXT)
    step = Trainer.step

    class Booked(Rank):
        def __init__(self, config, ranks=None, loaded=None):
            super().__init__(config, ranks, loaded)
            made.take("trainer weights", WEIGHTS)
            self.stepped = False

        def start(self, spec):
            made.give(*SHARED[1:])
            self.stepped = False
            trainer = super().start(spec)
            made.take("trainer masters", MASTERS)
            trainer.memory = self
            return trainer

        def _move(self, device):
            super()._move(device)
            made.give(*SHARED)
            if self.offloaded:  # it is changed after the move, which is to the GPU
                made.take("trainer weights", WEIGHTS)
                if self.trainer is not None:
                    made.take("trainer masters", MASTERS)
                if self.stepped:
                    made.take("trainer optimizer", OPTIMIZER)

        def send(self, updates):
            made.take("bucket", BUCKET)
            try:
                return super().send(updates)
            finally:
                made.give("bucket")

        def resend(self, update):
            made.take("bucket", BUCKET)
            try:
                return super().resend(update)
            finally:
                made.give("bucket")

        def logprobs(self, samples, temperature):
            scores = super().logprobs(samples, temperature)
            made.take("scoring", SCORING)
            made.give("scoring")
            return scores

    def booked_step(trainer, samples):
        assert not trainer.memory.offloaded
        made.take("step", STEP)
        output = step(trainer, samples)
        if not trainer.memory.stepped:
            made.take("trainer optimizer", OPTIMIZER)
            trainer.memory.stepped = True
        made.give("step")
        return output

    class Host(LocalServerHost):
        shares_gpus = True

        def servers(self, backend, model):
            words = list(backend.launch(model, Path("log"), "127.0.0.1", 1, gpu=0).command)
            set_to = float(words[words.index("--mem-fraction-static") + 1]) if model.memory_fraction else None
            self.server.process = Process(self.server, set_to or DEFAULT_FRACTION)
            return [Server(self.server.url, self.server.process)]

    monkeypatch.setattr(Trainer, "step", booked_step)
    monkeypatch.setattr(build, "Rank", Booked)
    monkeypatch.setattr(build, "LocalServerHost", Host)
    monkeypatch.setattr(controller, "gpu_bytes", lambda device: CARD)
    monkeypatch.setattr("vlmrl.checks.server_parity.TOLERANCE", 1e9)  # the fake's logprobs are invented
    made.host, made.memory = Host, Booked
    return made


@pytest.fixture
def server(gpu):
    fake = GpuServer(gpu, weights=WEIGHTS, other=GRAPHS)
    fake.finish = {"type": "length", "length": 3}
    gpu.host.server = fake
    yield fake
    fake.close()


def tasks(index, seed):
    return {"prompt": "Say a."}


def one(text, task):
    return 1.0


def demonstration(task, turn):
    return "a"


def config_of(folder: Path) -> Config:
    model = Model(path=f"random:{tiny.build(folder / 'model', 'qwen3')}", device="cpu", dtype="float32")
    data = Data(generator=tasks, size=4)
    return Config(
        output_dir=str(folder / "runs"),
        model=model,
        data=data,
        reward=one,
        rollout=Rollout(group_size=2, max_tokens=64, max_response_tokens=8),
        engine="sglang",
        server=ServerSettings(python="python", start_timeout=600.0),
        train=Train(steps=2, groups_per_batch=2, image_check=False),
        eval=Eval(data=EvalData(generator=tasks, size=4), every=1),
        warm_start=WarmStart(steps=2, demonstrate=demonstration, trajectories_per_step=2),
        checkpoint=Checkpoint(every=1),
    )


@pytest.fixture
def run_once(tmp_path) -> Any:
    """Trains; the value is the run's metrics and its summary."""
    runs = []

    def train():
        runs.append(run := build.build_run(config_of(tmp_path)))
        run.engine.servers.limits = Limits(health_every=0.1)
        log = RunLog(run.folder)
        summary = asyncio.run(loop.train(run, log, RunProgress(Console(quiet=True))))
        log.close()
        return log.rows(), summary, run.folder

    yield train
    for run in runs:
        run.engine.close()


def plan(config, sizes, gpu_bytes):
    """The share that the plan gives a server of the model of 2.13 billion parameters, with more trajectories than fit at once."""
    sizes = Sizes(int(WEIGHTS / 2), {"language_model": int(WEIGHTS / 2)}, cached=2 * 28 * 8 * 128)
    large = Config(engine="sglang", rollout=Rollout(max_tokens=16384), train=Train(groups_per_batch=64))
    return server_memory_fraction(large, sizes, gpu_bytes)


def test_trainer_and_server_never_hold_more_than_their_gpu(gpu, server, run_once, monkeypatch):
    monkeypatch.setattr(serving, "server_memory_fraction", plan)
    rows, summary, folder = run_once()
    assert server.errors == [] and server.launches == 1
    assert [row["step"] for row in rows if "loss" in row] == [1, 2]
    assert {"reward_before", "reward_after"} <= summary.keys()
    assert list((folder / "checkpoints").iterdir()) and (folder / "model").is_dir()
    paths = [path for path, _ in server.calls]
    sleeps = paths.count("/release_memory_occupation")
    # Three times for the parity check and the first weights; then, with the weights, for warm start, the run's trainer, steps,
    # checkpoints, and the end.
    assert sleeps == 3 + 2 * (1 + 1 + 2 + 2 + 1)
    assert paths.count("/resume_memory_occupation") == sleeps - 2
    assert server.cache > 0.75 * CARD  # the server has the GPU to itself


def test_a_server_that_is_restarted_between_two_steps_finds_its_memory(gpu, server, run_once, monkeypatch):
    monkeypatch.setattr(serving, "server_memory_fraction", plan)
    generate = GpuServer._generate
    responses = []

    async def dies_once(self, body):
        responses.append(body)
        if len(responses) == 12:  # of the second step
            self.process.stop()
            self.version = "default"
        return await generate(self, body)

    monkeypatch.setattr(GpuServer, "_generate", dies_once)
    rows, _, _ = run_once()
    assert server.errors == [] and server.launches == 2
    assert [row["step"] for row in rows if "loss" in row] == [1, 2]
