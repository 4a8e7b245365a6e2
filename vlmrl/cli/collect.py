"""`vlmrl collect`: play a recipe's tasks with any model, and keep the episodes to learn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vlmrl.cli.api_options import ApiOptions
from vlmrl.cli.recipe import Recipe, RecipePath
from vlmrl.config import resolve_config
from vlmrl.config.collection import Collection, Keep


@dataclass(frozen=True)
class CollectCommand:
    """Collect episodes of a recipe's training tasks, played by its policy or by another model.

    The same command continues one that was stopped."""

    recipe: RecipePath
    """Python file with a function `config() -> Config`. For its options, see `vlmrl collect RECIPE --help`."""

    def run(self, options: Sequence[str]) -> None:
        recipe = Recipe.load(self.recipe)
        chosen = recipe.options(CollectOptions(recipe.config()), options, f"vlmrl collect {self.recipe}")
        api = chosen.api_model()
        config = resolve_config(chosen.config, recipe.folder)
        folder = chosen.out or config.folder.with_name(f"{config.name}-episodes")
        collection = Collection(folder, chosen.tasks, chosen.episodes, chosen.retry_failed, chosen.keep)
        from vlmrl.run.collector import run_collection

        run_collection(config, collection, chosen.model, api)


@dataclass(frozen=True)
class CollectOptions(ApiOptions):
    model: str | None = None
    """Model that plays: a model's folder or hub name, a run's folder (the weights that it wrote last), or a checkpoint.
    With `--api`: its name there. Unset: `model.path`."""
    out: Path | None = None
    """Folder of the episodes. Unset: `runs/NAME-episodes`."""
    tasks: int | None = None
    """Play the first so many tasks. Unset: all."""
    episodes: int = 1
    """Episodes of each task."""
    retry_failed: bool = False
    """Play those again that failed in earlier commands."""
    keep: Keep = field(default_factory=Keep)
