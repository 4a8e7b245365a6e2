"""An env in another process, possibly on another machine with other packages: the client of `vlmrl env serve`.

Config(env="vlmrl:RemoteEnv", env_options={"url": "http://127.0.0.1:8100"}, ...)
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from vlmrl.env.answer import read_points
from vlmrl.env.base import Env, RetryTurn, encodable
from vlmrl.env.remote.serialize import checked_tools, deserialize_answer, serialize_task
from vlmrl.env.session import EnvContractError, TaskError
from vlmrl.multimodal.images import ImageUnavailableError
from vlmrl.types import Message, Task
from vlmrl.utils.http import HttpClient, RefusedError, RetryableError, UnreachableError, excerpt, parse_json, retrying
from vlmrl.utils.require import MOST_METRIC, moderate_number, require
from vlmrl.utils.tokens import bearer_headers

TOKEN_VARIABLE = "VLMRL_ENV_TOKEN"
RESTART_SECONDS = 20.0
"""How long an attempt to start a session waits for its server. The retries and refills of `rollout` are attempts of their own."""
MAX_METRICS = 1000  # of one server in all: each name has a mean in every row of the run's metrics
MAX_NAME = 200  # characters of a metric's name
MAX_STATE = 10_000  # characters of a state's name
MAX_POINTS = 10_000  # places of one step, and characters in their labels: they are logged with its trajectory
OWN_KEYS = frozenset({"reward", "points", "state", "compact"})  # of a step's info, which are no metrics


@dataclass(frozen=True)
class EnvConnection:
    """What all sessions of a process share: the HTTP client, the attributes of the served env's class, the names of metrics so far."""

    client: HttpClient
    tools: list[dict[str, Any]]
    replayable: bool
    metrics: set[str] = field(default_factory=set)


class RemoteEnv(Env):
    """Behaves like the env that the server at ``url`` was started with: its tools, images, metrics and rewards.

    A server may be silent for ``timeout`` seconds: while it works on a request or has it in its queue, it sends signs of life, so that
    the time in its queue, which may be long, does not count, and ``rollout.env_timeout`` does not apply. Whatever it sends, a request
    ends after ``longest_request`` seconds. A server that is unreachable, silent or broken is an env error: a new session replays the
    turns, and if that fails too, the trajectory fails. Only a session that starts waits for a server that is unreachable, for
    RESTART_SECONDS, so that one that restarts costs no trajectory.

    The environment variable ``token_variable`` holds the server's token, if it wants one. Images in responses are the responses' own
    content: a server cannot make this process open a path or a URL.
    """

    ends_late_calls = True

    def __init__(
        self,
        task: Task,
        url: str,
        timeout: float = 50.0,
        token_variable: str = TOKEN_VARIABLE,
        longest_request: float = 1800.0,
    ) -> None:
        super().__init__(task)
        self.url = url.rstrip("/")
        self._longest_request = longest_request
        self._connection: EnvConnection = self.shared
        self.tools = self._connection.tools
        self.replayable = self._connection.replayable
        # The client names the session, so that it can close it even if the response to its start was lost.
        self._session = f"{self.url}/sessions/{uuid.uuid4().hex}"
        self._started = False

    @classmethod
    def setup(
        cls, url: str, timeout: float = 50.0, token_variable: str = TOKEN_VARIABLE, longest_request: float = 1800.0
    ) -> EnvConnection:
        require(longest_request > 0, "env_options.longest_request", "greater than 0", longest_request)
        client = HttpClient(timeout, bearer_headers(token_variable))
        try:
            status, response = client.send("GET", f"{url.rstrip('/')}/health")
        except (RetryableError, RefusedError) as error:
            raise _no_server(url, repr(error)) from error
        if status == 401:
            raise ValueError(
                f"env_options.url: the env server at {url} refuses the token: set the environment variable {token_variable} to the "
                "server's token, or env_options.token_variable to the name of another variable."
            )
        try:
            health = parse_json(response)
            return EnvConnection(client, checked_tools(health["tools"]), bool(health["replayable"]))
        except (ValueError, KeyError, TypeError) as error:
            raise _no_server(url, f"{status} {excerpt(response, 200)}") from error

    def reset(self) -> list[Message] | None:
        try:
            body = {"task": serialize_task(self.task), "max_turns": self.max_turns, "tool_format": self.tool_format}
        except ImageUnavailableError:
            raise  # another attempt may read it
        except ValueError as error:
            raise TaskError(f"task {self.task.id} cannot be sent to an env server: {error}") from error
        self._started = True
        waiting = retrying(patience=RESTART_SECONDS, longest_pause=2.0, only=UnreachableError)
        response = waiting(self._request, "PUT", "", body)
        with self._protocol():
            self.tools, self.replayable = checked_tools(response["tools"]), bool(response["replayable"])
            return None if response["messages"] is None else deserialize_answer(response["messages"], "messages")

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        response = self._request("POST", "/step", {"response": response_text})
        with self._protocol():
            messages = deserialize_answer(response["messages"], "messages")
            info = _metrics(response["metrics"], self._connection.metrics)
            info["points"] = _points(response.get("points", []))
            info["state"], info["compact"] = _state(response.get("state")), bool(response.get("compact"))
            if response["reward"] is not None:
                info["reward"] = moderate_number(response["reward"], "reward")
            return {"messages": messages}, bool(response["done"]), info

    def format_observation(self, observation: dict[str, Any]) -> Message | list[Message]:
        return list(observation["messages"])  # formatted by the served env

    def finish(self, ending: str) -> float | None:
        body = {"ending": ending, "last_response": self.last_response, "last_turn": self.turn}
        response = self._request("POST", "/finish", body)
        with self._protocol():
            return None if response["reward"] is None else moderate_number(response["reward"], "reward")

    def close(self) -> None:
        if self._started:
            self._connection.client.send("DELETE", self._session)

    def _request(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The JSON of a response; an error of the served env is raised here as the same kind of error."""
        client = self._connection.client
        status, content = client.send(method, self._session + path, body, seconds=self._longest_request)
        if status == 200:
            with self._protocol():
                response = dict(parse_json(content))
            if "kind" not in response:
                return response
        try:
            error = parse_json(content)
            kind, message = error["kind"], encodable(str(error["message"])[:2000])
        except (ValueError, KeyError, TypeError):
            kind, message = "error", f"{status} {excerpt(content, 300)}"
        if kind == "retry" and path == "/step":
            raise RetryTurn(message)
        if kind == "contract":
            raise EnvContractError(f"env server {self.url}: {message}")
        raise RuntimeError(f"env server {self.url}: {message}")

    @contextmanager
    def _protocol(self) -> Iterator[None]:
        """Within the context, what a response should not hold is an env error."""
        try:
            yield
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise RuntimeError(
                f"env server {self.url} sent a response that breaks the protocol: {type(error).__name__}: {error}"
            ) from error


def _no_server(url: str, reason: str) -> ValueError:
    return ValueError(
        f"env_options.url: no env server answers at {url} ({reason}). Start one with `vlmrl env serve ENV`."
    )


def _points(given: Any) -> list[dict[str, Any]]:
    points = read_points(given)
    size = sum(len(each.label) + len(each.at) for each in points)
    if size > MAX_POINTS:
        raise ValueError(f"points must have at most {MAX_POINTS} places and characters in labels, but they have {size}")
    return [asdict(each) for each in points]


def _state(given: Any) -> str | None:
    if given is not None and not (isinstance(given, str) and len(given) <= MAX_STATE):
        raise ValueError(f"state must be a string of at most {MAX_STATE} characters, or null, but it is {given!r:.200}")
    return None if given is None else encodable(given)


def _metrics(given: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
    """The metrics of a step. ``known`` are the names so far, to which those of this step are added."""
    if (
        len(known.union(given)) > MAX_METRICS
        or not OWN_KEYS.isdisjoint(given)
        or max(map(len, given), default=0) > MAX_NAME
    ):
        names = f"names of at most {MAX_NAME} characters, none of {', '.join(sorted(OWN_KEYS))}"
        rule = f"at most {MAX_METRICS} in all episodes, with {names}"
        raise ValueError(f"metrics must be {rule}, but they are {list(given)!r:.200}")
    metrics = {encodable(name): moderate_number(value, f"metrics.{name}", MOST_METRIC) for name, value in given.items()}
    known.update(metrics)
    return metrics
