"""Functions with limits on CPU, memory and time: what they return, how they fail, and that the next call works."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from vlmrl import BoundedFunction, LimitError
from vlmrl.utils.bounded import _Worker

FUNCTIONS = """
import os, sys, time

def double(x): return 2 * x
def who(): return os.getpid()
def burn(): return 10 ** (10 ** 10)          # one call into C
def loop():
    while True: pass
def eat(): return len([bytearray(2 ** 20) for _ in range(100_000)])
def sleep(): time.sleep(3600)
def fail(): raise KeyError("no such thing")
def odd(): return object()
def deep(n): return deep(n + 1) + 1
def noise():
    print("not a result"); sys.stdout.flush(); os.write(1, b"nor this\\n")
    return "quiet"
def large(n): return "x" * n
def crash(): os.abort()
def leave(): os._exit(0)
def exhausted(): raise MemoryError
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("functions") / "functions.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.mark.slow
def test_calls_reuse_one_process(file: Path):
    double, who = BoundedFunction(f"{file}:double"), BoundedFunction(f"{file}:who")
    assert [double(2), double([1]), double("é")] == [4, [1, 1], "éé"]
    assert who() == who() != os.getpid()
    before = who()
    who.close()
    assert who() != before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cpu_seconds", "message"),
    [
        ("burn", 0.5, "more than 0.5 s of CPU"),
        ("loop", 0.5, "more than 0.5 s of CPU"),
        ("eat", 300, "more than 256 MiB of memory"),  # the kernel may need seconds for its pages
        ("exhausted", 300, "more than 256 MiB of memory"),
        ("crash", 300, r"its process crashed \(SIGABRT\)"),
    ],
)
def test_a_call_over_a_limit_says_so_and_the_next_one_works(file: Path, name: str, cpu_seconds: float, message: str):
    bounded = BoundedFunction(f"{file}:{name}", cpu_seconds=cpu_seconds, memory_mb=256)
    for _ in range(2):
        with pytest.raises(LimitError, match=f"{name}: {message}"):
            bounded()


@pytest.mark.slow
def test_waiting_is_a_timeout_and_no_limit(file: Path):
    with pytest.raises(TimeoutError, match=r"sleep: no result in 0.2 s"):
        BoundedFunction(f"{file}:sleep", timeout=0.2)()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("fail", (), "fail: KeyError: 'no such thing'"),
        ("odd", (), "odd: TypeError: Object of type object is not JSON serializable"),
        ("deep", (0,), "deep: RecursionError"),
        ("double", (), "double: TypeError: .*missing 1 required positional argument"),
        ("leave", (), "leave: its process ended with status 0"),
    ],
)
def test_an_error_of_the_function_is_raised(file: Path, name: str, arguments: tuple[int, ...], message: str):
    with pytest.raises(RuntimeError, match=message):
        BoundedFunction(f"{file}:{name}")(*arguments)


@pytest.mark.slow
def test_a_function_that_cannot_be_imported_says_why(file: Path):
    with pytest.raises(RuntimeError, match=r"absent: importing it raised AttributeError: .* has no attribute 'absent'"):
        BoundedFunction(f"{file}:absent")()
    with pytest.raises(RuntimeError, match=r"No module named 'no_such_module'"):
        BoundedFunction("no_such_module:f")()


@pytest.mark.slow
def test_what_a_function_prints_is_no_result_and_results_may_be_large(file: Path):
    assert BoundedFunction(f"{file}:noise")() == "quiet"
    assert len(BoundedFunction(f"{file}:large")(3_000_000)) == 3_000_000
    assert BoundedFunction(f"{file}:double")("x" * 3_000_000) == "x" * 6_000_000


@pytest.mark.slow
def test_threads_share_few_processes_and_one_that_hangs_stops_no_other(file: Path):
    who = BoundedFunction(f"{file}:who", processes=2)
    seen: list[int] = []
    threads = [threading.Thread(target=lambda: seen.append(who()), daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert len(seen) == 8 and len(set(seen)) <= 2


@pytest.mark.slow
def test_a_process_that_was_killed_from_outside_is_an_error_of_the_machine(file: Path):
    who = BoundedFunction(f"{file}:who")
    os.kill(who(), 9)
    with pytest.raises(RuntimeError, match="its process ended with status -9"):
        who()
    assert who() > 0


@pytest.mark.slow
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda who: pickle.loads(pickle.dumps(who))])
def test_a_copy_as_that_of_a_task_has_its_own_processes_and_the_same_limits(file: Path, copied):
    who = BoundedFunction(f"{file}:who", cpu_seconds=5)
    assert copied(who)() != who() and copied(who)._settings == who._settings


def test_settings_are_checked():
    with pytest.raises(ValueError, match=r"must be 'file.py:function' or 'module:function', but it is 'function'"):
        BoundedFunction("function")
    with pytest.raises(ValueError, match=r"cpu_seconds of a BoundedFunction must be above 0, but it is 0"):
        BoundedFunction("a:b", cpu_seconds=0)


@pytest.mark.slow
def test_a_forked_process_has_its_own_workers(file: Path):
    """With shared ones, each process reads results of the other, or waits for ever."""
    script = f"""
import os
from vlmrl import BoundedFunction
double = BoundedFunction({f"{file}:double"!r})
double(0)
child = os.fork()
wrong = [x for x in range(200) if double(f"{{child == 0}}{{x}}") != 2 * f"{{child == 0}}{{x}}"]
if child == 0:
    os._exit(bool(wrong))
assert not wrong and os.waitpid(child, 0)[1] == 0
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=600).returncode == 0


@pytest.mark.slow
def test_a_call_that_waits_ends_also_if_its_caller_was_killed(file: Path, monkeypatch: pytest.MonkeyPatch):
    """Nobody else would end it: it uses no CPU time and does not read its pipe."""
    monkeypatch.setattr(_Worker, "kill", lambda worker: None)
    worker = _Worker(f"{file}:sleep", cpu_seconds=2, memory_mb=1024, timeout=0.1)
    # The latter if this process stands still until the other has ended.
    with pytest.raises((TimeoutError, RuntimeError)):
        worker.call((), 0.1)
    assert worker._process.wait(timeout=600) == -signal.SIGALRM
