"""`vlmrl doctor`: problems of this machine and of a recipe's model, and their remedies."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from vlmrl.checks.doctor_machine import (
    GIB,
    Finding,
    check_disk,
    check_nccl,
    check_nvcc,
    existing_folder,
    machine_findings,
)
from vlmrl.cli.recipe import Recipe, RecipeOptions
from vlmrl.config import Config, resolve_config
from vlmrl.utils.terminal import printable


@dataclass(frozen=True)
class DoctorCommand:
    """Check this machine, and the model and memory of a recipe. Exits with 1 if there is an error."""

    recipe: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="RECIPE")] = None
    """Python file with a function `config() -> Config`. For its options, see `vlmrl doctor RECIPE --help`."""
    json: bool = False
    """Print a list of objects with `check`, `level`, `found` and `remedy`."""

    def run(self, options: Sequence[str]) -> None:
        if self.recipe is None:
            show(machine_findings(Path(Config().output_dir)), self.json)
            return
        recipe = Recipe.load(self.recipe)
        default = DoctorOptions(recipe.config(), self.json)
        chosen = recipe.options(default, options, f"vlmrl doctor {self.recipe}", self.__doc__)
        show(recipe_findings(chosen.config, recipe.folder, chosen.server), chosen.json)


@dataclass(frozen=True)
class DoctorOptions(RecipeOptions):
    json: bool = False
    """Print a list of objects with `check`, `level`, `found` and `remedy`."""
    server: bool = False
    """Start the recipe's inference servers and compare them with the trainer. Requires an `engine` with servers."""


def show(findings: Iterable[Finding], as_json: bool) -> None:
    """Print the findings as they come, or as JSON. Exits with 1 if one is an error."""
    seen = []
    for each in findings:
        seen.append(each)
        if not as_json:
            print(printable(str(each)), flush=True)
    if as_json:
        print(json.dumps([asdict(each) for each in seen], indent=2))
    if any(each.level == "error" for each in seen):
        raise SystemExit(1)


def recipe_findings(config: Config, folder: Path, server: bool) -> Iterator[Finding]:
    """The machine's findings, then those of the recipe's files, memory, model and, if wanted, servers."""
    from vlmrl.checks.doctor_model import model_findings
    from vlmrl.model.tiny import resolve as resolve_tiny
    from vlmrl.utils.output_files import OutputError, output_errors

    yield from machine_findings(Path(config.output_dir))
    try:
        config = resolve_config(config, folder)
        yield Finding("recipe", "ok", f"its files and code are there; it writes to {config.folder}")
    except ValueError as error:
        yield Finding("recipe", "error", str(error), "Make the file, or correct the setting.")
    yield from missing_packages(config)
    yield from server_environment_findings(config)
    try:
        with output_errors(config.models_dir):
            resolve_tiny(config.model.source, config.models_dir)
        yield from memory_findings(config)
        yield from model_findings(config)
    except OutputError as error:
        yield Finding("output", "error", str(error), "Set output_dir to a folder that you may write to.")
    except (ValueError, OSError) as error:
        remedy = "Set model.path to a model's folder, or to a model of the hub that can be reached."
        yield Finding("model", "error", str(error).splitlines()[0], remedy)
    if server:
        yield check_server(config)


def missing_packages(config: Config) -> Iterator[Finding]:
    """Errors for packages, and the program of an agent, that the recipe needs and that are not installed."""
    from vlmrl.engine.server_backend import new_backend
    from vlmrl.engine.server_checks import check_installed
    from vlmrl.gateway.agents import resolve_agent
    from vlmrl.report.trackers import tracker_classes

    checks: dict[str, Callable[[], object]] = {
        "report.to": lambda: tracker_classes(config.report.to),
        "agent": lambda: resolve_agent(config),
    }
    if config.has_servers:
        checks["engine"] = lambda: check_installed(new_backend(config))
    for setting, check in checks.items():
        try:
            check()
        except ValueError as error:
            yield Finding(setting, "error", str(error), "Install the package, or change the setting.")


def server_environment_findings(config: Config) -> Iterator[Finding]:
    """Findings about the servers' environment: it needs the trainer's NCCL and, on GPUs, a CUDA compiler."""
    from vlmrl.engine.server_backend import new_backend
    from vlmrl.engine.server_environment import cuda_home, different_nccl, environment_of, own_toolkit
    from vlmrl.plan.memory_plan import gpu_of

    if not config.has_servers or config.external_servers:
        return
    python = new_backend(config).python
    own, found = environment_of(sys.executable), environment_of(python)
    yield check_nccl(own.nccl, found.nccl, different_nccl({python: found.nccl}, python))
    if gpu_of(config) is not None:
        home = cuda_home({**os.environ, **config.server.env})
        yield check_nvcc(home, found.toolkit, own_toolkit(python) is not None, python)


def memory_findings(config: Config) -> Iterator[Finding]:
    """Whether the plan fits the GPU or the host, and the checkpoints the disk."""
    from vlmrl.cli.plan import sizes_of
    from vlmrl.plan.memory_plan import MemoryPlan, gpu_of
    from vlmrl.utils.machine_memory import memory_bytes

    plan = MemoryPlan.of(config, sizes_of(config), 1, gpu_of(config))
    if plan.gpu is None:
        on_host = sum(plan.trainer.values()) + sum(plan.engine.values())
        yield check_plan(on_host / GIB, memory_bytes() / GIB, "host memory")
    else:
        yield check_plan(plan.peak / GIB, plan.gpu.memory / GIB, plan.gpu.name)
    folder = existing_folder(Path(config.output_dir))
    # With checkpoint.every, one more while it is written; without, that of a stopped run.
    kept = config.checkpoint.keep + 1 if config.checkpoint.every else 1
    needed = 4 * plan.sizes.parameters + kept * 12 * plan.sizes.trained  # a model, and weights with two moments of Adam
    yield replace(check_disk(folder, shutil.disk_usage(folder).free / GIB, True, needed / GIB), check="checkpoints")


def check_plan(peak: float, memory: float, device: str) -> Finding:
    """``peak`` and ``memory`` in GiB."""
    found = f"the recipe needs about {peak:.2g} GiB of {memory:.1f} GiB ({device})"
    if peak > memory:
        return Finding("plan", "error", found, "`vlmrl plan RECIPE` says which settings make it fit.")
    return Finding("plan", "ok", found)


def check_server(config: Config) -> Finding:
    """Start the servers and compare weights and logprobs with the trainer's, as a run does at its start."""
    from vlmrl.engine.base import EngineError
    from vlmrl.engine.server_backend import SERVER_BACKENDS
    from vlmrl.run.build import build_run
    from vlmrl.utils.threads import run_awake

    if not config.has_servers:
        remedy = f"Add --engine {' or --engine '.join(SERVER_BACKENDS)}."
        return Finding("server", "error", f"the engine is {config.engine}, which starts no server", remedy)
    try:
        run = build_run(config)
        try:
            reports = run_awake(run.connect())
        finally:
            run.close()
    except (ValueError, EngineError, OSError) as error:
        remedy = f"See the server's log in {config.folder / 'servers'}."
        return Finding("server", "error", str(error).splitlines()[0], remedy)
    return Finding("server", "ok", "; ".join(" ".join(line.split()) for line in reports))
