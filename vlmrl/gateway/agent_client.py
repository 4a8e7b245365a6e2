"""The client that an agent gets to reach the model: the URL and key of its trajectory."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from urllib.parse import urlsplit

from vlmrl.utils.require import import_extra

MODEL = "policy"
"""The model's name for agents. A request may have any other."""


@dataclass(frozen=True)
class AgentClient:
    """The URL and the key of one trajectory: ``AgentClient("http://127.0.0.1:8000/t/9f3a", "sk-...")``.

    A client of any library that gets ``base_url`` and ``api_key``, or a process with the variables of ``environment``, plays the
    trajectory.
    """

    url: str  # of the trajectory
    api_key: str = field(repr=False)
    model: str = MODEL

    @property
    def base_url(self) -> str:
        """For clients of OpenAI's API: ``http://127.0.0.1:8000/t/9f3a/v1``."""
        return f"{self.url}/v1"

    @property
    def anthropic_base_url(self) -> str:
        """For clients of Anthropic's API, which add ``/v1/messages``."""
        return self.url

    @property
    def reward_url(self) -> str:
        """``POST {"reward": 0.5}`` to it adds to the trajectory's reward. The key is required as for the model."""
        return f"{self.url}/reward"

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which an agent in another process finds the model."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,  # older clients
            "OPENAI_API_KEY": self.api_key,
            "OPENAI_MODEL": self.model,
            "ANTHROPIC_BASE_URL": self.anthropic_base_url,
            "ANTHROPIC_API_KEY": self.api_key,
            "ANTHROPIC_MODEL": self.model,
            "VLMRL_REWARD_URL": self.reward_url,
        }

    def openai(self, **options: Any) -> Any:
        """An ``openai.OpenAI`` for the trajectory. It waits for a response as long as it takes, unless ``options`` have a ``timeout``.

        It uses no proxy of this process's environment.
        """
        return self._client("openai", "OpenAI", self.base_url, options)

    def async_openai(self, **options: Any) -> Any:
        """An ``openai.AsyncOpenAI``, as :meth:`openai`."""
        return self._client("openai", "AsyncOpenAI", self.base_url, options)

    def anthropic(self, **options: Any) -> Any:
        """An ``anthropic.Anthropic``, as :meth:`openai`."""
        return self._client("anthropic", "Anthropic", self.anthropic_base_url, options)

    def async_anthropic(self, **options: Any) -> Any:
        """An ``anthropic.AsyncAnthropic``, as :meth:`openai`."""
        return self._client("anthropic", "AsyncAnthropic", self.anthropic_base_url, options)

    def _client(self, package: str, name: str, base_url: str, options: dict[str, Any]) -> Any:
        module = import_extra(package, "agents")
        kind = "DefaultAsyncHttpxClient" if name.startswith("Async") else "DefaultHttpxClient"
        if "http_client" not in options:
            host = urlsplit(self.url).netloc.rpartition("@")[2]
            no_proxy = {f"all://{host}": None}
            options["http_client"] = getattr(module, kind)(verify=_certificates(), mounts=no_proxy)
        return getattr(module, name)(**{"base_url": base_url, "api_key": self.api_key, "timeout": None, **options})


@cache
def _certificates() -> ssl.SSLContext:
    """The certificates of this machine. Reading them takes 20 ms, most of the time of making a client."""
    return ssl.create_default_context()
