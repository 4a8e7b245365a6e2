"""BM25 over a corpus by the bm25s library: all scores are worked out when the index is made, and read from disk since then."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vlmrl.config.code import import_extra
from vlmrl.retrieval.base import Hit
from vlmrl.retrieval.corpus import Corpus, Places, hits
from vlmrl.retrieval.index_cache import cached_folder

FEW = 32  # so many maxima are found faster one by one than by partitioning all scores


class Bm25:
    """Words that a query and a passage share, rare ones first. The index is memory-mapped: processes share its pages.

    ``k1`` and ``b`` are Pyserini's for Wikipedia passages. Words are runs of two or more letters, lower case, not stemmed;
    ``stopwords`` is a language of bm25s, or ``""`` to keep all words.
    """

    name = "bm25"

    def __init__(self, corpus: Corpus, k1: float = 0.9, b: float = 0.4, stopwords: str = "en") -> None:
        self.corpus = corpus
        self.passages: int | None = len(corpus)
        self._bm25s: Any = import_extra("bm25s", "search")
        self._stopwords = stopwords or None

        def build(folder: Path) -> None:
            index = self._bm25s.BM25(k1=k1, b=b)
            index.index(self._words(list(corpus.texts()), as_ids=True), show_progress=False)
            index.save(folder)

        made_from = (corpus.digest(), k1, b, stopwords, self._bm25s.__version__)
        self._index = self._bm25s.BM25.load(cached_folder(self.name, made_from, build), mmap=True)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        return hits(self.corpus, [self._best(words, topk) for words in self._words(list(queries), as_ids=False)])

    def _best(self, words: list[str], topk: int) -> Places:
        if not words:
            return []
        scores = self._index.get_scores(words)
        return [(place, float(scores[place])) for place in best(scores, topk) if scores[place] > 0]

    def _words(self, texts: list[str], as_ids: bool) -> Any:
        return self._bm25s.tokenize(texts, stopwords=self._stopwords, return_ids=as_ids, show_progress=False)


def best(scores: np.ndarray[Any, Any], count: int) -> list[int]:
    """The places of the ``count`` highest scores, best first; of equal ones the earlier."""
    count = min(count, len(scores))
    if count > FEW:
        worst = np.partition(scores, -count)[-count]
        places = np.flatnonzero(scores >= worst)
        return places[np.argsort(-scores[places], kind="stable")][:count].tolist()
    left, found = scores.copy(), []
    for _ in range(count):
        found.append(int(left.argmax()))
        left[found[-1]] = -np.inf
    return found
