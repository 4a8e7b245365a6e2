"""Retrievers with one method, ``search(queries, topk)``: BM25, dense vectors, an HTTP server, or one that finds nothing.

from vlmrl import retrieval

retriever = retrieval.open_retriever("bm25", "corpus.jsonl")
retriever.search(["capital of France"], topk=3)      # [[Hit(Passage("12", "Paris", ...), score=7.1), ...]]
"""

from vlmrl.retrieval.base import Hit, Passage, Retriever, RetrieverError
from vlmrl.retrieval.corpus import Corpus, load_corpus
from vlmrl.retrieval.http_retriever import HttpRetriever
from vlmrl.retrieval.open import open_retriever

__all__ = ["Corpus", "Hit", "HttpRetriever", "Passage", "Retriever", "RetrieverError", "load_corpus", "open_retriever"]
