"""`vlmrl retriever serve`: a retriever as a server, with the field's request and reply (see `wire.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from vlmrl.config.code import import_extra
from vlmrl.retrieval.base import Retriever
from vlmrl.retrieval.opening import open_retriever
from vlmrl.retrieval.wire import document

MOST = 1000  # queries in one request, and hits for one query


@dataclass(frozen=True)
class ServeArguments:
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
    """Of a hub dataset."""
    topk: int = 3
    """Hits for a request that does not say how many."""
    host: str = "127.0.0.1"
    """The address to listen on. Anybody who reaches it may search: there is no password."""
    port: int = 8000


@dataclass
class Query:
    """The body of a request."""

    queries: list[str]
    topk: int | None = None
    return_scores: bool = False


def create_app(retriever: Retriever, topk: int = 3) -> Any:
    """The FastAPI application: POST /retrieve, GET /health. Requests run side by side in threads."""
    fastapi = import_extra("fastapi", "search")
    app = fastapi.FastAPI(title="vlmrl retriever")

    def health() -> dict[str, Any]:
        return {"status": "ok", "retriever": retriever.name, "passages": retriever.passages}

    def retrieve(query: Query) -> dict[str, Any]:
        wanted = topk if query.topk is None else query.topk
        if len(query.queries) > MOST or not 1 <= wanted <= MOST:
            raise fastapi.HTTPException(422, f"at most {MOST} queries, and topk from 1 to {MOST}; got {wanted}")
        found = retriever.search(query.queries, wanted)
        if not query.return_scores:
            return {"result": [[document(hit.passage) for hit in hits] for hits in found]}
        return {"result": [[{"document": document(hit.passage), "score": hit.score} for hit in hits] for hits in found]}

    app.get("/health")(health)
    app.post("/retrieve")(retrieve)
    return app


def serve(arguments: ServeArguments) -> None:
    """Serve a corpus of passages over HTTP until interrupted: POST /retrieve, GET /health."""
    uvicorn = import_extra("uvicorn", "search")
    retriever = open_retriever(
        arguments.retriever,
        arguments.corpus,
        encoder=arguments.encoder,
        query_prefix=arguments.query_prefix,
        passage_prefix=arguments.passage_prefix,
        split=arguments.split,
    )
    address = f"http://{arguments.host}:{arguments.port}"
    print(f"{retriever.passages} passages by {retriever.name} at {address}/retrieve", flush=True)
    uvicorn.run(create_app(retriever, arguments.topk), host=arguments.host, port=arguments.port, log_level="warning")
