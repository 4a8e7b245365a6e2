"""A program ends with its own status, whatever its daemon threads do. Each case is a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
LIMIT = 600.0  # seconds, for a machine that is ten times too slow

SPINS = """
import atexit, sys, threading
import torch
torch.set_num_threads(1)
from vlmrl.utils.threads import DaemonPool, keeping_exit_status

started = threading.Semaphore(0)

def spin():
    started.release()
    while True:
        torch.randn(200, 200) @ torch.randn(200, 200)

def program():
    atexit.register(print, "registered functions are called")
    pool = DaemonPool("busy", 3)
    for _ in range(3):
        pool.submit(spin)
    for _ in range(3):
        started.acquire()
    END
"""
KEPT = SPINS + "\nwith keeping_exit_status():\n    program()\n"


def ended(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LIMIT)


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("pass", 0),
        ("sys.exit(3)", 3),
        ("raise ValueError('why')", 1),
        ("raise KeyboardInterrupt", 130),
    ],
)
def test_a_program_with_busy_threads_ends_with_its_own_status(end: str, status: int):
    done = ended(KEPT.replace("END", end))
    assert done.returncode == status, done.stderr
    assert done.stdout == "registered functions are called\n"
    assert "terminate called" not in done.stderr
    if "why" in end:
        assert "why" in done.stderr


SCRIPT = """
import atexit, sys, threading
import torch
torch.set_num_threads(1)

ended = []
atexit.register(lambda: print("it waited for the queue") if len(ended) == 1000 else None)  # the last of these functions

from vlmrl.utils import threads
from vlmrl.utils.threads import DaemonPool

threads.GRACE_SECONDS = 600.0  # for any machine
started = threading.Semaphore(0)

def image():
    started.release()
    for _ in range(300):
        torch.randn(200, 200) @ torch.randn(200, 200)
    ended.append(1)

pool = DaemonPool("media", 4)
for _ in range(1000):
    pool.submit(image)
started.acquire()
sys.exit(3)
"""


def test_a_script_of_ones_own_waits_for_the_calls_in_progress_and_not_for_the_queue():
    done = ended(SCRIPT)
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")


RECIPE = """
import threading
import torch
import vlmrl
from vlmrl import Config, Data, Env, Eval, Model, Rollout, Train, obs

torch.set_num_threads(1)
hung = threading.Semaphore(0)


class Hangs(Env):
    \"\"\"Every third episode computes for ever.\"\"\"

    def step(self, response_text):
        if self.task.id.endswith("0") and not MARKS:
            MARKS.append(1)
            while True:
                torch.randn(200, 200) @ torch.randn(200, 200)
        return obs(), True, {"reward": float(len(response_text) % 2)}

    def finish(self, ending):
        return None if ending == "env_done" else 0.0


MARKS = []


def tasks(index, seed):
    return {"prompt": "Hi."}


def config():
    return Config(
        name="hang",
        model=Model(path="tiny:qwen3_vl"),
        data=Data(generator=tasks, size=4, seed=None),
        env=Hangs,
        rollout=Rollout(group_size=2, max_tokens=64, max_response_tokens=4, stop=("",), env_timeout=3.0,
                        max_env_retries_per_turn=0, max_failed_fraction=1.0),
        train=Train(steps=1, groups_per_batch=1),
        save_model=False,
    )


if __name__ == "__main__":
    vlmrl.main(config)
    assert MARKS, "no call hung"
    print("the code after the run is run")
"""


def test_a_run_whose_env_still_computes_ends_with_status_0(tmp_path: Path):
    (tmp_path / "recipe.py").write_text(RECIPE)
    done = subprocess.run([sys.executable, "recipe.py"], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "done in" in done.stdout and done.stdout.endswith("the code after the run is run\n")


LEFT = """
import asyncio, threading
from vlmrl.utils import threads
from vlmrl.utils.threads import keeping_exit_status, run_awake

threads.GRACE_SECONDS = threads.END_SECONDS = 0.5

async def ignores_that_it_is_cancelled():
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass

async def program():
    hung = [asyncio.create_task(asyncio.to_thread(threading.Event().wait)) for _ in range(100)]
    hung.append(asyncio.create_task(threads.await_user_code(ignores_that_it_is_cancelled())))
    await asyncio.sleep(0)
    print(await asyncio.to_thread(lambda: "another call is made"))
    return "the program goes on"

with keeping_exit_status():
    print(run_awake(program()))
"""


def test_a_program_ends_whatever_its_coroutines_left_in_threads_and_tasks():
    done = ended(LEFT)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "another call is made\nthe program goes on\n"


WAITS_FOR_ITS_OWN_THREAD = """
import atexit, threading
from concurrent.futures import ThreadPoolExecutor
from vlmrl.utils import threads
from vlmrl.utils.threads import DaemonPool, keeping_exit_status

threads.GRACE_SECONDS = threads.END_SECONDS = 0.5
started = threading.Event()

def hangs():
    started.set()
    threading.Event().wait()

def step():
    with ThreadPoolExecutor(1) as pool:  # which waits for its thread, also after the TimeoutError
        pool.submit(hangs).result(timeout=0.01)

idle = ThreadPoolExecutor(1, "idle")
idle.submit(int).result()
threading.Thread(target=threading.Event().wait, name="upload").start()
with keeping_exit_status():
    DaemonPool("env").submit(step)
    started.wait()
    atexit.register(print, "registered functions are called")
"""


def test_a_program_ends_if_a_call_of_an_env_waits_for_a_thread_of_its_own_that_hangs():
    done = ended(WAITS_FOR_ITS_OWN_THREAD)
    assert (done.returncode, done.stdout) == (0, "registered functions are called\n")
    assert done.stderr == "vlmrl: the process ends while threads still work: upload\n"


WAITS_FOR_PROCESSES = """
import multiprocessing, time
from concurrent.futures import ProcessPoolExecutor
from vlmrl.utils import threads

threads.END_SECONDS = threads.PROCESS_SECONDS = 0.5
context = multiprocessing.get_context("fork")

def hangs(ready):
    ready.set()
    time.sleep(3600)

def program():
    ready = context.Manager().Event()
    if USES_A_POOL:
        pool = ProcessPoolExecutor(2, context)
        pool.submit(hangs, ready)
        print(pool.submit(int).result())
    else:
        context.Process(target=hangs, args=(ready,)).start()
        print(0)
    ready.wait()

with threads.keeping_exit_status():
    program()
"""


@pytest.mark.parametrize("uses_a_pool", [False, True])
def test_a_program_ends_if_processes_that_its_envs_have_started_hang(uses_a_pool: bool):
    done = ended(WAITS_FOR_PROCESSES.replace("USES_A_POOL", str(uses_a_pool)))
    assert (done.returncode, done.stdout) == (0, "0\n")
    assert "vlmrl: the program waits for what it has started (" in done.stderr


WAITS_FOR_A_THREAD = """
import atexit, threading
from concurrent.futures import ThreadPoolExecutor
from vlmrl.utils import threads
from vlmrl.utils.threads import DaemonPool, keeping_exit_status

threads.END_SECONDS = threads.PROCESS_SECONDS = 0.5
idle = ThreadPoolExecutor(1, "idle")
idle.submit(int).result()

def step():
    if USES_A_POOL:
        pool = ThreadPoolExecutor(1, "limited")
        try:
            pool.submit(threading.Event().wait).result(timeout=0.01)
        except TimeoutError:
            pool.shutdown(wait=False)
    else:
        threading.Thread(target=threading.Event().wait, name="limited_0", daemon=False).start()

atexit.register(print, "registered functions are called")
with keeping_exit_status(), keeping_exit_status():
    DaemonPool("env").submit(step).result()
    raise SystemExit(3)
"""


@pytest.mark.parametrize("uses_a_pool", [False, True])
def test_a_program_ends_if_a_thread_that_an_ended_call_of_an_env_has_started_hangs(uses_a_pool: bool):
    done = ended(WAITS_FOR_A_THREAD.replace("USES_A_POOL", str(uses_a_pool)))
    assert (done.returncode, done.stdout) == (3, "registered functions are called\n")
    assert done.stderr == "vlmrl: the program waits for what it has started (limited_0); it ends in 0.5 s\n"


INTERRUPTED = """
import asyncio, signal
from vlmrl.run.stopping import ended_as_by_ctrl_c
from vlmrl.utils.threads import run_awake

signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a command that a script starts in the background

async def program():
    asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGTERM)
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0.01)
        print("cleaned up")

with ended_as_by_ctrl_c():
    run_awake(program())
"""


def test_a_signal_that_leaves_the_loop_at_once_lets_the_program_clean_up():
    done = ended(INTERRUPTED)
    assert (done.returncode, done.stdout) == (143, "cleaned up\n") and "Task was destroyed" not in done.stderr


ASYNC_ENV = """
import asyncio, threading
from vlmrl.env.session import ENVS
from vlmrl.utils.threads import keeping_exit_status, run_awake

began = threading.Event()

async def step():
    began.set()
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0.5)
        print("the container is removed")

async def program():
    playing = asyncio.create_task(ENVS.run(step()))
    await asyncio.to_thread(began.wait)

with keeping_exit_status():
    run_awake(program())
"""


def test_what_an_async_env_does_when_the_program_ends_is_cancelled_and_awaited():
    done = ended(ASYNC_ENV)
    assert (done.returncode, done.stdout, done.stderr) == (0, "the container is removed\n", "")
