"""Prepare questions and a corpus for envs/search: ``train.parquet``, ``validation.parquet`` and ``corpus.parquet``.

    python datasets/search.py --out data/search                                         # NQ and HotpotQA, from the hub
    python datasets/search.py --out data/search --source questions.jsonl --corpus corpus.jsonl

The hub's versions are FlashRAG's questions (Jin et al. 2024, arXiv 2405.13576) and Search-R1's Wikipedia of 2018, 21 million passages:
14 GB. ``--corpus none`` prepares no corpus, if a server has it already. Every tenth question of a file is held out.

A row has ``prompt`` (the question), ``answer`` (all right texts), ``id``, ``dataset`` and ``gold_passages`` (empty if not known). A
passage has ``id``, ``title`` and ``text``; images are not kept.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets as hf  # Hugging Face's: this folder has no __init__.py and is no package
import tyro

from vlmrl.retrieval import load_corpus

HUB = "RUC-NLPIR/FlashRAG_datasets"
WIKIPEDIA = "PeterJinGo/wiki-18-corpus"
SPLITS = {"train": {"nq": "train", "hotpotqa": "train"}, "validation": {"nq": "test", "hotpotqa": "dev"}}
TEXT, TEXTS = hf.Value("string"), hf.List(hf.Value("string"))
FEATURES = hf.Features({"id": TEXT, "prompt": TEXT, "answer": TEXTS, "dataset": TEXT, "gold_passages": TEXTS})

Row = dict[str, Any]


def prepare(
    out: Path, source: str = HUB, corpus: str = WIKIPEDIA, sets: tuple[str, ...] = ("nq", "hotpotqa")
) -> dict[str, int]:
    """Write questions and corpus, and print and return the number of rows of each file.

    Args:
        out: The folder to write to.
        source: A hub name with one configuration for each set, or a jsonl file of questions.
        corpus: A hub name or a file of passages, or none.
        sets: Names of question sets; of a file, rows whose dataset begins with one of them.
    """
    out.mkdir(parents=True, exist_ok=True)
    counts = {}
    for split in SPLITS:
        read = from_file(Path(source), sets, split) if source.endswith(".jsonl") else from_hub(source, sets, split)
        rows = [finished(row) for row in read]
        if not rows:
            raise SystemExit(f"{source} has no rows of {', '.join(sets)} for {split}")
        hf.Dataset.from_list(rows, features=FEATURES).to_parquet(out / f"{split}.parquet")
        counts[split] = len(rows)
    if corpus != "none":
        # The shared cache would give the passages that a file of this name had before.
        with TemporaryDirectory(prefix=".", dir=out) as cache:
            passages = hf.Dataset.from_generator(passages_of, gen_kwargs={"corpus": corpus}, cache_dir=cache)
            passages.to_parquet(out / "corpus.parquet")
            counts["corpus"] = len(passages)
            del passages  # it maps the cache's files
    for name, count in counts.items():
        print(f"{out / name}.parquet: {count} rows")
    return counts


def from_hub(name: str, sets: tuple[str, ...], split: str) -> Iterator[Row]:
    for chosen in sets:
        if chosen not in SPLITS[split]:
            raise SystemExit(f"sets must be of {', '.join(SPLITS[split])}, but one is {chosen!r}")
        for row in hf.load_dataset(name, chosen, split=SPLITS[split][chosen]):
            yield {**row, "dataset": chosen}


def from_file(path: Path, sets: tuple[str, ...], split: str) -> Iterator[Row]:
    """The file's rows of this split. A row's split depends only on its id, or on its question if it has no id."""
    with path.open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            held_out = zlib.crc32(str(row.get("id") or row["question"]).encode()) % 10 == 0
            if held_out == (split == "validation") and str(row.get("dataset", sets[0])).startswith(sets):
                yield row


def finished(row: Row) -> Row:
    """The row with our column names; its answers are in answers, golden_answers or answer."""
    answer = next((row[key] for key in ("answers", "golden_answers", "answer") if row.get(key)), None)
    if answer is None:
        raise SystemExit(f"no answers, golden_answers or answer in the row {str(row)[:200]}")
    texts = [answer] if isinstance(answer, str) else answer
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise SystemExit(
            f"the answer must be a text or a list of texts, but it is {str(answer)[:100]} in the row {str(row)[:200]}"
        )
    return {
        "id": str(row.get("id", "")),
        "prompt": row["question"],
        "answer": texts,
        "dataset": row.get("dataset", ""),
        "gold_passages": row.get("gold_passages") or [],
    }


def passages_of(corpus: str) -> Iterator[Row]:
    passages = load_corpus(corpus)
    for index in range(len(passages)):
        passage = passages[index]
        yield {"id": passage.id, "title": passage.title, "text": passage.text}


if __name__ == "__main__":
    tyro.cli(prepare)
