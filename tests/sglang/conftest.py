"""Real SGLang servers on the CPU, with tiny models: one for each model, started when a test first asks for it, and shared."""

from __future__ import annotations

import asyncio
import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from vlmrl import parts
from vlmrl.config import Config, Data, Lora, Model, Rollout, SGLang, Train
from vlmrl.env import Env, obs

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    if importlib.util.find_spec("sglang") is None:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs SGLang: make test-sglang has an environment with it"))


class Peek(Env):
    """Shows a picture at each of three turns, whatever is said."""

    def step(self, response_text):
        from rollout_fixtures import COLORS, picture

        color = COLORS[(self.task.seed + self.turn) % len(COLORS)]
        done = self.turn == 2
        return (
            obs("Look:", images=[picture(color, (96 + 32 * self.turn, 64))]),
            done,
            {"reward": len(response_text) % 2},
        )

    def finish(self, ending):
        return 0.0


def tasks(index, seed):
    from rollout_fixtures import picture

    shown = picture("red" if index % 2 else "blue", (64, 64))
    return {
        "prompt": [
            {"role": "user", "content": [{"type": "image", "image": shown}, {"type": "text", "text": "What color?"}]}
        ]
    }


def config_of(model: Path, folder: Path, **sglang) -> Config:
    settings = {
        "args": {"max-total-tokens": 16384, "skip-server-warmup": True},
        "env": {"PYTHONPATH": str(HERE / "shim")},
    }
    quick = {"health_every": 2.0, "health_timeout": 60.0, "start_timeout": 300.0}
    return Config(
        name=model.name,
        output_dir=str(folder),
        model=Model(path=str(model), device="cpu", dtype="bfloat16"),
        data=Data(generator=tasks, size=8),
        env=Peek,
        rollout=Rollout(group_size=4, max_turns=3, max_tokens=512, max_reply_tokens=100, stop=("e", "o", "<")),
        engine="sglang",
        sglang=SGLang(**(settings | quick | sglang)),
        train=Train(steps=2, groups_per_batch=2),
    )


def connected(config: Config) -> parts.Run:
    run = parts.build(config)
    try:
        run.hands = asyncio.run(run.serving.connect(run.store))
    except BaseException:
        run.engine.close()
        raise
    run.first_weights = {name: weight.detach().clone() for name, weight in run.model.policy.model.named_parameters()}
    return run


@pytest.fixture(scope="session")
def qwen3_run(qwen3_vl, tmp_path_factory):
    """A run on a server of the tiny Qwen3-VL."""
    run = connected(config_of(qwen3_vl, tmp_path_factory.mktemp("qwen3_run")))
    yield run
    run.engine.close()


@pytest.fixture(scope="session")
def qwen2_5_run(qwen2_5_vl, tmp_path_factory):
    """A run on a server of the tiny Qwen2.5-VL."""
    run = connected(config_of(qwen2_5_vl, tmp_path_factory.mktemp("qwen2_5_run")))
    yield run
    run.engine.close()


@pytest.fixture(scope="session")
def lora_run(qwen2_5_vl, tmp_path_factory):
    """A run of the tiny Qwen2.5-VL that trains adapters."""
    config = config_of(qwen2_5_vl, tmp_path_factory.mktemp("lora_run"))
    args = config.sglang.args | {"lora-backend": "torch_native"}
    model = replace(config.model, lora=Lora(rank=4, alpha=8))
    run = connected(replace(config, model=model, sglang=replace(config.sglang, args=args)))
    yield run
    run.engine.close()


@pytest.fixture(params=["qwen3_run", "qwen2_5_run"])
def run(request):
    """A run of each family in turn."""
    return request.getfixturevalue(request.param)
