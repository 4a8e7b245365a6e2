"""Writes ``crash.txt`` into a run's folder when an error ends the run."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from vlmrl.config import Config
from vlmrl.report.provenance import describe_machine, package_versions
from vlmrl.report.records import changed_settings, plain
from vlmrl.report.run_data import load_run
from vlmrl.utils.output_files import atomic_write
from vlmrl.utils.terminal import printable

FILE = "crash.txt"
MOST_TRAJECTORIES = 3


@contextmanager
def crash_report(
    folder: Path, config: Config, say: Callable[[str], None], *expected: type[Exception]
) -> Iterator[None]:
    """Write ``crash.txt`` into the run's folder if the block raises an error that is not ``expected``, and print where it is.

    It has the error, the settings that differ from the defaults, versions, the last metrics, and the trajectories that the error
    names, or those that failed last.
    """
    path = folder / FILE
    path.unlink(missing_ok=True)  # of an earlier start
    try:
        yield
    except expected:
        raise
    except Exception as error:
        with suppress(Exception):  # what is wrong, such as the disk or a GPU, may keep the report from being made
            atomic_write(path, printable(describe_crash(error, folder, config)))
            say(f"crash report: {path}")
        raise


def describe_crash(error: BaseException, folder: Path, config: Config) -> str:
    """The text of ``crash.txt``."""
    with suppress(ValueError, OSError):
        run = load_run(folder)
        metrics = [_json(row) for row in run.metrics[-1:]]
        trajectories = run.trajectories(run.steps[-1]) if run.steps else []
        failures = [row for row in run.failures if row["step"] == run.steps[-1]] if run.steps else []
        shown = _named_by(str(error), trajectories) or failures
        return _text(error, config, metrics, shown[:MOST_TRAJECTORIES])
    return _text(error, config, [], [])


def _text(error: BaseException, config: Config, metrics: Sequence[str], trajectories: Sequence[dict[str, Any]]) -> str:
    sections = {
        "error": "".join(traceback.format_exception(error)),
        "settings that differ from the defaults": "\n".join(changed_from_defaults(config)),
        "versions": _json({"versions": package_versions(), "machine": describe_machine()}),
        "last metrics": "\n".join(metrics) or "none were logged",
        "trajectories": "\n".join(map(_json, trajectories)) or "the error names none, and none failed in the last step",
    }
    head = f"vlmrl crash report, {time.strftime('%Y-%m-%d %H:%M:%S %z')}: run {config.name} in {config.folder}\n"
    return head + "".join(f"\n== {title} ==\n{text.rstrip()}\n" for title, text in sections.items())


def changed_from_defaults(config: Config) -> list[str]:
    """The settings that differ from the defaults, a line each: ``"optim.lr = 0.0001 (default 1e-06)"``."""
    changed = changed_settings(plain(Config(output_dir=config.output_dir)), plain(config))
    return [f"{name} = {value!r} (default {default!r})" for name, (default, value) in changed.items()]


def _named_by(message: str, records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The trajectories whose ids the error has: ``"trajectory step000003/00001/04, turn 2: ..."``."""
    words = {word.rstrip(".,:;") for word in message.split()}
    return [record for record in records if record["id"] in words]


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False)
