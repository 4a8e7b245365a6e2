"""`vlmrl eval`: rewards and pass@k on held-out tasks, of one model or several, without training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vlmrl.cli.recipe import Recipe, RecipeOptions, RecipePath
from vlmrl.config import resolve_config
from vlmrl.utils.require import require

if TYPE_CHECKING:
    from vlmrl.engine.chat_engine import ApiModel


@dataclass(frozen=True)
class EvalCommand:
    """Evaluate models on the held-out tasks of a recipe."""

    recipe: RecipePath
    """Python file with a function `config() -> Config`. For its options, see `vlmrl eval RECIPE --help`."""

    def run(self, options: Sequence[str]) -> None:
        recipe = Recipe.load(self.recipe)
        chosen = recipe.options(EvalOptions(recipe.config()), options, f"vlmrl eval {self.recipe}", self.__doc__)
        api = chosen.api_model()
        from vlmrl.run.eval_program import run_evaluation

        run_evaluation(resolve_config(chosen.config, recipe.folder), chosen.models, chosen.out, api)


@dataclass(frozen=True)
class ApiOptions(RecipeOptions):
    """The options to play with a model behind a chat API in place of the policy."""

    api: str | None = None
    """Base URL of an OpenAI-compatible chat API, such as https://api.openai.com/v1, whose `--model` plays."""
    model: str | None = None
    """Model's name at `--api`."""
    api_key_variable: str = "OPENAI_API_KEY"
    """Environment variable with the API's key. No key is sent if it is unset."""
    api_body: str = "{}"
    """Further fields of each request as JSON; null removes a field: '{"max_tokens": null, "max_completion_tokens": 2000}'."""
    budget: int | None = None
    """Tokens of prompts and responses that this command may spend at `--api`. Then no request begins; those in flight may exceed it.
    Unset: no limit."""

    def api_model(self) -> ApiModel | None:
        """The model at ``--api``; ``None`` without one. Raises ValueError for options that do not fit."""
        from vlmrl.engine.chat_engine import ApiModel

        if self.api is None:
            if self.budget is not None:
                raise ValueError("--budget needs --api: only tokens of an API are paid for.")
            return None
        is_url = self.api.startswith(("http://", "https://"))
        require(is_url, "--api", "a URL that begins with http:// or https://", self.api)
        if not self.model:
            raise ValueError("--api needs --model: the name that the API has for it.")
        require(self.budget is None or self.budget > 0, "--budget", "positive", self.budget)
        try:
            body = json.loads(self.api_body)
        except ValueError as error:
            raise ValueError(f"--api-body must be a JSON object: {error}.") from error
        if not isinstance(body, dict):
            raise ValueError(f"--api-body must be a JSON object, but it is {self.api_body!r:.100}.")
        return ApiModel(self.api, self.model, self.api_key_variable, body, self.budget)


@dataclass(frozen=True)
class EvalOptions(ApiOptions):
    models: tuple[str, ...] = ()
    """Models to evaluate, compared with the first one, or with the model of `--api`. Unset: the model of `--api`, or `model.path`.
    A model's folder or hub name, a run's folder (the weights that it wrote last), or a checkpoint: `runs/x/checkpoints/step000020`."""
    out: Path | None = None
    """Write the results to this JSON file, with versions, commit and settings.
    Results of a run's model are also written to `evaluations` in the run's folder."""
