"""Interrupted commands, and images that would silently be wrong."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vlmrl.cli import main as cli
from vlmrl.engine.base import EngineError
from vlmrl.multimodal.images import load_image
from vlmrl.run import checkpointing, stopping
from vlmrl.run.checkpointing import LoopState, save_stopped
from vlmrl.run.recorder import Recorder
from vlmrl.run.stopping import RunStopped, StopRequest, stop_on_signals
from vlmrl.train.checkpoint import Checkpoints, load_json

HANG = """
import time
from vlmrl import Config, Data, Env, Rollout, Train


class Hangs(Env):
    def step(self, response_text):
        print("stepping", flush=True)
        time.sleep(1e6)


def tasks(index, seed):
    return {"prompt": "Hi."}


def config():
    return Config(
        name="hang",
        data=Data(generator=tasks, size=4),
        env="hang.py:Hangs",
        rollout=Rollout(group_size=2, max_tokens=64, max_response_tokens=4, env_timeout=1e6),
        train=Train(steps=1, groups_per_batch=1),
    )
"""


NOTICED_LATE = """
import _thread, asyncio, threading
from vlmrl.utils.threads import run_awake

async def forever():
    threading.Timer(0.2, _thread.interrupt_main).start()  # sets the signal's flag without waking the loop
    await asyncio.get_running_loop().create_future()

run_awake(forever())
"""


@pytest.mark.slow
def test_a_ctrl_c_just_before_the_loop_sleeps_is_noticed():
    run = subprocess.run([sys.executable, "-c", NOTICED_LATE], capture_output=True, text=True, timeout=600)
    assert "KeyboardInterrupt" in run.stderr


@pytest.mark.slow
def test_ctrl_c_ends_a_run_whose_env_hangs(tmp_path):
    (tmp_path / "hang.py").write_text(HANG.replace("max_response_tokens=4", "max_response_tokens=4, stop=('',)"))
    run = subprocess.Popen(
        [sys.executable, "-m", "vlmrl", "train", "hang.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert run.stdout is not None
    for line in run.stdout:
        if "stepping" in line:
            break
    run.send_signal(signal.SIGINT)
    try:
        rest, _ = run.communicate(timeout=600)
    finally:
        run.kill()
    assert run.returncode == 130, rest
    assert "stopped by SIGINT after" in rest and "Traceback" not in rest


def test_end_of_input_ends_play(tmp_path, monkeypatch, capsys):
    (tmp_path / "hang.py").write_text(HANG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    words = ["vlmrl", "play", "hang.py:Hangs", "--data.generator", "hang.py:tasks", "--by-hand", "-n", "1"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match="130"):
        cli.main()
    assert "stopped" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["uint16", "float32"])
def test_more_than_8_bits_a_channel_are_refused_not_clipped(kind):
    with pytest.raises(ValueError, match="more than 8 bits a channel"):
        load_image(Image.fromarray(np.full((20, 20), 200, dtype=kind)))


SIGNALS = """
import asyncio, signal, sys
from vlmrl.run.stopping import RunStopped, StopRequest, stop_on_signals

async def work(stop):
    try:
        await stop.interruptible(begin())
    except RunStopped as stopped:
        print("saving", stopped, stopped.status, flush=True)
        await asyncio.get_running_loop().create_future()  # a disk that hangs

async def begin():
    print("began", flush=True)
    await asyncio.get_running_loop().create_future()

stop = StopRequest()
with stop_on_signals(stop, float(sys.argv[1])):
    asyncio.run(work(stop))
"""


def started(grace_seconds: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SIGNALS, str(grace_seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "began\n"
    return process


@pytest.mark.slow
def test_a_second_ctrl_c_stops_at_once_and_one_that_a_launcher_passes_on_does_not():
    process = started(1e6)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None and process.stdout.readline() == "saving SIGINT 130\n"
    while process.poll() is None:  # those within a second are the first one, passed on
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.2)
    _, errors = process.communicate()
    assert process.returncode == 130 and "stopped at once" in errors


def test_two_ctrl_c_at_once_let_the_run_save_its_last_step(monkeypatch):
    """The terminal's, and the same one passed on by `uv run`, `make` or a shell script."""
    monkeypatch.setattr(stopping, "_end_process", lambda number, why: pytest.fail(why))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    stop = StopRequest()
    with stop_on_signals(stop):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
    assert stop.number == signal.SIGINT


def test_a_ctrl_c_that_has_ended_the_outputs_reader_too_stops_the_run_in_order(monkeypatch):
    """`vlmrl train ... 2>&1 | tee log`: the handler's error in the middle of an update lost all steps since the last checkpoint."""
    reader, writer = os.pipe()
    os.close(reader)
    stop = StopRequest()
    with os.fdopen(writer, "w") as unread, stop_on_signals(stop):
        monkeypatch.setattr(sys, "__stderr__", unread)
        os.kill(os.getpid(), signal.SIGINT)
    assert stop.number == signal.SIGINT


@pytest.mark.slow
@pytest.mark.parametrize("is_ignored", [False, True])
def test_the_end_of_its_terminal_stops_a_run_in_order_unless_it_runs_under_nohup(is_ignored):
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    try:
        process = started(1e6)
    finally:
        signal.signal(signal.SIGHUP, handler)
    process.send_signal(signal.SIGHUP)
    if is_ignored:
        process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert process.stdout.readline() == ("saving SIGTERM 143\n" if is_ignored else "saving SIGHUP 129\n")
    process.kill()
    process.communicate()


@pytest.mark.slow
def test_sigterm_ends_the_process_when_its_grace_period_ends():
    """Whatever it does then: on a slow machine it may not have begun to save."""
    process = started(0.5)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=600)
    assert output in ("saving SIGTERM 143\n", "")
    assert process.returncode == 143 and "within 0.5 seconds after SIGTERM" in errors


def test_what_is_not_interruptible_goes_on_to_its_end():
    events = []

    async def update(stop: StopRequest) -> None:
        stop.request(signal.SIGTERM)
        await asyncio.sleep(0)
        events.append("updated")

    async def steps() -> None:
        stop = StopRequest()
        await update(stop)
        await stop.interruptible(asyncio.sleep(0))

    with pytest.raises(RunStopped, match="SIGTERM"):
        asyncio.run(steps())
    assert events == ["updated"]


@pytest.mark.parametrize("grace_seconds", [1e6, None])
def test_a_repeated_sigterm_is_ignored(monkeypatch, grace_seconds):
    class InterruptedTimer(threading.Timer):
        """The second signal comes while the handler of the first makes its timer."""

        def start(self) -> None:
            super().start()
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(stopping.threading, "Timer", InterruptedTimer)
    monkeypatch.setattr(stopping, "SAME_SIGNAL_SECONDS", 0.0)
    monkeypatch.setattr(stopping, "_end_process", lambda number, why: pytest.fail(why))
    stop = StopRequest()
    with stop_on_signals(stop, grace_seconds):
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.number == signal.SIGTERM
    assert not [
        each for each in threading.enumerate() if isinstance(each, InterruptedTimer) and not each.finished.is_set()
    ]


def test_a_part_to_finish_that_is_cancelled_has_cleaned_up_when_its_caller_goes_on():
    """An engine's pause would still be cleaned up while the engine is resumed."""
    done: list[str] = []

    async def part() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.sleep(0)
            done.append("cleaned up")

    async def steps() -> None:
        finishing = asyncio.create_task(StopRequest().finish(part()))
        for _ in range(5):
            await asyncio.sleep(0)
        finishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await finishing
        assert done == ["cleaned up"]

    asyncio.run(steps())


def test_an_error_of_a_part_that_is_stopped_does_not_fail_the_run():
    async def part() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            raise OSError("cleanup failed")

    async def steps() -> None:
        stop = StopRequest()
        asyncio.get_running_loop().call_soon(lambda: asyncio.get_running_loop().call_soon(stop.request, signal.SIGTERM))
        await stop.interruptible(part())

    with pytest.raises(RunStopped, match="SIGTERM") as stopped:
        asyncio.run(steps())
    assert isinstance(stopped.value.__cause__, OSError)


class DeadEngine:
    """Its servers ended with the signal that stops the run."""

    said = "server 0: connection refused"

    async def pause(self) -> None:
        raise EngineError(self.said)

    resume = pause


class HangingEngine:
    said = "TimeoutError"

    async def pause(self) -> None:
        await asyncio.get_running_loop().create_future()

    resume = pause


@pytest.mark.parametrize("engine", [DeadEngine(), HangingEngine()])
def test_a_stopped_run_saves_its_checkpoint_though_its_engine_is_dead_or_hangs(tmp_path, engine, monkeypatch):
    monkeypatch.setattr(checkpointing, "STOPPED_PAUSE", 0.05)
    monkeypatch.setattr(checkpointing, "LAST_PAUSE", 1e6)

    def save(folder: Path) -> None:
        (folder / "weights").touch()

    settings = SimpleNamespace(checkpoint=SimpleNamespace(every=10), save_model=False)
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2)
    run: Any = SimpleNamespace(checkpoints=checkpoints, config=settings, colocated=True, engine=engine, folder=tmp_path)
    said: list[str] = []
    trainer: Any = SimpleNamespace(save=save, differs_from_start=True)
    asyncio.run(save_stopped(run, trainer, LoopState(step=5), SimpleNamespace(say=said.append)))  # type: ignore[arg-type]
    saved = checkpoints.newest()
    assert saved is not None and load_json(saved)["step"] == 5 and (saved / "weights").exists()
    assert said == [f"the engine did not release the GPUs to the trainer: {engine.said}"]


@pytest.mark.filterwarnings("error")
def test_a_stop_before_a_batch_leaves_nothing_unawaited():
    stop = StopRequest()
    stop.request(signal.SIGINT)
    taken = []

    class Buffer:
        async def take(self, step):
            taken.append(step)

    async def step() -> None:
        await stop.interruptible(Recorder.play(SimpleNamespace(), 1, Buffer()))

    with pytest.raises(RunStopped):
        asyncio.run(step())
    assert taken == []


def test_the_steps_of_a_stage_count_once_as_earlier_ones():
    state, trackers = LoopState(stage="sft", step=3), SimpleNamespace(earlier_steps=0)
    state.end_stage(SimpleNamespace(trackers=trackers))  # type: ignore[arg-type]
    assert (state.earlier_steps, trackers.earlier_steps) == (0, 3)  # as a stop before the next stage saves it
    state.begin("train", {}, None)
    assert (state.earlier_steps, state.step) == (3, 0)
