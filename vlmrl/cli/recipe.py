"""Loading a recipe, and how a command reports errors and interrupts."""

from __future__ import annotations

import inspect
import io
import os
import re
import select
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from vlmrl.config import Config, Conversations, Data, EvalData
from vlmrl.config.code import load_object
from vlmrl.config.option_names import describe_unknown, option_names
from vlmrl.utils.require import require
from vlmrl.utils.terminal import print_traceback, printable
from vlmrl.utils.users_line import users_line

RecipePath = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RECIPE")]
SFT_PATH = re.compile(r"--sft\.data\.[^.]+\.path")
STANDARD_OUTPUT = 1  # its file descriptor


@dataclass(frozen=True)
class RecipeOptions:
    """The options of a command: all settings of a recipe, and its own in a subclass."""

    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


CommandOptions = TypeVar("CommandOptions", bound=RecipeOptions)
AnyData = TypeVar("AnyData", Data, EvalData)
AnyRows = TypeVar("AnyRows", Data, Conversations)


@dataclass(frozen=True)
class Recipe:
    """A Python file with a function ``config() -> Config``. Relative paths are looked up in ``folder`` first."""

    function: Callable[[], Config]
    folder: Path
    description: str

    @classmethod
    def load(cls, path: str) -> Recipe:
        """Raises ValueError if the file does not exist, is no .py file, cannot be imported or has no ``config``."""
        require(path.endswith(".py"), "RECIPE", "a Python file, which ends in .py", path)
        return cls.of(load_object(f"{path}:config"))

    @classmethod
    def of(cls, function: Callable[[], Config]) -> Recipe:
        """Raises ValueError if ``function`` is not a function, such as the Config that it should return."""
        if not inspect.isfunction(function):
            raise ValueError(
                f"a recipe's config must be a function that returns a vlmrl.Config, but it is {function!r:.80}."
            )
        module = inspect.getmodule(function)
        return cls(function, Path(inspect.getfile(function)).resolve().parent, getattr(module, "__doc__", None) or "")

    def config(self) -> Config:
        """The recipe's settings. Raises ValueError if its function raises, or returns something else."""
        try:
            made = self.function()
        except ValueError:
            raise
        except Exception as error:
            raise ValueError(f"config() raised {type(error).__name__}: {error}") from error
        if not isinstance(made, Config):
            file = inspect.getfile(self.function)
            raise ValueError(f"{file}: config() must return a vlmrl.Config, but it returned {made!r:.80}.")
        return made

    def options(
        self, default: CommandOptions, words: Sequence[str], prog: str, what: str | None = None
    ) -> CommandOptions:
        """The options of a command from ``words``. ``default`` has the recipe's config; ``prog`` is the command without options.

        ``what`` the command does precedes the recipe's description in its help.
        """
        description = "\n\n".join(filter(None, [inspect.cleandoc(what or ""), self.description]))
        recipe = with_one_source(default.config, words)
        # Options may be of functions that the command line replaces: `joined` adds the others.
        plain = replace(default, config=replace(recipe, algo=replace(recipe.algo, options={})))
        chosen, unknown = parse(
            type(default), default=plain, args=words, description=description, prog=prog, return_unknown_args=True
        )
        if unknown:
            names = list(option_names(plain))
            options = [word for word in unknown if word.startswith("--") or "=" in word] or unknown[:1]
            found = [f"vlmrl: {describe_unknown(word, names)}." for word in options]
            print("\n".join(found), f"For full helptext, run {prog} --help", file=sys.stderr)
            raise SystemExit(2)
        return replace(chosen, config=joined(recipe, chosen.config))


def parse(kind: Any, **options: Any) -> Any:
    """As `tyro.cli`. Its help has each paragraph of a description in one line; they are wrapped at the terminal's width."""
    if {"-h", "--help"}.isdisjoint(options["args"]):
        return tyro.cli(kind, **options)
    shown = _Held(sys.stdout)
    try:
        with redirect_stdout(shown):
            return tyro.cli(kind, **options)
    finally:
        if text := shown.getvalue():
            print("\n".join(map(_wrapped, text.splitlines())))


class _Held(io.StringIO):
    """What is printed, while tyro sees in it the encoding of ``output`` and whether that is a terminal."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self._output = output

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return str(self._output.encoding)

    def isatty(self) -> bool:
        return bool(self._output.isatty())


def _wrapped(line: str) -> str:
    is_text = line[:1].isalnum() or line[:1] in ("`", '"')  # no box, no color, no line of code
    if not is_text or line.startswith("usage:"):
        return line
    width = shutil.get_terminal_size().columns
    return textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)


def with_one_source(recipe: Config, words: Sequence[str]) -> Config:
    """``recipe`` without the generator that a dataset among the options ``words`` replaces, or the dataset that a generator does.

    ``--eval.data.generator None`` unsets the size and the seed of `eval.data`, too, as nothing would read them. In a recipe without
    `sft.data`, ``--sft.data.NAME.path`` adds the dataset NAME.
    """
    pairs = zip((word.partition("=") for word in words), [*words[1:], ""], strict=False)
    given = {name.replace("_", "-"): value if equals else following for (name, equals, value), following in pairs}

    def replaced(prefix: str, data: AnyData) -> AnyData:
        if given.get(f"{prefix}.path", "None") != "None" and data.generator is not None:
            return replace(data, generator=None, size=None, options={})
        if given.get(f"{prefix}.generator", "None") != "None" and data.path is not None:
            own: dict[str, Any] = {"columns": {}, "prompt": None} if isinstance(data, Data) else {}
            return replace(data, path=None, split="train", **own)
        source = "path" if data.generator is None else "generator"
        unset = isinstance(data, EvalData) and given.get(f"{prefix}.{source}") == "None"
        return type(data)() if unset else data

    evaluation = replace(recipe.eval, data=replaced("--eval.data", recipe.eval.data))
    named = {key.split(".")[2]: path for key, path in given.items() if path and SFT_PATH.fullmatch(key)}
    sft = recipe.sft.data or {name.replace("-", "_"): Conversations(path) for name, path in named.items()}
    return replace(recipe, data=replaced("--data", recipe.data), eval=evaluation, sft=replace(recipe.sft, data=sft))


def joined(recipe: Config, chosen: Config) -> Config:
    """``chosen`` with the columns and the options of ``algo`` of ``recipe`` that the command line has not set.

    Options of a function that the command line has replaced are left out.
    """

    def merged(data: AnyRows, before: AnyRows) -> AnyRows:
        return replace(data, columns=before.columns | data.columns)

    parts = [(name, part, recipe.mixture[name].data) for name, part in chosen.mixture.items()]
    sft = {name: merged(rows, recipe.sft.data[name]) for name, rows in chosen.sft.data.items()}
    return replace(
        chosen,
        data=merged(chosen.data, recipe.data),
        mixture={name: replace(part, data=merged(part.data, before)) for name, part, before in parts},
        sft=replace(chosen.sft, data=sft),
        algo=chosen.algo.with_options(recipe.algo.options),
    )


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Print errors of the user, the engine or the machine in one line instead of a traceback, and exit with status 1.

    After Ctrl-C the status is 130, and 141 if the output's reader has ended. An error in vlmrl itself keeps its traceback.
    """
    if sys.excepthook is sys.__excepthook__:  # before torch adds the rank to what is printed
        sys.excepthook = print_traceback
    try:
        yield
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        raise SystemExit(130) from None
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads_the_output():
            raise SystemExit(141) from None  # as of SIGPIPE
        is_expected = isinstance(error, ValueError | OSError) or _ended_the_run(error)
        place = users_line(error)
        if not is_expected and (place is None or place.calls_vlmrl):
            raise
        message = str(error) if is_expected else f"{type(error).__name__}: {error}"
        where = f" ({place})" if place and str(place) not in message else ""
        print(printable(f"vlmrl: {message}{where}"), file=sys.stderr)
        raise SystemExit(1) from error


def _nobody_reads_the_output() -> bool:
    """Whether standard output is a pipe whose reader has ended, as in `vlmrl doctor | head`. What was not read is dropped."""
    output = select.poll()
    output.register(STANDARD_OUTPUT, 0)
    is_broken = any(event & select.POLLERR for _, event in output.poll(0))
    if is_broken:
        os.dup2(os.open(os.devnull, os.O_WRONLY), STANDARD_OUTPUT)  # else the interpreter's own flush fails
    return is_broken


def _ended_the_run(error: Exception) -> bool:
    from vlmrl.cluster import ClusterError
    from vlmrl.engine.base import EngineError
    from vlmrl.rollout.runner import RolloutError

    return isinstance(error, RolloutError | EngineError | ClusterError)
