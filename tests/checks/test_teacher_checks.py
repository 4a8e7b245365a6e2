"""Planted faults of a teacher: one that does not see, one with another tokenizer, and settings that cannot be meant."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial

import pytest
from PIL import Image

from vlmrl.checks.image_swap import ImageSwapError
from vlmrl.checks.teacher_check import check_reader, check_teacher_images
from vlmrl.config import Algo, Config, Model, Optim, Rollout, Teacher
from vlmrl.model.loading import load_model, load_reader
from vlmrl.multimodal.pixels import ArrayPixels
from vlmrl.train.trainer import Trainer, TrainerSpec
from vlmrl.types import Sample


def test_a_blind_teacher_is_found_and_one_that_sees_passes(qwen3_vl, monkeypatch):
    model = load_model(Model(path=str(qwen3_vl), device="cpu"), qwen3_vl.parent, seed=0)
    store, pad = model.new_store(), model.policy.image_token_id
    item = store.load(Image.new("RGB", (64, 64), "red"))
    seen = Sample([1, *[pad] * item.num_tokens, 2], [3, 4], [1, 1], None, [0, 0], "g", "t", True, "stop", [item])
    sample = replace(seen, prompt_token_ids=[1, 2], media=[], teacher_rows=[seen])
    spec = TrainerSpec(Algo(), Optim(), 1, 1000, teacher=Teacher(model="elsewhere"))
    trainer = Trainer(model.policy, spec, teacher=model.policy.frozen_copy())
    score = partial(trainer.score, by_teacher=True)
    assert check_teacher_images(score, store, [sample], pad) > 1e-3
    assert check_teacher_images(score, store, [replace(sample, teacher_rows=[])], pad) is None
    encode = trainer.teacher.model.encode_images
    black = lambda item: replace(item, pixels=ArrayPixels(item.pixels.read() * 0))  # noqa: E731
    monkeypatch.setattr(trainer.teacher.model, "encode_images", lambda images: encode([black(i) for i in images]))
    with pytest.raises(ImageSwapError, match=r"trajectory t, the teacher's image 0 .* changed by .* nats.*is blind"):
        check_teacher_images(score, store, [sample], pad)


def test_another_tokenizer_or_family_is_refused_by_name(qwen3_vl, qwen2_5_vl, tmp_path):
    reader = partial(load_reader, cache_dir=tmp_path)
    mine = reader(Model(path=str(qwen3_vl)))
    check_reader(mine, reader(Model(path=str(qwen3_vl))))
    with pytest.raises(ValueError, match=r"its model family must be that of .*: Qwen25VL there and Qwen3VL here"):
        check_reader(mine, reader(Model(path=str(qwen2_5_vl))))
    other = tmp_path / "other"
    shutil.copytree(qwen3_vl, other)
    theirs = reader(Model(path=str(other)))
    theirs.tokenizer.add_tokens(["<new>"], special_tokens=True)
    theirs.tokenizer.save_pretrained(other)
    with pytest.raises(ValueError, match=r"vocabulary must be that of .*: '<new>' is \d+ there and None here"):
        check_reader(mine, reader(Model(path=str(other))))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (lambda: Config(teacher=Teacher(model="self")), r"teacher\.sees must be set with teacher\.model self"),
        (lambda: Teacher(model="http://host:8000"), r"teacher\.model must be .*servers as PROGRAM:URL, but"),
        (lambda: Teacher(model="vllm:http://host:8000"), r"teacher\.top_k must be set with servers"),
        (
            lambda: Config(
                rollout=Rollout(temperature=0.7), teacher=Teacher(model="sglang:https://host:1", loss="sampled")
            ),
            r"rollout\.temperature must be 1 with servers as the teacher",
        ),
        (lambda: Teacher(sees="a.py:b"), r"teacher\.sees must be unset without teacher\.model"),
        (lambda: Teacher(model="m", loss="sampled", top_k=5), r"teacher\.top_k must be unset"),
        (lambda: Config(algo=Algo(advantage="none")), r"teacher\.model must be set with algo\.advantage none"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        settings()
