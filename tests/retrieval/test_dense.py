"""The dense retriever with a model of four words, whose vectors are written by hand."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from vlmrl import retrieval

sentence_transformers = pytest.importorskip("sentence_transformers", reason="needs vlmrl[dense]")
pytest.importorskip("faiss", reason="needs vlmrl[dense]")

VECTORS = {"[UNK]": [0.0, 0.1], "cat": [1.0, 0.0], "kitten": [0.9, 0.1], "car": [0.0, 1.0], "find:": [0.0, 9.0]}


@pytest.fixture
def encoder(tmp_path):
    return save_encoder(tmp_path / "encoder", VECTORS)


def save_encoder(folder, vectors):
    """A folder in sentence-transformers' form: a text's vector is the mean of its words'."""
    from sentence_transformers.models import StaticEmbedding

    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(vectors)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    module = StaticEmbedding(words, embedding_weights=np.array(list(vectors.values()), dtype=np.float32))
    sentence_transformers.SentenceTransformer(modules=[module], device="cpu").save(str(folder))
    return str(folder)


def test_passages_are_found_by_meaning_without_a_common_word(tmp_path, encoder, monkeypatch):
    monkeypatch.setenv("VLMRL_CACHE", str(tmp_path / "cache"))
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"id": word, "text": word}) + "\n" for word in ("car", "kitten")))
    retriever = retrieval.open_retriever("dense", str(corpus), encoder=encoder)
    (hits,) = retriever.search(["cat"], topk=5)
    assert [hit.passage.id for hit in hits] == ["kitten", "car"]
    assert [round(hit.score, 3) for hit in hits] == [round(0.9 / 0.82**0.5, 3), 0.0]
    assert retriever.passages == 2

    (folder,) = (tmp_path / "cache/retrieval").iterdir()
    made = (folder / "flat.faiss").stat().st_mtime_ns
    prefixed = retrieval.open_retriever("dense", str(corpus), encoder=encoder, query_prefix="find: ")
    assert prefixed.search(["cat"], topk=1)[0][0].passage.id == "car"  # the prefix is read
    assert (folder / "flat.faiss").stat().st_mtime_ns == made


def test_an_encoder_of_other_weights_in_the_same_folder_gets_an_index_of_its_own(tmp_path, encoder, monkeypatch):
    """Its queries were compared with the vectors that the encoder before it had made of the passages."""
    monkeypatch.setenv("VLMRL_CACHE", str(tmp_path / "cache"))
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"id": word, "text": word}) + "\n" for word in ("car", "kitten")))
    found = []
    for vectors in (VECTORS, VECTORS | {"cat": [0.0, 1.0], "kitten": [0.0, 1.0], "car": [1.0, 0.0]}):
        save_encoder(encoder, vectors)
        retriever = retrieval.open_retriever("dense", str(corpus), encoder=encoder)
        found.append(retriever.search(["cat"], topk=1)[0][0].passage.id)
    assert found == ["kitten", "kitten"]


def test_code_in_an_encoders_folder_is_not_run(tmp_path):
    marker, folder = tmp_path / "code-has-run", tmp_path / "encoder"
    folder.mkdir()
    (folder / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": "", "type": "own.Module"}]))
    (folder / "own.py").write_text(f"import os\nos.makedirs({str(marker)!r})\n")
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"text": "cat"}))
    with pytest.raises(ValueError, match=r"custom code|sentence-transformers must be 6 or newer"):
        retrieval.open_retriever("dense", str(tmp_path / "corpus.jsonl"), encoder=str(folder))
    assert not marker.exists()
