"""The tools of a real MCP server, over stdio and over HTTP: episodes, tool and env errors, and no process left."""

import asyncio
import json
import os
import sys
import time
from pathlib import Path

import pytest
from testing.episodes import a_task, play, play_audited, turn_loop
from testing.servers import free_port, served

pytest.importorskip("mcp", reason="needs mcp: pip install 'vlmrl[mcp]'")

import mcp_server

from vlmrl import McpEnv
from vlmrl.env.base import resolve_env

pytestmark = pytest.mark.slow

COMMAND = f"{sys.executable} {mcp_server.__file__}"


class Painter(McpEnv):
    def judge(self, reply: str) -> float:
        return float(reply == "done")


def shout(text: str) -> str:
    """Say it louder.

    Args:
        text: What to say.
    """
    return text.upper()


class Shouter(Painter):
    functions = [shout]  # noqa: RUF012
    allowed = ("add",)


def call(name: str, **arguments) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'


def observation_text(trajectory, turn: int) -> str:
    content = trajectory.turns[turn].messages[0]["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "(image)") for part in content)


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until_ended(process: int) -> None:
    deadline = time.monotonic() + 20
    while is_running(process):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def http_server():
    with served(mcp_server.server.streamable_http_app()) as url:
        yield f"{url}/mcp"


def test_an_episode_over_stdio_has_images_parallel_calls_and_tool_errors():
    replies = [
        call("paint", color="red") + call("add", a=1, b=2) + call("paint", color="blue"),
        call("paint", color="none") + call("add", a="one", b=2) + call("fly") + call("whoami"),
        "done",
    ]
    trajectory = play_audited(Painter, replies, a_task(), options={"server": COMMAND}, max_tokens=4000)
    assert (trajectory.ending, trajectory.reward) == ("env_done", 1.0)
    assert [item.image.getpixel((0, 0)) for item in trajectory.turns[1].media] == [(255, 0, 0), (0, 0, 255)]
    assert observation_text(trajectory, 1) == (
        "<tool_response>\nred:(image)\n</tool_response>\n<tool_response>\n3\n</tool_response>\n"
        "<tool_response>\nblue:(image)\n</tool_response>"
    )
    errors = observation_text(trajectory, 2)
    assert "Error: Error executing tool paint: none is no color" in errors
    assert "Error: add: arguments.a: 'one' is not of type 'integer'." in errors
    assert "Error: there is no tool 'fly'; the tools are paint, add, whoami, vanish, hang." in errors
    assert trajectory.turns[1].metrics == {"tool_calls": 4.0, "tool_errors": 3.0}
    wait_until_ended(int(errors.split("<tool_response>\n")[-1].split("\n")[0]))


def test_episodes_over_http_share_a_server_and_have_local_functions_too(http_server: str):
    loop = turn_loop(
        Shouter,
        [call("add", a=1, b=2) + call("shout", text="hi"), call("paint", color="red"), "done"],
        options={"server": http_server},
    )

    async def go():
        return await asyncio.gather(*(loop.play(a_task(), "g", f"g/{member}") for member in range(4)))

    for trajectory in asyncio.run(go()):
        assert (trajectory.ending, trajectory.reward) == ("env_done", 1.0), trajectory.error
        assert (
            observation_text(trajectory, 1)
            == "<tool_response>\n3\n</tool_response>\n<tool_response>\nHI\n</tool_response>"
        )
        assert "there is no tool 'paint'; the tools are shout, add." in observation_text(trajectory, 2)


def test_after_a_server_died_a_new_one_replays_the_episode(tmp_path: Path):
    replies = [call("add", a=1, b=1), call("vanish", marker=str(tmp_path / "marker")), "done"]
    trajectory = play(Painter, replies, options={"server": COMMAND}, max_tokens=4000, max_reply_tokens=1000)
    assert (trajectory.ending, trajectory.reward) == ("env_done", 1.0), trajectory.error
    assert trajectory.metrics["env_retries"] == 1 and "still here" in observation_text(trajectory, 2)


def test_without_a_server_the_trajectory_fails():
    away = play(Painter, ["done"], options={"server": f"http://127.0.0.1:{free_port()}/mcp"})
    assert away.ending == "error" and "MCP server http://127.0.0.1" in away.error and away.reward is None
    none = play(Painter, ["done"], options={"server": "/no/such/command --flag"})
    assert none.ending == "error" and "FileNotFoundError" in none.error


def test_closing_ends_the_process_of_a_tool_that_hangs(tmp_path: Path):
    marker = tmp_path / "process"

    async def go():
        env = resolve_env(Painter, options={"server": COMMAND}).build(a_task())
        await env.reset()
        hanging = asyncio.create_task(env.step(call("hang", marker=str(marker))))
        while not marker.exists() or not marker.read_text():
            await asyncio.sleep(0.02)
        hanging.cancel()
        await env.close()

    asyncio.run(go())
    wait_until_ended(int(marker.read_text()))


def test_no_process_is_left_after_a_run_is_stopped():
    seen: list[int] = []

    async def go():
        env = resolve_env(Painter, options={"server": COMMAND}).build(a_task())
        await env.reset()
        observation, _, _ = await env.step(call("whoami"))
        seen.append(int(observation["tool_results"][0][0]["text"]))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(go())
    wait_until_ended(seen[0])
