"""Load the code that a config names, and resolve a config against the folder of its recipe.

load_object("envs/geo3k.py:Geo3kEnv", folder)     # a file, which need not be in a package
load_object("my_package.envs:MyEnv")              # an importable module
resolve_config(config, Path("recipes"))           # all names of code loaded, all local paths absolute
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import re
import shlex
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from vlmrl.config.data import Conversations, Data, EvalData, Part
from vlmrl.config.fields import Code, Codes, Named, NamedOrNone, Settings, check_type, is_command, name_of, perhaps
from vlmrl.config.gateway import Gateway, names_hosts
from vlmrl.config.model import RANDOM, Model
from vlmrl.config.run import Config
from vlmrl.config.training import OWN, Report, Teacher
from vlmrl.utils.require import require

FILE_MODULE = "vlmrl_file_"
"""Prefix of the modules that :func:`load_object` makes of files. Only the process that loaded a file can import its module."""
DATA_SUFFIXES = (".parquet", ".json", ".jsonl", ".csv")
_executed: dict[str, tuple[Path, bytes]] = {}
"""The modules that :func:`load_object` made of files, by name: the file, and a hash of the content that was executed."""


def resolve_config(config: Config, folder: Path | None = None) -> Config:
    """``config`` with every name of code replaced by its function or class and every local path made absolute.

    Names and paths are looked up in ``folder`` (the recipe's), then in the working directory; ``output_dir`` is in the latter.
    Names of built-in functions, names on the Hugging Face Hub and ``tiny:FAMILY`` stay as they are. Code of ``algo`` is a name,
    with the absolute path of its file, if that loads the same function: trainer ranks in other processes load it there. They get other
    functions by pickle. Resolving twice changes nothing.

    Raises:
        ValueError: a file, a module or a name does not exist, or importing it failed; the message starts with the setting.
    """
    resolved: Config = _resolve("", config, folder)
    return resolved


def _resolve(name: str, section: Any, folder: Path | None) -> Any:
    """A section with all its settings resolved; ``name`` is its name in the config."""
    types = typing.get_type_hints(type(section), include_extras=True)
    changed = {}
    for each in fields(section):
        setting, value = f"{name}.{each.name}".lstrip("."), getattr(section, each.name)
        if isinstance(value, Settings):
            changed[each.name] = _resolve(setting, value, folder)
        elif value is not None:
            resolve = _PATHS.get((type(section), each.name)) or _RESOLVERS.get(types[each.name])
            changed[each.name] = resolve(setting, value, folder) if resolve else value
    return replace(section, **changed)


def _load_codes(name: str, codes: Any, folder: Path | None) -> Any:
    """As :func:`load_code`, for one function, several, or several with weights."""
    if isinstance(codes, dict):
        return {load_code(name, code, folder): weight for code, weight in codes.items()}
    if isinstance(codes, tuple):
        return tuple(load_code(name, code, folder) for code in codes)
    return load_code(name, codes, folder)


def _resolve_parts(name: str, parts: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    return {part: _resolve(f"{name}.{part}", section, folder) for part, section in parts.items()}


def _resolve_name(field: str, code: str | Callable[..., Any], folder: Path | None) -> str | Callable[..., Any]:
    """The name of a built-in function, or of code by an absolute path. A function stays as it is if no name loads that same one."""
    if isinstance(code, str):
        if ":" in code:
            load_code(field, code, folder)
        return _absolute_code(field, code, folder)
    # The file of the main program is not loaded a second time: the copy would not see the values that the program sets.
    if getattr(code, "__module__", None) in (None, "__main__") or not hasattr(code, "__qualname__"):
        return code
    path = code_path(code)
    with suppress(ValueError):
        if load_object(path) is code:  # not the function that it wraps, nor a method without its object
            return path
    return code


def _resolve_names(field: str, codes: Sequence[str | Callable[..., Any]], folder: Path | None) -> tuple[Any, ...]:
    return tuple(_resolve_name(field, code, folder) for code in codes)


def _absolute_code(field: str, code: str, folder: Path | None) -> str:
    where, _, name = code.rpartition(":")
    return f"{_existing(field, where, folder)}:{name}" if where.endswith(".py") else code


def _resolve_trackers(field: str, trackers: Sequence[str], folder: Path | None) -> tuple[str, ...]:
    """Only the paths of files: what a tracker needs is imported when it is made."""
    return tuple(_absolute_code(field, each, folder) for each in trackers)


def _absolute(field: str, path: str, folder: Path | None) -> str:
    """``path`` as an absolute path, so that the run's files stay in one place when an env changes the working directory."""
    return str(Path(path).absolute())


def _existing(field: str, path: str, folder: Path | None) -> str:
    try:
        return str(resolve_path(path, folder))
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from error


def _resolve_folders(field: str, folders: Sequence[str], folder: Path | None) -> tuple[str, ...]:
    return tuple(each if names_hosts(each) else _existing(field, each, folder) for each in folders)


def _resolve_template(field: str, template: str, folder: Path | None) -> str:
    return _existing(field, template, folder) if Path(template).suffix or "/" in template else template


def _resolve_data(field: str, path: str, folder: Path | None) -> str:
    return str(local_data(path, folder, field) or path)


def _resolve_model(field: str, path: str, folder: Path | None) -> str:
    """The first local folder of this name, or ``path`` itself: a name on the Hub, or ``tiny:FAMILY``."""
    if field == "teacher.model" and (path in OWN or "://" in path):
        return path
    prefix = RANDOM if path.startswith(RANDOM) else ""
    source = path.removeprefix(prefix)
    return prefix + next((str(place) for place in places(source, folder) if place.is_dir()), source)


def _resolve_agent(field: str, agent: str | Callable[..., Any], folder: Path | None) -> Any:
    """The function, or the command line with absolute paths of the files that it names, since it runs in a folder of its own."""
    if not is_command(agent):
        return load_code(field, agent, folder)
    try:
        words = shlex.split(agent)
    except ValueError as error:
        raise ValueError(f"{field} must be a command line, but it is {agent!r}: {error}.") from error
    return shlex.join(_absolute_file(word, folder) for word in words)


def _absolute_file(word: str, folder: Path | None) -> str:
    """The absolute path of the file ``word``, or ``word``. A link stays: the Python of a virtual environment is one."""
    roots = [Path.cwd()] if folder is None else [folder, Path.cwd()]
    try:
        files = [(root / Path(word).expanduser()).absolute() for root in roots]
        return next((str(file) for file in files if file.is_file()), word)
    except (OSError, RuntimeError):  # too long for a file's name, or the home of nobody: a script for `sh -c`
        return word


def places(path: str | Path, folder: Path | None = None) -> list[Path]:
    """The absolute paths where ``path`` is looked for, in order: in ``folder``, then in the working directory."""
    roots = [Path.cwd()] if folder is None else [Path(folder), Path.cwd()]
    return list(dict.fromkeys((root / Path(path).expanduser()).resolve() for root in roots))


def resolve_path(path: str | Path, folder: Path | None = None) -> Path:
    """The first of :func:`places` that exists.

    Raises:
        ValueError: none exists; the message lists all of them.
    """
    looked = places(path, folder)
    for place in looked:
        if place.exists():
            return place
    beside = [file.name for each in looked if each.parent.is_dir() for file in each.parent.iterdir()]
    close = difflib.get_close_matches(Path(path).name, beside, n=3, cutoff=0.75)
    names = f". Close names there: {', '.join(dict.fromkeys(close))}" if close else ""
    raise ValueError(f"{str(path)!r} does not exist. Looked at: {', '.join(map(str, looked))}{names}")


def is_local_path(path: str) -> bool:
    """Whether ``path`` has the form of a local path, which no name on the Hub has: ``./a``, ``/a``, ``~/a``, ``a/``, ``a/b/c``."""
    return path.startswith((".", "/", "~")) or path.endswith("/") or path.count("/") > 1


def local_data(path: str, folder: Path | None = None, field: str = "data.path") -> Path | None:
    """The local data file or folder that ``path`` names; ``None`` if it can only be a name on the Hub.

    Raises:
        ValueError: ``path`` has the form of a local path, but nothing is there.
    """
    is_local = Path(path).suffix in DATA_SUFFIXES or is_local_path(path)
    if not is_local and not any(place.exists() for place in places(path, folder)):
        return None
    try:
        return resolve_path(path, folder)
    except ValueError as error:
        raise ValueError(f"{field} {error}") from error


def load_code(field: str, code: str | Callable[..., Any] | None, folder: Path | None = None) -> Any:
    """The object that the setting ``field`` names; a function, a class or ``None`` is returned as it is."""
    if not isinstance(code, str):
        return code
    try:
        return load_object(code, folder)
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from error.__cause__


def find_function(
    field: str, code: str | Callable[..., Any], parameters: Sequence[str], registry: Mapping[str, Callable[..., Any]]
) -> Callable[..., Any]:
    """The function that the setting ``field`` names: a key of ``registry``, code to load, or the function itself.

    Raises:
        ValueError: it does not exist, or is not callable. ``parameters`` are for the message.
    """
    if registry and isinstance(code, str) and code not in registry and ":" not in code:
        names = ", ".join(sorted(registry))
        rule = f"one of {names}, or code such as file.py:function"
        raise ValueError(f"{field} must be {rule}, but it is {code!r}.{perhaps(code, registry)}")
    function = registry[code] if isinstance(code, str) and code in registry else load_code(field, code)
    require(callable(function), field, f"a function ({', '.join(parameters)})", function)
    return function


def resolve_function(
    field: str,
    code: str | Callable[..., Any],
    parameters: Sequence[str],
    options: Mapping[str, Any] | None = None,
    *,
    options_field: str | None = None,
    registry: Mapping[str, Callable[..., Any]] | None = None,
) -> Callable[..., Any]:
    """:func:`find_function`, callable with ``parameters`` by position and ``options`` (the setting ``options_field``) by keyword.

    Raises:
        ValueError: it does not exist, it is not callable, or the call does not fit its signature.
    """
    function = find_function(field, code, parameters, registry or {})
    signature = inspect.signature(function)
    try:
        (signature.bind if options_field is None else signature.bind_partial)(*parameters)
    except TypeError as error:
        name, call = name_of(function), ", ".join(parameters)
        raise ValueError(
            f"{field} must be callable as {name}({call}), but its signature is {name}{signature}: {error}."
        ) from error
    if options_field is not None:
        check_options(options_field, function, len(parameters), options or {})
    return function


def check_options(field: str, function: Callable[..., Any], arguments: int, options: Mapping[str, Any]) -> None:
    """Raises ValueError unless ``function`` accepts ``arguments`` positional arguments and these keyword options.

    The value of an option must be of the type that the signature gives it, if it does.
    """
    try:
        inspect.signature(function).bind(*[None] * arguments, **options)
    except TypeError as error:
        name = name_of(function)
        raise ValueError(
            f"{field} do not fit {name}: {error}; its signature is {name}{inspect.signature(function)}."
        ) from error
    types = _option_types(function)
    for name, value in options.items():
        if name in types:
            check_type(f"{field}.{name}", value, types[name])


def _option_types(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotated types of a function's parameters, or of a class's; none if an annotation names what does not exist here."""
    annotated = getattr(function, "__init__", None) if isinstance(function, type) else function
    try:
        return typing.get_type_hints(annotated)
    except (NameError, TypeError):  # a name that only type checkers import; a partial, or another callable object
        return {}


def code_path(code: Callable[..., Any]) -> str:
    """The string that names ``code``: ``/path/file.py:Name`` for code of a file or the main program, else ``module:Name``."""
    name = code.__module__
    file = getattr(sys.modules.get(name), "__file__", None)
    is_file = name == "__main__" or name.startswith(FILE_MODULE)
    return f"{Path(file).resolve() if is_file and file else name}:{code.__qualname__}"


def load_object(spec: str, folder: Path | None = None) -> Any:
    """The object that ``module:name`` or ``path/to/file.py:name`` names; ``name`` may be dotted (``file.py:Class.method``).

    :func:`resolve_path` finds a file. It is executed once per process, unless :func:`forget_changed_files` is called, as a module
    whose name contains a hash of its path, so that files of one name in two folders are two modules.

    Raises:
        ValueError: the form is wrong, or the file, the module or the name does not exist, or importing it failed.
    """
    where, _, name = spec.rpartition(":")
    if not where or not name:
        raise ValueError(f"{spec!r} names no object: write 'module:name' or 'path/to/file.py:name'")
    module = _load_file(resolve_path(where, folder), spec) if where.endswith(".py") else _load_module(where, spec)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{spec!r}: {where} has no {name!r}. {_similar(part, found)}")
        found = getattr(found, part)
    return found


def forget_changed_files() -> None:
    """Let :func:`load_object` execute each file again whose content has changed, such as an env that was edited between two
    trainings in a notebook. What a file imports stays as it is."""
    for name, (path, digest) in list(_executed.items()):
        if not path.is_file() or _digest(path.read_bytes()) != digest:
            del _executed[name]
            sys.modules.pop(name, None)


def code_files() -> dict[Path, bytes]:
    """A hash of each file that :func:`load_object` has executed, and of what they have imported from their own folders."""
    folders = {path.parent for path, _ in _executed.values()}
    modules = [vars(module).get("__file__") for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    paths = [Path(file) for file in modules if isinstance(file, str) and "site-packages" not in file]
    own = [path for path in paths if not folders.isdisjoint(path.parents) and path.is_file()]
    return {path: _digest(path.read_bytes()) for path in own}


def _load_module(name: str, spec: str) -> ModuleType:
    if "/" in name or "\\" in name:
        raise ValueError(f"{spec!r}: a path to a Python file ends in .py, and {name!r} does not")
    if name.split(".")[0] == "datasets":
        raise ValueError(
            f"{spec!r}: 'datasets' is always Hugging Face's package, not a local folder of that name. "
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
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as Python does for a program: `import helper` finds the file beside it
    module, source = importlib.util.module_from_spec(found), path.read_bytes()
    _executed[name] = path, _digest(source)
    sys.modules[name] = module  # before it runs: dataclasses and pickle look their module up by name
    try:
        # Not by the loader, whose cache takes a file edited within a second for the earlier one if its size is the same.
        exec(compile(source, path, "exec"), vars(module))
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"{spec!r}: running {path} raised {type(error).__name__}: {error}") from error
    return module


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _similar(name: str, owner: Any) -> str:
    public = [other for other in vars(owner) if not other.startswith("_")]
    close = difflib.get_close_matches(name, public, n=5)
    return f"Close names: {', '.join(close)}" if close else f"It has: {', '.join(sorted(public)) or 'nothing public'}"


Resolver = Callable[[str, Any, Path | None], Any]
"""From the full name of a setting, its value and the recipe's folder to the resolved value."""
_RESOLVERS: dict[Any, Resolver] = {
    Code: load_code,
    Codes: _load_codes,
    Named: _resolve_name,
    NamedOrNone: _resolve_name,
    tuple[Named, ...]: _resolve_names,
    dict[str, Part]: _resolve_parts,
    dict[str, Conversations]: _resolve_parts,
}
"""By the type of a setting."""
_PATHS: dict[tuple[type, str], Resolver] = {
    (Config, "agent"): _resolve_agent,
    (Config, "engine"): _resolve_name,
    (Config, "output_dir"): _absolute,
    (Model, "path"): _resolve_model,
    (Model, "chat_template"): _resolve_template,
    (Teacher, "model"): _resolve_model,
    (Data, "path"): _resolve_data,
    (EvalData, "path"): _resolve_data,
    (Conversations, "path"): _resolve_data,
    (Gateway, "images"): _resolve_folders,
    (Report, "to"): _resolve_trackers,
}
"""By section and name: settings that are paths, or may contain one."""
