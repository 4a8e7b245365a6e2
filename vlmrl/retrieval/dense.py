"""Dense retrieval: passages and queries as vectors of a sentence-transformers model, compared exactly by FAISS."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from rich.progress import track

from vlmrl.retrieval.base import LONGEST_QUERY, Hit, index_folder
from vlmrl.retrieval.corpus import Corpus
from vlmrl.utils.require import import_extra, require

CHUNK = 4096  # passages encoded at a time while the index is built
_UNIT_LENGTH = {"normalize_embeddings": True, "show_progress_bar": False}


class Dense:
    """Ranks passages by the cosine of their vectors with the query's. ``model`` is a hub name or a folder.

    Set the prefixes for models that were trained with them and do not store them, such as e5's ``query: `` and ``passage: ``.
    Not thread-safe: wrap it in a :class:`~vlmrl.retrieval.base.BatchingRetriever`.
    """

    name = "dense"

    def __init__(self, corpus: Corpus, model: str, query_prefix: str = "", passage_prefix: str = "") -> None:
        self.corpus = corpus
        self.passages: int | None = len(corpus)
        self._faiss: Any = import_extra("faiss", "dense")
        library = import_extra("sentence_transformers", "dense")
        rule = "6 or newer, since older ones run code of the model's folder (pip install -U 'vlmrl[dense]')"
        version = library.__version__
        require(int(version.partition(".")[0]) >= 6, "the version of sentence-transformers", rule, version)
        self._model: Any = library.SentenceTransformer(model)
        self._query_prefix, self._passage_prefix = query_prefix or None, passage_prefix or None
        made_from = (corpus.digest(), model, passage_prefix, *_digests(Path(model)))
        folder = index_folder(self.name, made_from, self._build_index)
        self._index = self._faiss.read_index(str(folder / "flat.faiss"), self._faiss.IO_FLAG_MMAP_IFC)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        vectors = self._model.encode_query(
            [query[:LONGEST_QUERY] for query in queries], prompt=self._query_prefix, **_UNIT_LENGTH
        )
        scores, indices = self._index.search(vectors, min(topk, len(self.corpus)))
        rows = zip(indices.tolist(), scores.tolist(), strict=True)
        return self.corpus.hits([list(zip(*row, strict=True)) for row in rows])

    def _build_index(self, folder: Path) -> None:
        index: Any = None
        texts = self.corpus.texts()
        for _ in track(range(0, len(self.corpus), CHUNK), f"encoding {len(self.corpus)} passages", transient=True):
            passages = list(islice(texts, CHUNK))
            vectors = self._model.encode_document(passages, prompt=self._passage_prefix, **_UNIT_LENGTH)
            index = index or self._faiss.IndexFlatIP(vectors.shape[1])
            index.add(vectors)
        self._faiss.write_index(index, str(folder / "flat.faiss"))


def _digests(folder: Path) -> Iterator[tuple[str, str]]:
    """The files of an encoder's folder, whose weights may be other ones than when an index was built; none of a hub name."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                yield str(path.relative_to(folder)), hashlib.file_digest(file, "blake2b").hexdigest()
