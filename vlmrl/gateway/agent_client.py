"""The client that an agent gets to reach the model: the URL and key of its trajectory."""

from __future__ import annotations

import inspect
import ssl
from contextlib import suppress
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
    _made: list[Any] = field(default_factory=list, repr=False, compare=False)

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
        is_ours = "http_client" not in options  # the agent's own may be shared by its episodes
        if is_ours:
            host = urlsplit(self.url).netloc.rpartition("@")[2]
            no_proxy = {f"all://{host}": None}
            options["http_client"] = getattr(module, kind)(verify=_certificates(), mounts=no_proxy)
        made = getattr(module, name)(**{"base_url": base_url, "api_key": self.api_key, "timeout": None, **options})
        if is_ours:
            self._made.append(made)
        return made

    def close(self) -> None:
        """Close the clients made here that are not async. Python would close their connections at some later time."""
        for made in self._made:
            if not inspect.iscoroutinefunction(made.close):
                with suppress(Exception):  # of a client that the agent has changed or closed
                    made.close()

    async def close_all(self) -> None:
        """As :meth:`close`, with the async ones. To be called on the event loop that they ran on."""
        self.close()
        for made in self._made:
            if inspect.iscoroutinefunction(made.close):
                with suppress(Exception):
                    await made.close()


@cache
def _certificates() -> ssl.SSLContext:
    """The certificates of this machine. Reading them takes 20 ms, most of the time of making a client."""
    return ssl.create_default_context()
