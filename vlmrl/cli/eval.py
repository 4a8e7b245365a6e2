"""`vlmrl eval`: rewards and pass@k on held-out tasks, of one model or several, without training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vlmrl.cli.api_options import ApiOptions
from vlmrl.cli.recipe import Recipe, RecipePath
from vlmrl.config import resolve_config


@dataclass(frozen=True)
class EvalCommand:
    """Evaluate models on the held-out tasks of a recipe."""

    recipe: RecipePath
    """Python file with a function `config() -> Config`. For its options, see `vlmrl eval RECIPE --help`."""

    def run(self, options: Sequence[str]) -> None:
        recipe = Recipe.load(self.recipe)
        chosen = recipe.options(EvalOptions(recipe.config()), options, f"vlmrl eval {self.recipe}")
        api = chosen.api_model()
        from vlmrl.run.eval_program import run_evaluation

        run_evaluation(resolve_config(chosen.config, recipe.folder), chosen.models, chosen.out, api)


@dataclass(frozen=True)
class EvalOptions(ApiOptions):
    models: tuple[str, ...] = ()
    """Models to evaluate. Each is compared with the first one, or with that of `--api`. Unset: `model.path`, or that of `--api` alone.
    A model's folder or hub name, a run's folder (the weights that it wrote last), or a checkpoint: `runs/x/checkpoints/step000020`."""
    out: Path | None = None
    """Write the results to this JSON file, with versions, commit and settings.
    Those of a run's model are also written to `evaluations` in the run's folder."""
