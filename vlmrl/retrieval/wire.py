"""The field's retrieval protocol, as Search-R1's server speaks it: what client and server put on the wire.

    POST /retrieve   {"queries": ["capital of France"], "topk": 3, "return_scores": true}
    reply            {"result": [[{"document": {"id": "12", "contents": "Paris\\nParis is ...", ...}, "score": 7.1}, ...]]}

Without ``return_scores`` a hit is the document alone. Ours have ``title``, ``text`` and, with an image, ``image`` as a data URI
beside the field's ``id`` and ``contents``.
"""

from __future__ import annotations

from typing import Any

from vlmrl.multimodal.images import data_uri
from vlmrl.retrieval.base import Hit, Passage


def document(passage: Passage) -> dict[str, Any]:
    contents = f"{passage.title}\n{passage.text}"
    shown = {"id": passage.id, "title": passage.title, "text": passage.text, "contents": contents}
    return shown if passage.image is None else {**shown, "image": data_uri(passage.image)}


def read_result(result: Any, queries: int) -> list[list[Hit]]:
    """The hits for each query, with scores or without. Raises ValueError where ``result`` has not this form."""
    if not isinstance(result, list) or len(result) != queries:
        raise ValueError(f"result must be a list with one list for each of {queries} queries")
    return [[_hit(item, place) for place, item in enumerate(hits)] for hits in result]


def _hit(item: Any, place: int) -> Hit:
    if not isinstance(item, dict):
        raise ValueError(f"a hit must be an object, not {item!r:.80}")
    found = item.get("document", item)
    score = item.get("score", -place) if "document" in item else -place
    title, text = found.get("title"), found.get("text")
    if text is None:
        title, _, text = str(found["contents"]).partition("\n")
    image = found.get("image")
    if image is not None and not str(image).startswith("data:"):
        raise ValueError("an image must come as a data URI")  # a path or an address would be opened on this machine
    return Hit(Passage(str(found.get("id", "")), str(title or "").strip().strip('"'), str(text), image), float(score))
