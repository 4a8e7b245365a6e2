"""The retrieval protocol of Search-R1's server: its JSON payload, and the client.

    POST /retrieve   {"queries": ["capital of France"], "topk": 3, "return_scores": true}
    response            {"result": [[{"document": {"id": "12", "contents": "Paris\\nParis is ...", ...}, "score": 7.1}, ...]]}

Without ``return_scores`` a hit is the document alone. Besides ``id`` and ``contents``, vlmrl's server sends ``title``, ``text``
and, for a passage with an image, ``image`` as a data URI.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vlmrl.multimodal.embedded import check_embedded
from vlmrl.multimodal.images import data_uri
from vlmrl.retrieval.base import Hit, Passage, RetrieverError
from vlmrl.utils.http import HttpClient, RefusedError, RetryableError, retrying
from vlmrl.utils.tokens import bearer_headers

LONGEST_PAUSE = 5.0  # seconds between two attempts
TOKEN_VARIABLE = "VLMRL_RETRIEVER_TOKEN"


class HttpRetriever:
    """The retriever behind ``url``, such as ``http://127.0.0.1:8000``, with or without ``/retrieve``.

    ``timeout`` is that of one request, in seconds. Connection errors, timeouts and statuses 429 and 5xx are retried with growing
    pauses for ``patience`` seconds, then they are a RetrieverError. Any other status is a RetrieverError at once. The environment
    variable ``token_variable`` holds the server's token, if it wants one.
    """

    name = "http"
    passages: int | None = None

    def __init__(
        self, url: str, timeout: float = 10.0, patience: float = 30.0, token_variable: str = TOKEN_VARIABLE
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/retrieve") + "/retrieve"
        self.patience = patience
        self.token_variable = token_variable
        self._client = HttpClient(timeout, bearer_headers(token_variable))

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        body = {"queries": list(queries), "topk": topk, "return_scores": True}
        try:
            response = retrying(patience=self.patience, longest_pause=LONGEST_PAUSE)(
                self._client.post_json, self.url, body
            )
            return [hits[:topk] for hits in parse_hits(response["result"], len(queries))]
        except RetryableError as error:
            raise RetrieverError(f"retriever {self.url}: no answer in {self.patience:g} s: {error}") from error
        except RefusedError as error:
            hint = f" Is its token in the environment variable {self.token_variable}?" if error.status == 401 else ""
            raise RetrieverError(f"retriever {self.url} refuses: {error}{hint}") from error
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise RetrieverError(f"retriever {self.url} sent a response that breaks the protocol: {error!r}") from error


def passage_payload(passage: Passage) -> dict[str, Any]:
    """A passage as the protocol's document."""
    contents = f"{passage.title}\n{passage.text}"
    document = {"id": passage.id, "title": passage.title, "text": passage.text, "contents": contents}
    return document if passage.image is None else {**document, "image": data_uri(passage.image)}


def parse_hits(result: Any, queries: int) -> list[list[Hit]]:
    """The hits for each query, with or without scores. Raises ValueError, KeyError or TypeError for any other form."""
    if not isinstance(result, list) or len(result) != queries:
        raise ValueError(f"result must be a list with one list for each of {queries} queries")
    return [[_hit(item, rank) for rank, item in enumerate(hits)] for hits in result]


def _hit(item: Any, rank: int) -> Hit:
    if not isinstance(item, dict):
        raise ValueError(f"a hit must be an object, not {item!r:.80}")
    document = item.get("document", item)
    score = item.get("score", -rank) if "document" in item else -rank
    title, text = document.get("title"), document.get("text")
    if text is None:
        title, _, text = str(document["contents"]).partition("\n")
    image = document.get("image")
    if image is not None:
        check_embedded(image, "a hit's image")
    title, text = str(title or "").strip().strip('"'), str(text)
    (title + text).encode()  # raises UnicodeEncodeError, a ValueError, for half a surrogate pair
    return Hit(Passage(str(document.get("id", "")), title, text, image), float(score))
