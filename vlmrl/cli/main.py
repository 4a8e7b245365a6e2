"""The entry point of the `vlmrl` command."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Union

from tyro.conf import OmitSubcommandPrefixes, Suppress, subcommand

import vlmrl
from vlmrl.cli.collect import CollectCommand
from vlmrl.cli.data_check import DataCheckCommand
from vlmrl.cli.doctor import DoctorCommand
from vlmrl.cli.eval import EvalCommand
from vlmrl.cli.export import ExportCommand
from vlmrl.cli.init import InitCommand
from vlmrl.cli.plan import PlanCommand
from vlmrl.cli.play import PlayCommand
from vlmrl.cli.recipe import errors_in_one_line, parse
from vlmrl.cli.reproduce import ReproduceCommand
from vlmrl.cli.serve import ServeEnvCommand, ServeRetrieverCommand
from vlmrl.cli.train import SftCommand, TrainCommand
from vlmrl.cli.view import ViewCommand
from vlmrl.utils.threads import keeping_exit_status

DESCRIPTION = """Reinforcement learning for vision-language agents.

Run `vlmrl COMMAND --help` for the options of a command and `vlmrl train RECIPE --help` for all settings of a recipe,
and `vlmrl --version` for the version."""
# Commands that take the settings of a recipe.
WITH_OPTIONS = ("train", "sft", "collect", "eval", "reproduce", "plan", "doctor")
NOTHING = Annotated[None, Suppress]  # a union of subcommands needs two members


@dataclass(frozen=True)
class DataCommands:
    """Inspect datasets: `vlmrl data check RECIPE`."""

    command: Annotated[DataCheckCommand, subcommand("check")] | NOTHING


@dataclass(frozen=True)
class RetrieverCommands:
    """Serve passages to search envs: `vlmrl retriever serve`."""

    command: Annotated[ServeRetrieverCommand, subcommand("serve")] | NOTHING


@dataclass(frozen=True)
class EnvCommands:
    """Serve envs to runs in other processes: `vlmrl env serve ENV`."""

    command: Annotated[ServeEnvCommand, subcommand("serve")] | NOTHING


COMMANDS: dict[str, Any] = {
    "train": TrainCommand,
    "sft": SftCommand,
    "collect": CollectCommand,
    "init": InitCommand,
    "eval": EvalCommand,
    "export": ExportCommand,
    "reproduce": ReproduceCommand,
    "plan": PlanCommand,
    "doctor": DoctorCommand,
    "play": PlayCommand,
    "view": ViewCommand,
    "data": DataCommands,
    "retriever": RetrieverCommands,
    "env": EnvCommands,
}
NESTED: dict[str, Any] = {
    "data check": DataCheckCommand,
    "retriever serve": ServeRetrieverCommand,
    "env serve": ServeEnvCommand,
}


def main() -> None:
    """The console script."""
    with keeping_exit_status():
        run_command()


def run_command() -> None:
    """Run the command that the command line names."""
    arguments = sys.argv[1:]
    if arguments == ["--version"]:
        print(vlmrl.__version__)
        return
    words, options = split_at_recipe(arguments or ["--help"])
    command = parse_command(words)
    with errors_in_one_line():
        command.run(options)


def parse_command(words: Sequence[str]) -> Any:
    """The command that the first ``words`` name, with its arguments. Its own parser reads them: so errors name its own help."""
    for count, commands in ((2, NESTED), (1, COMMANDS)):
        name = " ".join(words[:count])
        if name in commands:
            return parse(commands[name], args=words[count:], prog=f"vlmrl {name}", config=(OmitSubcommandPrefixes,))
    if words and words[0] not in COMMANDS and not words[0].startswith("-"):
        close = difflib.get_close_matches(words[0], COMMANDS, n=1)
        known = f"perhaps you meant {close[0]!r}" if close else f"there are {', '.join(COMMANDS)}"
        print(f"vlmrl: there is no command {words[0]!r}; {known}. For full helptext, run vlmrl --help", file=sys.stderr)
        raise SystemExit(2)
    every: Any = Union[tuple(Annotated[kind, subcommand(name)] for name, kind in COMMANDS.items())]  # noqa: UP007
    return parse(every, args=words, prog="vlmrl", description=DESCRIPTION)


def split_at_recipe(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """``train recipe.py --optim.lr 1`` -> ``train recipe.py`` and ``--optim.lr 1``: a recipe must be loaded before its options
    are known. The arguments of other commands are not split."""
    if arguments[0] == "play":  # also without a recipe
        named = 2 if arguments[1:2] and not arguments[1].startswith("-") else 1
        return list(arguments[:named]), list(arguments[named:])
    words = 3 if arguments[0] == "data" else 2 if arguments[0] in WITH_OPTIONS else len(arguments)
    if any(word.startswith("-") for word in arguments[:words]):
        words = len(arguments)
    return list(arguments[:words]), list(arguments[words:])
