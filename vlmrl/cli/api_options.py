"""The options that let a model behind a chat API play in place of the policy."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlmrl.cli.recipe import RecipeOptions

if TYPE_CHECKING:
    from vlmrl.engine.chat_engine import ApiModel


@dataclass(frozen=True)
class ApiOptions(RecipeOptions):
    api: str | None = None
    """Base URL of an OpenAI-compatible chat API, such as https://api.openai.com/v1, whose `--model` plays."""
    model: str | None = None
    """Model's name at `--api`."""
    api_key_variable: str = "OPENAI_API_KEY"
    """Environment variable with the API's key. No key is sent if it is unset."""
    api_body: str = "{}"
    """Further fields of each request as JSON; null leaves a field out: '{"max_tokens": null, "max_completion_tokens": 2000}'."""
    budget: int | None = None
    """Tokens that this command may spend at `--api`, of prompts and responses. No request begins once they are spent; those in flight
    then are the excess. Unset: no limit."""

    def api_model(self) -> ApiModel | None:
        """The model at ``--api``; ``None`` without one. Raises ValueError for options that do not fit."""
        from vlmrl.engine.chat_engine import ApiModel

        if self.api is None:
            if self.budget is not None:
                raise ValueError("--budget needs --api: only tokens of an API are paid for.")
            return None
        if not self.api.startswith(("http://", "https://")):
            raise ValueError(f"--api must be a URL that begins with http:// or https://, but it is {self.api!r}.")
        if not self.model:
            raise ValueError("--api needs --model: the name that the API has for it.")
        if self.budget is not None and self.budget <= 0:
            raise ValueError(f"--budget must be positive, but it is {self.budget}.")
        try:
            body = json.loads(self.api_body)
        except ValueError as error:
            raise ValueError(f"--api-body must be a JSON object: {error}.") from error
        if not isinstance(body, dict):
            raise ValueError(f"--api-body must be a JSON object, but it is {self.api_body!r:.100}.")
        return ApiModel(self.api, self.model, self.api_key_variable, body, self.budget)
