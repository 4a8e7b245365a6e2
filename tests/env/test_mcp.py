"""The tools of a real MCP server, over stdio and over HTTP: episodes, tool and env errors, and no process left."""

import asyncio
import base64
import io
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from testing.episodes import a_task, play, play_audited, turn_loop, wait_until
from testing.servers import free_port, served_asgi

pytest.importorskip("mcp", reason="needs mcp: pip install 'vlmrl[mcp]'")

import mcp_server
from mcp_types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

from vlmrl import McpEnv
from vlmrl.env import mcp, mcp_stdio
from vlmrl.env.base import resolve_env
from vlmrl.env.mcp import _content as content_of
from vlmrl.env.tools import parts_of
from vlmrl.multimodal import images
from vlmrl.multimodal.images import DecodedImage

slow = pytest.mark.slow

COMMAND = f"{sys.executable} {mcp_server.__file__}"


class Painter(McpEnv):
    def judge(self, response: str) -> float:
        return float(response == "done")


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


def texts(trajectory, turn: int) -> list[str]:
    """The text of each tool message before a turn's response."""
    contents = [message["content"] for message in trajectory.turns[turn].messages]
    return [
        content if isinstance(content, str) else "".join(part.get("text", "(image)") for part in content)
        for content in contents
    ]


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until_ended(process: int) -> None:
    wait_until(lambda: not is_running(process))


def result(*blocks: Any) -> CallToolResult:
    return CallToolResult(content=list(blocks))


def png(color: str = "red") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 32), color).save(buffer, format="PNG")
    return buffer.getvalue()


def image_block(content: bytes) -> ImageContent:
    return ImageContent(data=base64.b64encode(content).decode(), mime_type="image/png")


def broken_png() -> bytes:
    """As the official test server's image: the pixels do not fit their checksum."""
    content = bytearray(png())
    content[content.index(b"IDAT") + 6] ^= 0xFF
    return bytes(content)


@pytest.mark.parametrize("content", [broken_png(), b"", b"no image", png()[:40], b"GIF89a"])
def test_an_image_that_cannot_be_decoded_becomes_a_text_beside_the_others(content: bytes):
    lost = "[image, image/png: it cannot be decoded]"
    assert content_of(result(image_block(content))) == lost
    first, second, third = content_of(result(TextContent(text="two:"), image_block(content), image_block(png())))
    assert (first, second) == ("two:", lost) and third.image.getpixel((0, 0)) == (255, 0, 0)


def test_the_images_of_an_answer_have_a_limit_together(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mcp, "MOST_PIXELS", 2 * 64 * 32)
    blocks = [image_block(png()) for _ in range(3)]
    assert len(content_of(result(*blocks[:2]))) == 2
    with pytest.raises(ValueError, match="its images have more than 4096 pixels in all"):
        content_of(result(*blocks))


def test_an_image_is_decoded_and_hashed_once_outside_the_event_loop(monkeypatch: pytest.MonkeyPatch):
    class Client:
        async def call_tool(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
            return result(image_block(png()))

    threads: list[str] = []
    hash_of = images._content_hash
    monkeypatch.setattr(
        images, "_content_hash", lambda *args: threads.append(threading.current_thread().name) or hash_of(*args)
    )
    env = resolve_env(Painter, options={"server": COMMAND}).build(a_task())
    env._client = Client()  # type: ignore[attr-defined]
    (shown,) = asyncio.run(env._call_tool("paint"))  # type: ignore[attr-defined]
    assert isinstance(shown, DecodedImage) and parts_of([shown]) == [{"type": "image", "image": shown}]
    assert len(threads) == 1 and threads[0].startswith("vlmrl-cpu-")


def test_resources_and_links_keep_their_uri():
    blob = base64.b64encode(b"%PDF").decode()
    red = base64.b64encode(png()).decode()
    link = {"uri": "file:///notes.md", "name": "notes"}
    blocks = [
        EmbeddedResource(resource=TextResourceContents(uri="file:///a.py", text="x = 1", mime_type="text/x-python")),
        EmbeddedResource(resource=TextResourceContents(uri="memo://1", text="")),
        EmbeddedResource(resource=BlobResourceContents(uri="file:///a.pdf", blob=blob, mime_type="application/pdf")),
        ResourceLink(**link),
        ResourceLink(**link, title="My notes", description="Of today", mime_type="text/markdown"),
        AudioContent(data="", mime_type="audio/wav"),
    ]
    assert content_of(result(*blocks)) == (
        "[resource file:///a.py, text/x-python]\nx = 1\n[resource memo://1]\n\n[resource file:///a.pdf, application/pdf]\n"
        "[resource file:///notes.md: notes]\n[resource file:///notes.md, text/markdown: My notes. Of today]\n[audio, audio/wav]"
    )
    label, shown = content_of(
        result(EmbeddedResource(resource=BlobResourceContents(uri="file:///a.png", blob=red, mime_type="image/png")))
    )
    assert label == "[resource file:///a.png, image/png]" and shown.size == (64, 32)


@slow
def test_a_broken_image_is_an_observation_and_stderr_goes_to_a_file(tmp_path: Path, capfd):
    log = tmp_path / "server.log"
    options = {"server": COMMAND, "server_log": str(log)}
    trajectory = play_audited(Painter, [call("odd"), call("odd"), "done"], options=options, max_tokens=4000)
    assert (trajectory.ending, trajectory.reward) == ("env_done", 1.0)
    assert texts(trajectory, 1) == ["here:\n[image, image/png: it cannot be decoded]"]
    assert "env_errors" not in trajectory.metrics
    assert log.read_text().count("the painter spilled a bucket") == 2
    assert "spilled" not in capfd.readouterr().err


@slow
def test_an_error_of_a_server_names_the_file_with_its_stderr():
    command = f"{sys.executable} -c 'import sys; sys.exit(\"no paint today\")'"
    trajectory = play(Painter, ["done"], options={"server": command}, max_env_retries_per_turn=0)
    assert trajectory.ending == "error"
    log = Path(trajectory.error.rpartition("; the server's stderr is in ")[2])
    assert "no paint today" in log.read_text()


@slow
def test_the_log_has_the_beginning_and_the_end_of_a_long_stderr(tmp_path: Path):
    log = tmp_path / "server.log"
    script = "import sys; sys.stderr.write('first' + 'x' * 5_000_000 + 'last'); sys.exit(1)"
    options = {"server": f'{sys.executable} -c "{script}"', "server_log": str(log)}
    trajectory = play(Painter, ["done"], options=options, max_env_retries_per_turn=0)
    assert trajectory.ending == "error"
    first, last = log.read_text().split("\n[...]\n")
    assert first == "first".ljust(mcp_stdio.MOST_LOGGED, "x") and last == "last".rjust(mcp_stdio.READ_BYTES, "x")


@pytest.fixture
def http_server():
    with served_asgi(mcp_server.server.streamable_http_app()) as url:
        yield f"{url}/mcp"


@slow
def test_arguments_that_the_server_refuses_are_shown_to_the_model_and_its_own_errors_are_not():
    responses = [call("divide", a=4, b=0) + call("divide", a=4, b=2), "done"]
    trajectory = play_audited(Painter, responses, a_task(), options={"server": COMMAND}, max_tokens=4000)
    assert texts(trajectory, 1) == ["Error: b must not be 0", "2"] and trajectory.reward == 1.0
    failed = play(Painter, [call("divide", a=4, b=-1)], a_task(), options={"server": COMMAND}, max_tokens=4000)
    assert failed.ending == "error" and "no space left" in failed.error


@slow
def test_an_episode_over_stdio_has_images_parallel_calls_and_tool_errors():
    responses = [
        call("paint", color="red") + call("add", a=1, b=2) + call("paint", color="blue"),
        call("paint", color="none") + call("add", a="one", b=2) + call("fly") + call("whoami"),
        "done",
    ]
    trajectory = play_audited(Painter, responses, a_task(), options={"server": COMMAND}, max_tokens=4000)
    assert (trajectory.ending, trajectory.reward) == ("env_done", 1.0)
    assert [item.image.getpixel((0, 0)) for item in trajectory.turns[1].media] == [(255, 0, 0), (0, 0, 255)]
    assert texts(trajectory, 1) == ["red:(image)", "3", "blue:(image)"]
    *errors, process = texts(trajectory, 2)
    assert errors == [
        "Error: Error executing tool paint: none is no color",
        "Error: add: arguments.a: 'one' is not of type 'integer'.",
        "Error: there is no tool 'fly'; the tools are paint, add, whoami, leave, vanish, hang, odd, divide.",
    ]
    assert trajectory.turns[1].metrics == {"tool_calls": 4.0, "tool_errors": 3.0}
    wait_until_ended(int(process))


@slow
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
        assert texts(trajectory, 1) == ["3", "HI"]
        assert texts(trajectory, 2) == ["Error: there is no tool 'paint'; the tools are shout, add."]


@slow
def test_a_tool_that_is_allowed_and_that_the_server_lacks_is_an_error():
    """A misspelled name, or that of a tool that the server had yesterday: the policy was trained without it, unsaid."""

    class Misspelled(Shouter):
        allowed = ("shout", "paint", "ad", "divde")

    failed = play(Misspelled, ["done"], options={"server": COMMAND}, max_env_retries_per_turn=0, max_tokens=4000)
    assert failed.ending == "error" and failed.reward is None
    assert "has no tool ad, divde, which Misspelled.allowed names; its tools are paint, add, whoami," in failed.error


@slow
def test_after_a_server_died_a_new_one_replays_the_episode(tmp_path: Path):
    responses = [call("add", a=1, b=1), call("vanish", marker=str(tmp_path / "marker")), "done"]
    trajectory = play(Painter, responses, options={"server": COMMAND}, max_tokens=4000, max_response_tokens=1000)
    assert (trajectory.ending, trajectory.reward) == ("env_done", 1.0), trajectory.error
    assert trajectory.metrics["env_retries"] == 1 and texts(trajectory, 2) == ["still here"]


@slow
def test_without_a_server_the_trajectory_fails():
    away = play(Painter, ["done"], options={"server": f"http://127.0.0.1:{free_port()}/mcp"})
    assert away.ending == "error" and "MCP server http://127.0.0.1" in away.error and away.reward is None
    none = play(Painter, ["done"], options={"server": "/no/such/command --flag"})
    assert none.ending == "error" and "FileNotFoundError" in none.error


@slow
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


@slow
def test_a_server_that_ignores_its_end_is_killed_when_closing_takes_longer_than_a_call_may():
    """The client would kill it after four seconds; cancelled before that, it left the process and waited for it without end."""
    seen: list[int] = []

    async def go():
        env = resolve_env(Painter, options={"server": f"{COMMAND} --stay"}).build(a_task())
        await env.reset()
        observation, _, _ = await env.step(call("whoami"))
        seen.append(int(observation["tool_results"][0][0]["text"]))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(env.close(), 0.5)

    asyncio.run(go())
    wait_until_ended(seen[0])


@slow
@pytest.mark.parametrize("bare", [False, True])
def test_what_a_tool_leaves_running_ends_with_its_episode(bare):
    """A shell's `server &` went on in all later episodes, with its port and its share of the processors, and after the run. So did
    one without its parent's environment: `env -i server &`, `sudo`, and daemons that write their title over it, as redis does."""
    trajectory = play(Painter, [call("leave", bare=bare), "done"], options={"server": COMMAND}, max_tokens=4000)
    (process,) = texts(trajectory, 1)
    wait_until_ended(int(process))


@slow
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
