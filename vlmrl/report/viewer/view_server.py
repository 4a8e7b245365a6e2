"""The server of `vlmrl view --serve`: the page, and its data as JSON.

    GET /                                    the page, without data
    GET /api/runs/0?generation=..&metrics=3  what the run wrote since (FollowedRun.updates)
    GET /api/runs/0/trajectories/17          one record
    GET /api/runs/0/trajectories/17/log      the output of an agent's command
    GET /api/runs/0/search?text=..&step=3    numbers of trajectories
    GET /api/runs/0/images/3fa9              a PNG

It only reads. With a token, everything below ``/api`` needs it; the page has it from its own address, behind ``#``, which a browser
sends to nobody.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler

from vlmrl.report.run_data import LISTS, MOST_BYTES
from vlmrl.report.viewer.followed_run import FollowedRun
from vlmrl.report.viewer.page import page_halves
from vlmrl.utils.http_server import guarded
from vlmrl.utils.output_files import open_regular

MAX_BODY = 4096  # bytes: no request has a body
MAX_DIGITS = 16  # of an index
MOST_AT_ONCE = 4000  # entries of each list in one response
MOST_SEARCHES = 2  # at once: each reads all trajectories, and the threads answer other requests, too
IMMUTABLE = "private, max-age=31536000, immutable"  # an image's id is its content hash

Read = Callable[[FollowedRun, web.Request], web.Response]
Answer = Callable[[FollowedRun, web.Request], Awaitable[web.Response]]


def _in_thread(read: Read) -> Answer:
    async def answer(run: FollowedRun, request: web.Request) -> web.Response:
        return await asyncio.to_thread(read, run, request)

    return answer


def create_view_app(runs: Sequence[FollowedRun], title: str, token: str | None = None) -> web.Application:
    """The app that serves ``runs``, guarded by ``token``."""
    page = "".join(page_halves(title, {"title": title, "live": True, "runs": [{} for _ in runs]})).encode()
    app = web.Application()
    searching = asyncio.Semaphore(MOST_SEARCHES)

    async def search(run: FollowedRun, request: web.Request) -> web.Response:
        left = threading.Event()
        async with searching:
            try:
                return await asyncio.to_thread(_search, run, request, left)
            finally:  # also if the client has left
                left.set()

    async def front(request: web.Request) -> web.Response:
        headers = {"Content-Type": "text/html; charset=utf-8", "Cache-Control": "no-store"}
        return web.Response(body=page, headers=headers)

    def of_run(answer: Answer) -> Handler:
        async def endpoint(request: web.Request) -> web.Response:
            try:
                run = runs[_index(request.match_info["run"])]
                return await answer(run, request)
            except IndexError:
                return web.Response(status=404, text="there is no such run, trajectory, log or image.")
            except (KeyError, ValueError) as error:
                return web.Response(status=400, text=f"the request is malformed: {error}")

        return endpoint

    app.router.add_get("/", front)
    for path, read in READS.items():
        app.router.add_get("/api/runs/{run}" + path, of_run(_in_thread(read)))
    app.router.add_get("/api/runs/{run}/search", of_run(search))
    return guarded(app, token, MAX_BODY, public=("/",))


def _updates(run: FollowedRun, request: web.Request) -> web.Response:
    counts = {name: int(request.query.get(name, 0)) for name in LISTS}
    return web.json_response(run.updates(request.query.get("generation", ""), counts, MOST_AT_ONCE))


def _trajectory(run: FollowedRun, request: web.Request) -> web.Response:
    number = _index(request.match_info["number"])
    return web.json_response(run.record(number) | {"has_log": run.log_path(number) is not None})


def _log(run: FollowedRun, request: web.Request) -> web.Response:
    path = run.log_path(_index(request.match_info["number"]))
    if path is None:
        raise IndexError
    headers = {"Cache-Control": "no-store"}
    return web.Response(body=_content(run, path), content_type="text/plain", charset="utf-8", headers=headers)


def _search(run: FollowedRun, request: web.Request, left: threading.Event) -> web.Response:
    step = request.query.get("step")
    return web.json_response(run.search(request.query["text"], None if step is None else int(step), left.is_set))


def _image(run: FollowedRun, request: web.Request) -> web.Response:
    path = run.image_path(request.match_info["image_id"])
    if path is None:
        raise IndexError
    return web.Response(body=_content(run, path), content_type="image/png", headers={"Cache-Control": IMMUTABLE})


def _content(run: FollowedRun, path: Path) -> bytes:
    with open_regular(path, run.folder) as file:
        return file.read(MOST_BYTES)


READS: dict[str, Read] = {
    "": _updates,
    "/trajectories/{number}": _trajectory,
    "/trajectories/{number}/log": _log,
    "/images/{image_id}": _image,
}


def _index(text: str) -> int:
    """An index in an address. Raises IndexError for text that cannot be one: Python refuses to convert thousands of digits."""
    if not (text.isdecimal() and len(text) < MAX_DIGITS):
        raise IndexError
    return int(text)
