"""Reads the settings of a run back from its ``config.json``, and finds its checkpoints."""

from __future__ import annotations

import dataclasses
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from vlmrl.config.model import Model
from vlmrl.config.run import Config
from vlmrl.utils.json_files import read_object
from vlmrl.utils.require import require

T = TypeVar("T")
SECTIONS = {"model", "rollout", "train"}
"""Settings that every run has, and no model: its folder has another ``config.json``."""


@dataclass(frozen=True)
class SavedRun:
    """A run's folder and the settings in its ``config.json``: ``SavedRun(Path("runs/geo3k"), {"seed": 0, "model": {...}, ...})``."""

    folder: Path
    """Where its files are."""
    settings: dict[str, Any]
    """In JSON types, with all sections of :data:`SECTIONS`."""

    @classmethod
    def around(cls, path: Path) -> Self | None:
        """The run whose folder is ``path`` or the nearest one above it."""
        folders = (path, *path.absolute().parents) if path.is_dir() else ()
        found = ((folder, read_settings(folder)) for folder in folders)
        return next((cls(folder, settings) for folder, settings in found if settings is not None), None)

    @property
    def model(self) -> Model:
        """The model that it trained. Raises ValueError if another version of vlmrl has other settings."""
        return from_plain(Model, self.settings["model"], "model")

    @property
    def seed(self) -> int:
        """The seed of its random weights. Raises ValueError if it is none."""
        seed = self.settings.get("seed")
        require(
            type(seed) is int and 0 <= seed < 2**64, "seed", "a whole number from 0 to 2**64 - 1 in config.json", seed
        )
        return int(seed or 0)


def read_settings(folder: Path) -> dict[str, Any] | None:
    """The settings of the run in ``folder``, in JSON types; ``None`` if its ``config.json`` is no run's or cannot be read."""
    found = read_object(folder / "config.json")
    return found if found is not None and found.keys() >= SECTIONS else None


def read_config(folder: Path) -> Config:
    """The config of the run in ``folder``.

    Raises:
        ValueError: there is no run, or a setting is unknown, wrong, or code that only the run's recipe can make.
    """
    settings = read_settings(folder)
    if settings is None:
        raise ValueError(f"{folder} must be a run's folder, but it has no config.json of a run.")
    return from_plain(Config, settings)


def is_checkpoint(folder: Path) -> bool:
    """Whether ``folder`` is a complete checkpoint of a run."""
    return (folder / "run.json").is_file() and (folder / "trainer").is_dir()


def from_plain(kind: type[T], values: dict[str, Any], name: str = "") -> T:
    """An object of the dataclass ``kind`` from the JSON types that :func:`vlmrl.report.records.plain` made of it.

    ``from_plain(Lora, {"rank": 4, "targets": ["q_proj"]}, "model.lora")``
    """
    if not isinstance(values, dict):
        raise ValueError(f"{name or 'config.json'} must be an object, but it is {values!r:.80}.")
    hints = get_type_hints(kind)
    unknown = sorted(values.keys() - hints.keys())
    if unknown:
        raise ValueError(f"{name or 'config.json'}: unknown setting {unknown[0]!r}; another version of vlmrl wrote it.")
    fields = {key: _value(hints[key], value, f"{name}.{key}".lstrip(".")) for key, value in values.items()}
    return kind(**fields)


def _value(hint: Any, value: Any, name: str) -> Any:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_plain(hint, value, name)
    if get_origin(hint) in (Union, types.UnionType):
        return _code(value, name) if isinstance(value, str) else value
    if get_origin(hint) is dict and dataclasses.is_dataclass(get_args(hint)[1]) and isinstance(value, dict):
        return {key: _value(get_args(hint)[1], item, f"{name}.{key}") for key, item in value.items()}
    return float(value) if hint is float and value in ("inf", "-inf", "nan") else value  # strings in JSON


def _code(value: str, name: str) -> str:
    """Code by name. A function inside a function, or a lambda, has none."""
    if "<locals>" in value or "<lambda>" in value:
        raise ValueError(f"{name} is {value!r}, which only the run's recipe can make: load the recipe instead.")
    return value
