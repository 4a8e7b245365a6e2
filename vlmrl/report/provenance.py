"""The provenance of results: versions of packages, the commit, and the machine."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

import vlmrl
from vlmrl.checks.tested_versions import TESTED_PACKAGES, installed_version
from vlmrl.utils.work_pool import usable_cores

PACKAGES = (*TESTED_PACKAGES, "datasets", "tokenizers", "numpy", "peft", "ray")


def provenance() -> dict[str, Any]:
    """``{"versions": {"vlmrl": "0.1.0", ...}, "commit": "d1c65cd", "machine": {...}}``. A commit that is not known is ``None``."""
    return {"versions": package_versions(), "commit": git_commit(), "machine": describe_machine()}


def package_versions() -> dict[str, str]:
    """The versions of vlmrl, Python and those of :data:`PACKAGES` that are installed. Nothing is imported for it."""
    found = {name: version for name in PACKAGES if (version := installed_version(name)) is not None}
    return {"vlmrl": vlmrl.__version__, "python": platform.python_version(), **found}


def git_commit() -> str | None:
    """The commit of the repository that vlmrl runs from, ``d1c65cd+changes`` if tracked files differ from it.

    ``None`` for an installed wheel, also inside somebody else's repository.
    """
    root = Path(vlmrl.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    try:
        commit = _git(root, "rev-parse", "--short", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):  # git is not installed, or refuses another user's repository
        return None
    return f"{commit}+changes" if changed else commit


def describe_machine() -> dict[str, Any]:
    """The processor, the cores that this process may use, torch's threads, and GPUs: ``{"cpu": "...", "cores": 2, ...}``."""
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"cpu": _cpu_name(), "cores": usable_cores(), "threads": torch.get_num_threads(), "gpus": gpus}


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")  # Linux only; `platform.processor` is often empty there
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
