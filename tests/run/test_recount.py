"""A run's gradients, counted again by plain transformers from what the engine was asked and what it sampled."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText

import vlmrl
from vlmrl import Algo, Config, Data, Env, Model, Optim, Rollout, Train, obs
from vlmrl.engine.hf.engine import HFEngine
from vlmrl.run import loop
from vlmrl.train.trainer import Trainer

pytestmark = pytest.mark.slow

STOP = tuple("aeiostrnd1")  # a model with random weights says one of these soon


def noise(number: int, width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8))


def task(index: int, seed: int) -> dict[str, Any]:
    return {"prompt": "<image>What is it? <image>", "images": [noise(index, 64, 96), noise(99, 33, 70)]}


class Crops(Env):
    unfinished_reward = 0.0

    def step(self, response_text: str) -> Any:
        luck = zlib.crc32(response_text.encode())
        crops = [noise(luck % 3, *[(64, 64), (31, 40)][luck % 2]) for _ in range(luck % 3)]
        return obs(f"Closer {luck % 5}", images=crops), self.turn == 2 or luck % 5 == 0, {"reward": luck % 7 / 7}


class Watch:
    """What the engine was asked and sampled, the trajectories, and each optimizer step's samples, weights and gradients."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: dict[str, list[Any]] = {}
        self.batches: list[list[Any]] = []
        self.steps: list[dict[str, Any]] = []
        generate, update, apply, train_on = (
            HFEngine.generate_batch,
            Trainer._update,
            Trainer._apply_gradient,
            loop.train_on,
        )

        async def generate_batch(engine: HFEngine, requests: Any) -> Any:
            found = await generate(engine, requests)
            for request, completion in zip(requests, found, strict=True):
                self.asked.setdefault(request.trajectory_id, []).append((request, completion))
            return found

        def updated(trainer: Trainer, samples: Any, old: Any) -> Any:
            weights = {name: each.detach().clone() for name, each in trainer.policy.model.named_parameters()}
            self.steps.append({"ids": list(dict.fromkeys(each.trajectory_id for each in samples)), "weights": weights})
            return update(trainer, samples, old)

        def applied(trainer: Trainer) -> Any:
            named = trainer.policy.model.named_parameters()
            self.steps[-1]["gradient"] = {name: each.grad.clone() for name, each in named if each.grad is not None}
            return apply(trainer)

        def trained(run: Any, trainer: Any, trajectories: Any) -> Any:
            self.batches.append(list(trajectories))
            self.run = run
            return train_on(run, trainer, trajectories)

        monkeypatch.setattr(HFEngine, "generate_batch", generate_batch)
        monkeypatch.setattr(Trainer, "_update", updated)
        monkeypatch.setattr(Trainer, "_apply_gradient", applied)
        monkeypatch.setattr(loop, "train_on", trained)


def advantages(trajectories: list[Any], by_turn: bool) -> dict[tuple[str, int], float]:
    """GRPO of whole rewards, or of returns-to-go at each turn, by hand."""
    found = {}
    for group in {each.group_id for each in trajectories}:
        members = [each for each in trajectories if each.group_id == group]
        rewards = {each.id: [*(turn.reward or 0.0 for turn in each.turns)] for each in members}
        total = compared({name: sum(given) for name, given in rewards.items()})
        for turn in range(max(map(len, rewards.values()))):
            to_go = {name: sum(given[turn:]) for name, given in rewards.items() if len(given) > turn}
            values = compared(to_go) if by_turn and len(to_go) > 1 else total
            found |= {(name, turn): values[name] for name in to_go}
    return found


def compared(rewards: dict[str, float]) -> dict[str, float]:
    values = np.array([*rewards.values()])
    if np.ptp(values) < 1e-9:
        return dict.fromkeys(rewards, 0.0)
    return {name: (value - values.mean()) / (values.std(ddof=1) + 1e-6) for name, value in rewards.items()}


def logprobs_of(model: Any, processor: Any, request: Any, completion: Any, banned: list[int]) -> torch.Tensor:
    """Of the response's tokens, by transformers' own forward of one row."""
    image_id, response = model.config.image_token_id, completion.token_ids
    images = [Image.fromarray(np.array(item.image)) for item in request.media]
    inputs = processor(images=images, return_tensors="pt") if images else {}
    sizes = iter([int(grid.prod()) // processor.merge_size**2 for grid in inputs.get("image_grid_thw", [])])
    ids = [each for token in request.prompt_ids for each in [token] * (next(sizes) if token == image_id else 1)]
    whole = torch.tensor([[*ids, *response]])
    kinds = {"mm_token_type_ids": (whole == image_id).long()} if images else {}
    logits = model(input_ids=whole, **inputs, **kinds).logits[0, len(ids) - 1 : -1].clone()
    logits[:, banned] = -torch.inf
    return logits.log_softmax(-1)[range(len(response)), response]


def recounted(watch: Watch, step: dict[str, Any], by_turn: bool) -> dict[str, Any]:
    """The gradient of an optimizer step: PPO's loss, a mean over all sampled tokens."""
    batch = next(each for each in watch.batches if step["ids"][0] in {trajectory.id for trajectory in each})
    given = advantages(batch, by_turn)
    rows = [(name, turn, *pair) for name in step["ids"] for turn, pair in enumerate(watch.asked[name])]
    tokens = sum(len(completion.token_ids) for *_, completion in rows)
    policy = watch.run.model.policy
    model = AutoModelForImageTextToText.from_pretrained(watch.run.model.path, dtype=torch.float32)
    processor = AutoImageProcessor.from_pretrained(watch.run.model.path)
    model.load_state_dict(step["weights"], strict=False)
    for name, turn, request, completion in rows:
        now = logprobs_of(model, processor, request, completion, policy.banned_ids)
        ratio, advantage = (now - torch.tensor(completion.logprobs)).exp(), given[name, turn]
        (-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage).sum() / tokens).backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize(
    ("family", "history", "samples", "credit", "groups"),
    [
        ("qwen3_vl", "keep_last_images", "merged", "turn", 1),
        ("qwen3_vl_moe", "append", "step_wise", "trajectory", 2),
        ("qwen2_5_vl", "last_turns", "step_wise", "turn", 2),
    ],
)
def test_gradients_are_those_of_plain_transformers(monkeypatch, tmp_path, family, history, samples, credit, groups):
    """Two steps; with one group an optimizer step, the second one's ratio is to the weights before the first."""
    watch = Watch(monkeypatch)
    limits = {"group_size": 3, "max_turns": 3, "max_tokens": 1000, "max_response_tokens": 12, "stop": STOP}
    config = Config(
        output_dir=str(tmp_path),
        model=Model(path=f"tiny:{family}", device="cpu"),
        data=Data(generator=task, size=16),
        env=Crops,
        rollout=Rollout(**limits, history=history, samples=samples),
        algo=Algo(credit=credit),
        optim=Optim(lr=3e-3),
        train=Train(steps=2, groups_per_batch=2, groups_per_step=groups, tokens_per_micro_batch=500),
        save_model=False,
    )
    vlmrl.train(config)
    assert len(watch.steps) == (4 if groups == 1 else 2)
    for step in watch.steps:
        wanted = recounted(watch, step, credit == "turn")
        size = float(torch.stack([each.norm() for each in wanted.values()]).norm())
        assert wanted.keys() == step["gradient"].keys()
        for name, gradient in step["gradient"].items():
            assert float((gradient - wanted[name]).norm()) <= 1e-5 * size, name
