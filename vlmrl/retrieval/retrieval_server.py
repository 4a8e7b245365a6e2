"""`vlmrl retriever serve`: a retriever as an HTTP server; see `http_retriever.py` for the protocol."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from aiohttp import web

from vlmrl.retrieval.base import Hit, Retriever
from vlmrl.retrieval.http_retriever import TOKEN_VARIABLE, passage_payload
from vlmrl.retrieval.open import open_retriever
from vlmrl.utils.http_server import BODY, Binding, run_server
from vlmrl.utils.json_files import json_body
from vlmrl.utils.work_pool import WorkPool

LIMIT = 1000  # queries in one request, and hits for one query
MAX_HITS = 10_000  # of one request: a million took 5 GB and held up all other requests for 20 seconds
MAX_BYTES = 2**26  # of one response: passages may be whole pages and have images
THREADS = 32  # requests that search at the same time; a batching retriever joins them


@dataclass(frozen=True)
class RetrieverServerArguments:
    corpus: str
    """A jsonl, json or parquet file of passages (columns text or contents; id, title, image), or a hub dataset."""
    retriever: Literal["bm25", "dense"] = "bm25"
    encoder: str | None = None
    """For dense: a sentence-transformers model, by hub name or folder."""
    query_prefix: str = ""
    """For encoders trained with one, such as `query: `."""
    passage_prefix: str = ""
    """For encoders trained with one, such as `passage: `."""
    split: str = "train"
    """Split of a hub dataset."""
    topk: int = 3
    """Hits per query if a request sets no topk."""
    host: str = "127.0.0.1"
    """Address to listen on. Any other than the loopback address requires a token."""
    port: int = 8000
    token_variable: str = TOKEN_VARIABLE
    """Environment variable with the token that clients must send. Unset: none is required."""
    max_body_mib: float = 16.0
    """MiB of a request's body, which holds the queries; larger ones are refused."""


def create_retriever_app(retriever: Retriever, topk: int = 3) -> web.Application:
    """The app, without a guard: POST /retrieve, GET /health. Requests run in parallel threads."""
    threads = WorkPool("retriever", THREADS)  # it forgets the queries of clients that leave its queue

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "retriever": retriever.name, "passages": retriever.passages})

    async def retrieve(request: web.Request) -> web.Response:
        return await threads.run(math.inf, _answer, retriever, request[BODY], topk)

    async def end(app: web.Application) -> None:
        threads.close()

    app = web.Application()
    app.router.add_get("/health", health)
    app.router.add_post("/retrieve", retrieve)
    app.on_cleanup.append(end)
    return app


def _answer(retriever: Retriever, content: bytes, topk: int) -> web.Response:
    try:
        queries, wanted, scored = _read(content, topk)
    except ValueError as error:
        return web.json_response({"detail": str(error)}, status=422)
    found = _result(retriever.search(queries, wanted), scored)
    if found is None:
        detail = (
            f"a response may have at most {MAX_BYTES} bytes, but the passages and images of {len(queries)} queries with topk {wanted} "
            "have more: send fewer queries, or a smaller topk."
        )
        return web.json_response({"detail": detail}, status=422)
    return web.Response(text=found, content_type="application/json")


def _result(found: Sequence[Sequence[Hit]], scored: bool) -> str | None:
    """The JSON of a response, hit by hit: one text of all of it would hold up the event loop. ``None``: more than MAX_BYTES."""
    size, lists = 0, []
    for hits in found:
        texts = []
        for hit in hits:
            texts.append(json.dumps(_payload(hit, scored)))
            size += len(texts[-1])
            if size > MAX_BYTES:
                return None
        lists.append(f"[{', '.join(texts)}]")
    return f'{{"result": [{", ".join(lists)}]}}'


def _read(content: bytes, topk: int) -> tuple[list[str], int, bool]:
    """Queries, hits per query, and whether scores are wanted. Raises ValueError for a body that breaks the protocol."""
    body = json_body(content)
    queries = body.get("queries")
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise ValueError(
            'the body must be a JSON object with queries, a list of texts: {"queries": ["capital of France"]}.'
        )
    wanted = topk if body.get("topk") is None else body["topk"]
    if type(wanted) is not int or wanted < 1 or max(len(queries), wanted) > LIMIT or len(queries) * wanted > MAX_HITS:
        raise ValueError(
            f"a request may have at most {LIMIT} queries, a topk from 1 to {LIMIT}, and {MAX_HITS} hits in all, but it has "
            f"{len(queries)} queries and topk {reprlib.repr(wanted)[:100]}."
        )
    return queries, wanted, body.get("return_scores") is True


def _payload(hit: Hit, scored: bool) -> dict[str, Any]:
    document = passage_payload(hit.passage)
    return {"document": document, "score": hit.score} if scored else document


def serve_retriever(arguments: RetrieverServerArguments) -> None:
    """Serve a corpus of passages over HTTP until interrupted: POST /retrieve, GET /health."""
    binding = Binding.from_options(arguments.host, arguments.port, arguments.token_variable, arguments.max_body_mib)
    retriever = open_retriever(
        arguments.retriever,
        arguments.corpus,
        encoder=arguments.encoder,
        query_prefix=arguments.query_prefix,
        passage_prefix=arguments.passage_prefix,
        split=arguments.split,
    )
    app = create_retriever_app(retriever, arguments.topk)
    run_server(app, binding, f"{retriever.passages} passages by {retriever.name}", "/retrieve")
