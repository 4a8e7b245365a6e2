"""The ``config.json`` and the model of somebody else's run: read as they are, or refused by name."""

from __future__ import annotations

import os

import pytest

from vlmrl import Config
from vlmrl.config.saved import from_plain, read_settings
from vlmrl.run.model_export import export_model


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": 5}, "model must be an object, but it is 5"),
        ({"model": []}, "model must be an object"),
        ({"mixture": {"a": None}}, "mixture.a must be an object"),
        ({"mixture": 5}, "mixture must be of the type"),
        ({"algo": {"corrections": 5}}, "algo.corrections must be"),
        ({"optim": {"lr": "abc"}}, "optim.lr must be of the type float"),
        ({"optim": {"lr": {}}}, "optim.lr must be of the type float"),
        ({"seed": -1}, "seed must be from 0"),
    ],
)
def test_a_wrong_type_in_a_runs_settings_is_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        from_plain(Config, settings)


def test_neither_a_pipe_nor_a_device_is_read_as_settings(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    assert read_settings(tmp_path) is None
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").symlink_to("/dev/zero")
    assert read_settings(tmp_path) is None


@pytest.mark.parametrize("put", [os.mkfifo, lambda path: path.symlink_to(__file__)])
def test_an_export_publishes_no_file_from_outside_of_the_models_folder(put, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen2"}')
    (model / "model.safetensors").write_bytes(b"x")
    export_model(model, str(tmp_path / "first"))
    put(model / "notes.txt")
    with pytest.raises(ValueError, match=r"notes\.txt must be a regular file"):
        export_model(model, str(tmp_path / "second"))
    assert not (tmp_path / "second").exists()
