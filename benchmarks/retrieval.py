"""Retrieval on real passages: the share of gold passages that are found, and the time of a query under 64 threads.

    python benchmarks/retrieval.py --data ../shared/data/search
    python benchmarks/retrieval.py --data ../shared/data/search --encoder sentence-transformers/all-MiniLM-L6-v2

``--data`` is a folder with ``corpus.jsonl`` (id, title, text) and ``questions.jsonl`` (question, dataset, gold_passages). Each of 64
threads searches without a pause (the worst case), or waits about 100 ms between searches, as for a model's response.
"""

from __future__ import annotations

import json
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

import tyro

from vlmrl.retrieval import HttpRetriever, Retriever, open_retriever


def recall(retriever: Retriever, questions: list[dict], topk: int = 3) -> dict[str, float]:
    """The mean share of a question's gold passages among its first hits, by dataset and over all."""
    shares = defaultdict(list)
    for start in range(0, len(questions), 64):
        batch = questions[start : start + 64]
        for row, hits in zip(batch, retriever.search([row["question"] for row in batch], topk), strict=True):
            gold = set(row["gold_passages"])
            share = len(gold & {hit.passage.id for hit in hits}) / len(gold)
            shares[row["dataset"]].append(share)
            shares["all"].append(share)
    return {name: statistics.fmean(found) for name, found in sorted(shares.items())}


def latency(retriever: Retriever, queries: list[str], threads: int, pause: float, each: int = 40) -> list[float]:
    """Seconds of every query, sorted: ``threads`` ask side by side, waiting ``pause`` seconds, on average, before each."""
    seconds: list[float] = []

    def play(number: int) -> None:
        rng = random.Random(number)
        for turn in range(each):
            time.sleep(pause * 2 * rng.random())
            began = time.perf_counter()
            retriever.search([queries[(number * each + turn) % len(queries)]], 3)
            seconds.append(time.perf_counter() - began)

    playing = [threading.Thread(target=play, args=(number,)) for number in range(threads)]
    for thread in playing:
        thread.start()
    for thread in playing:
        thread.join()
    return sorted(seconds)


def report(name: str, retriever: Retriever, questions: list[dict], threads: int) -> None:
    shares = ", ".join(f"{dataset} {share:.3f}" for dataset, share in recall(retriever, questions).items())
    print(f"{name}: recall@3 {shares}")
    queries = [row["question"] for row in questions]
    for pause in (0.0, 0.1):
        took = latency(retriever, queries, threads, pause)
        median, late = took[len(took) // 2] * 1e3, took[int(len(took) * 0.95)] * 1e3
        kind = "with pauses" if pause else "without a pause"
        print(f"{name}: {threads} threads {kind}: median {median:.1f} ms, 95th percentile {late:.1f} ms", flush=True)


def serve(corpus: Path) -> tuple[subprocess.Popen[str], str]:
    """A server of ours in a process of its own, and its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vlmrl", "retriever", "serve", "--corpus", str(corpus), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process, f"http://127.0.0.1:{port}"


def main(data: Path, encoder: str | None = None, threads: int = 64) -> None:
    """Print recall and latency of BM25 in this process and over HTTP, and of a dense retriever if an encoder is given."""
    corpus = data / "corpus.jsonl"
    with (data / "questions.jsonl").open() as lines:
        questions = [row for row in map(json.loads, lines) if row["gold_passages"]]
    for time_of in ("first", "second"):
        began = time.perf_counter()
        bm25 = open_retriever("bm25", str(corpus))
        print(f"bm25: opened the {time_of} time in {time.perf_counter() - began:.2f} s, {bm25.passages} passages")
    report("bm25", bm25, questions, threads)
    process, address = serve(corpus)
    try:
        report("bm25 over HTTP", HttpRetriever(address), questions, threads)
    finally:
        process.kill()
        process.wait()
    if encoder:
        began = time.perf_counter()
        dense = open_retriever("dense", str(corpus), encoder=encoder)
        print(f"dense: opened in {time.perf_counter() - began:.1f} s")
        report("dense", dense, questions, threads)


if __name__ == "__main__":
    tyro.cli(main)
