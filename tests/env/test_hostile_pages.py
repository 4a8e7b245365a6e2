"""Pages that give or ask for more than they should: only their own episode fails, and quickly."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from testing.browser import need_chromium
from testing.browsers import call, click, opened, page_env
from testing.episodes import wait_until
from testing.servers import answering

from vlmrl import BrowserEnv
from vlmrl.env.browser import chromium_process
from vlmrl.env.browser.browser_pool import BrowserFailure
from vlmrl.utils.http_server import ServerThread, open_port

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def chromium():
    need_chromium()


def on_click(script: str) -> str:
    return f"<div style='height:100px' onclick='{script}'></div>"


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("Array(3e6).fill(0)", "a list of 3000000 values"),  # it took 10 s, in which other episodes failed
        ('"x".repeat(2 ** 29 - 30)', '"' + "x" * 100 + '"'),  # it ended the driver of all episodes
        ("10n ** 5000n", "a value of the type bigint"),
    ],
)
async def test_a_reward_that_is_no_number_stays_in_its_page(tmp_path, value, what):
    async with opened(page_env(tmp_path, on_click(f"window.reward = {value}"))) as env:
        with pytest.raises(ValueError, match=r"reward_script of .* must give a number") as raised:
            await env.step(click(500, 500))
        assert str(raised.value).endswith(f"but it gave {what}.")


async def test_marks_beyond_the_window_are_cut_to_it(tmp_path):
    """Pillow draws each pixel of a frame, also those beside the image, and holds the interpreter: 13 s for this page's one button."""
    html = """<button>A</button><script>
    innerWidth = innerHeight = 2e9;
    Element.prototype.getBoundingClientRect = () => ({ left: -2e9, top: 0, right: 2e9, bottom: 2e9 });
    Math.max = (_, side) => side;
    document.elementFromPoint = () => null;
    </script>"""
    async with opened(page_env(tmp_path, html), observe="marks") as env:
        assert await env._call(env._tab.boxes()) == [(0, 0, 200, 100)]


async def test_a_page_that_asks_until_it_is_refused_goes_on(tmp_path):
    asking = on_click("let n = 0; while (confirm(`Again ${n}?`)) n++; document.title = n")
    async with opened(page_env(tmp_path, asking)) as env:
        observation, _, _ = await env.step(click(500, 500))
        assert observation["obs_str"].splitlines()[-1].endswith("confirm: Again 9?")
        assert await env.evaluate("document.title") == "10"


@pytest.mark.parametrize("leave", ["history.back()", "close()", "history.go(-2)"])
async def test_a_page_cannot_leave_to_what_its_tab_showed_before(tmp_path, leave):
    """It was about:blank, where a script that names an element of the page throws, or an earlier episode's page with its seed."""
    left = page_env(tmp_path, on_click(leave), "document.querySelector('div').x ?? null", reuse_tabs=True)
    for seed in (1, 2, 3):
        async with opened(left, seed=seed) as env:
            assert seed == 1 or env._tab.episodes > 1
            if seed != 2:
                await env.step(click(500, 500))
            assert await env.evaluate("location.search") == f"?seed={seed}"


async def test_a_link_to_mail_starts_no_program_of_this_machine(tmp_path, monkeypatch):
    """Chromium starts xdg-email for a click on one without asking, and xdg-settings for any scheme that it does not know."""
    chromium_process.programs_that_do_nothing.cache_clear()
    harmless, written = Path(chromium_process.programs_that_do_nothing().name), tmp_path / "written"
    (tmp_path / "own").mkdir()
    for program in list(harmless.iterdir()):
        assert os.access(program, os.X_OK)
        for kind, path in (("own", tmp_path / "own" / program.name), ("harmless", program)):
            path.write_text(f"#!/bin/sh\necho {kind} ${{0##*/}} >> {written}\n")
            path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "own"), prepend=os.pathsep)
    try:
        async with opened(page_env(tmp_path, on_click("location.href = `mailto:a@b`")), sessions=3) as env:
            await env.step(click(500, 500))
            await asyncio.to_thread(wait_until, lambda: written.exists() and "xdg-email" in written.read_text())
        await asyncio.to_thread(env._pool.close)
    finally:
        chromium_process.programs_that_do_nothing.cache_clear()
    assert "own" not in written.read_text(), written.read_text()


async def test_a_page_with_endless_dialogs_fails_alone(tmp_path):
    """Chromium was so busy with them that it was taken for one that hangs, and ended with all its episodes."""
    (tmp_path / "calm").mkdir()
    calm = page_env(tmp_path / "calm", on_click("window.reward = 1"))
    busy = page_env(tmp_path, on_click("for (;;) alert(1)"))
    async with opened(calm, timeout=5.0) as other, opened(busy, timeout=5.0) as env:
        with pytest.raises(BrowserFailure, match="took longer than 5 s"):
            await env.step(click(500, 500))
        await env.close()
        _, done, info = await other.step(click(500, 500))
        assert done and info["reward"] == 1
        assert other._pool.counts["hung"] == 0


async def test_a_chromium_that_draws_no_page_any_more_is_replaced(tmp_path, monkeypatch):
    """A page with 6,000 blurred layers held up the process that draws all pages for minutes after it was closed: all others failed."""
    monkeypatch.setattr(chromium_process, "DRAWING_SECONDS", 5.0)
    calm = page_env(tmp_path, on_click("window.reward = 1"))
    async with opened(calm, timeout=10.0) as env:
        process, pool = env._lease.process, env._pool
        infos = await pool.loop.run(process._control.send("SystemInfo.getProcessInfo"))
        (drawing,) = (info["id"] for info in infos["processInfo"] if info["type"] == "GPU")
        os.kill(drawing, signal.SIGSTOP)
        with pytest.raises(BrowserFailure, match="took longer than 10 s"):
            await env._look()
    async with asyncio.timeout(600):
        await pool.loop.run(process.ended.wait())
    async with opened(calm, timeout=600.0) as env:
        _, done, info = await env.step(click(500, 500))
        assert done and info["reward"] == 1 and env._lease.process is not process
    assert pool.counts["hung"] == 1


async def listened(env: BrowserEnv, *events: str) -> list[Any]:
    """What the tab's context says from now on. Playwright is used in its own thread alone: else two calls may get one number."""
    heard: list[Any] = []

    async def listen() -> None:
        for event in events:
            env._tab._context.on(event, lambda what: heard.append(what))

    await env._pool.loop.run(listen())
    return heard


@pytest.mark.parametrize(
    "flood",
    [
        "console.log(1)",
        "console.context().log(1)",
        "Promise.reject(1)",
        'document.body.appendChild(document.createElement("iframe")).contentWindow.console.log(1)',
    ],
)
async def test_a_page_writes_to_no_console(tmp_path, flood):
    """A page that did so without an end held up the driver of all episodes for longer than their calls may take."""
    async with opened(page_env(tmp_path, on_click(f"{flood}; window.reward = 1"))) as env:
        heard = await listened(env, "console", "weberror")
        _, done, info = await env.step(click(500, 500))
        assert done and info["reward"] == 1
        await env.evaluate("0")
        assert heard == []


async def test_an_error_of_a_page_stays_in_it(tmp_path):
    async with opened(page_env(tmp_path, on_click("window.seen = 1; throw 1"))) as env:
        heard = await listened(env, "weberror")
        await env.step(click(500, 500))
        assert await env.evaluate("window.seen") == 1 and heard == []


async def test_a_page_sends_no_name_to_a_name_server(tmp_path, monkeypatch):
    """A name such as SECRET.example.com says what a page knows: WebRTC looked up that of a TURN server, past the proxy."""
    log = tmp_path / "net.json"
    monkeypatch.setattr(chromium_process, "ARGUMENTS", (*chromium_process.ARGUMENTS, f"--log-net-log={log}"))
    connect = """new Promise((done) => {
      const urls = "turn:secret.example.com:3478?transport=tcp";
      const peer = new RTCPeerConnection({ iceServers: [{ urls, username: "a", credential: "b" }] });
      peer.onicegatheringstatechange = () => peer.iceGatheringState === "complete" && done();
      peer.createDataChannel("x");
      peer.createOffer().then((offer) => peer.setLocalDescription(offer));
    })"""
    async with opened(page_env(tmp_path, ""), sessions=5) as env:
        await env.evaluate(connect)
        await asyncio.sleep(1)  # the name was looked up after that
    await asyncio.to_thread(env._pool.close)
    written = log.read_text()
    assert "secret.example.com" not in written, "Chromium looked the name up"
    assert "constants" in written


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
async def test_a_page_of_this_machine_is_found(host):
    async def page(request: web.Request) -> web.StreamResponse:
        return web.Response(text="<b>here</b>", content_type="text/html")

    app = web.Application()
    app.router.add_get("/", page)
    try:
        listener = open_port(host.strip("[]"), 0)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    server = ServerThread(app, listener, "page")
    try:
        async with opened(site(f"http://{host}:{listener.getsockname()[1]}")) as env:
            assert await env.evaluate("document.body.innerText") == "here"
    finally:
        server.close()


def site(url: str) -> type[BrowserEnv]:
    return type("Site", (BrowserEnv,), {"page": f"{url}/"})


def test_a_redirect_of_the_pages_server_leads_to_no_other_server():
    """The browser follows redirects without asking: only the proxy that does not exist is in their way."""
    reached: list[str] = []

    async def elsewhere(request: web.Request) -> web.StreamResponse:
        reached.append(request.path)
        return web.Response(headers={"Access-Control-Allow-Origin": "*"})

    async def play(url: str) -> Any:
        async with opened(site(url)) as env:
            await env.step(call("wait", time=1))
            return await env.evaluate("Promise.all(window.tried)")

    with answering(elsewhere) as other:
        html = """<img src=/away><iframe src=/away></iframe><script>
        const worker = new Worker("/worker.js");
        window.tried = [fetch("/away").then(() => "reached", () => "refused"), new Promise(done => {
          worker.onmessage = event => done(event.data);
        })];
        </script>"""

        async def page(request: web.Request) -> web.StreamResponse:
            if request.path == "/away":
                raise web.HTTPFound(f"{other}/secret")
            if request.path == "/worker.js":
                script = 'fetch("/away").then(() => postMessage("reached"), () => postMessage("refused"))'
                return web.Response(text=script, content_type="text/javascript")
            return web.Response(text=html, content_type="text/html")

        with answering(page) as url:
            assert asyncio.run(play(url)) == ["refused", "refused"]
    assert reached == []


def test_episodes_on_one_server_share_nothing_at_the_same_time():
    """They are of one origin, for which a browser shares storage, caches, locks and channels."""
    html = """<script>window.heard = []; new BroadcastChannel("c").onmessage = event => heard.push(event.data);
    async function leave() {
      localStorage.x = 1; document.cookie = "x=1"; await (await caches.open("c")).put("/k", new Response("x"));
      await (await navigator.storage.getDirectory()).getFileHandle("f", {create: true});
      await new Promise(done => { indexedDB.open("d").onsuccess = done });
      await new Promise(done => navigator.locks.request("l", () => (done(), new Promise(() => {}))));
      new BroadcastChannel("c").postMessage("x");
    }
    async function found() {
      const files = []; for await (const name of (await navigator.storage.getDirectory()).keys()) files.push(name);
      return [localStorage.length, document.cookie, (await caches.keys()).length, files.length, (await indexedDB.databases()).length,
              (await navigator.locks.query()).held.length, heard.length];
    }</script>"""

    async def page(request: web.Request) -> web.StreamResponse:
        return web.Response(text=html, content_type="text/html")

    async def play(url: str) -> Any:
        async with opened(site(url)) as env, opened(site(url)) as other:
            await env.evaluate("leave()")
            return await env.evaluate("found()"), await other.evaluate("found()")

    with answering(page) as url:
        own, others = asyncio.run(play(url))
    assert own[:6] == [1, "x=1", 1, 1, 1, 1]
    assert others == [0, "", 0, 0, 0, 0, 0]
