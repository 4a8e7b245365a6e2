"""Server programs from outside the package, by name; `test_conformance_fake.py` plays and trains with one."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
from testing import policy_backend
from testing.engine_drivers import policy_config

from vlmrl.config import Config, Data, Model, ServerSettings, resolve_config
from vlmrl.engine.server_backend import new_backend
from vlmrl.plan.memory_plan import MemoryPlan, Sizes
from vlmrl.report.run_log import read_rows
from vlmrl.run.build import build_run
from vlmrl.run.program import run_training

ROOT = Path(__file__).parents[2]
FILE = Path(policy_backend.__file__)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"--port": 1}, "server.args must not contain port, but it is 1: each server gets a free one."),
        (
            {"api_key": "hunter2"},
            "server.args must not contain api-key: a secret does not belong into a recorded config.",
        ),
    ],
)
def test_an_argument_that_the_program_cannot_use_is_refused_before_a_model_is_loaded(tmp_path, args, message):
    config = Config(
        model=Model(path="no such model"),
        data=Data(generator=lambda index, seed: {"prompt": "?"}, size=4),
        reward=lambda text, task: 1.0,
        engine=f"{FILE}:PolicyBackend",
        server=ServerSettings(args=args),
    )
    for use in (build_run, lambda config: MemoryPlan.of(config, Sizes(1, {"a": 1}, 1), 1)):
        with pytest.raises(ValueError, match=re.escape(message)):
            use(config)


def test_a_file_is_found_beside_the_recipe():
    config = resolve_config(Config(engine=f"{FILE.name}:PolicyBackend"), FILE.parent)
    assert config.engine == f"{FILE}:PolicyBackend"


@pytest.mark.slow
def test_a_server_program_in_a_file_of_its_own_serves_a_whole_run(qwen3_vl, tmp_path):
    rewards = itertools.cycle([0.0, 1.0])
    config = policy_config(qwen3_vl, tmp_path)
    run_training(replace(config, reward=lambda text, task: next(rewards), train=replace(config.train, steps=2)))
    rows = [row for row in read_rows(config.folder / "metrics.jsonl") if "loss" in row]
    assert [(row["failed"], row["weight_sync/bytes"] > 0) for row in rows] == [(0, True)] * 2
    assert max(row["logprob_mismatch/max"] for row in rows) < 1e-3  # also of the second, after an update


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("toy", "engine must be one of embedded, sglang, vllm, or file.py:Class, but it is 'toy'"),
        (f"{FILE}:PolicyReceiver", "engine must name a subclass of ServerBackend, but"),
        (f"{FILE}:Toy", "has no 'Toy'"),
        ("no/file.py:Toy", "'no/file.py' does not exist"),
    ],
)
def test_an_engine_that_names_no_server_program_is_an_error(engine, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        new_backend(Config(engine=engine))


ALLOWED = {
    "vlmrl/config/option_names.py": ['"engine": "use_vllm",'],  # what others call the option
    "vlmrl/engine/server_backend.py": [  # the registry
        '"sglang": "vlmrl.engine.sglang.backend:SGLangBackend",',
        '"vllm": "vlmrl.engine.vllm.backend:VLLMBackend",',
    ],
    "vlmrl/config/run.py": [  # the help of `engine`
        '"""Inference engine. `embedded`: the model in this process. `sglang`: SGLang servers '
        "(`pip install 'vlmrl[sglang]'`).",
        "`vllm`: vLLM servers (`pip install 'vlmrl[vllm]'`). `file.py:Class`: servers of a program of your own "
        '(a `ServerBackend`)."""',
    ],
    "vlmrl/config/training.py": [  # the help of `teacher.model`
        "`sglang:URL` or `vllm:URL`: running servers, several separated by commas, of a model with the policy's tokenizer.",
    ],
    "vlmrl/checks/tested_versions.py": [  # rows of versions
        '{"torch": "2.14", "transformers": "5.19", "sglang": "0.5.23"},',
        '{"torch": "2.13", "transformers": "5.19", "vllm": "0.32.0"},',
    ],
}
OWN = ("vlmrl/engine/sglang/", "vlmrl/engine/vllm/")


def test_server_programs_are_named_only_in_their_own_folders():
    wrong = []
    for path in sorted((ROOT / "vlmrl").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        if name.startswith(OWN):
            continue
        lines = [
            line.strip() for line in path.read_text().splitlines() if re.search("sglang|vllm", line, re.IGNORECASE)
        ]
        wrong += [f"{name}: {line}" for line in lines if line not in ALLOWED.get(name, [])]
    assert not wrong
