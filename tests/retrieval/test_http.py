"""Server and client of the retrieval protocol, over real sockets on the loopback address."""

import asyncio
import io
import json
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from aiohttp import web
from PIL import Image
from testing.servers import answering, closed_port, served

from vlmrl.cli import main as cli
from vlmrl.multimodal.images import load_image
from vlmrl.retrieval import Hit, HttpRetriever, Passage, RetrieverError, open_retriever, retrieval_server
from vlmrl.retrieval.retrieval_server import RetrieverServerArguments, create_retriever_app, serve_retriever
from vlmrl.utils import http_server

pytestmark = pytest.mark.slow
LIMIT = 600.0  # seconds, for a machine that is ten times too slow

ROWS = [
    {"id": "p", "title": "Paris", "text": "Paris is the capital of France."},
    {"id": "r", "title": "Rome", "text": "Rome is the capital of Italy."},
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VLMRL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


def serving(retriever):
    """The address of the retriever's server."""
    return served(create_retriever_app(retriever, topk=2))


def test_the_server_speaks_search_r1s_protocol(corpus):
    with serving(open_retriever("bm25", corpus)) as url:
        assert httpx.get(f"{url}/health", timeout=LIMIT).json() == {"status": "ok", "retriever": "bm25", "passages": 2}
        body = {"queries": ["capital of France", "quantum"], "topk": 1, "return_scores": True}
        (hit,), nothing = httpx.post(f"{url}/retrieve", json=body, timeout=LIMIT).json()["result"]
        paris = {**ROWS[0], "contents": "Paris\nParis is the capital of France."}
        assert hit["document"] == paris and hit["score"] > 0 and nothing == []
        plain = httpx.post(f"{url}/retrieve", json={"queries": ["capital of France"]}, timeout=LIMIT).json()
        assert [found["id"] for found in plain["result"][0]] == ["p", "r"] and plain["result"][0][0] == paris
        for wrong in (
            {"topk": 3},
            {"queries": "France"},
            {"queries": ["a"], "topk": 0},
            {"queries": ["a"] * 1001},
            {"queries": ["a"] * 11, "topk": 1000},  # 1000 x 1000 hits took 5 GB and all threads' time
            {"queries": [5]},
            [],
        ):
            assert httpx.post(f"{url}/retrieve", json=wrong, timeout=LIMIT).status_code == 422


def test_a_web_page_whose_name_points_at_the_server_reads_nothing(corpus, monkeypatch):
    """By the command itself, since the app alone has no guard."""
    healthy: list[str] = []

    def serve(listener, app):
        with served(app, is_guarded=False) as url:
            headers = {"Host": "evil.example"}
            for response in (
                httpx.get(f"{url}/health", headers=headers, timeout=LIMIT),
                httpx.post(f"{url}/retrieve", json={"queries": ["Paris"]}, headers=headers, timeout=LIMIT),
            ):
                assert response.status_code == 403 and "Paris" not in response.text
            healthy.append(httpx.get(f"{url}/health", timeout=LIMIT).text)

    monkeypatch.setattr(http_server, "serve_on", serve)
    serve_retriever(RetrieverServerArguments(corpus, port=0))
    assert "bm25" in healthy[0]


def test_the_client_returns_what_the_served_retriever_finds(corpus):
    bm25 = open_retriever("bm25", corpus)
    with serving(bm25) as url:
        for address in (url, f"{url}/", f"{url}/retrieve"):
            assert open_retriever(address).search(["capital of Italy", "quantum"], 2) == bm25.search(
                ["capital of Italy", "quantum"], 2
            )
        with pytest.raises(RetrieverError, match="refuses: 422"):
            HttpRetriever(url).search(["a"], 0)


class Images:
    """A retriever whose passage has an image."""

    name, passages = "images", 1

    def __init__(self, image):
        self.image = image

    def search(self, queries, topk):
        return [[Hit(Passage("1", "Red", "a square", self.image), 1.0)] for _ in queries]


def test_images_are_sent_with_their_passages(tmp_path):
    square = Image.new("RGB", (8, 6), "red")
    square.save(tmp_path / "red.png")
    buffer = io.BytesIO()
    square.save(buffer, format="JPEG")
    for source, kind in ((square, "png"), (str(tmp_path / "red.png"), "png"), (buffer.getvalue(), "jpeg")):
        with serving(Images(source)) as url:
            image = HttpRetriever(url).search(["red"], 1)[0][0].passage.image
        assert image.startswith(f"data:image/{kind};base64,")
        assert load_image(image).size == (8, 6)


def responding(*responses):
    """A server that gives these (status, body) one after another, the last one for ever."""
    left = list(responses)

    async def respond(request):
        status, body = left.pop(0) if len(left) > 1 else left[0]
        return web.Response(status=status, text=body)

    return answering(respond)


FOUND = json.dumps({"result": [[{"id": 3, "contents": '"Rome"\nA city.'}]]})


def test_a_response_has_a_limit_of_bytes():
    passage = Passage("p", "", "x" * 100_000)

    class Pages:
        name, passages = "pages", 1

        def search(self, queries, topk):
            return [[Hit(passage, 1.0)] * topk for _ in queries]

    with serving(Pages()) as url:
        body = {"queries": ["a", "b"], "topk": 1000}  # 400 MB, which took 1 GB and held up the event loop for a second
        refused = httpx.post(f"{url}/retrieve", json=body, timeout=LIMIT)
        assert refused.status_code == 422 and "send fewer queries, or a smaller topk" in refused.json()["detail"]
        few = httpx.post(f"{url}/retrieve", json={**body, "topk": 3}, timeout=LIMIT).json()["result"]
        assert [len(hits) for hits in few] == [3, 3]


def test_temporary_failures_are_retried():
    with responding((503, "starting"), (429, "busy"), (200, FOUND)) as url:
        assert HttpRetriever(url).search(["rome"], 1) == [[Hit(Passage("3", "Rome", "A city."), 0.0)]]


def test_an_unreachable_server_is_an_error_after_the_patience():
    with (
        closed_port() as port,
        pytest.raises(RetrieverError, match=r"/retrieve: no answer in 0.4 s: ClientConnectorError"),
    ):
        HttpRetriever(f"http://127.0.0.1:{port}", timeout=600.0, patience=0.4).search(["a"], 1)


@pytest.mark.parametrize(
    "body",
    [
        "no json",
        "[]",
        json.dumps({"result": []}),
        json.dumps({"result": [["text"]]}),
        json.dumps({"result": [[{"document": {"id": 1}}]]}),
        json.dumps({"result": [[{"id": 1, "text": "a", "image": "/etc/hostname"}]]}),
        json.dumps({"result": [[{"id": 1, "text": "a", "image": "http://images.invalid/a.png"}]]}),
        json.dumps({"result": [[{"id": 1, "text": "a", "image": "data:../../etc/hostname"}]]}),
        json.dumps({"result": [[{"id": 1, "text": "a", "image": {"path": "/etc/hostname"}}]]}),
        json.dumps({"result": [[{"id": 1, "text": "a\ud800"}]]}),
        json.dumps({"result": [[{"document": {"id": 1, "text": "a"}, "score": 10**350}]]}),
        json.dumps({"result": [5]}),
        "[" * 100_000,
    ],
)
def test_a_response_that_breaks_the_protocol_is_an_error(body):
    with (
        responding((200, body)) as url,
        pytest.raises(RetrieverError, match="sent a response that breaks the protocol"),
    ):
        HttpRetriever(url).search(["a"], 1)


def test_hits_beyond_topk_are_left_out():
    body = json.dumps({"result": [[{"id": name, "text": name} for name in "abc"]]})
    with responding((200, body)) as url:
        assert [hit.passage.id for hit in HttpRetriever(url).search(["x"], 2)[0]] == ["a", "b"]


def test_a_server_with_a_token_answers_those_who_have_it(corpus, monkeypatch):
    monkeypatch.delenv("VLMRL_RETRIEVER_TOKEN", raising=False)
    with served(create_retriever_app(open_retriever("bm25", corpus)), token="s3cret", max_body=2**20) as url:
        with pytest.raises(RetrieverError, match=r"refuses: 401 the token is missing or wrong.* VLMRL_RETRIEVER_TOKEN"):
            open_retriever(url).search(["capital of Italy"], 1)
        monkeypatch.setenv("VLMRL_RETRIEVER_TOKEN", "s3cret")
        assert open_retriever(url).search(["capital of Italy"], 1)[0][0].passage.id == "r"
        with pytest.raises(RetrieverError, match="refuses: 413"):
            open_retriever(url).search(["a" * 2**20], 1)
        monkeypatch.delenv("VLMRL_RETRIEVER_TOKEN")
        monkeypatch.setenv("OTHER", "s3cret")
        assert HttpRetriever(url, token_variable="OTHER").search(["capital of Italy"], 1)[0][0].passage.id == "r"


def test_the_command_names_what_is_missing(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["vlmrl", "retriever", "serve", "--corpus", "missing.jsonl"])
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    assert capsys.readouterr().err.startswith("vlmrl: corpus 'missing.jsonl' does not exist")


def test_a_client_that_leaves_the_queue_leaves_nothing_in_it(monkeypatch):
    """Or its queries would fill the memory, since its bytes no longer count among those of the bodies."""
    monkeypatch.setattr(retrieval_server, "THREADS", 1)
    entered, go, queued, left = (threading.Event() for _ in range(4))
    searched = []

    class Slow(Images):
        def search(self, queries, topk):
            searched.append(queries[0])
            entered.set()
            assert go.wait(LIMIT)
            return super().search(queries, topk)

    @web.middleware
    async def watch(request, handler):
        try:
            asyncio.get_running_loop().call_soon(queued.set)  # the handler has begun to wait
            return await handler(request)
        except asyncio.CancelledError:
            left.set()
            raise

    app = http_server.guarded(create_retriever_app(Slow(None)), None, 2**20)
    app.middlewares.append(watch)
    with served(app) as url, ThreadPoolExecutor(1) as other:
        answer = other.submit(httpx.post, f"{url}/retrieve", json={"queries": ["first"]}, timeout=LIMIT)
        assert entered.wait(LIMIT) and queued.wait(LIMIT)
        queued.clear()
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=LIMIT) as connection:
            body = b'{"queries": ["left"]}'
            connection.sendall(b"POST /retrieve HTTP/1.1\r\nHost: localhost\r\nContent-Length: 21\r\n\r\n" + body)
            assert queued.wait(LIMIT)
        assert left.wait(LIMIT)
        go.set()
        assert answer.result().status_code == 200
        assert httpx.post(f"{url}/retrieve", json={"queries": ["last"]}, timeout=LIMIT).status_code == 200
    assert searched == ["first", "last"]
