"""Pages in a real Chromium as environments: what the agent sees, what its actions do, and what it cannot reach."""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
import threading
from dataclasses import replace

import pytest
from PIL import Image
from testing.browser import need_chromium
from testing.browsers import call, click, opened, page_env, shown
from testing.episodes import a_task, play, play_audited
from testing.servers import served_asgi

from vlmrl import BrowserEnv, MiniWobEnv
from vlmrl.env.base import resolve_env
from vlmrl.env.browser.browser_env import _is_page_in
from vlmrl.env.browser.browser_pool import OPENING, BrowserFailure, Lease
from vlmrl.env.browser.browser_tab import BrowserTab

pytestmark = pytest.mark.slow

RED = "<div style='position:absolute;left:0;top:0;width:100px;height:100px;background:#f00' onclick='window.reward=0.5'></div>"
FIELD = "<input id=field style='position:absolute;left:0;top:0;width:100px;height:40px'>"


@pytest.fixture(autouse=True)
def chromium():
    need_chromium()


def pixels(png: bytes) -> Image.Image:
    return Image.open(io.BytesIO(png)).convert("RGB")


async def test_a_click_on_the_right_place_gives_the_reward(tmp_path):
    async with opened(page_env(tmp_path, RED), scale=2.0) as env:
        (message,) = env.prompt
        screenshot, text = message["content"]
        assert text == {"type": "text", "text": "Go."}
        first = pixels(screenshot["image"])
        assert first.size == (400, 200)
        assert first.getpixel((199, 100)) == (255, 0, 0) and first.getpixel((201, 100)) == (255, 255, 255)
        observation, done, info = await env.step(click(750, 500))
        assert not done and "reward" not in info and shown(observation) == screenshot["image"]
        _, done, info = await env.step(click(499, 500))
        assert done and info["reward"] == 0.5
        assert info["points"] == [{"label": "left_click", "at": [[0.499, 0.5]]}]


async def test_pixels_as_coordinates_are_those_of_the_screenshot(tmp_path):
    async with opened(page_env(tmp_path, RED), scale=2.0, coordinates="pixels") as env:
        assert "400x200" in env.tools[0]["function"]["description"]
        observation, done, _ = await env.step(click(500, 100))
        assert not done and "x from 0 to 400" in observation["obs_str"]
        _, done, _ = await env.step(click(199, 100))
        assert done


async def test_text_keys_drags_and_scrolls(tmp_path):
    html = FIELD + "<div style='height:3000px'></div>"
    async with opened(page_env(tmp_path, html), height=200) as env:
        value = "document.querySelector('#field').value"
        await env.step(click(100, 100) + call("type", text="abc") + call("key", keys=["Backspace"]))
        assert await env.evaluate(value) == "ab"
        await env.step(call("key", keys=["ctrl", "a"]) + call("type", text="Z"))
        assert await env.evaluate(value) == "Z"
        await env.step(call("scroll", pixels=-300))
        assert await env.evaluate("scrollY") == 300
        await env.step(call("scroll", pixels=100))
        assert await env.evaluate("scrollY") == 200


async def test_a_drag_moves_the_pointer_with_the_button_held(tmp_path):
    html = """<script>window.seen = [];
    for (const type of ["mousedown", "mouseup", "contextmenu", "dblclick"])
      addEventListener(type, (event) => seen.push([type, event.clientX, event.clientY, event.shiftKey]));</script>"""
    async with opened(page_env(tmp_path, html)) as env:
        await env.step(call("mouse_move", coordinate=[100, 100]) + call("left_click_drag", coordinate=[500, 500]))
        await env.step(call("left_click_drag", start_coordinate=[0, 0], coordinate=[1000, 1000]))
        assert await env.evaluate("seen") == [
            ["mousedown", 20, 10, False],
            ["mouseup", 100, 50, False],
            ["mousedown", 0, 0, False],
            ["mouseup", 199, 99, False],
        ]
        await env.evaluate("seen.length = 0")
        await env.step(call("right_click", coordinate=[500, 500], text="shift"))
        assert ["contextmenu", 100, 50, True] in await env.evaluate("seen")


@pytest.mark.parametrize(
    ("response", "words"),
    [
        ("I click the button.", "Call computer_use"),
        (call("left_click", coordinate=[5000, 0]), "coordinate must be"),
        ('<tool_call>{"name": "click"}</tool_call>', "there is no tool 'click'"),
        ("<tool_call>{", "does not end"),
        (call("left_click", coordinate=[[1], 2]), "coordinate"),
    ],
)
async def test_a_wrong_response_is_an_observation(tmp_path, response, words):
    async with opened(page_env(tmp_path, RED)) as env:
        observation, done, info = await env.step(response)
        assert words in observation["obs_str"] and not done and info == {"invalid": 1}


async def test_a_long_response_is_read_outside_the_event_loop(tmp_path, monkeypatch):
    async with opened(page_env(tmp_path, RED)) as env:
        threads = []
        read = env.read_actions
        monkeypatch.setattr(
            env, "read_actions", lambda text: threads.append(threading.current_thread().name) or read(text)
        )
        for text in (click(900, 900), click(900, 900) + "x" * 30_000, "x" * 30_000):
            _, done, info = await env.step(text)
            assert not done and info["invalid"] == (text[0] == "x")
        assert threads[0] == threading.current_thread().name and all("vlmrl-cpu" in name for name in threads[1:])


async def test_a_reward_that_is_no_number_is_an_error_that_names_the_script(tmp_path):
    async with opened(page_env(tmp_path, RED, "'won'")) as env:
        with pytest.raises(ValueError, match="reward_script of PageEnv must give a number"):
            await env.step(click(100, 100))


def test_a_reward_that_is_not_finite_fails_its_trajectory_and_not_the_run(tmp_path):
    env_class = page_env(tmp_path, f"{RED}{FIELD}", "window.reward === undefined ? null : Number(field.value || 'x')")
    spec = resolve_env(env_class, options={"width": 192, "height": 128, "tools_in_prompt": False})
    trajectory = play(spec, [click(100, 700)], max_tokens=4000, max_response_tokens=400)
    rule = "the reward of the page of PageEnv must be a number from -1e+15 to 1e+15, but it is nan"
    assert trajectory.ending == "error" and rule in trajectory.error


async def test_the_model_may_end_the_task(tmp_path):
    class Ending(page_env(tmp_path, RED)):
        def end(self, action):
            return 1.0 if action.text == "42" else -0.5

    for response, reward in ((call("answer", text="42"), 1.0), (call("terminate", status="success"), -0.5)):
        async with opened(Ending) as env:
            _, done, info = await env.step(response)
            assert done and info["reward"] == reward


async def test_page_time_passes_with_actions_only(tmp_path):
    html = """<script>window.ticks = 0; setInterval(() => ticks++, 100); const start = Date.now();
    setTimeout(async () => { await null; window.late = Date.now() - start; }, 2500);</script>"""
    async with opened(page_env(tmp_path, html), step_seconds=0.5) as env:
        before = await env.evaluate("[ticks, Date.now() - start, window.late ?? null]")
        assert before == [5, 500, None]
        await asyncio.sleep(0.3)
        assert await env.evaluate("ticks") == 5
        await env.step(call("wait", time=2))
        assert await env.evaluate("[ticks, Date.now() - start, late]") == [25, 2500, 2500]


@pytest.mark.parametrize("address", ["about:blank#x", "view-source:about:blank", "chrome://version"])
async def test_a_frame_without_a_document_that_loads_does_not_hang_the_browser(tmp_path, address):
    """Playwright waits for ever for `about:blank#x`: the browser was ended, and the episodes of all its pages replayed. Nor does it
    see that Chromium refuses an address: each call of such a page's episodes failed."""
    page = page_env(tmp_path, f"<iframe src='{address}'></iframe>" + RED)
    async with opened(page, step_seconds=0.5) as env:
        assert (await env.step(click(250, 500)))[2]["reward"] == 0.5


async def test_random_numbers_come_from_the_seed(tmp_path):
    html = "<script>document.title = [Math.random(), new Date().toISOString()].join()</script>"
    titles = []
    for seed in (1, 2, 1):
        async with opened(page_env(tmp_path, html), seed=seed) as env:
            titles.append(await env.evaluate("document.title"))
    assert titles[0] == titles[2] != titles[1]


async def test_marks_are_drawn_and_can_be_clicked(tmp_path):
    html = """<button style='position:absolute;left:10px;top:10px;width:60px;height:30px'>A</button>
    <span id=b style='position:absolute;left:100px;top:10px;width:60px;height:30px'>B</span>
    <button style='display:none'>C</button>
    <script>document.querySelector('#b').addEventListener('click', () => { window.reward = 2; })</script>"""
    async with opened(page_env(tmp_path, html), observe="marks") as env:
        plain = await env._call(env._tab.screenshot())
        assert await env._call(env._tab.boxes()) == [(10, 10, 70, 40), (100, 10, 160, 40)]
        drawn = env.prompt[0]["content"][0]["image"]
        assert drawn.size == (200, 100) and drawn.getpixel((100, 39)) != pixels(plain).getpixel((100, 39))
        observation, done, _ = await env.step(call("left_click", mark=3))
        assert not done and "marks 1 to 2" in observation["obs_str"]
        _, done, info = await env.step(call("left_click", mark=2))
        assert done and info["reward"] == 2 and info["points"][0]["at"] == [[0.65, 0.25]]


async def test_the_accessibility_tree_as_text(tmp_path):
    async with opened(page_env(tmp_path, "<h1>Shop</h1><button>Buy</button>"), observe="tree") as env:
        text = env.prompt[0]["content"][1]["text"]
        assert 'heading "Shop"' in text and 'button "Buy"' in text


async def test_a_dialog_is_accepted_and_shown_as_text(tmp_path):
    async with opened(page_env(tmp_path, "<div style='height:100px' onclick='alert(\"Sold out\")'></div>")) as env:
        observation, _, _ = await env.step(click(500, 500))
        assert "alert: Sold out" in observation["obs_str"]
        observation, _, _ = await env.step(call("wait", time=1))
        assert observation["obs_str"] == ""


async def test_many_dialogs_are_cut(tmp_path):
    html = "<div style='height:100px' onclick='for (let i = 0; i < 30; i++) alert(i)'></div>"
    async with opened(page_env(tmp_path, html)) as env:
        observation, _, _ = await env.step(click(500, 500))
        assert observation["obs_str"].splitlines()[-1].endswith("alert: 9")


async def test_copied_text_stays_in_its_episode(tmp_path):
    """Chromium has one clipboard for all tabs."""
    html = """<textarea id=first style='position:absolute;left:0;top:0;width:100px;height:50px'>one\ntwo</textarea>
    <textarea id=second style='position:absolute;left:100px;top:0;width:90px;height:50px'></textarea>
    <script>window.seen = [];
    second.addEventListener("paste", (event) => seen.push(event.clipboardData.getData("text/plain")));</script>"""
    first, second = click(250, 250), click(750, 250)
    paste = call("key", keys=["ctrl", "v"])
    env_class = page_env(tmp_path, html)
    async with opened(env_class) as env, opened(env_class) as other:
        await env.step(first + call("key", keys=["ctrl", "a"]) + call("key", keys=["ctrl", "c"]))
        await other.step(second + paste + call("middle_click", coordinate=[750, 250]))
        assert await other.evaluate("[second.value, seen]") == ["", ["", ""]]
        await env.step(second + paste + paste)
        assert await env.evaluate("[second.value, seen]") == ["one\ntwoone\ntwo", ["one\ntwo"] * 2]
        await env.step(first + call("key", keys=["ctrl", "a"]) + call("key", keys=["ctrl", "x"]))
        await env.evaluate("navigator.clipboard.writeText('three')")
        await env.step(first + paste)
        assert await env.evaluate("first.value") == "three"


def test_a_page_of_a_server_with_a_fragment_gets_its_seed(tmp_path):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/html")]})
        await send({"type": "http.response.body", "body": b"<script>window.number = Math.random()</script>"})

    async def main():
        for address in ("/", "/#/route", "/?a=1#/route"):
            env_class = type("Site", (BrowserEnv,), {"page": url + address})
            numbers = []
            for seed in (1, 2):
                async with opened(env_class, seed=seed) as env:
                    numbers.append(await env.evaluate("number"))
                    assert await env.evaluate("location.hash") == address[address.find("#") :].lstrip("/")
            assert numbers[0] != numbers[1]

    with served_asgi(app) as url:
        asyncio.run(main())


def test_the_first_screenshot_has_the_images_that_the_episodes_start_requested():
    """MiniWoB's dialogs lacked their cross in some screenshots, so that members of a group saw other pixels."""

    async def app(scope, receive, send):
        is_image = scope["path"] == "/red.svg"
        if is_image:
            await asyncio.sleep(0.3)
        kind = b"image/svg+xml" if is_image else b"text/html"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        red = b"<svg xmlns='http://www.w3.org/2000/svg'><rect width='200' height='100' fill='red'/></svg>"
        await send({"type": "http.response.body", "body": red if is_image else b"<!DOCTYPE html><p>page"})

    async def main():
        class Site(BrowserEnv):
            page = f"{url}/"

            async def prepare(self) -> str:
                style = "position:absolute;left:0;top:0;width:200px;height:100px;background:url(red.svg)"
                await self.evaluate("(style) => { document.querySelector('p').style = style }", style)
                return ""

        async with opened(Site) as env:
            screenshot = env.prompt[0]["content"][0]["image"]
        assert Image.open(io.BytesIO(screenshot)).convert("RGB").getpixel((100, 90)) == (255, 0, 0)

    with served_asgi(app) as url:
        asyncio.run(main())


@pytest.mark.parametrize("leave", ["", "onclick='location.replace(this.href); return false'"])
def test_a_link_that_the_server_redirects_elsewhere_leads_back(leave):
    """Chromium's error page has no element that a reward script names: such a script failed the trajectory."""

    async def app(scope, receive, send):
        headers = [(b"content-type", b"text/html"), (b"location", b"http://example.com/")]
        status = 302 if scope["path"] == "/elsewhere" else 200
        await send({"type": "http.response.start", "status": status, "headers": headers})
        style = "position:absolute;left:0;top:0;width:200px;height:100px"
        link = f"""<a id=link href=elsewhere style="{style}" {leave.replace("'", '"')}>link</a>"""
        await send({"type": "http.response.body", "body": link.encode()})

    async def main():
        site = type("Site", (BrowserEnv,), {"page": f"{url}/", "reward_script": "link.innerText === 'done' ? 1 : null"})
        async with opened(site) as env:
            for _ in range(2):
                _, done, _ = await env.step(click(500, 500))
                assert not done and await env.evaluate("location.pathname") == "/"

    with served_asgi(app) as url:
        asyncio.run(main())


async def test_a_dead_link_to_a_file_leads_back(tmp_path):
    html = "<a href='gone.html' style='position:absolute;left:0;top:0;width:200px;height:100px'>link</a>"
    async with opened(page_env(tmp_path, html)) as env:
        await env.step(click(500, 500))
        assert await env.evaluate("document.body.innerText") == "link"


async def test_a_file_url_may_have_escapes(tmp_path):
    (tmp_path / "a b").mkdir()
    page_env(tmp_path / "a b", "Hello")
    page = (tmp_path / "a b" / "page.html").as_uri()
    async with opened(BrowserEnv, page=page) as env:
        assert await env.evaluate("document.body.innerText + location.search") == "Hello?seed=0"


def test_the_page_reaches_nothing_but_its_own_folder(tmp_path):
    (tmp_path / "secret.html").write_text("secret")
    inner = tmp_path / "site"
    inner.mkdir()
    (inner / "own.js").write_text("window.own = true")
    received = []

    async def app(scope, receive, send):
        if scope["type"] != "lifespan":
            received.append(scope["path"])

    with served_asgi(app) as url:
        html = f"""<script src=own.js></script><img src='http://example.com/a.png'><iframe src='../secret.html'></iframe>
        <script>window.tried = 0; fetch("{url}").then(() => {{ window.reached = 1 }}).catch(() => tried++);
        const socket = new WebSocket("{url.replace("http", "ws")}");
        socket.onopen = () => {{ window.reached = 2 }}; socket.onerror = () => tried++;</script>
        <a href='{url}' style='position:absolute;left:0;top:0;width:200px;height:100px'>away</a>"""

        async def main():
            async with opened(page_env(inner, html)) as env:
                _, _, info = await env.step(call("wait", time=1))
                assert await env.evaluate("[window.own, window.reached ?? null, tried]") == [True, None, 2]
                assert info["blocked_requests"] == 3
                _, _, info = await env.step(click(500, 500))
                assert await env.evaluate("[location.protocol, window.own]") == ["file:", True]  # the page stays
                assert info["blocked_requests"] == 4

        asyncio.run(main())
    assert received == []


async def test_webrtc_sends_no_packet(tmp_path):
    """It goes around the proxy: a page reached any address by UDP."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stun:
        stun.bind(("127.0.0.1", 0))
        html = f"""<script>const peer = new RTCPeerConnection({{iceServers: [{{urls: "stun:127.0.0.1:{stun.getsockname()[1]}"}}]}});
        window.found = []; peer.createDataChannel("x"); peer.createOffer().then(offer => peer.setLocalDescription(offer));
        peer.onicecandidate = event => found.push(event.candidate && event.candidate.candidate)</script>"""
        async with opened(page_env(tmp_path, html)) as env:
            for _ in range(100):
                await env.step(call("wait", time=1))
                if (found := await env.evaluate("found")) and found[-1] is None:
                    break
            assert found == [None]  # it ended, and found no way to others
        stun.setblocking(False)
        with pytest.raises(BlockingIOError):
            stun.recv(100)


async def test_nothing_is_kept_from_one_episode_to_the_next(tmp_path):
    html = """<style>div:hover { background: #00f }</style><div style='height:100px'></div><script>
    const seen = [localStorage.x, sessionStorage.x, document.cookie, window.name, window.y].join();
    localStorage.x = sessionStorage.x = window.name = window.y = 1; document.title = seen;</script>"""
    first = []
    for _ in range(2):
        async with opened(page_env(tmp_path, html)) as env:
            assert await env.evaluate("document.title") == ",,,,"
            first.append(env.prompt[0]["content"][0]["image"])
            await env.step(click(500, 500))
    assert first[0] == first[1]


async def test_a_page_that_hangs_is_an_env_error_and_others_go_on(tmp_path):
    html = "<button style='width:200px;height:100px' onclick='while (true);'>Hang</button>"
    async with (
        opened(page_env(tmp_path, html), timeout=120.0) as env,
        opened(page_env(tmp_path, RED), timeout=120.0) as other,
    ):
        pool, patient = env._pool, env._pool.limits
        pool.limits = replace(patient, timeout=3.0)
        with pytest.raises(BrowserFailure, match="longer than 3 s"):
            await env.step(click(500, 500))
        pool.limits = patient
        _, done, _ = await other.step(click(100, 100))
        assert done
    async with opened(page_env(tmp_path, RED), timeout=120.0) as env:
        _, done, _ = await env.step(click(100, 100))
        assert done


def test_an_episode_in_the_turn_loop_goes_on_in_another_browser(tmp_path):
    """The audit finds nothing wrong, and the browser's death after the first turn is one counted retry."""
    env_class = page_env(tmp_path, RED + "<script>onclick = () => { document.body.style.background = '#00f' }</script>")

    class Killed(env_class):
        killed = False

        async def step(self, response_text):
            if self.turn == 1 and not Killed.killed:
                Killed.killed = True
                self._lease.process.kill_now()
            return await super().step(response_text)

    spec = resolve_env(Killed, options={"width": 192, "height": 128, "tools_in_prompt": False})
    responses = [click(900, 900), call("wait", time=1), click(100, 100)]
    trajectory = play_audited(spec, responses, max_tokens=4000, max_response_tokens=400)
    assert trajectory.reward == 0.5 and trajectory.ending == "env_done"
    assert trajectory.metrics["env_errors"] == trajectory.metrics["env_retries"] == 1
    assert [[each.label for each in turn.points] for turn in trajectory.turns] == [["left_click"], [], ["left_click"]]


async def test_tabs_for_which_nobody_waits_any_more_are_not_opened_in_parallel(tmp_path, monkeypatch):
    made = []

    async def slow(*args):
        made.append(1)
        await asyncio.sleep(1.0)
        made.pop()
        raise RuntimeError("no tab")

    async with opened(page_env(tmp_path, RED)) as env:
        monkeypatch.setattr(BrowserTab, "new", slow)
        most = 0
        for _ in range(8):  # clients that leave
            opening = [asyncio.create_task(env._pool.open(Lease(), env._kind, False)) for _ in range(OPENING)]
            await asyncio.sleep(0.1)
            most = max(most, len(made))
            for task in opening:
                task.cancel()
        with pytest.raises(BrowserFailure, match="no tab"):
            await env._pool.open(Lease(), env._kind, False)
        assert most == OPENING


async def test_sessions_are_bounded_and_wait(tmp_path):
    async def aiter_of(env_class):
        async with opened(env_class, sessions=1) as env:
            yield len(env.prompt)

    env_class = page_env(tmp_path, RED)
    async with opened(env_class, sessions=1) as env:
        second = asyncio.create_task(anext(aiter_of(env_class)))
        done, _ = await asyncio.wait([second], timeout=0.5)
        assert not done
        await env.close()
        assert await second == 1


async def test_an_episode_that_is_cancelled_while_it_opens_keeps_no_session_and_no_tab(tmp_path):
    spec = resolve_env(page_env(tmp_path, RED), options={"width": 200, "height": 100, "sessions": 1})
    for number in range(12):
        env = spec.build(a_task())
        opening = asyncio.create_task(env.reset())
        await asyncio.sleep(0.04 * number)  # from before the tab is requested until after the page is loaded
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        await env.close()
    env = spec.build(a_task())
    await asyncio.wait_for(env.reset(), 600)
    contexts = env._lease.process.handle.contexts
    async with asyncio.timeout(600):
        while len(contexts) > 1:
            await asyncio.sleep(0.01)
            contexts = env._lease.process.handle.contexts
    await env.close()


GROWING = """<script>
window.keep = [];
onclick = () => { for (let i = 0; i < 40; i++) keep.push(new Uint8Array(10 << 20).fill(i + 1)); };
</script>"""


async def until_ended(pool, process):
    await asyncio.wait_for(pool.loop.run(process.ended.wait()), 600)


async def test_a_page_that_grows_beyond_twice_the_memory_is_ended_while_its_episode_goes_on(tmp_path):
    async with opened(page_env(tmp_path, GROWING), memory_mib=220) as env:
        pool, process = env._pool, env._lease.process
        with contextlib.suppress(BrowserFailure):  # it may be ended before the click returns
            await env.step(click(500, 500))
        await until_ended(pool, process)
        assert env._lease.process is process  # the episode has not ended
        with pytest.raises(BrowserFailure):
            await env.step(click(500, 500))
    assert pool.counts["too_large"] == 1 and not process.alive


async def test_a_browser_above_its_memory_is_replaced_when_its_last_episode_ends(tmp_path):
    async def above() -> int:
        return 600 * 2**20

    env_class = page_env(tmp_path, RED)
    for _ in range(2):
        async with opened(env_class, memory_mib=400) as env:
            pool, process = env._pool, env._lease.process
            process.memory_bytes = above
            async with asyncio.timeout(600):
                while not process.retired:
                    await asyncio.sleep(0.01)
            await env.step(click(500, 500))  # the episode goes on
        await until_ended(pool, process)
    assert pool.counts["too_large"] == pool.counts["started"] == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"page": "nowhere.html"}, "there is no file"),
        ({"page": "http://example.com/"}, "a URL of this machine"),
        ({"page": "ftp://127.0.0.1:1/"}, "a URL of this machine"),
        ({"width": 0}, "env_options.width must be from 16 to 4096"),
        ({"scale": 9.0}, "env_options.scale"),
        ({}, "is missing"),
    ],
)
def test_wrong_options_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        resolve_env(BrowserEnv, options=options).build(a_task())


@pytest.mark.parametrize(
    "page",
    [
        "/etc/passwd",
        "../../../etc/passwd",
        "file:///etc/passwd",
        "http://127.0.0.1:8000/admin",
        "linked.html",
        "keys.env",
        "shop.py",
        "a" * 9999,
        "\0.html",
        3,
    ],
)
def test_a_task_names_no_page_outside_the_folder_of_its_env(tmp_path, page):
    """Tasks come from datasets, and through `vlmrl env serve` from other machines."""
    (tmp_path / "shop.py").write_text(
        "from vlmrl import BrowserEnv\n\n\nclass Shop(BrowserEnv):\n    page = 'shop.html'\n"
    )
    (tmp_path / "shop.html").write_text("<html></html>")
    (tmp_path / "linked.html").symlink_to("/etc/passwd")
    (tmp_path / "keys.env").write_text("KEY=1")
    spec = resolve_env(f"{tmp_path}/shop.py:Shop")
    with pytest.raises(ValueError, match=r"the column page of task .* must name a file in the folder of Shop"):
        spec.build(replace(a_task(), data={"page": page}))
    assert spec.build(replace(a_task(), data={"page": "shop.html"})).url == (tmp_path / "shop.html").as_uri()


def test_a_page_whose_name_has_megabytes_is_refused_at_once(tmp_path, monkeypatch):
    """Looking for links in one of 650 KB, of a task that a client sends, kept a thread for 10 s."""
    monkeypatch.setattr("os.path.realpath", lambda *_, **__: pytest.fail("its links are looked for"))
    assert not _is_page_in(tmp_path, "../x/" * 2**17 + "a.html")


@pytest.mark.parametrize("name", ["../miniwob/click-test", "/etc/passwd", "../../../../etc/passwd"])
def test_a_task_names_miniwob_pages_by_their_names(name):
    pytest.importorskip("miniwob")
    with pytest.raises(ValueError, match="must name tasks of MiniWoB"):
        resolve_env(MiniWobEnv).build(replace(a_task(), data={"miniwob": name}))


def test_wrong_programs_and_limits_are_named_before_anything_is_played(monkeypatch):
    with pytest.raises(ValueError, match="apt install chromium"):
        resolve_env(BrowserEnv, options={"chromium": "/nowhere/chromium"})
    with pytest.raises(ValueError, match=r"env_options\.sessions must be positive"):
        resolve_env(BrowserEnv, options={"sessions": 0})
