"""An env in another process, possibly on another machine with other packages: the client of `vlmrl env serve`.

Config(env="vlmrl:RemoteEnv", env_options={"url": "http://127.0.0.1:8100"}, ...)
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

import httpx

from vlmrl.env.base import Env, RetryTurn
from vlmrl.env.remote.serialize import deserialize, serialize_task
from vlmrl.env.session import EnvContractError
from vlmrl.types import Message, Task
from vlmrl.utils.http import http_client


@dataclass(frozen=True)
class EnvConnection:
    """What all sessions of a process share: the HTTP client, and the attributes of the served env's class."""

    client: httpx.Client
    tools: list[dict[str, Any]]
    replayable: bool


class RemoteEnv(Env):
    """Behaves like the env that the server at ``url`` was started with: its tools, images, metrics and rewards.

    A request may take ``timeout`` seconds; keep it below ``rollout.env_timeout``. A server that is unreachable, late or broken is an
    env error: a new session replays the turns, and if that fails too, the trajectory fails. No request is retried by itself.
    """

    def __init__(self, task: Task, url: str, timeout: float = 50.0) -> None:
        super().__init__(task)
        self.url = url.rstrip("/")
        self._connection: EnvConnection = self.shared
        self.tools = self._connection.tools
        self.replayable = self._connection.replayable
        # The client names the session, so that it can close it even if the reply to its start was lost.
        self._session = f"{self.url}/sessions/{uuid.uuid4().hex}"
        self._started = False

    @classmethod
    def setup(cls, url: str, timeout: float = 50.0) -> EnvConnection:
        client = http_client(timeout)
        try:
            health = client.get(f"{url.rstrip('/')}/health").raise_for_status().json()
            return EnvConnection(client, health["tools"], health["replayable"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"env_options.url: no env server answers at {url} ({error!r}). Start one with `vlmrl env serve ENV`."
            ) from error

    def reset(self) -> list[Message] | None:
        self._started = True
        body = {"task": serialize_task(self.task), "max_turns": self.max_turns, "tool_format": self.tool_format}
        reply = self._request("PUT", "", body)
        self.tools, self.replayable = reply["tools"], reply["replayable"]
        return deserialize(reply["messages"])

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        result = self._request("POST", "/step", {"reply": response_text})
        reward = {} if result["reward"] is None else {"reward": result["reward"]}
        return {"messages": deserialize(result["messages"])}, result["done"], {**result["metrics"], **reward}

    def format_observation(self, observation: dict[str, Any]) -> Message | list[Message]:
        return list(observation["messages"])  # formatted by the served env

    def finish(self, ending: str) -> float | None:
        body = {"ending": ending, "last_reply": self.last_reply, "last_turn": self.turn}
        return self._request("POST", "/finish", body)["reward"]

    def close(self) -> None:
        if self._started:
            self._connection.client.delete(self._session)

    def _request(self, method: str, path: str, body: dict[str, Any]) -> Any:
        """The JSON of a reply; an error of the served env is raised here as the same kind of error."""
        response = self._connection.client.request(method, self._session + path, json=body)
        if response.status_code == 200:
            return response.json()
        try:
            error = response.json()
            kind, message = error["kind"], error["message"]
        except (ValueError, KeyError, TypeError):
            kind, message = "error", f"{response.status_code} {response.text:.300}"
        if kind == "retry":
            raise RetryTurn(message)
        if kind == "contract":
            raise EnvContractError(f"env server {self.url}: {message}")
        raise RuntimeError(f"env server {self.url}: {message}")
