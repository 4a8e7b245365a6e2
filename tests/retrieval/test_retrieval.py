"""Corpora, indices and retrievers on a handful of passages, by hand."""

import json
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from vlmrl import retrieval
from vlmrl.retrieval.base import LONGEST_QUERY, BatchingRetriever, EmptyRetriever, Hit, Passage
from vlmrl.retrieval.bm25 import Bm25, best
from vlmrl.retrieval.corpus import load_corpus

ROWS = [
    {"id": "p", "title": "Paris", "text": "Paris is the capital of France, on the Seine."},
    {"id": "r", "title": "Rome", "text": "Rome is the capital of Italy."},
    {"id": "n", "title": "Nile", "text": "The Nile is a river in Africa."},
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of this test's own."""
    monkeypatch.setenv("VLMRL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache/retrieval"


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def corpus(tmp_path):
    return write(tmp_path / "corpus.jsonl", ROWS)


def ids(hits):
    return [hit.passage.id for hit in hits]


def test_titles_are_searched_and_passages_without_a_word_of_the_query_are_not_found(corpus):
    retriever = retrieval.open_retriever("bm25", corpus)
    found = retriever.search(["What is the capital of France?", "nile", "quantum", "", "?!"], topk=2)
    assert [ids(hits) for hits in found] == [["p", "r"], ["n"], [], [], []]
    assert found[0][0].passage == Passage("p", "Paris", "Paris is the capital of France, on the Seine.")
    assert found[0][0].score > found[0][1].score > 0 and retriever.passages == 3


def test_of_a_query_the_first_characters_are_searched(corpus):
    """15 MB of words held a thread for 50 seconds."""
    retriever = retrieval.open_retriever("bm25", corpus)
    long = "x " * (LONGEST_QUERY // 2)
    assert ids(retriever.search(["capital " + long + "nile"], 3)[0]) == ["r", "p"]


def test_topk_may_exceed_the_number_of_passages(corpus):
    assert ids(retrieval.open_retriever("bm25", corpus).search(["capital river"], topk=50)[0]) == ["n", "r", "p"]


@pytest.mark.parametrize("count", [3, 40])
def test_best_returns_the_highest_scores_and_the_earlier_of_equal_ones(count):
    scores = np.array([0.5, 2.0, 1.0, 2.0] + [1.0] * 60, dtype=np.float32)
    assert best(scores, count) == [1, 3, 2, *range(4, 64)][:count]
    assert scores[1] == 2.0


def test_an_index_is_built_once_per_corpus_and_setting(corpus, cache, tmp_path):
    first = Bm25(load_corpus(corpus))
    (folder,) = cache.iterdir()
    stamp = (folder / "params.index.json").stat().st_mtime_ns
    assert ids(Bm25(load_corpus(corpus)).search(["France"], 1)[0]) == ["p"]
    assert [folder] == list(cache.iterdir()) and (folder / "params.index.json").stat().st_mtime_ns == stamp
    assert isinstance(first._index.scores["data"], np.memmap)

    same = write(tmp_path / "copy.jsonl", ROWS)
    Bm25(load_corpus(same))
    assert len(list(cache.iterdir())) == 1  # it is the content that counts
    Bm25(load_corpus(corpus), b=0.75)
    assert len(list(cache.iterdir())) == 2
    changed = write(tmp_path / "corpus.jsonl", [*ROWS[:2], {**ROWS[2], "text": "It flows."}])
    assert ids(retrieval.open_retriever("bm25", changed).search(["flows"], 3)[0]) == ["n"]
    assert len(list(cache.iterdir())) == 3


def test_contents_hold_the_title_in_their_first_line(tmp_path):
    rows = [{"id": "7", "contents": '"Paris"\nParis is a city.\nIt is old.'}, {"id": "8", "contents": "no title"}]
    corpus = load_corpus(write(tmp_path / "wiki.jsonl", rows))
    assert corpus[0] == Passage("7", "Paris", "Paris is a city.\nIt is old.")
    assert next(iter(corpus.texts())) == "Paris\nParis is a city.\nIt is old."


def test_rows_may_come_from_a_function_and_need_no_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def rows():\n    return [{'text': 'red'}, {'text': 'blue'}]\n")
    retriever = retrieval.open_retriever("bm25", "mine.py:rows")
    assert [hit.passage for hit in retriever.search(["blue"], 3)[0]] == [Passage("1", "", "blue")]


def test_images_are_found_beside_the_corpus(tmp_path):
    (tmp_path / "images").mkdir()
    Image.new("RGB", (8, 8), "red").save(tmp_path / "images/red.png")
    rows = [{"text": "a red square", "image": "images/red.png"}, {"text": "nothing to see", "image": None}]
    corpus = load_corpus(write(tmp_path / "corpus.jsonl", rows))
    assert corpus[0].image == str(tmp_path / "images/red.png") and corpus[1].image is None


def test_images_inside_a_parquet_file_stay_encoded(tmp_path):
    import datasets as hf

    features = hf.Features({"text": hf.Value("string"), "image": hf.Image()})
    rows = [{"text": "a red square", "image": Image.new("RGB", (8, 8), "red")}]
    hf.Dataset.from_list(rows, features=features).to_parquet(tmp_path / "corpus.parquet")
    image = load_corpus(str(tmp_path / "corpus.parquet"))[0].image
    assert isinstance(image, bytes) and image.startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": 5}, r"corpus .*, row 0: text must be a text, but it is 5"),
        ({"text": "Paris", "title": ["a"]}, r"corpus .*, row 0: title must be a text"),
        ({"text": None}, r"corpus .* must have words of two letters"),
        ({"text": "the"}, r"corpus .* must have words of two letters"),
    ],
)
def test_a_corpus_that_cannot_be_searched_is_refused(tmp_path, monkeypatch, row, message):
    monkeypatch.setenv("VLMRL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "corpus.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=message):
        retrieval.open_retriever("bm25", str(tmp_path / "corpus.jsonl"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"retriever": "elastic"}, "retriever must be bm25, dense, nothing or the address of a server"),
        ({"retriever": "bm25"}, "corpus must be set for the retriever bm25"),
        ({"corpus": "missing.jsonl"}, "corpus 'missing.jsonl' does not exist"),
        ({"retriever": "dense", "corpus": "GOOD"}, "encoder must be set for the retriever dense"),
        ({"corpus": "BAD"}, "must have a column text or contents, but its columns are: words"),
        ({"corpus": "EMPTY"}, "returned no rows"),
    ],
)
def test_wrong_settings_are_errors_that_say_what_is_wrong(tmp_path, monkeypatch, settings, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def rows():\n    return []\n")
    made = {"GOOD": ROWS, "BAD": [{"words": "a"}]}
    if (name := settings.get("corpus")) in made:
        settings = {**settings, "corpus": write(tmp_path / f"{name}.jsonl", made[name])}
    if name == "EMPTY":
        settings = {**settings, "corpus": "mine.py:rows"}
    with pytest.raises(ValueError, match="(?s)" + message.replace("(", r"\(")):
        retrieval.open_retriever(**settings)


def test_a_package_that_is_not_installed_is_named_with_its_extra(corpus, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(ValueError, match=r"bm25s is not installed.*pip install 'vlmrl\[search\]'"):
        retrieval.open_retriever("bm25", corpus)


def test_the_empty_retriever_finds_nothing():
    assert retrieval.open_retriever("nothing").search(["a", "b"], 3) == [[], []]


class Slow(EmptyRetriever):
    """Takes its time over the first batch; says each query back."""

    def __init__(self):
        self.batches, self.go = [], threading.Event()

    def search(self, queries, topk):
        self.batches.append((list(queries), topk))
        if len(self.batches) == 1:
            assert self.go.wait(600)
        if "bad" in queries:
            raise RuntimeError("no such thing")
        return [[Hit(Passage(query, "", ""), float(rank)) for rank in range(topk)] for query in queries]


def ask(retriever, queries, topk, answers):
    def run():
        try:
            answers[queries[0]] = [ids(hits) for hits in retriever.search(queries, topk)]
        except RuntimeError as error:
            answers[queries[0]] = str(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_waiting_queries_are_answered_in_one_batch(monkeypatch):
    slow, answers = Slow(), {}
    retriever = BatchingRetriever(slow, max_batch=3)
    threads = [ask(retriever, ["a"], 1, answers)]
    while not slow.batches:
        threading.Event().wait(0.01)
    for queries, topk in ((["b"], 1), (["c", "d"], 2), (["bad"], 1)):
        threads.append(ask(retriever, queries, topk, answers))
        while retriever._requests.qsize() < len(threads) - 1:
            threading.Event().wait(0.01)
    slow.go.set()
    for thread in threads:
        thread.join(600)
    # those for other numbers of hits apart: else one client's many would be found for all
    assert slow.batches == [(["a"], 1), (["b"], 1), (["c", "d"], 2), (["bad"], 1)]
    assert answers == {"a": [["a"]], "b": [["b"]], "c": [["c", "c"], ["d", "d"]], "bad": "no such thing"}


def test_a_caller_with_many_queries_does_not_make_others_wait_for_all():
    """1,000 queries of one client held up all others of a retriever's server for 11 s, with 20,000 passages."""
    slow, answers = Slow(), {}
    retriever = BatchingRetriever(slow, max_batch=3)
    many = ask(retriever, list("abcdefghi"), 1, answers)
    while not slow.batches:
        threading.Event().wait(0.01)
    few = ask(retriever, ["few"], 1, answers)
    while retriever._requests.empty():
        threading.Event().wait(0.01)
    slow.go.set()
    for thread in (many, few):
        thread.join(600)
    assert [queries for queries, _ in slow.batches[:2]] == [list("abc"), ["few", *"def"]]
    assert answers == {"a": [[letter] for letter in "abcdefghi"], "few": [["few"]]}


def test_the_documents_example_runs(corpus, tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs/search.md").read_text()
    monkeypatch.chdir(tmp_path)
    exec(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0], {})
    assert capsys.readouterr().out.startswith("Paris Paris is the capital of France")


def test_a_library_of_encoders_that_runs_code_of_their_folders_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", SimpleNamespace(__version__="5.4.1"))
    monkeypatch.setitem(sys.modules, "faiss", SimpleNamespace())
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"text": "cat"}))
    with pytest.raises(ValueError, match=r"sentence-transformers must be 6 or newer, .* but it is '5\.4\.1'"):
        retrieval.open_retriever("dense", str(tmp_path / "corpus.jsonl"), encoder=str(tmp_path))
