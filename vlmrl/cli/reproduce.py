"""`vlmrl reproduce`: a recipe's seeds and controls, trained and evaluated, as a table."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from vlmrl.cli.recipe import Recipe, RecipeOptions, RecipePath, parse
from vlmrl.config import Config, resolve_config
from vlmrl.utils.require import require


@dataclass(frozen=True)
class ReproduceCommand:
    """Train a recipe with several seeds and controls, evaluate the models, and write a table."""

    recipe: RecipePath
    """Python file with a function `config() -> Config`. For the options, see `vlmrl reproduce RECIPE --help`."""

    def run(self, options: Sequence[str]) -> None:
        recipe, prog = Recipe.load(self.recipe), f"vlmrl reproduce {self.recipe}"
        description = f"{DESCRIPTION}\n\n{recipe.description}"
        chosen, settings = parse(
            ReproduceOptions, args=options, description=description, prog=prog, return_unknown_args=True
        )
        config = recipe.options(RecipeOptions(recipe.config()), settings, prog).config
        run_reproduction(self.recipe, config, chosen, settings)


DESCRIPTION = """Train with each seed, one after another, then the controls, and evaluate every trained model. A repeated command skips
finished runs. Any setting of the recipe may follow, such as `--optim.lr 1e-5`, and applies to all runs."""


@dataclass(frozen=True)
class ReproduceOptions:
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the training runs."""
    controls: Annotated[
        tuple[Literal["shuffled", "blanked"], ...] | None, tyro.conf.arg(metavar="[{shuffled,blanked} ...]")
    ] = None
    """Controls: `shuffled` trains the first seed with shuffled rewards; `blanked` evaluates the seeds' models with blanked images.
    Unset: `shuffled` if the recipe's `algo.credit` is `trajectory`, and `blanked` if it sets `eval.blank_images`."""
    output_dir: Path = Path("runs/reproduce")
    """Folder of the runs. The results are in its `NAME-SETTINGS/results.md`, with the recipe's `name`."""

    def __post_init__(self) -> None:
        require(len(set(self.seeds)) == len(self.seeds) > 0, "--seeds", "different numbers, one at least", self.seeds)


def run_reproduction(recipe: str, config: Config, chosen: ReproduceOptions, settings: Sequence[str]) -> None:
    """Run what is not finished, then write the table. ``settings`` are the recipe's options as they were given.

    Raises:
        ValueError: the recipe has no held-out tasks, saves no model, or a setting belongs to this command.
    """
    from vlmrl.report.results import results_markdown
    from vlmrl.run.evaluate import require_held_out
    from vlmrl.run.reproduction import ExperimentError, launch_process, plan_experiments, reproduce, settings_digest
    from vlmrl.utils.output_files import atomic_write

    require_held_out(config)
    require(config.save_model, "save_model", "True with vlmrl reproduce, which evaluates the trained models", False)
    for name in ("seed", "name", "train.shuffle-rewards", "train.shuffle_rewards"):
        given = any(word.partition("=")[0] == f"--{name}" for word in settings)
        require(not given, f"--{name}", "left to vlmrl reproduce, which sets it for each run", "given")
    usual = {"shuffled": config.algo.credit == "trajectory", "blanked": config.eval.blank_images}
    controls = [name for name, fits in usual.items() if fits] if chosen.controls is None else list(chosen.controls)
    if "shuffled" in controls:
        # What the recipe cannot have is refused here, not after its seeds are trained.
        replace(config, train=replace(config.train, shuffle_rewards=True))
    # Loads the code that the runs load, so that changes of it are noticed.
    resolve_config(config, Path(recipe).resolve().parent)
    folder = chosen.output_dir / f"{config.name}-{settings_digest(config)}"
    experiments = plan_experiments(recipe, settings, config, folder, chosen.seeds, controls)
    try:
        results = reproduce(experiments, launch_process, lambda line: print(f"\nreproduce: {line}", flush=True))
    except ExperimentError as error:
        raise SystemExit(f"vlmrl: {error}") from None
    title = f"{config.name}, with other settings" if settings else config.name
    command = ["vlmrl", "reproduce", recipe, "--seeds", *map(str, chosen.seeds), "--controls", *controls, *settings]
    text = results_markdown(title, shlex.join(command), results, time.strftime("%Y-%m-%d"))
    atomic_write(folder / "results.md", text)
    print(f"\nresults       {folder / 'results.md'}")
    print(f"look at it    vlmrl view {shlex.join(str(each.run) for each in experiments)} --serve")
