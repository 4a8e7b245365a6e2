"""Images at http addresses: what is tried again, how long, how much is read, and which hosts may be reached."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Collection

import pytest
from aiohttp import web
from testing.clocks import pass_time
from testing.servers import answering, closed_port

from vlmrl.multimodal import fetch as fetching
from vlmrl.multimodal.fetch import fetch, is_public
from vlmrl.utils.http import RefusedError, RetryableError, http_loop

pytestmark = pytest.mark.slow
Answer = web.Response | Callable[[web.Request], Awaitable[web.StreamResponse]]


def get(url: str, seconds: float = 60.0, hosts: Collection[str] | None = None) -> bytes | str:
    """The body, or the error's name and text."""
    try:
        return http_loop().wait(fetch(url, seconds, hosts))
    except (RetryableError, RefusedError) as error:
        return f"{type(error).__name__}: {error}"


def fetched(*answers: Answer, seconds: float = 60.0) -> tuple[bytes | str, int]:
    """The result, and the number of requests, of a server that gives these answers, the last one for ever."""
    requests: list[str] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        requests.append(request.path)
        answer = answers[min(len(requests), len(answers)) - 1]
        if callable(answer):
            return await answer(request)
        return web.Response(status=answer.status, body=answer.body, headers=answer.headers)

    with answering(handle) as url:
        return get(f"{url}/a.png", seconds), len(requests)


PNG = web.Response(body=b"png")


async def breaks_off(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "10"})
    await response.prepare(request)
    await response.write(b"half")
    assert request.transport is not None
    request.transport.close()
    return response


async def drips(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b"x" * 100)
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "failure", [web.Response(status=503), web.Response(status=429), web.Response(status=500), breaks_off]
)
def test_a_failure_that_may_pass_is_tried_again(failure: Answer):
    assert fetched(failure, PNG) == (b"png", 2)


@pytest.mark.parametrize(
    ("failure", "named"),
    [
        (web.Response(status=404), "RefusedError: 404 Not Found"),
        (web.Response(status=403), "RefusedError: 403 Forbidden"),
        (web.Response(status=204), "RefusedError: 204 No Content"),
        (
            web.Response(headers={"Content-Encoding": "gzip"}, body=b"x"),
            "RefusedError: its body has the encoding gzip, which was not requested",
        ),
        (
            web.Response(status=302, headers={"Location": "file:///etc/passwd"}),
            "RefusedError: file:///etc/passwd is not an http address",
        ),
    ],
)
def test_a_failure_that_will_stay_is_not_tried_again(failure: Answer, named: str):
    assert fetched(failure) == (named, 1)


@pytest.mark.parametrize(
    "url", ["http://[::1/x", "http://a:99999/x", "http://a:b/x", "http://a\\@b/x", "http://xn--/x"]
)
@pytest.mark.parametrize("hosts", [["*"], ["a"]])
def test_an_invalid_url_is_refused(url: str, hosts: list[str]):
    """A trajectory whose agent named one failed, and was played again, whatever the agent did about the error."""
    assert get(url, hosts=hosts) == f"RefusedError: {url} is not an http address"


HAN = "".join(chr(0x4E00 + i * 7919 % 20000) for i in range(3000))


@pytest.mark.parametrize(
    "address", [f"http://{HAN}/", f"http://a@{HAN}.b:80?c", f"http://a/{'b' * 2**14}", f"http:/\t/{HAN}", f"\n //{HAN}"]
)
def test_an_address_that_takes_long_to_parse_is_refused(address: str, monkeypatch: pytest.MonkeyPatch):
    """A host of 10,000 letters held up the process's loop for all requests for half a minute, also those to the engine."""
    monkeypatch.setattr(fetching, "URL", lambda address: pytest.fail("it was parsed"))
    assert get(address) == f"RefusedError: {address[:300]} is not an http address"


def test_a_redirect_to_a_long_host_is_refused():
    """Some servers write it with letters other than ASCII's."""
    moved = web.Response(status=302, headers={"Location": f"//{HAN[:1000]}/"})
    body, requests = fetched(moved, PNG)
    assert (str(body)[:13], requests) == ("RefusedError:", 1)


def test_a_redirect_with_a_long_address_in_its_query_is_followed():
    moved = web.Response(status=302, headers={"Location": f"/login?to=https://{'a' * 400}"})
    body, requests = fetched(moved, PNG)
    assert (type(body), requests) == (bytes, 2)


def test_a_long_path_with_other_letters_is_no_long_host():
    with answering(lambda request: asyncio.sleep(0, web.Response(body=b"png"))) as url:
        assert get(f"{url}/{HAN[:400]}//x@{HAN[:400]}") == b"png"


def test_attempts_are_limited_and_the_last_failure_is_named(monkeypatch):
    monkeypatch.setattr(fetching, "ATTEMPTS", 2)
    assert fetched(web.Response(status=503)) == ("RetryableError: 503 Service Unavailable (2 attempts)", 2)
    with closed_port() as port:
        assert str(get(f"http://127.0.0.1:{port}/")).startswith("RetryableError: ClientConnectorError")


def test_all_attempts_together_have_a_deadline_which_names_the_last_failure():
    async def drips_until_the_deadline(request: web.Request) -> web.StreamResponse:
        pass_time(http_loop().loop)
        return await drips(request)

    assert fetched(drips_until_the_deadline) == ("RetryableError: no whole response within 60 s", 1)
    assert fetched(web.Response(status=503), drips_until_the_deadline) == (
        "RetryableError: no whole response within 60 s; the last of 1 failures was 503 Service Unavailable",
        2,
    )


def test_a_body_over_the_limit_is_not_read_to_its_end(monkeypatch):
    monkeypatch.setattr(fetching, "MAX_BYTES", 250)
    for too_large in (web.Response(body=b"x" * 251), drips):
        assert fetched(too_large) == ("RefusedError: its body has more than 250 bytes", 1)
    assert fetched(web.Response(body=b"x" * 250)) == (b"x" * 250, 1)


def test_redirects_are_followed_so_often():
    moved = web.Response(status=302, headers={"Location": "b.png"})
    assert fetched(*[moved] * 10, PNG) == (b"png", 11)
    assert fetched(moved) == ("RefusedError: it has more than 10 redirects", 11)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "*"])
def test_a_host_of_this_machine_must_be_named(host: str):
    """`*`, which stands for all public hosts, is also a name of this machine: glibc reads it as no name at all."""
    reached = []

    async def handle(request: web.Request) -> web.Response:
        reached.append(request.path)
        return web.Response(body=b"png")

    with answering(handle) as url:
        address = url.replace("127.0.0.1", host)
        refused = str(get(address, hosts=["*"]))
        assert refused.startswith("RefusedError") and "is not a public address of the internet" in refused
        assert "is none of those" in str(get(address, hosts=["images.example"]))
        assert reached == []
        assert get(url, hosts=["127.0.0.1"]) == b"png"


@pytest.mark.parametrize("host", ["localhost", "*"])
def test_a_redirect_or_a_name_does_not_lead_to_this_machine(host: str, monkeypatch: pytest.MonkeyPatch):
    """A server that may be reached leads to one that may not; and a public name has a private address."""
    reached = []

    async def private(request: web.Request) -> web.Response:
        reached.append(request.path)
        return web.Response(body=b"secret")

    with answering(private) as inner:

        async def redirect(request: web.Request) -> web.Response:
            return web.Response(status=302, headers={"Location": inner.replace("127.0.0.1", host)})

        with answering(redirect) as url:
            assert get(url) == b"secret" and reached == ["/"]
            assert "not a public address" in str(get(url, hosts=["127.0.0.1", "*"])) and reached == ["/"]
        port = int(inner.rpartition(":")[2])
        address = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: address)
        assert "not a public address" in str(get(f"http://images.example:{port}/", hosts=["*"])) and reached == ["/"]


def test_a_host_that_is_named_with_a_port_is_reached_at_no_other():
    reached = []

    async def private(request: web.Request) -> web.Response:
        reached.append(request.path)
        return web.Response(body=b"secret")

    async def redirect(request: web.Request) -> web.Response:
        return web.Response(status=302, headers={"Location": inner})

    async def show(request: web.Request) -> web.Response:
        return web.Response(body=b"png")

    with answering(private) as inner, answering(show) as url, answering(redirect) as moved:
        for hosts in ([url.partition("://")[2]], [url.partition("://")[2], "*"]):
            assert get(url, hosts=hosts) == b"png"
            assert str(get(inner, hosts=hosts)).startswith("RefusedError") and reached == []
        assert "RefusedError" in str(get(moved, hosts=[moved.partition("://")[2]])) and reached == []
        assert get(inner, hosts=["127.0.0.1"]) == b"secret"


def test_public_addresses():
    assert all(map(is_public, ["93.184.216.34", "2606:4700::1", "::ffff:93.184.216.34", "64:ff9b::5db8:d822"]))
    private = ["127.0.0.1", "10.0.0.1", "192.168.1.1", "172.16.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "::"]
    private += ["::1", "::ffff:10.0.0.1", "fe80::1%eth0", "fd00::1", "64:ff9b::a00:1", "2002:a00:1::", "224.0.0.1"]
    private += ["168.63.129.16", "192.0.0.192", "::127.0.0.1", "64:ff9b:1::a00:1", "fec0::2"]  # public for Python 3.11
    private += ["::ffff:0:7f00:1"]
    assert not any(map(is_public, private))
