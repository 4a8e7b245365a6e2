"""The command line: `vlmrl train RECIPE`, `vlmrl eval RECIPE`, `vlmrl play ENV`, `vlmrl data check RECIPE`,
`vlmrl retriever serve`.

A recipe is a Python file with a function ``config() -> Config``; every field of the config is an option.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from vlmrl.config import Config
from vlmrl.config.code import load_object
from vlmrl.utils.threads import run_awake

USAGE = """usage: vlmrl COMMAND ...

  vlmrl train RECIPE [options]     train as the recipe says; RECIPE is a Python file with config() -> Config
  vlmrl eval RECIPE [options]      play the held-out tasks and report their reward
  vlmrl play ENV [options]         play an env on a few tasks and print what happens
  vlmrl data check RECIPE [options]  show the first tasks as the model will see them, and what is too long
  vlmrl retriever serve [options]  serve a corpus of passages to search envs over HTTP
  vlmrl env serve ENV [options]    play an env for runs in other processes, over HTTP

`vlmrl COMMAND --help` and `vlmrl train RECIPE --help` tell the options."""


@dataclass(frozen=True)
class TrainArguments:
    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)
    dry_run: bool = False
    """Resolve everything, print the plan, and stop."""
    resume: bool = False
    """Go on from the newest checkpoint in the run's folder, if there is one."""


def main() -> None:
    """The console script."""
    arguments = sys.argv[1:]
    commands: dict[str, Callable[[Sequence[str]], None]] = {
        "train": train_command,
        "eval": eval_command,
        "play": play_command,
        "data": data_command,
        "retriever": retriever_command,
        "env": env_command,
    }
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return
    if arguments[0] not in commands:
        raise SystemExit(f"vlmrl: there is no command {arguments[0]!r}; the commands are {', '.join(commands)}.")
    commands[arguments[0]](arguments[1:])


def run_recipe(config: Callable[[], Config]) -> None:
    """Train as a recipe file run as a program asks."""
    file = Path(inspect.getfile(config)).resolve()
    _train(config, inspect.getmodule(config).__doc__ or "", file.parent, sys.argv[1:])


def train_command(arguments: Sequence[str]) -> None:
    config, doc, folder, rest = _load_recipe("train", arguments)
    _train(config, doc, folder, rest)


def eval_command(arguments: Sequence[str]) -> None:
    config, doc, folder, rest = _load_recipe("eval", arguments)
    settings = tyro.cli(Config, default=config(), args=rest, description=doc, prog="vlmrl eval RECIPE")
    with _errors_in_one_line():
        from vlmrl.report.progress import RunProgress
        from vlmrl.run.build import build_run
        from vlmrl.run.evaluate import Evaluation, evaluate_run

        run = build_run(settings, folder)

        async def evaluate() -> Evaluation:
            await run.connect()
            return await evaluate_run(run, RunProgress(), label="eval")

        try:
            result = _until_interrupted(lambda: run_awake(evaluate()))
        finally:
            run.engine.close()
        print(
            f"held-out reward {result.reward:.3f} +- {result.standard_error:.3f} on {len(result.trajectories)} trajectories"
        )


def play_command(arguments: Sequence[str]) -> None:
    from vlmrl.cli.play import PlayArguments, play

    settings = tyro.cli(PlayArguments, args=arguments, prog="vlmrl play", description=play.__doc__)
    with _errors_in_one_line():
        _until_interrupted(lambda: run_awake(play(settings)))


def retriever_command(arguments: Sequence[str]) -> None:
    if arguments[:1] != ["serve"]:
        raise SystemExit("usage: vlmrl retriever serve --corpus FILE [options]")
    from vlmrl.retrieval.server import ServeArguments, serve

    settings = tyro.cli(ServeArguments, args=arguments[1:], prog="vlmrl retriever serve", description=serve.__doc__)
    with _errors_in_one_line():
        serve(settings)


def data_command(arguments: Sequence[str]) -> None:
    if arguments[:1] != ["check"]:
        raise SystemExit("usage: vlmrl data check RECIPE [options]")
    from vlmrl.cli.data_check import CheckArguments, check

    config, _, folder, rest = _load_recipe("data check", arguments[1:])
    with _errors_in_one_line():
        default = CheckArguments(config())
    settings = tyro.cli(
        CheckArguments, default=default, args=rest, prog="vlmrl data check RECIPE", description=check.__doc__
    )
    with _errors_in_one_line():
        if not _until_interrupted(lambda: check(settings, folder)):
            raise SystemExit(1)


def env_command(arguments: Sequence[str]) -> None:
    if arguments[:1] != ["serve"]:
        raise SystemExit("usage: vlmrl env serve ENV [options]")
    from vlmrl.env.remote.server import ServeArguments, serve

    settings = tyro.cli(ServeArguments, args=arguments[1:], prog="vlmrl env serve", description=serve.__doc__)
    with _errors_in_one_line():
        serve(settings)


def _until_interrupted(play: Callable[[], Any]) -> Any:
    """Ctrl-C, and the end of what is typed, end a command in one line, with status 130."""
    try:
        return play()
    except (KeyboardInterrupt, EOFError):
        print("\nstopped", file=sys.stderr)
        raise SystemExit(130) from None


def _train(config: Callable[[], Config], doc: str, folder: Path, arguments: Sequence[str]) -> None:
    with _errors_in_one_line():
        default = TrainArguments(config())
    chosen = tyro.cli(TrainArguments, default=default, args=arguments, description=doc)
    with _errors_in_one_line():
        from vlmrl.run.program import run_training

        run_training(chosen.config, folder, dry_run=chosen.dry_run, resume=chosen.resume)


def _load_recipe(command: str, arguments: Sequence[str]) -> tuple[Callable[[], Config], str, Path, list[str]]:
    if not arguments or arguments[0].startswith("-"):
        raise SystemExit(f"usage: vlmrl {command} RECIPE [options]\n\nRECIPE is a Python file with config() -> Config.")
    with _errors_in_one_line():
        config = load_object(f"{arguments[0]}:config")
    doc: Any = inspect.getmodule(config).__doc__
    return config, doc or "", Path(arguments[0]).resolve().parent, list(arguments[1:])


class _errors_in_one_line:  # noqa: N801
    """Tells a user's mistake in one line instead of a traceback."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        from vlmrl.cluster import ClusterError
        from vlmrl.engine.base import EngineError
        from vlmrl.rollout.runner import RolloutError

        if isinstance(error, ValueError | RolloutError | EngineError | ClusterError | OSError):
            print(f"vlmrl: {error}", file=sys.stderr)
            raise SystemExit(1) from error
