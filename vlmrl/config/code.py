"""Finding what a recipe names: files (from its own folder, then the working directory) and Python objects.

load_object("envs/geo3k.py:Geo3kEnv", base_dir)     # a file, which need not be in a package
load_object("my_package.envs:MyEnv")                # an importable module
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

FILE_MODULE = "vlmrl_file_"
"""How the modules' names begin that :func:`load_object` made of files: nothing but this process can import them."""


def places(path: str | Path, base_dir: Path | None = None) -> list[Path]:
    """Where ``path`` is looked for, in order: under ``base_dir``, then under the working directory."""
    roots = [Path.cwd()] if base_dir is None else [Path(base_dir), Path.cwd()]
    return list(dict.fromkeys((root / Path(path).expanduser()).resolve() for root in roots))


def resolve_path(path: str | Path, base_dir: Path | None = None) -> Path:
    """The first of :func:`places` that exists, as an absolute path.

    Raises:
        ValueError: nothing is there; the message names every place looked at.
    """
    looked = places(path, base_dir)
    for place in looked:
        if place.exists():
            return place
    raise ValueError(f"{str(path)!r} does not exist. Looked at: {', '.join(map(str, looked))}")


def load_object(spec: str, base_dir: Path | None = None) -> Any:
    """What ``module:name`` or ``path/to/file.py:name`` names; ``name`` may be dotted (``file.py:Class.method``).

    A file is found as :func:`resolve_path` says and executed once per process, under a module name of its own, so that
    files of the same name in two folders do not meet.

    Raises:
        ValueError: the form is wrong, or the file, the module or the name is not there, or its import raised.
    """
    where, _, name = spec.rpartition(":")
    if not where or not name:
        raise ValueError(f"{spec!r} names no object: write 'module:name' or 'path/to/file.py:name'")
    module = _load_file(resolve_path(where, base_dir), spec) if where.endswith(".py") else _load_module(where, spec)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{spec!r}: {where} has no {name!r}. {_similar(part, found)}")
        found = getattr(found, part)
    return found


def _load_module(name: str, spec: str) -> ModuleType:
    if "/" in name or "\\" in name:
        raise ValueError(f"{spec!r}: a path to a Python file ends in .py, and {name!r} does not")
    if name.split(".")[0] == "datasets":
        raise ValueError(
            f"{spec!r}: 'datasets' is Hugging Face's package, never the folder of the same name. "
            f"Name the file instead: {name.replace('.', '/')}.py:{spec.rpartition(':')[2]}"
        )
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise ValueError(f"{spec!r}: importing {name!r} raised {type(error).__name__}: {error}") from error


def _load_file(path: Path, spec: str) -> ModuleType:
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    name = f"{FILE_MODULE}{re.sub(r'[^0-9A-Za-z_]', '_', path.stem)}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None, path
    assert found.loader is not None, path
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # before it runs: dataclasses and pickle look their module up by name
    try:
        found.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"{spec!r}: running {path} raised {type(error).__name__}: {error}") from error
    return module


def _similar(name: str, owner: Any) -> str:
    public = [other for other in vars(owner) if not other.startswith("_")]
    close = difflib.get_close_matches(name, public, n=5)
    return f"Close names: {', '.join(close)}" if close else f"It has: {', '.join(sorted(public)) or 'nothing public'}"


def require(package: str, extra: str) -> ModuleType:
    """An optional package, imported now. Raises ValueError naming the extra of vlmrl that installs it, where it is not there."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{package} is not installed ({error}): it comes with pip install 'vlmrl[{extra}]'."
        ) from error


def check_options(field: str, function: Callable[..., Any], arguments: int, options: Mapping[str, Any]) -> None:
    """Raises ValueError where ``function`` cannot be called with so many plain arguments and these options."""
    try:
        inspect.signature(function).bind(*[None] * arguments, **options)
    except TypeError as error:
        name = getattr(function, "__qualname__", str(function))
        raise ValueError(f"{field} do not fit {name}: {error}; it is {name}{inspect.signature(function)}.") from error
