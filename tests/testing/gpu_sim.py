"""A simulated CUDA machine for tests: `tests/gpu_sim` built with the machine's C compiler and preloaded into a Python subprocess.

In the subprocess, torch finds H100s that compute nothing. Tensors live on ``cuda`` with true sizes in torch's own allocator,
inductor and Triton compile for sm_90, and what is read back from a GPU is zero. :func:`device_counts` says what a device saw.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from testing.preloaded import Preloaded

SOURCES = Path(__file__).parents[1] / "gpu_sim"
ROOT = SOURCES.parents[1]
H100 = 85_028_372_480  # bytes, as CUDA reports them
COUNTS = ("contexts", "allocated", "peak", "mallocs", "launches", "syncs", "uploads", "downloads")
# Libraries whose other functions do nothing and succeed, and the runtime, whose other functions raise a clear error.
DO_NOTHING = ("cu*/lib/libcublas.so.*", "cu*/lib/libcublasLt.so.*", "nccl/lib/libnccl.so.*")
RUNTIME = "cu*/lib/libcudart.so.*"


class CannotSimulate(Exception):
    """Why this machine cannot build or run the simulated GPU."""


@dataclass(frozen=True)
class SimulatedGpu:
    """A process that the built library is loaded into; it is forked for each script."""

    process: Preloaded

    def run(
        self,
        script: str | Path,
        *args: object,
        devices: int = 1,
        memory: int = H100,
        contents: bool = False,
        nccl_hangs: bool = False,
        forbidden: int = -1,
        timeout: float = 600,
        env: dict[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a Python script, or its source, in a process that sees ``devices`` GPUs of ``memory`` bytes, in the repository's folder.

        ``contents``: copies to and from a GPU move bytes; otherwise everything read from a GPU is zero. ``nccl_hangs``: collectives
        end only when their group is aborted. ``forbidden``: a device that the process must not touch; it aborts with a traceback.

        Raises:
            AssertionError: the script failed; with its output.
        """
        source = (
            f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
            if isinstance(script, Path)
            else script
        )
        settings = {
            "SIMULATED_CUDA_DEVICES": str(devices),
            "SIMULATED_CUDA_MEMORY": str(memory),
            "SIMULATED_CUDA_CONTENTS": str(int(contents)),
            "SIMULATED_NCCL_HANGS": str(int(nccl_hangs)),
            "SIMULATED_CUDA_FORBIDDEN": str(forbidden),
        }
        done = self.process.run(source, *args, env=settings | (env or {}), timeout=timeout)
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
        return done


def _environment(library: Path) -> dict[str, str]:
    """That of a process with simulated GPUs, which keeps the kernels that it compiles beside the library."""
    settings = {
        "LD_PRELOAD": str(library),
        "TRITON_LIBCUDA_PATH": str(library.parent),
        "PYTHONFAULTHANDLER": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(library.parent / "inductor"),
        "TRITON_CACHE_DIR": str(library.parent / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_WORKER_START": "subprocess",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_MODULE_LOADING": "LAZY",
    }
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), **settings}


def build(folder: Path) -> SimulatedGpu:
    """Compile the library into ``folder``.

    Raises:
        CannotSimulate: the machine lacks a C compiler, or torch has no CUDA build with headers.
    """
    compiler, nvidia = shutil.which("gcc") or shutil.which("cc"), _nvidia()
    if compiler is None or shutil.which("nm") is None:
        raise CannotSimulate("no C compiler was found: install gcc and binutils.")
    defined = {name for path in SOURCES.glob("*.c") for name in re.findall(r"\b(\w+)\(", path.read_text())}
    stubs = folder / "stubs.c"
    stubs.write_text(_stubs(nvidia, defined))
    library = folder / "libcuda.so.1"  # preloaded under this name, it is also what Triton opens
    options = ["-shared", "-fPIC", "-O1", "-w", "-pthread", f"-Wl,-soname,{library.name}", f"-I{SOURCES}"]
    headers = [f"-I{path}" for path in nvidia.glob("cu*/include")]
    sources = [*sorted(map(str, SOURCES.glob("*.c"))), str(stubs)]
    done = subprocess.run(
        [compiler, *options, *headers, *sources, "-ldl", "-o", str(library)], capture_output=True, text=True
    )
    if done.returncode:
        raise AssertionError(f"the simulated GPU does not compile:\n{done.stderr[-4000:]}")
    (folder / "libcuda.so").symlink_to(library.name)
    return SimulatedGpu(Preloaded(_environment(library), ROOT))


def why_no_triton() -> str | None:
    """Why Triton cannot compile kernels here; ``None`` if it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return None if header.exists() else f"Triton needs Python's header {header}: install python3-dev"


def _nvidia() -> Path:
    """The folder of the CUDA libraries that torch was installed with."""
    import torch

    version = torch.version.cuda
    if version is None:
        raise CannotSimulate(f"torch {torch.__version__} has no CUDA build.")
    folder = Path(torch.__file__).parents[1] / "nvidia"
    if not [*folder.glob("cu*/include/cuda_runtime_api.h")] or not [*folder.glob(RUNTIME)]:
        raise CannotSimulate(f"the headers of CUDA {version} are not in {folder}; CUDA 13 wheels have them.")
    return folder


def _stubs(nvidia: Path, defined: set[str]) -> str:
    """C code for every function of the libraries that our files do not define."""
    reported = {name for library in nvidia.glob(RUNTIME) for name in _exported(library)} - defined
    for header in nvidia.glob("cu*/include/cuda.h"):  # no driver is installed: its functions are those of the header
        reported |= _declared(header.read_text()) - defined
    empty = {name for pattern in DO_NOTHING for library in nvidia.glob(pattern) for name in _exported(library)}
    lines = ['#include "simulated.h"']
    lines += [f'int {name}(void) {{ return simulated_missing("{name}"); }}' for name in sorted(reported - defined)]
    lines += [f"int {name}(void) {{ return 0; }}" for name in sorted(empty - reported - defined)]
    return "\n".join(lines)


def _declared(header: str) -> set[str]:
    """The functions of cuda.h, and the versions that its macros give them, as ``cuMemAlloc_v2``."""
    return set(re.findall(r"CUDAAPI\s+(cu\w+)\(", header)) | set(re.findall(r"#define +cu\w+ +(cu\w+)$", header, re.M))


def _exported(library: Path) -> set[str]:
    listed = subprocess.run(["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True)
    names = {line.split()[-1].split("@")[0] for line in listed.stdout.splitlines() if " T " in line or " W " in line}
    return {name for name in names if name.isidentifier() and name.lstrip("_").startswith(("cu", "nccl"))}


def device_counts(device: int = 0) -> dict[str, int]:
    """What a simulated device has seen so far, within a process that :meth:`SimulatedGpu.run` started."""
    read = ctypes.CDLL(None).simulated_read
    read.restype, read.argtypes = ctypes.c_long, [ctypes.c_char_p, ctypes.c_int]
    return {name: read(name.encode(), device) for name in COUNTS}
