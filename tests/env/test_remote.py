"""An env behind a server behaves like a local one, and HTTP failures are env errors."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from testing.episodes import a_task, image, play, play_audited, turn_loop, wait_until
from testing.servers import free_port, served

from vlmrl import Env, RemoteEnv, RetryTurn, ToolEnv, obs
from vlmrl.env.base import resolve_env
from vlmrl.env.remote import client
from vlmrl.env.remote.env_server import EnvServer, create_env_app
from vlmrl.env.remote.serialize import serialize, serialize_task
from vlmrl.env.session import EnvContractError, EnvSession
from vlmrl.multimodal.images import ImageUnavailableError
from vlmrl.types import PointSet
from vlmrl.utils.http import HttpClient

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


class Album(Env):
    """Shows the task's image, then plain ones in the colors that are named, and pays for each; ``quit`` ends it."""

    opened: list[Album]
    closed: list[Album]

    def __init_subclass__(cls) -> None:
        cls.opened, cls.closed = [], []

    def __init__(self, task: Any, pay: float = 0.25) -> None:
        super().__init__(task)
        self.pay = pay
        self.opened.append(self)

    def reset(self) -> list[dict[str, Any]]:
        return [
            {
                "role": "user",
                "content": [{"type": "image", "image": self.task.images[0]}, {"type": "text", "text": "Go on."}],
            }
        ]

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        if response_text == "again" and self.turn == 1:
            raise RetryTurn("not that")
        if response_text == "quit":
            return obs(), True, {"turn": self.turn, "most": self.max_turns, "seed": self.seed}
        info = {"reward": self.pay, "note": "text", "points": [{"label": "click", "at": [[0.25, 1]]}]}
        return obs(f"{response_text}:", images=[image(response_text)]), False, info

    def finish(self, ending: str) -> float:
        return 1.0 if (ending, self.last_response) == ("env_done", "quit") else 0.5

    def close(self) -> None:
        self.closed.append(self)


class Tools(ToolEnv):
    def paint(self, color: str) -> Any:
        """Paint it.

        Args:
            color: With this color.
        """
        return image(color)

    functions = [paint]  # noqa: RUF012

    def judge(self, response: str) -> float:
        return float(self.tool_format == "json")


@contextmanager
def remote(env: Any, port: int = 0, **options: Any) -> Iterator[tuple[dict[str, Any], EnvServer]]:
    """The options of a :class:`RemoteEnv` that plays ``env``, and the server behind it."""
    server = EnvServer(resolve_env(env, options=options), timeout=600.0)
    with served(create_env_app(server), port) as url:
        yield {"url": url}, server


TASK = a_task("?", [image("orange")], seed=7)


def test_a_remote_episode_equals_a_local_one():
    class Mine(Album):
        pass

    responses = ["red", "blue", "quit"]
    here = play_audited(Mine, responses, TASK, options={"pay": 0.75})
    with remote(Mine, pay=0.75) as (options, server):
        there = play_audited(RemoteEnv, responses, TASK, options=options)
        assert not server.sessions
    for one, other in zip(here.turns, there.turns, strict=True):
        assert (one.prompt_ids, one.reward) == (other.prompt_ids, other.reward)
        assert [item.id for item in one.media] == [item.id for item in other.media]
        assert one.points == other.points
    assert here.turns[0].points == [PointSet("click", ((0.25, 1.0),))]
    assert (there.ending, there.reward) == (here.ending, here.reward) == ("env_done", 2.5)
    assert there.turns[2].metrics == here.turns[2].metrics == {"turn": 2.0, "most": 4.0, "seed": 7.0}
    assert len(Mine.opened) == len(Mine.closed) == 2


def test_a_servers_env_names_its_states_and_asks_for_summaries():
    class Rooms(Env):
        def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
            return obs(), False, {"state": 7 + self.turn, "compact": self.turn == 1}

    async def results(options: dict[str, Any]) -> list[Any]:
        session = EnvSession(resolve_env(RemoteEnv, options=options), TASK, max_turns=4, timeout=600.0, max_retries=0)
        try:
            await session.start()
            return [await session.step(response) for response in "ab"]
        finally:
            await session.close()

    with remote(Rooms) as (options, _):
        assert [(result.state, result.compact) for result in asyncio.run(results(options))] == [
            ("7", False),
            ("8", True),
        ]


def test_a_web_page_whose_name_points_at_the_server_reads_nothing():
    with remote(Album) as (options, _):
        headers = {"Host": "evil.example"}
        assert httpx.get(f"{options['url']}/health", headers=headers).status_code == 403


def test_a_server_with_a_token_plays_with_those_who_have_it(monkeypatch: pytest.MonkeyPatch):
    class Mine(Album):
        pass

    app = create_env_app(EnvServer(resolve_env(Mine)))
    with served(app, token="s3cret", max_body=2**20) as url:
        for variable, value in (("VLMRL_ENV_TOKEN", None), ("VLMRL_ENV_TOKEN", "other"), ("OTHER", "s3cret")):
            monkeypatch.delenv("VLMRL_ENV_TOKEN", raising=False)
            if value:
                monkeypatch.setenv(variable, value)
            with pytest.raises(
                ValueError, match="refuses the token: set the environment variable VLMRL_ENV_TOKEN"
            ) as error:
                resolve_env(RemoteEnv, options={"url": url})
            assert "s3cret" not in str(error.value) and "other" not in str(error.value).replace("another", "")
        options = {"url": url, "token_variable": "OTHER"}
        assert play_audited(RemoteEnv, ["red", "quit"], TASK, options=options).reward == 1.25
        monkeypatch.setenv("VLMRL_ENV_TOKEN", "s3cret")
        assert play_audited(RemoteEnv, ["red", "quit"], TASK, options={"url": url}).reward == 1.25
        large = play(RemoteEnv, ["red"], a_task("?", [image()], data={"x": "a" * 2**20}), options={"url": url})
        assert large.ending == "error" and "413 the body has more than 1048576 bytes" in large.error
    assert len(Mine.opened) == len(Mine.closed) == 2


def test_an_image_that_is_unavailable_once_is_read_again(monkeypatch: pytest.MonkeyPatch):
    outcomes = iter([ImageUnavailableError("its address did not answer in time"), None])

    def serialize_the_second_time(task: Any) -> Any:
        outcome = next(outcomes)
        if outcome is not None:
            raise outcome
        return serialize_task(task)

    monkeypatch.setattr(client, "serialize_task", serialize_the_second_time)

    class Mine(Album):
        pass

    with remote(Mine) as (options, _):
        trajectory = play(RemoteEnv, ["red", "quit"], TASK, options=options)
    assert (trajectory.error, trajectory.reward, trajectory.metrics["env_retries"]) == (None, 1.25, 1.0)


def test_tools_of_the_served_env_are_known_before_the_first_episode():
    with remote(Tools) as (options, _):
        spec = resolve_env(RemoteEnv, options=options)
        assert spec.build(TASK).tools[0]["function"]["name"] == "paint"
        responses = ['<tool_call>{"name": "paint", "arguments": {"color": "red"}}</tool_call>', "done"]
        trajectory = play_audited(spec, responses)
    assert trajectory.reward == 1.0 and trajectory.turns[1].media[0].image.getpixel((0, 0)) == (255, 0, 0)
    assert '"name": "paint"' in turn_loop(spec, []).renderer.decode(trajectory.turns[0].prompt_ids)


def test_a_rejected_turn_is_sampled_again():
    class Mine(Album):
        pass

    responses = iter(["red", "again", "quit"])
    with remote(Mine) as (options, _):
        trajectory = play(RemoteEnv, lambda request, turn: next(responses), TASK, options=options)
    assert [turn.text for turn in trajectory.turns] == ["red", "quit"]
    assert trajectory.turns[1].metrics["turns_resampled"] == 1


def test_after_a_remote_error_a_new_session_replays_the_turns():
    class Mine(Album):
        def step(self, response_text: str) -> Any:
            if response_text == "quit" and len(self.opened) == 1:
                raise ConnectionError("the album is away")
            return super().step(response_text)

    with remote(Mine) as (options, server):
        trajectory = play(RemoteEnv, ["red", "quit"], TASK, options=options)
        assert (trajectory.reward, trajectory.metrics["env_retries"]) == (1.25, 1.0)
        wait_until(lambda: len(Mine.closed) == len(Mine.opened) == 2 and not server.sessions)
        Mine.opened.clear()
        broken = play(RemoteEnv, ["red", "quit"], TASK, options=options, max_env_retries_per_turn=0)
    assert (broken.ending, broken.final_reward) == ("error", None) and "the album is away" in broken.error


def test_an_env_that_cannot_be_replayed_fails_at_once():
    class Mine(Album):
        replayable = False

        def step(self, response_text: str) -> Any:
            raise OSError("no")

    with remote(Mine) as (options, _):
        assert play(RemoteEnv, ["red"], TASK, options=options).ending == "error"
    assert len(Mine.opened) == 1


def test_an_env_that_breaks_the_contract_stops_the_run():
    class Mine(Album):
        def step(self, response_text: str) -> Any:
            return "nothing"

    with remote(Mine) as (options, _), pytest.raises(EnvContractError, match="step must return"):
        play(RemoteEnv, ["red"], TASK, options=options)


def test_a_dead_server_fails_the_trajectory_and_a_restarted_one_replays_it(monkeypatch):
    monkeypatch.setattr("vlmrl.env.remote.client.RESTART_SECONDS", 0.0)

    class Mine(Album):
        pass

    port = free_port()
    with remote(Mine, port) as (options, _):
        spec = resolve_env(RemoteEnv, options=options)
    dead = play(spec, ["red", "quit"], TASK)
    assert (dead.ending, dead.reward) == ("error", None) and "ClientConnectorError" in dead.error

    first = remote(Mine, port)
    first.__enter__()
    second = remote(Mine, port)

    def response(request: Any, turn: int) -> str:
        if turn == 1:  # between two turns: all sessions are lost
            first.__exit__(None, None, None)
            second.__enter__()
        return ["red", "quit"][turn]

    trajectory = play(spec, response, TASK)
    second.__exit__(None, None, None)
    assert (trajectory.ending, trajectory.reward, trajectory.metrics["env_retries"]) == ("env_done", 1.25, 1.0)


def test_a_session_waits_for_a_server_that_restarts(monkeypatch):
    """Attempts at once used up the retries within a second, so that a restart failed all trajectories that were played."""

    class Mine(Album):
        pass

    port = free_port()
    with remote(Mine, port) as (options, _):
        spec = resolve_env(RemoteEnv, options=options)
    again, attempts = remote(Mine, port), []
    send = HttpClient.send

    def counted(client: HttpClient, method: str, *rest: Any, **options: Any) -> Any:
        attempts.append(method)
        if len(attempts) == 4:  # more than all the retries of a turn
            again.__enter__()
        return send(client, method, *rest, **options)

    monkeypatch.setattr(HttpClient, "send", counted)
    trajectory = play(spec, ["red", "quit"], TASK)
    again.__exit__(None, None, None)
    assert attempts[:5] == ["PUT"] * 4 + ["POST"]
    assert (trajectory.ending, trajectory.reward) == ("env_done", 1.25) and "env_retries" not in trajectory.metrics


def test_an_unreachable_server_is_an_error_at_startup():
    with pytest.raises(ValueError, match=r"no env server answers at http.* Start one with `vlmrl env serve ENV`"):
        resolve_env(RemoteEnv, options={"url": f"http://127.0.0.1:{free_port()}"})


def test_a_hung_remote_env_fails_the_trajectory_and_is_closed_by_the_server():
    gate = threading.Event()

    class Mine(Album):
        def step(self, response_text: str) -> Any:
            gate.wait(600)
            return super().step(response_text)

    class Impatient(RemoteEnv):
        def step(self, response_text: str) -> Any:
            client = self._connection.client
            patient, client.timeout = client.timeout, 0.5
            try:
                return super().step(response_text)
            finally:
                client.timeout = patient

    with remote(Mine) as (options, server):
        loop = turn_loop(Impatient, ["red"], options={**options, "timeout": 600.0}, max_env_retries_per_turn=0)
        trajectory = asyncio.run(loop.play(TASK, "g", "g/00"))
        assert trajectory.ending == "error" and "SocketTimeoutError" in trajectory.error
        wait_until(lambda: not server.sessions)
        gate.set()
        wait_until(lambda: len(Mine.closed) == 1)


async def test_idle_sessions_are_closed_and_all_of_them_at_the_end():
    class Mine(Album):
        pass

    server = EnvServer(resolve_env(Mine), idle_timeout=60.0, max_sessions=2)
    body = json.dumps({"task": serialize_task(TASK), "max_turns": 4, "tool_format": "json"}).encode()
    await server.start("old", body)
    await server.start("new", body)
    with pytest.raises(RuntimeError, match="there are 2 sessions"):
        await server.start("third", body)
    server.max_sessions, server.max_bytes = 3, 100
    with pytest.raises(RuntimeError, match="the tasks of the open ones have 100 bytes"):
        await server.start("large", body)
    server.sessions["old"].last_used -= 61
    await server.close_idle()
    assert list(server.sessions) == ["new"] and Mine.closed == Mine.opened[:1]
    with pytest.raises(RuntimeError, match=r"there is no session old: .* idle for 60 s"):
        await server.step("old", b'{"response": "red"}')
    await server.close_all()
    assert not server.sessions and len(Mine.closed) == 2


async def test_the_memory_of_a_task_counts_and_not_the_bytes_of_its_request():
    server = EnvServer(resolve_env(Album))
    server.max_bytes = 2**22
    task = serialize_task(TASK) | {"data": {"many": [{}] * 40_000}}  # 160 kB, of which 9 MB are made
    body = json.dumps({"task": task, "max_turns": 4, "tool_format": "json"}).encode()
    with pytest.raises(RuntimeError, match=r"the tasks of the open ones have 4194304 bytes"):
        await server.start("many", body)
    assert not server.sessions


@pytest.mark.parametrize("place", ["images", "data", "answer", "prompt"])
async def test_the_memory_of_a_tasks_images_counts_before_they_are_decoded(place):
    """A PNG of one color with 64 megapixels has 200 kB: a request of 25 MB had 100 of them, which take 25 GB."""
    server = EnvServer(resolve_env(Album))
    server.max_bytes = 2**22
    image = serialize(Image.new("RGB", (1000, 600)), "image")
    shown = [{"role": "user", "content": [{"type": "image", "image": image}] * 2}]
    task = serialize_task(TASK) | {place: shown if place == "prompt" else {"many": [image] * 2}}
    task["images"] = task["images"]["many"] if place == "images" else None
    body = json.dumps({"task": task, "max_turns": 4, "tool_format": "json"}).encode()
    with pytest.raises(RuntimeError, match=r"the tasks of the open ones have 4194304 bytes"):
        await server.start("many", body)
    assert not server.sessions


def test_the_command_serves_an_env_by_its_file(tmp_path: Path):
    port = free_port()
    command = [sys.executable, "-m", "vlmrl", "env", "serve", str(ROOT / "envs/zoom.py:ZoomEnv"), "--port", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [*command, "--env-options", "crop", "32"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE
    ) as process:
        try:
            assert b"ZoomEnv at http://127.0.0.1" in process.stdout.readline()
            deadline = time.monotonic() + 600
            while True:
                try:
                    spec = resolve_env(RemoteEnv, options={"url": f"http://127.0.0.1:{port}"})
                    break
                except ValueError:
                    assert time.monotonic() < deadline
                    time.sleep(0.1)
            call = '<tool_call>{"name": "zoom", "arguments": {"bbox": [0, 0, 500, 500]}}</tool_call>'
            trajectory = play_audited(
                spec, [call, "<answer>red</answer>"], a_task("?", [image(size=(64, 64))], answer="red")
            )
            assert trajectory.reward == 1.0 and trajectory.turns[1].media[0].image.size == (32, 32)
        finally:
            process.terminate()
    assert process.returncode is not None
