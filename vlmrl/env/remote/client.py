"""An env that another process plays, maybe on another machine and with other packages: the client of `vlmrl env serve`.

Config(env="vlmrl:RemoteEnv", env_options={"url": "http://127.0.0.1:8100"}, ...)
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

import httpx

from vlmrl.env.base import Env, RetryTurn
from vlmrl.env.remote.serialize import from_wire, task_to_wire
from vlmrl.env.session import EnvContractError
from vlmrl.types import Message, Task


@dataclass(frozen=True)
class Server:
    """What all sessions of a process share: the connections, and what the served env's class says."""

    client: httpx.Client
    tools: list[dict[str, Any]]
    replayable: bool


class RemoteEnv(Env):
    """Has the contract of the env that the server at ``url`` was started with: its tools, images, metrics and rewards.

    A request may take ``timeout`` seconds, so keep it below ``rollout.env_timeout``. A server that is away, late or broken is an env
    error: a fresh session replays the turns, then the trajectory is lost.
    """

    def __init__(self, task: Task, url: str, timeout: float = 50.0) -> None:
        super().__init__(task)
        self.url = url.rstrip("/")
        self._server: Server = self.shared
        self.tools = self._server.tools
        self.replayable = self._server.replayable
        # Named here, so that it can be closed even if its start was never answered.
        self._session = f"{self.url}/sessions/{uuid.uuid4().hex}"
        self._asked = False

    @classmethod
    def setup(cls, url: str, timeout: float = 50.0) -> Server:
        client = httpx.Client(timeout=timeout, limits=httpx.Limits(max_connections=None))
        try:
            answer = client.get(f"{url.rstrip('/')}/health").raise_for_status().json()
            return Server(client, answer["tools"], answer["replayable"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"no env server answers at {url}: {error!r}. Start one with `vlmrl env serve ENV`."
            ) from error

    def reset(self) -> list[Message] | None:
        self._asked = True
        asked = {"task": task_to_wire(self.task), "max_turns": self.max_turns, "tool_format": self.tool_format}
        started = self._ask("PUT", "", asked)
        self.tools, self.replayable = started["tools"], started["replayable"]
        return from_wire(started["messages"])

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        result = self._ask("POST", "/step", {"reply": response_text})
        reward = {} if result["reward"] is None else {"reward": result["reward"]}
        return {"messages": from_wire(result["messages"])}, result["done"], {**result["metrics"], **reward}

    def format_observation(self, observation: dict[str, Any]) -> Message | list[Message]:
        return list(observation["messages"])  # the server's env has made them

    def finish(self, ending: str) -> float | None:
        asked = {"ending": ending, "last_reply": self.last_reply, "last_turn": self.turn}
        return self._ask("POST", "/finish", asked)["reward"]

    def close(self) -> None:
        if self._asked:
            self._server.client.delete(self._session)

    def _ask(self, method: str, path: str, body: dict[str, Any]) -> Any:
        answer = self._server.client.request(method, self._session + path, json=body)
        if answer.status_code == 200:
            return answer.json()
        try:
            kind, message = answer.json()["kind"], answer.json()["message"]
        except (ValueError, KeyError, TypeError):
            kind, message = "error", f"{answer.status_code} {answer.text:.300}"
        if kind == "retry":
            raise RetryTurn(message)
        if kind == "contract":
            raise EnvContractError(f"env server {self.url}: {message}")
        raise RuntimeError(f"env server {self.url}: {message}")
