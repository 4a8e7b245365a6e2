"""BM25 over a corpus, by the bm25s library: all scores are computed when the index is built, and read from disk by queries."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vlmrl.retrieval.base import LONGEST_QUERY, Hit, index_folder
from vlmrl.retrieval.corpus import Corpus, Ranking
from vlmrl.utils.require import import_extra

FEW = 32  # up to this count, finding the maxima one by one is faster than partitioning all scores


class Bm25:
    """Ranks passages by the words they share with a query, rare words first. Processes share the memory-mapped index.

    The defaults of ``k1`` and ``b`` are Pyserini's for Wikipedia passages. Words are runs of two or more letters, in lower case,
    without stemming. ``stopwords`` is a language of bm25s, or ``""`` to keep all words.
    """

    name = "bm25"

    def __init__(self, corpus: Corpus, k1: float = 0.9, b: float = 0.4, stopwords: str = "en") -> None:
        self.corpus = corpus
        self.passages: int | None = len(corpus)
        self._bm25s: Any = import_extra("bm25s", "search")
        self._stopwords = stopwords or None

        def build_index(folder: Path) -> None:
            index = self._bm25s.BM25(k1=k1, b=b)
            words = self._words(list(corpus.texts()), as_ids=True)
            if not any(words.ids):
                raise ValueError(f"corpus {corpus.name} must have words of two letters or more beside stopwords.")
            index.index(words, show_progress=False)
            index.save(folder)

        made_from = (corpus.digest(), k1, b, stopwords, self._bm25s.__version__)
        self._index = self._bm25s.BM25.load(index_folder(self.name, made_from, build_index), mmap=True)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        words_of_each = self._words([query[:LONGEST_QUERY] for query in queries], as_ids=False)
        return self.corpus.hits([self._rank(words, topk) for words in words_of_each])

    def _rank(self, words: list[str], topk: int) -> Ranking:
        if not words:
            return []
        scores = self._index.get_scores(words)
        return [(index, float(scores[index])) for index in best(scores, topk) if scores[index] > 0]

    def _words(self, texts: list[str], as_ids: bool) -> Any:
        return self._bm25s.tokenize(texts, stopwords=self._stopwords, return_ids=as_ids, show_progress=False)


def best(scores: np.ndarray[Any, Any], count: int) -> list[int]:
    """The indices of the ``count`` highest scores, best first; equal scores in order of index."""
    count = min(count, len(scores))
    if count > FEW:
        threshold = np.partition(scores, -count)[-count]
        indices = np.flatnonzero(scores >= threshold)
        return indices[np.argsort(-scores[indices], kind="stable")][:count].tolist()
    left, found = scores.copy(), []
    for _ in range(count):
        found.append(int(left.argmax()))
        left[found[-1]] = -np.inf
    return found
