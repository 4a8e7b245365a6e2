"""A Python process that has imported the trainer once and is forked for each script: the imports take five seconds of a core.

    server = Preloaded(environment)
    done = server.run("print(1)", env={"A": "1"})
    server.run_ranks(2, "testing.fsdp_script", folder)

As with ``python -c``, a script has its own process, environment, arguments and output; it ends without the interpreter's own end,
where autograd's thread for a GPU may ask for the lock of an interpreter that is gone, which aborts.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

MODULES = (
    "vlmrl.run.loop",
    "vlmrl.cli.train",
    "torch._inductor.compile_fx",
    "transformers.models.qwen3_vl.modeling_qwen3_vl",
)


class Preloaded:
    """The process; ``environment`` is that of its start, to which each script adds its own."""

    def __init__(self, environment: dict[str, str], cwd: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd=cwd,
            text=True,
        )

    def run(
        self, source: str, *args: object, env: dict[str, str] | None = None, timeout: float = 600
    ) -> subprocess.CompletedProcess[str]:
        """Run a script in a fork of the process."""
        [done] = self._run(source, args, [env or {}], timeout)
        return done

    def run_ranks(self, count: int, module: str, *args: object, **variables: object) -> None:
        """Call the ``main`` of a module with ``args`` as strings, on so many ranks, with the environment that `torchrun` gives them.

        ``variables`` are further ones of the environment.

        Raises:
            AssertionError: one of them failed; with its output.
        """
        source = f"import sys; from {module} import main; main(*sys.argv[1:])"
        with reserved_port() as port:
            common = {
                "WORLD_SIZE": count,
                "LOCAL_WORLD_SIZE": count,
                "GROUP_WORLD_SIZE": 1,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "TORCHELASTIC_RUN_ID": "preloaded",
                **variables,
            }
            ranks = [{"RANK": rank, "LOCAL_RANK": rank, **common} for rank in range(count)]
            environments = [{name: str(value) for name, value in each.items()} for each in ranks]
            for done in self._run(source, args, environments, timeout=1200):
                assert done.returncode == 0, done.stderr[-8000:]

    def _run(
        self, source: str, args: Sequence[object], environments: Sequence[dict[str, str]], timeout: float
    ) -> list[subprocess.CompletedProcess[str]]:
        """What a fork for each environment did. If one fails or ``timeout`` seconds pass, all are killed.

        Raises:
            subprocess.TimeoutExpired: the time has passed.
        """
        words = ["-c", *map(str, args)]
        with tempfile.TemporaryDirectory() as folder:
            outputs = [[f"{folder}/{kind}{index}" for kind in ("out", "err")] for index in range(len(environments))]
            scripts = [
                {"source": source, "argv": words, "env": env, "outputs": names}
                for env, names in zip(environments, outputs, strict=True)
            ]
            self._process.stdin.write(json.dumps(scripts) + "\n")
            self._process.stdin.flush()
            children, expired = self._answer(), threading.Event()
            late = threading.Timer(timeout, lambda: (expired.set(), kill(children)))
            late.start()
            try:
                codes = self._answer()
            finally:
                late.cancel()
            texts = [[Path(name).read_text() for name in names] for names in outputs]
        if expired.is_set():
            raise subprocess.TimeoutExpired(words, timeout, *texts[0])
        return [subprocess.CompletedProcess(words, code, *text) for code, text in zip(codes, texts, strict=True)]

    def _answer(self) -> list[int]:
        line = self._process.stdout.readline()
        assert line, f"the process of all scripts ended with status {self._process.wait()}"
        return json.loads(line)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port that the system gives to no other process, and at which one that names it can listen."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def kill(children: Sequence[int]) -> None:
    """End processes with all that they have started."""
    for child in children:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)


def main() -> None:
    """Answer each request on stdin, a list of scripts, with their process ids, and then with their exit statuses."""
    for name in MODULES:
        __import__(name)
    for line in sys.stdin:
        scripts = json.loads(line)
        children, codes = [], {}
        for script in scripts:
            child = os.fork()
            if child == 0:
                os._exit(run(**script))
            with suppress(PermissionError):  # it has a session of its own already
                os.setpgid(child, child)  # here, too: it may be killed before it is that far
            children.append(child)
        print(json.dumps(children), flush=True)
        try:
            while len(codes) < len(children):
                child, status = os.wait()
                codes[child] = os.waitstatus_to_exitcode(status)
                if codes[child]:
                    kill([other for other in children if other not in codes])
        except KeyboardInterrupt:
            kill([child for child in children if child not in codes])
            raise
        print(json.dumps([codes[child] for child in children]), flush=True)


def run(source: str, argv: list[str], env: dict[str, str], outputs: list[str]) -> int:
    """Run a script in this process, and return its exit status."""
    with suppress(PermissionError):  # it leads a group, and not a session, if its parent was faster
        os.setsid()
    for number, path in zip((1, 2), outputs, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ |= env
    tempfile.tempdir, sys.argv = None, argv
    code = 0
    try:
        exec(compile(source, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    main()
