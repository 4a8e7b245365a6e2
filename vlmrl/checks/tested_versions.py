"""The versions of packages: installed ones, those that vlmrl is tested with, and how they compare."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

TESTED: tuple[dict[str, str], ...] = (
    {"torch": "2.15", "transformers": "5.24"},
    {"torch": "2.11", "transformers": "5.17"},
    {"torch": "2.14", "transformers": "5.19", "sglang": "0.5.23"},
    {"torch": "2.13", "transformers": "5.19", "vllm": "0.32.0"},
)
"""Combinations that the tests ran with. The README names them; pyproject.toml has the oldest as lower bounds."""

TESTED_PACKAGES = tuple(dict.fromkeys(name for each in TESTED for name in each))


def installed_version(package: str) -> str | None:
    """The version of a package, without importing it; ``None`` if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def oldest_and_newest(package: str) -> tuple[str, str] | None:
    """The oldest and the newest tested version of ``package``."""
    versions = sorted((each[package] for each in TESTED if package in each), key=numbers)
    return (versions[0], versions[-1]) if versions else None


def numbers(version: str) -> tuple[int, ...]:
    """``2.15.0+cu130`` as ``(2, 15, 0)``."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def is_within(version: str, oldest: str, newest: str) -> bool:
    """Whether ``version`` is from ``oldest`` to any patch of ``newest``: 2.15.1 is a patch of 2.15."""
    found = numbers(version)
    return found >= numbers(oldest) and found[: len(numbers(newest))] <= numbers(newest)
