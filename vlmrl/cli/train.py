"""`vlmrl train`, and recipe files that are run as programs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from vlmrl.cli.recipe import Recipe, RecipeOptions, RecipePath, errors_in_one_line
from vlmrl.config import Config, resolve_config
from vlmrl.utils.require import require
from vlmrl.utils.threads import keeping_exit_status


@dataclass(frozen=True)
class TrainCommand:
    """Train with a recipe. `vlmrl init DIR` writes a first one."""

    recipe: RecipePath
    """Python file with a function `config() -> Config`.
    `vlmrl train recipe.py`: train with its settings.
    `vlmrl train recipe.py --help`: list all settings of the recipe, each with its value.
    `vlmrl train recipe.py --dry-run`: check settings and the first tasks, print the plan, stop.
    `vlmrl train recipe.py --optim.lr 1e-5 --no-save-model`: every setting is an option.
    `vlmrl train recipe.py --checkpoint.every 10 --resume`: continue from the newest checkpoint.
    (Results are in `runs/NAME/`: metrics, trajectories, the curve and the model.)"""

    def run(self, options: Sequence[str]) -> None:
        train_recipe(Recipe.load(self.recipe), options, program=["vlmrl", "train", self.recipe])


@dataclass(frozen=True)
class SftCommand:
    """Fine-tune a recipe's model on its recorded conversations (`sft.data`), without reinforcement learning."""

    recipe: RecipePath
    """Python file with a function `config() -> Config`. It needs an env and tasks only for a held-out reward.
    `vlmrl sft recipe.py --sft.data.mine.path runs/x-episodes`: with conversations that a recipe without `sft.data` does not have.
    `vlmrl sft recipe.py --help`: list all options, which are those of `vlmrl train`.
    `vlmrl train recipe.py --resume`: continue with reinforcement learning from the last checkpoint (`checkpoint.every`),
    with the same options.
    `vlmrl train recipe.py`: fine-tune and train in one run."""

    def run(self, options: Sequence[str]) -> None:
        train_recipe(Recipe.load(self.recipe), options, program=["vlmrl", "sft", self.recipe], only_sft=True)


@dataclass(frozen=True)
class TrainOptions(RecipeOptions):
    dry_run: bool = False
    """Check all settings, make and render the first two tasks, print the plan and exit without training.
    `vlmrl data check` reads all rows."""
    resume: bool = False
    """Continue from the newest checkpoint in the run's folder. Without one, start from the beginning."""


def run_recipe(config: Callable[[], Config]) -> None:
    """Train with the recipe file that is run as a program, with its command-line options."""
    with keeping_exit_status(), errors_in_one_line():
        train_recipe(Recipe.of(config), sys.argv[1:], program=["python", sys.argv[0]])


def train_recipe(recipe: Recipe, options: Sequence[str], program: Sequence[str], *, only_sft: bool = False) -> None:
    """Train with a recipe. ``program`` and ``options`` are the command line. ``only_sft``: without reinforcement learning."""
    what = SftCommand.__doc__ if only_sft else None
    chosen = recipe.options(TrainOptions(recipe.config()), options, shlex.join(program), what)
    config = resolve_config(chosen.config, recipe.folder)
    if only_sft:
        rule = "set for vlmrl sft, such as by --sft.data.mine.path runs/x-episodes"
        require(bool(config.sft.data), "sft.data", rule, config.sft.data)
        config = replace(config, train=replace(config.train, steps=0))

    from vlmrl.run.program import run_training

    run_training(config, dry_run=chosen.dry_run, resume=chosen.resume, command=[*program, *options])
