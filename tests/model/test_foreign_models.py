"""A model's folder that somebody else made: its code is not run, and neither is code that is pickled in its weights."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from testing.runs import short_quickstart

from vlmrl.config import Model
from vlmrl.model import tiny
from vlmrl.model.loading import image_processor_of, largest_image_of, load_model, load_reader, on_host
from vlmrl.model.model_files import load_video_processor
from vlmrl.run.build import build_run, check_saving


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


@pytest.mark.parametrize("known", [True, False])
def test_code_in_a_models_folder_is_not_run(known, qwen3_vl, tmp_path, monkeypatch):
    marker, folder = tmp_path / "code-has-run", copied(qwen3_vl, tmp_path / "model")
    monkeypatch.setattr("builtins.input", lambda *words: pytest.fail("it asks whether to run the code"))
    for name in ("modeling_own", "configuration_own", "processing_own"):
        (folder / f"{name}.py").write_text(f"import os\nos.makedirs({str(marker)!r})\n")
    for name in ("config.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json"):
        path = folder / name
        settings = json.loads(path.read_text()) if path.exists() else {}
        kinds = {
            "AutoConfig": "configuration_own.C",
            "AutoProcessor": "processing_own.P",
            "AutoTokenizer": ["processing_own.T", None],
        }
        models = ("AutoModel", "AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoImageProcessor")
        settings["auto_map"] = kinds | dict.fromkeys(models, "modeling_own.M")
        if name == "config.json" and not known:
            settings["model_type"] = "own"
        path.write_text(json.dumps(settings))
    model = Model(path=str(folder), device="cpu")
    if known:
        assert load_model(model, tmp_path, seed=0).policy is not None
    else:
        with pytest.raises(ValueError, match=r"model\.path .* brings code of its own, which is not run"):
            load_model(model, tmp_path, seed=0)
    assert not marker.exists()


def test_code_that_a_part_of_a_config_names_is_not_run(tmp_path, monkeypatch):
    """transformers makes a part of SmolVLM by its type, and asked about the code of one for which it has no model."""
    monkeypatch.setattr("builtins.input", lambda *words: pytest.fail("it asks whether to run the code"))
    marker, folder = tmp_path / "code-has-run", Path(tiny.build(tmp_path / "model", "smolvlm"))
    (folder / "modeling_own.py").write_text(f"import os\nos.makedirs({str(marker)!r})\n")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= {"model_type": "siglip_text_model", "auto_map": {"AutoModel": f"{folder}--modeling_own.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    for device in ("cpu", "meta"):
        with pytest.raises(ValueError, match=r"Unrecognized configuration class"):
            load_model(Model(path=str(folder), device=device), tmp_path, seed=0)
    assert not marker.exists()


class Code:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("kind", ["image", "video"])
def test_a_processor_that_is_code_is_refused_before_the_training(kind, qwen3_vl, tmp_path, monkeypatch):
    """transformers asks on the terminal whether to run it, and of the video processor at the end: nothing was saved then."""
    folder = copied(qwen3_vl, tmp_path / "model")
    monkeypatch.setattr("builtins.input", lambda *words: pytest.fail("it asks whether to run the code"))
    path = folder / "processor_config.json"
    settings = json.loads(path.read_text())
    settings[f"{kind}_processor"] |= {
        f"{kind}_processor_type": "Own",
        "auto_map": {f"Auto{kind.title()}Processor": "own.P"},
    }
    path.write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="custom code"):
        load_reader(Model(path=str(folder)), tmp_path)


def change(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def change_processor(folder: Path, kind: str, **values: object) -> None:
    settings = json.loads((folder / "processor_config.json").read_text())
    settings[f"{kind}_processor"] |= values
    change(folder / "processor_config.json", **settings)


PRIVATE = {"video_processor_type": "Ernie4_5_VLMoeVideoProcessor", "draw_on_frames": False}


def test_a_processor_saves_no_file_elsewhere(qwen3_vl, tmp_path):
    """Ernie's has a font, whose file was saved with the trained model, and uploaded with it."""
    private, folder = tmp_path / "id_rsa", copied(qwen3_vl, tmp_path / "model")
    private.write_text("a line of a key")
    change_processor(folder, "video", **PRIVATE, font=str(private), size={"shortest_edge": 1, "longest_edge": 2**16})
    with pytest.raises(ValueError, match=r"video_processor_type in its processor_config\.json must be .*'Ernie4_5_VLM"):
        load_reader(Model(path=str(folder)), tmp_path)


def test_a_video_processor_in_a_file_of_its_own_saves_no_file_elsewhere(qwen3_vl, tmp_path):
    folder = copied(qwen3_vl, tmp_path / "model")
    settings = json.loads((folder / "processor_config.json").read_text())
    (folder / "video_preprocessor_config.json").write_text(json.dumps(settings.pop("video_processor") | PRIVATE))
    (folder / "processor_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"video_processor_type in its video_preprocessor_config\.json must be"):
        load_video_processor(str(folder))


SOURCE = {"_auto_class": "AutoConfig", "__module__": "my_rewards"}
UNDER_NO_NAME = {"attribute_map": {"_auto_class": "none"}}
UNDER_OTHER_NAMES = {"attribute_map": {"a": "_auto_class", "b": "__module__"}, "a": "AutoConfig", "b": "my_rewards"}


@pytest.mark.parametrize(
    ("part", "settings"),
    [("", SOURCE), ("", UNDER_OTHER_NAMES), ("", UNDER_NO_NAME), ("image", SOURCE), ("video", SOURCE)],
)
def test_a_model_is_saved_without_source_files_of_this_machine(part, settings, qwen3_vl, tmp_path, monkeypatch):
    """transformers copied the file of whatever module such settings name: a user's own rewards were uploaded with the model."""
    (tmp_path / "my_rewards.py").write_text("KEY = 'private'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "my_rewards", importlib.import_module("my_rewards"))
    folder, saved = copied(qwen3_vl, tmp_path / "model"), tmp_path / "saved"
    if part:
        change_processor(folder, part, **settings)
    else:
        change(folder / "config.json", **settings)
    with suppress(ValueError):
        load_model(Model(path=str(folder)), tmp_path, seed=0).save(saved)
    assert not (saved / "my_rewards.py").exists()
    with pytest.raises(ValueError, match=r"must not have _auto_class"):
        load_model(Model(path=str(folder)), tmp_path, seed=0)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_config_names_no_file_that_is_read_in_its_place(device, qwen3_vl, tmp_path):
    """transformers took the processor's class from it, which was not checked: Ernie's saved a private file with the trained model."""
    folder = copied(qwen3_vl, tmp_path / "model")
    shutil.copy(folder / "config.json", folder / "config.4.0.0.json")
    change(folder / "config.4.0.0.json", **PRIVATE)
    change(folder / "config.json", configuration_files=["config.4.0.0.json"])
    settings = json.loads((folder / "processor_config.json").read_text())
    del settings["video_processor"]["video_processor_type"]
    (folder / "processor_config.json").write_text(json.dumps(settings))
    for load in (load_reader, image_processor_of, largest_image_of):
        with pytest.raises(ValueError, match=r"config\.json must not have configuration_files"):
            load(Model(path=str(folder)), tmp_path)
    with pytest.raises(ValueError, match=r"config\.json must not have configuration_files"):
        load_model(Model(path=str(folder), device=device), tmp_path, seed=0)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("file", "settings"),
    [
        ("config.json", {"distributed_config": "none"}),
        ("config.json", {"save_pretrained": True}),
        ("tokenizer_config.json", {"backend_tokenizer": "tokenizers"}),
    ],
)
def test_what_cannot_be_saved_is_known_before_the_training(file, settings, device, qwen3_vl, tmp_path):
    """transformers takes settings of any name. The trained model could not be saved, at the end of the run."""
    folder = copied(qwen3_vl, tmp_path / "model")
    change(folder / file, **settings)
    loaded = load_model(Model(path=str(folder), device=device), tmp_path, seed=0)
    with pytest.raises(
        ValueError, match=r"model\.path .* saving them failed: \w+: .* Remove what does not belong there"
    ):
        check_saving(loaded)


def test_a_run_tries_what_it_will_save(qwen3_vl, tmp_path):
    folder = copied(qwen3_vl, tmp_path / "model")
    change(folder / "config.json", save_pretrained=True)
    with pytest.raises(ValueError, match=r"model\.path .* saving them failed"):
        build_run(short_quickstart(tmp_path, model=Model(path=str(folder))))


def test_a_full_disk_is_not_the_models_fault(qwen3_vl, tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    loaded = load_model(Model(path=str(qwen3_vl), device="meta"), tmp_path, seed=0)
    monkeypatch.setattr(type(loaded.tokenizer), "save_pretrained", full)
    with pytest.raises(OSError, match="No space left"):
        check_saving(loaded)


def test_an_older_name_of_a_processor_of_another_model_is_refused(qwen3_vl, tmp_path):
    """transformers makes `Idefics3ImageProcessor` of it."""
    folder = copied(qwen3_vl, tmp_path / "model")
    change_processor(folder, "image", feature_extractor_type="Idefics3FeatureExtractor")
    with pytest.raises(ValueError, match=r"feature_extractor_type in its processor_config\.json must be"):
        load_reader(Model(path=str(folder)), tmp_path)


@pytest.mark.parametrize("file", ["processor_config.json", "preprocessor_config.json", "config.json"])
@pytest.mark.parametrize("kind", ["image", "video"])
@pytest.mark.parametrize("name", ["AutoFeatureExtractor", "AutoModelForMaskedLM"])
def test_a_processor_of_a_class_that_asks_whether_to_run_code_is_refused(
    name, kind, file, qwen3_vl, tmp_path, monkeypatch
):
    """Such a class does not pass on that no code is to run: transformers asked on the terminal."""
    marker, folder = tmp_path / "code-has-run", copied(qwen3_vl, tmp_path / "model")
    monkeypatch.setattr("builtins.input", lambda *words: pytest.fail("it asks whether to run the code"))
    (folder / "own.py").write_text(f"import os\nos.makedirs({str(marker)!r})\n")
    change(folder / "config.json", auto_map={"AutoModelForMaskedLM": "own.M"})
    own = {"feature_extractor_type": "Own", "auto_map": {"AutoFeatureExtractor": "own.F"}}
    change(folder / "processor_config.json", feature_extractor=own)
    field = f"{kind}_processor_type"
    if file == "processor_config.json":
        change_processor(folder, kind, **{field: name})
    else:
        settings = json.loads((folder / "processor_config.json").read_text())
        part = settings.pop(f"{kind}_processor")
        del part[field]
        (folder / "processor_config.json").write_text(json.dumps(settings))
        (folder / "preprocessor_config.json").write_text(json.dumps(part))
        change(folder / file, **{field: name})
    with pytest.raises(ValueError, match=rf"{field} in its {file} must be a processor .*'{name}'"):
        load_reader(Model(path=str(folder)), tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["Qwen2VLImageProcessorFast", "Qwen2VLFeatureExtractor"])
def test_older_names_of_an_image_processor_are_read(name, qwen3_vl, tmp_path):
    folder = copied(qwen3_vl, tmp_path / "model")
    key = "feature_extractor_type" if name.endswith("Extractor") else "image_processor_type"
    change_processor(folder, "image", **{"image_processor_type": None, key: name})
    assert type(load_reader(Model(path=str(folder)), tmp_path).image_processor).__name__ == "Qwen2VLImageProcessor"


def test_the_attention_of_a_models_config_is_not_loaded(qwen3_vl, tmp_path):
    """It may name a kernel on the hub, which is code."""
    folder = copied(qwen3_vl, tmp_path / "model")
    change(folder / "config.json", _attn_implementation="kernels-community/flash-attn")
    assert load_model(Model(path=str(folder), device="cpu"), tmp_path, seed=0).policy is not None


def test_adapters_in_a_models_folder_are_refused(qwen3_vl, tmp_path):
    folder = copied(qwen3_vl, tmp_path / "model")
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/private"}))
    with pytest.raises(ValueError, match=r"has adapters of its own \(adapter_config\.json\).* merge them"):
        load_model(Model(path=str(folder), device="cpu"), tmp_path, seed=0)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("part", [None, "text_config"])
def test_quantized_weights_are_refused_before_they_are_loaded(part, device, qwen3_vl, tmp_path):
    """With bitsandbytes' int8 only the other parameters were trained, and the model could not be saved after the training."""
    folder = copied(qwen3_vl, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (config if part is None else config[part])["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"must not have quantized weights.* \(fp8\)"):
        load_model(Model(path=str(folder), device=device), tmp_path, seed=0)


def test_a_config_names_no_index_of_weights(qwen3_vl, tmp_path):
    other, folder = copied(qwen3_vl, tmp_path / "other"), copied(qwen3_vl, tmp_path / "model")
    with safe_open(other / "model.safetensors", "pt") as file:
        shards = dict.fromkeys(file.keys(), "../other/model.safetensors")
    (folder / "own.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    change(folder / "config.json", transformers_weights="own.safetensors.index.json")
    with pytest.raises(ValueError, match=r"config\.json must not have transformers_weights"):
        load_model(Model(path=str(folder), device="cpu"), tmp_path, seed=0)


def test_a_tokenizer_is_read_from_no_file_elsewhere(qwen3_vl, tmp_path):
    other, folder = copied(qwen3_vl, tmp_path / "other"), copied(qwen3_vl, tmp_path / "model")
    (other / "tokenizer.json").rename(other / "tokenizer.1.0.json")
    change(folder / "tokenizer_config.json", fast_tokenizer_files=["../other/tokenizer.1.0.json"])
    with pytest.raises(ValueError, match=r"fast_tokenizer_files in its tokenizer_config\.json must name regular files"):
        load_reader(Model(path=str(folder)), tmp_path)


def test_a_tokenizer_is_read_through_no_link_in_a_subfolder(qwen3_vl, tmp_path):
    other, folder = copied(qwen3_vl, tmp_path / "other"), copied(qwen3_vl, tmp_path / "model")
    (folder / "sub").mkdir()
    (folder / "sub/tokenizer.1.0.json").symlink_to(other / "tokenizer.json")
    change(folder / "tokenizer_config.json", fast_tokenizer_files=["sub/tokenizer.1.0.json"])
    with pytest.raises(ValueError, match=r"tokenizer\.1\.0\.json must be in the folder, but it is a link to .*other"):
        load_reader(Model(path=str(folder)), tmp_path)


@pytest.mark.parametrize("setting", ["vocab_file", "vocab", "tokenizer_file", "gguf_file", "name_or_path"])
def test_special_tokens_come_without_other_settings(setting, qwen3_vl, tmp_path):
    """transformers takes them last: the lines of any text of this machine became tokens of the trained model."""
    private, folder = tmp_path / "id_rsa", copied(qwen3_vl, tmp_path / "model")
    private.write_text("a line of a key\n[UNK]\n")
    (folder / "tokenizer.json").rename(folder / "vocab.json")
    change(folder / "tokenizer_config.json", tokenizer_class="BertTokenizer", vocab={"[UNK]": 0})
    tokens = {"eos_token": {"content": "[UNK]"}, "additional_special_tokens": ["<a>"], "image_token": "<b>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(tokens))
    load_reader(Model(path=str(folder)), tmp_path)
    change(folder / "special_tokens_map.json", **{setting: str(private)})
    with pytest.raises(ValueError, match=rf"special_tokens_map\.json must have special tokens alone.*{setting}"):
        load_reader(Model(path=str(folder)), tmp_path)


def test_a_gguf_file_is_looked_for_in_the_models_folder(qwen3_vl, tmp_path):
    folder = copied(qwen3_vl, tmp_path / "model")
    (tmp_path / "other.gguf").write_text("GGUF")
    (folder / "tokenizer.json").unlink()
    change(folder / "tokenizer_config.json", gguf_file="../other.gguf")
    with pytest.raises(ValueError, match=r"gguf_file in its tokenizer_config\.json must not name a file outside"):
        load_reader(Model(path=str(folder)), tmp_path)


@pytest.mark.parametrize("setting", ["vocab", "init_inputs", "gguf_file", "vocab_file"])
def test_the_settings_of_a_tokenizer_name_no_file_elsewhere(setting, qwen3_vl, tmp_path):
    """transformers reads `vocab` as a file of tokens, which the trained model is saved with."""
    private, folder = tmp_path / "id_rsa", copied(qwen3_vl, tmp_path / "model")
    private.write_text("a line of a key\n[UNK]\n")
    change(folder / "tokenizer_config.json", tokenizer_file=str(private))  # left by an older transformers, and not read
    load_reader(Model(path=str(folder)), tmp_path)
    change(folder / "tokenizer_config.json", tokenizer_file=None, gguf_file=str(private))  # read first
    with pytest.raises(ValueError, match="gguf_file in its"):
        load_reader(Model(path=str(folder)), tmp_path)
    change(folder / "tokenizer_config.json", gguf_file=None)
    (folder / "tokenizer.json").rename(folder / "vocab.json")
    settings = {"tokenizer_class": "BertTokenizer", "special_tokens_map_file": str(private)}
    change(folder / "tokenizer_config.json", **settings, vocab={"[UNK]": 0})
    load_reader(Model(path=str(folder)), tmp_path)
    named = [str(private)] if setting == "init_inputs" else str(private)
    change(folder / "tokenizer_config.json", **{setting: named})
    with pytest.raises(
        ValueError, match=rf"{setting} in its tokenizer_config\.json must not name a file outside .*id_rsa"
    ):
        load_reader(Model(path=str(folder)), tmp_path)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("name", ["RagTokenizer", "RagTokenizerFast", "AutoTokenizer"])
def test_a_tokenizer_of_a_class_that_asks_whether_to_run_code_is_refused(name, file, tmp_path, monkeypatch):
    """Such a class loads tokenizers of its own, and does not pass on that no code is to run."""
    marker, folder = tmp_path / "code-has-run", tiny.build(tmp_path / "model", "qwen3")
    monkeypatch.setattr("builtins.input", lambda *words: pytest.fail("it asks whether to run the code"))
    parts = {"question_encoder": {"model_type": "vit"}, "generator": {"model_type": "vit"}}
    change(folder / "config.json", **parts)
    change(folder / "tokenizer_config.json", tokenizer_class=None)
    change(folder / file, tokenizer_class=name)
    (folder / "own.py").write_text(f"import os\nos.makedirs({str(marker)!r})\n")
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.T", None]}}
    for part in ("question_encoder_tokenizer", "generator_tokenizer"):
        (folder / part).mkdir()
        (folder / part / "tokenizer_config.json").write_text(json.dumps(own))
    with pytest.raises(
        ValueError, match=rf"tokenizer_class in its {file} must be a tokenizer of transformers, but .*{name}"
    ):
        load_reader(Model(path=str(folder)), tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize("read", [largest_image_of, image_processor_of])
def test_the_tokenizer_that_a_processor_reads_is_checked_too(read, tmp_path, monkeypatch):
    """`vlmrl plan` loads SmolVLM's tokenizer alone, and transformers asked whether to run the folder's code."""
    monkeypatch.setattr("builtins.input", lambda *words: pytest.fail("it asks whether to run the code"))
    folder = Path(tiny.build(tmp_path / "model", "smolvlm"))
    (folder / "own.py").write_text("")
    change(folder / "config.json", auto_map={"AutoModelForMaskedLM": "own.M"})
    change(folder / "tokenizer_config.json", tokenizer_class="AutoModelForMaskedLM", auto_map=["own.T", "own.T"])
    with pytest.raises(ValueError, match=r"tokenizer_class in its tokenizer_config\.json must be a tokenizer"):
        read(Model(path=str(folder)), tmp_path)


@pytest.mark.parametrize("name", ["chat_template.jinja", "vocab.txt", "additional_chat_templates"])
def test_a_link_to_a_text_elsewhere_is_not_read(name, qwen3_vl, tmp_path):
    """An export of a run with this model would publish it. Links within the folder and to the hub's blobs are usual."""
    blobs, private = tmp_path / "hub/blobs", tmp_path / "private"
    folder = copied(qwen3_vl, tmp_path / "hub/snapshots/1")
    blobs.mkdir()
    private.mkdir()
    for file in ("tokenizer.json", "chat_template.jinja", "model.safetensors"):
        (folder / file).rename(blobs / file)
        (folder / file).symlink_to(f"../../blobs/{file}")
    (folder / "other.jinja").symlink_to("chat_template.jinja")
    assert load_reader(Model(path=str(folder)), tmp_path).renderer.chat_template
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(private)
    with pytest.raises(ValueError, match=rf"{name} must be in the folder, but it is a link to .*private"):
        load_reader(Model(path=str(folder)), tmp_path)


def test_the_blobs_of_a_model_are_no_link_either(qwen3_vl, tmp_path):
    folder, private = copied(qwen3_vl, tmp_path / "hub/snapshots/1"), tmp_path / "private"
    private.mkdir()
    (private / "id_rsa").write_text("secret")
    (tmp_path / "hub/blobs").symlink_to(private)
    (folder / "vocab.txt").symlink_to("../../blobs/id_rsa")
    with pytest.raises(ValueError, match=r"vocab\.txt must be in the folder, but it is a link to .*private/id_rsa"):
        load_reader(Model(path=str(folder)), tmp_path)


def test_pickled_code_in_weights_is_not_run(qwen3_vl, tmp_path):
    marker, folder = tmp_path / "code-has-run", copied(qwen3_vl, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Code(marker)}, folder / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"(?i)weights_only|unpickl|safetensors|no file named"):
        load_model(Model(path=str(folder), device="cpu"), tmp_path, seed=0)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["../other/model.safetensors", "{other}/model.safetensors", "pipe", "missing", 5])
def test_an_index_of_weights_names_no_file_elsewhere(name, qwen3_vl, tmp_path):
    """transformers opens what it names: another model's weights, or a pipe, which it waits for."""
    other, folder = copied(qwen3_vl, tmp_path / "other"), copied(qwen3_vl, tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    os.mkfifo(folder / "pipe")
    with safe_open(folder / "weights.safetensors", "pt") as file:
        names = list(file.keys())
    index = folder / "model.safetensors.index.json"

    def write(shard: object) -> Model:
        index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, shard)}))
        return Model(path=str(folder), device="cpu")

    assert load_model(write("weights.safetensors"), tmp_path, seed=0).policy is not None
    hostile = write(name.format(other=other) if isinstance(name, str) else name)
    for read in (lambda: load_model(hostile, tmp_path, seed=0), lambda: on_host(hostile, tmp_path)):
        with pytest.raises(
            ValueError, match=r"model\.path .*index\.json must name regular files in its folder, but it names"
        ):
            read()
