"""datasets/search.py from local files: the rows that envs/search reads."""

import json
from pathlib import Path

import datasets as hf
import pytest

from vlmrl.config import Data
from vlmrl.config.code import load_object
from vlmrl.data import load_tasks
from vlmrl.retrieval import load_corpus

SCRIPT = Path(__file__).parents[2] / "datasets/search.py"
prepare = load_object(f"{SCRIPT}:prepare")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(hf.config, "HF_DATASETS_CACHE", tmp_path / "hf_cache")


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_questions_and_passages_become_tasks_and_a_corpus(tmp_path):
    rows = [{"id": f"q{n}", "dataset": "nq_qed", "question": f"Who is {n}?", "answers": [str(n)]} for n in range(40)]
    rows[1] |= {"gold_passages": ["p"]}
    rows += [{"id": "m", "dataset": "musique", "question": "Left out?", "answers": ["yes"]}]
    source = write(tmp_path / "questions.jsonl", rows)
    corpus = write(tmp_path / "corpus.jsonl", [{"id": "p", "contents": '"One"\nIt is 1.'}])
    counts = prepare(tmp_path / "out", source, corpus)
    assert counts["train"] + counts["validation"] == 40 and counts["validation"] > 0 and counts["corpus"] == 1

    made = [load_tasks(Data(path=str(tmp_path / f"out/{split}.parquet"))) for split in ("train", "validation")]
    tasks = {tasks[index].data["id"]: tasks[index] for tasks in made for index in range(len(tasks))}
    assert set(tasks) == {f"q{n}" for n in range(40)}  # each in one split, none lost
    one = tasks["q1"]
    assert one.prompt == [{"role": "user", "content": "Who is 1?"}] and one.answer == ["1"]
    assert one.data["gold_passages"] == ["p"] and tasks["q2"].data["gold_passages"] == []
    passage = load_corpus(str(tmp_path / "out/corpus.parquet"))[0]
    assert (passage.id, passage.title, passage.text) == ("p", "One", "It is 1.")


def test_a_corpus_that_was_edited_is_read_again(tmp_path):
    """Hugging Face's cache would give the passages that a file of this name had before."""
    source = write(tmp_path / "q.jsonl", [{"question": f"What is {n}?", "answer": "red"} for n in range(40)])
    for texts in (["It is 1."], ["It is 2.", "It is 3."]):
        corpus = write(tmp_path / "corpus.jsonl", [{"text": text} for text in texts])
        assert prepare(tmp_path / "out", source, corpus)["corpus"] == len(texts)
        assert [passage.text for passage in load_corpus(str(tmp_path / "out/corpus.parquet"))] == texts
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        f"{name}.parquet" for name in ("train", "validation", "corpus")
    }


@pytest.mark.parametrize("answers", [{"golden_answers": ["red"]}, {"answer": "red"}])
def test_answers_under_the_fields_other_names_are_found(tmp_path, answers):
    rows = [{"question": f"What is {n}?", **answers} for n in range(40)]
    prepare(tmp_path, write(tmp_path / "q.jsonl", rows), "none")
    assert load_tasks(Data(path=str(tmp_path / "train.parquet")))[0].answer == ["red"]
    assert not (tmp_path / "corpus.parquet").exists()


@pytest.mark.parametrize("answers", [{"text": ["red"], "answer_start": [3]}, {"value": "red", "aliases": []}, [7]])
def test_answers_of_another_form_are_an_error(tmp_path, answers):
    """As SQuAD's: the names of the fields were the right answers."""
    rows = [{"question": f"What is {n}?", "answers": answers} for n in range(9)]
    with pytest.raises(SystemExit, match="the answer must be a text or a list of texts, but it is"):
        prepare(tmp_path, write(tmp_path / "q.jsonl", rows), "none")


def test_a_missing_column_is_an_error(tmp_path):
    with pytest.raises(SystemExit, match="no answers, golden_answers or answer in the row"):
        prepare(tmp_path, write(tmp_path / "q.jsonl", [{"question": f"{n}?"} for n in range(9)]), "none")
    source = write(tmp_path / "q.jsonl", [{"question": "a?", "answer": "b", "dataset": "nq"}])
    with pytest.raises(SystemExit, match="has no rows of musique for train"):
        prepare(tmp_path, source, "none", ("musique",))
