"""The Python environment of servers: its NCCL, and the CUDA toolkit that compiles their kernels.

Servers usually run in an environment of their own (`server.python`), whose packages this process does not see.
"""

from __future__ import annotations

import inspect
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PROBE_SECONDS = 60.0
LIBRARY = "lib64/libcudart.so"  # which kernels are linked with; NVIDIA's packages have only lib/libcudart.so.13


@dataclass(frozen=True)
class ServerEnvironment:
    """Packages of a Python environment. Each field is None where there is no such package."""

    nccl: str | None = None
    """Such as ``2.30.7``."""
    package: str | None = None
    """The package that contains NCCL."""
    toolkit: str | None = None
    """Folder of NVIDIA's packages that contains ``bin/nvcc``."""


@cache
def environment_of(python: str) -> ServerEnvironment:
    """The environment of an interpreter. Nothing is known of one that cannot be run on this machine."""
    if python == sys.executable:
        return ServerEnvironment(**_packages())
    script = f"{inspect.getsource(_packages)}\nimport json\nprint(json.dumps(_packages()))"
    try:
        output = subprocess.run([python, "-c", script], capture_output=True, timeout=PROBE_SECONDS, check=True).stdout
        return ServerEnvironment(**json.loads(output))
    except (OSError, ValueError, subprocess.SubprocessError):
        return ServerEnvironment()


def _packages() -> dict[str, str | None]:
    """The fields of :class:`ServerEnvironment` for this interpreter. Its source is also run by others, so it imports what it needs."""
    import sysconfig
    from contextlib import suppress
    from importlib.metadata import PackageNotFoundError, version
    from pathlib import Path

    found: dict[str, str | None] = {}
    for package in ("nvidia-nccl-cu12", "nvidia-nccl-cu13"):
        with suppress(PackageNotFoundError):  # not torch.cuda.nccl.version(), which torch was built with
            found = {"nccl": version(package), "package": package}
    compilers = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin/nvcc"))
    return found | {"toolkit": str(compilers[-1].parent.parent) if compilers else None}


def different_nccl(servers: Mapping[str, str | None], python: str) -> str:
    """Why trainer and servers cannot be in one NCCL group, and what to install. Empty if nothing is known against it.

    ``servers``: the NCCL version of each, by URL, or None if it is not known. ``python``: the interpreter of their environment. NCCL
    refuses a communicator of unequal versions ("Mismatched NCCL version detected").
    """
    own = environment_of(sys.executable)
    others = {url: version for url, version in servers.items() if version is not None and version != own.nccl}
    if own.nccl is None or not others:
        return ""
    newest = max([own.nccl, *others.values()], key=lambda version: [int(part) for part in version.split(".")])
    older = sys.executable if newest != own.nccl else python
    each = ", ".join(f"{version} at {url}" for url, version in others.items())
    return (
        f"the trainer has NCCL {own.nccl}, and the servers {each}: NCCL connects equal versions only. In the environment of the older "
        f"one, run `{older} -m pip install {own.package}=={newest}` (pip may warn that torch names another)."
    )


def cuda_home(variables: Mapping[str, str]) -> str | None:
    """The CUDA toolkit that a server finds, in the order in which servers look for it. None: there is none."""
    if home := variables.get("CUDA_HOME") or variables.get("CUDA_PATH"):
        return home if Path(home, "bin/nvcc").exists() else None
    if nvcc := shutil.which("nvcc", path=variables.get("PATH")):
        return str(Path(nvcc).parent.parent)
    return "/usr/local/cuda" if Path("/usr/local/cuda/bin/nvcc").exists() else None


def own_toolkit(python: str) -> str | None:
    """The toolkit among the packages of an environment, if kernels can be linked with it."""
    toolkit = environment_of(python).toolkit
    return toolkit if toolkit is not None and Path(toolkit, LIBRARY).exists() else None
