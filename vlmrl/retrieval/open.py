"""Makes any retriever from plain settings, as an env's options or a command line give them."""

from __future__ import annotations

from vlmrl.retrieval.base import BatchingRetriever, EmptyRetriever, Retriever
from vlmrl.retrieval.bm25 import Bm25
from vlmrl.retrieval.corpus import load_corpus
from vlmrl.retrieval.dense import Dense
from vlmrl.retrieval.http_retriever import HttpRetriever

KINDS = "bm25, dense, nothing or the address of a server (http://...)"


def open_retriever(
    retriever: str = "bm25",
    corpus: str | None = None,
    *,
    encoder: str | None = None,
    query_prefix: str = "",
    passage_prefix: str = "",
    split: str = "train",
) -> Retriever:
    """``bm25`` or ``dense`` over ``corpus`` (see :func:`load_corpus`), ``nothing``, or the server at an ``http://`` address.

    ``encoder`` is the sentence-transformers model of ``dense``. An index is built by the first call and cached.

    Raises:
        ValueError: a setting is missing or unknown, the corpus does not exist, or a package is not installed.
    """
    if retriever.startswith(("http://", "https://")):
        return HttpRetriever(retriever)
    if retriever == "nothing":
        return EmptyRetriever()
    if retriever not in ("bm25", "dense"):
        raise ValueError(f"retriever must be {KINDS}, but it is {retriever!r}.")
    if not corpus:
        raise ValueError(f"corpus must be set for the retriever {retriever}: a file, a hub name or file.py:function.")
    passages = load_corpus(corpus, split)
    if retriever == "bm25":
        return BatchingRetriever(Bm25(passages), max_batch=8)  # it searches for one query after the other
    if not encoder:
        raise ValueError(
            "encoder must be set for the retriever dense: the name or folder of a sentence-transformers model."
        )
    return BatchingRetriever(Dense(passages, encoder, query_prefix, passage_prefix))
