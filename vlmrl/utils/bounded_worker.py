"""The process behind :class:`~vlmrl.utils.bounded.BoundedFunction`: reads arguments, writes results, one line of JSON each.

It is run by path and imports nothing but the function's file, so that it starts at once and is small.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

OUT_OF_MEMORY = 77  # exit status
LATE_SECONDS = 5.0  # after the deadline of the process that waits for the result, which it has given up by then


def serve(function: str, cpu_seconds: float, memory_mb: int, timeout: float) -> None:
    """Answer calls until the other end of the pipes is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    for limit in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(limit, signal.SIG_DFL)  # it may have been ignored there
    responses = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what the function prints must not be read as a result
    try:
        call = _load(function)
    except Exception as error:
        return _write(responses, {"error": f"importing it raised {type(error).__name__}: {error}"[:2000]})
    _limit_memory(memory_mb)
    _write(responses, {})
    for line in sys.stdin.buffer:
        arguments = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # then the kernel ends this process, whatever it is doing
        signal.setitimer(signal.ITIMER_REAL, timeout + LATE_SECONDS)  # and a call that only waits
        try:
            response = {"result": call(*arguments)}
            json.dumps(response)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except Exception as error:
            response = {"error": f"{type(error).__name__}: {error}"[:2000]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(responses, response)


def _write(responses: Any, response: dict[str, Any]) -> None:
    line = json.dumps(response).encode() + b"\n"
    while line:
        line = line[responses.write(line) :]


def _load(function: str) -> Callable[..., Any]:
    where, _, name = function.rpartition(":")
    if not where.endswith(".py"):
        module = importlib.import_module(where)
    else:
        spec = importlib.util.spec_from_file_location("bounded_function", where)
        assert spec is not None and spec.loader is not None, where
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    found: Any = getattr(module, name)
    return found


def _limit_memory(memory_mb: int) -> None:
    """Limit the address space to what is in use now and ``memory_mb`` MiB more, where the system knows such a limit."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        with open("/proc/self/statm") as pages:
            used = int(pages.read().split()[0]) * resource.getpagesize()
        limit = used + memory_mb * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash on hostile input writes no core file


if __name__ == "__main__":
    serve(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
