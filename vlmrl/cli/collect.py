"""`vlmrl collect`: play a recipe's tasks with any model, and keep the episodes to learn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vlmrl.cli.eval import ApiOptions
from vlmrl.cli.recipe import Recipe, RecipePath
from vlmrl.config import resolve_config
from vlmrl.config.collection import Collection


@dataclass(frozen=True)
class CollectCommand:
    """Collect episodes of a recipe's training tasks, played by its policy or by another model.

    Repeat the command to continue a stopped one."""

    recipe: RecipePath
    """Python file with a function `config() -> Config`. For its options, see `vlmrl collect RECIPE --help`."""

    def run(self, options: Sequence[str]) -> None:
        recipe = Recipe.load(self.recipe)
        chosen = recipe.options(CollectOptions(recipe.config()), options, f"vlmrl collect {self.recipe}", self.__doc__)
        api = chosen.api_model()
        from vlmrl.run.collector import run_collection

        run_collection(resolve_config(chosen.config, recipe.folder), chosen, chosen.model, api)


@dataclass(frozen=True)
class CollectOptions(Collection, ApiOptions):
    model: str | None = None
    """Model that plays: a model's folder or hub name, a run's folder (the weights that it wrote last), or a checkpoint.
    With `--api`: the model's name there. Unset: `model.path`."""
