"""The ``config.json`` and the model of somebody else's run: read as they are, or refused by name."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest

from vlmrl import Config
from vlmrl.config.saved import SavedRun, from_plain, read_settings
from vlmrl.model.loading import chat_template_text
from vlmrl.run import model_export
from vlmrl.run.eval_program import resolve_eval_models
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


@pytest.mark.parametrize("name", ["model", "model/vocab.txt", "model/sub", "model/sub/notes.txt"])
def test_a_link_that_takes_the_place_of_a_file_after_the_look_at_it_is_not_exported(name, tmp_path, monkeypatch):
    """Who owns the run's folder sees, by inotify, when the first file is read."""
    run, private = tmp_path / "run", tmp_path / "private"
    for folder in (run, private):
        (folder / "model/sub").mkdir(parents=True)
        (folder / "model/config.json").write_text('{"model_type": "qwen2"}')
        (folder / "model/vocab.txt").write_text(folder.name)
        (folder / "model/sub/notes.txt").write_text(folder.name)

    def replace_after_look(folder):
        (run / name).rename(tmp_path / "aside")
        (run / name).symlink_to(private / name)

    monkeypatch.setattr(model_export, "_check_own_files", replace_after_look)
    with pytest.raises((ValueError, NotADirectoryError)):
        export_model(run, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_an_export_publishes_no_folder_that_a_run_links_to(tmp_path):
    private = tmp_path / "private"
    private.mkdir()
    (private / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "run").mkdir()
    (tmp_path / "run/model").symlink_to(private)
    with pytest.raises(
        ValueError, match=r"run/model must be a folder of the run, but a link leads from there to .*private"
    ):
        export_model(tmp_path / "run", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("link", ["checkpoints", "checkpoints/step000001", "checkpoints/step000001/trainer"])
def test_an_export_publishes_no_checkpoint_that_a_run_links_to(link, tmp_path):
    run, private = tmp_path / "run", tmp_path / "private"
    (private / "checkpoints/step000001/trainer").mkdir(parents=True)
    (private / "checkpoints/step000001/run.json").write_text("{}")
    shutil.copytree(private, run)
    shutil.rmtree(run / link)
    (run / link).symlink_to(private / link)
    with pytest.raises(ValueError, match=r"but (a link leads from there to .*private|it is a link)"):
        export_model(run, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("use", [export_model, lambda run, out: resolve_eval_models([str(run)], Config())])
def test_a_pipe_is_not_read_to_find_the_weights_that_a_run_wrote_last(use, tmp_path):
    """`vlmrl export` and `vlmrl eval` waited for a writer, and read a link to /dev/zero until no memory was left."""
    run = tmp_path / "run"
    for folder in ("model", "checkpoints/step000001/trainer"):
        (run / folder).mkdir(parents=True)
    (run / "model/config.json").write_text('{"model_type": "qwen2"}')
    (run / "config.json").write_text('{"model": {}, "rollout": {}, "train": {}}')
    (run / "saved.json").write_text('{"model": []}')
    pipe = run / "checkpoints/step000001/run.json"
    os.mkfifo(pipe)
    # It writes nothing, and lets a reader go on that waits for it.
    threading.Thread(target=lambda: os.close(os.open(pipe, os.O_WRONLY)), daemon=True).start()
    with pytest.raises(ValueError, match=r"run\.json must be a file, but it is a pipe"):
        use(run, str(tmp_path / "out"))


@pytest.mark.parametrize("name", ["id_rsa", "link.jinja"])
def test_a_runs_settings_name_no_other_file_than_a_template(name, tmp_path):
    """An export writes it into the model, and an evaluation shows it to the policy."""
    (tmp_path / "id_rsa").write_text("secret")
    (tmp_path / "link.jinja").symlink_to(tmp_path / "id_rsa")
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    with pytest.raises(
        ValueError, match=r"model\.chat_template must be a file NAME\.jinja .*id_rsa is not named NAME\.jinja"
    ):
        chat_template_text(str(tmp_path / name))
    assert chat_template_text(str(tmp_path / "own.jinja")) == "{{ messages }}"


def test_the_seed_of_a_runs_settings_is_a_number():
    for settings in ({}, {"seed": "x"}, {"seed": -1}):
        with pytest.raises(ValueError, match="seed must be a whole number"):
            _ = SavedRun(Path(), settings).seed
    assert SavedRun(Path(), {"seed": 3}).seed == 3


def test_a_pipe_is_not_read_as_a_chat_template(tmp_path):
    os.mkfifo(tmp_path / "a.jinja")
    with pytest.raises(ValueError, match=r"a\.jinja is no regular file"):
        chat_template_text(str(tmp_path / "a.jinja"))
