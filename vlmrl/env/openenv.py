"""Environments of an OpenEnv server as Envs: one method parses responses into actions, the other formats observations.

class EchoEnv(OpenEnvEnv):
    def read_action(self, response):
        return {"message": response}

    def show(self, observation):
        return obs(observation["echoed_message"])

Config(env="echo.py:EchoEnv", env_options={"url": "http://127.0.0.1:8000"}, ...)
"""

from __future__ import annotations

import abc
from typing import Any

from vlmrl.env.base import Env, obs
from vlmrl.multimodal.embedded import check_embedded
from vlmrl.types import Message, Task
from vlmrl.utils.require import import_extra, moderate_number


class OpenEnvEnv(Env):
    """A session of the OpenEnv server at ``url``, seeded by the task, from ``reset`` to ``close``.

    The first observation comes after the prompt's last message. The reward is the sum of the environment's rewards, also if the
    episode is cut off. A server that fails or cannot be reached is an env error.
    """

    unfinished_reward = 0.0  # beside the rewards so far

    def __init__(self, task: Task, url: str) -> None:
        super().__init__(task)
        self.url = url
        self._client: Any = None

    @classmethod
    def setup(cls, **options: Any) -> Any:
        return import_extra("openenv.core.generic_client", "openenv")  # fails at startup if it is missing

    @abc.abstractmethod
    def read_action(self, response: str) -> dict[str, Any]:
        """The action in a response. The text of a ValueError becomes the observation, and no action is taken."""

    @abc.abstractmethod
    def show(self, observation: dict[str, Any]) -> dict[str, Any]:
        """The agent's observation, made by :func:`~vlmrl.env.base.obs` from the server's.

        Its images must be pixels, encoded bytes or data URIs: a path or URL that a server names is not opened.
        """

    async def reset(self) -> list[Message] | None:  # type: ignore[override]
        module = import_extra("openenv.core.generic_client", "openenv")
        self._client = module.GenericEnvClient(base_url=self.url)
        result = await self._client.reset(seed=self.seed)
        first = self.format_observation(self._shown(result.observation))
        return [*self.task.prompt, *([first] if isinstance(first, dict) else first)]

    async def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:  # type: ignore[override]
        try:
            action = self.read_action(response_text)
        except ValueError as error:
            return obs(str(error)), False, {"reward": 0.0, "invalid": 1}
        result = await self._client.step(action)
        reward = moderate_number(float(result.reward or 0.0), f"OpenEnv server {self.url}: a reward")
        info = {"reward": reward, "invalid": 0}
        return self._shown(result.observation), bool(result.done), info

    def _shown(self, observation: dict[str, Any]) -> dict[str, Any]:
        """The observation of :meth:`show`. What a server sends is an error of its episode, not of the env's code."""
        shown = self.show(observation)
        text = shown.get("obs_str", "")
        if not isinstance(text, str | None):
            raise RuntimeError(
                f"OpenEnv server {self.url}: the text of {type(self).__name__}.show is {text!r:.100}, not a str."
            )
        for image in shown.get("multi_modal_data", {}).get("image", []):
            check_embedded(image, f"an image of {type(self).__name__}.show")
        return shown

    async def close(self) -> None:  # type: ignore[override]
        if self._client is not None:
            await self._client.close()
