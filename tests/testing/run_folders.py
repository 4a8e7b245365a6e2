"""Run folders that look like those of a run, made without a model: for what reads them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from testing.fakes import item_of
from vlmrl.multimodal.images import content_hash, encode_png
from vlmrl.report.records import trajectory_record
from vlmrl.report.run_log import json_lines
from vlmrl.report.token_columns import Decode, TokenTexts
from vlmrl.types import MediaItem, Task, TrainedTokens, Trajectory, Turn

WORDS = [" the", " triangle", " is", " 猫", "\n", " 42", "<answer>", "</answer>", " so", " angle", " A", "zoom", " <b>"]
ENDINGS = ["env_done", "env_done", "env_done", "max_turns", "length"]


def decode(ids: list[int]) -> str:
    return "".join(WORDS[token % len(WORDS)] for token in ids)


def write_run_folder(
    folder: Path, steps: int = 4, groups: int = 4, group_size: int = 4, turns: int = 2, seed: int = 0
) -> Path:
    """A run of ``steps`` steps with ``groups * group_size`` trajectories each, in the form of a real run's folder.

    Each group has an image of its own, and each second turn a crop of it. In each step one trajectory failed and was retried; the
    last step has an evaluation and one with blanked images. There are two advisories.
    """
    rng = random.Random(seed)
    (folder / "images").mkdir(parents=True)
    config: dict[str, Any] = {
        "name": folder.name,
        "optim": {"lr": 1e-4, "weight_decay": 0.0},
        "train": {"steps": steps},
        "eval": {"chance": 0.25},
    }
    (folder / "config.json").write_text(json.dumps(config))
    texts, trajectories, metrics = TokenTexts(decode), [], []
    for step in range(1, steps + 1):
        played = [
            t for group in range(groups) for t in _group(folder, rng, f"step{step:06d}/{group:05d}", group_size, turns)
        ]
        lost = _failed(played[0], f"TimeoutError: step() of <ZoomEnv object at 0x7f{step:06x}> took {60 + step}.2 s")
        trajectories += [trajectory_record(each, step, "train", texts) for each in (*played, lost)]
        metrics.append(_train_row(step, played, rng))
    for kind in ("eval", "blanked"):
        tested = _group(folder, rng, f"{kind}{steps:06d}/00000", group_size, turns)
        trajectories += [trajectory_record(each, steps, kind, texts) for each in tested]  # type: ignore[arg-type]
        mean = sum(each.reward or 0 for each in tested) / len(tested)
        row = {"reward/mean": mean, "standard_error": 0.05, "tasks": 1.0, "trajectories": float(len(tested))}
        metrics.append({"step": steps, "time": 1.8e9, **{f"{kind}/{name}": value for name, value in row.items()}})
    advisories = [
        {
            "name": "truncated",
            "step": 1,
            "message": "every response was cut.",
            "setting": "rollout.max_response_tokens",
        },
        {"name": "no_signal", "step": min(2, steps), "message": "all rewards are equal.", "setting": "data"},
    ]
    parts = {"metrics": metrics, "trajectories": trajectories, "advisories": advisories}
    for name, records in parts.items():
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    (folder / "summary.json").write_text(json.dumps({"reward_before": 0.3, "reward_after": 0.8}))
    return folder


def write_episodes(
    folder: Path, trajectories: Sequence[Trajectory], step: int = 1, decode: Decode | None = None
) -> Path:
    """A run's folder with these trajectories of one ``step`` and nothing else."""
    texts = TokenTexts(decode) if decode else None
    (folder / "images").mkdir(parents=True)
    for item in {item.id: item for each in trajectories for turn in each.turns for item in turn.media}.values():
        (folder / "images" / f"{item.id}.png").write_bytes(encode_png(item.image))
    records = [trajectory_record(each, step, texts=texts) for each in trajectories]
    (folder / "trajectories.jsonl").write_bytes(json_lines(records))
    return folder


def _group(folder: Path, rng: random.Random, group_id: str, size: int, turns: int) -> list[Trajectory]:
    image = _image(folder, rng, (160, 120))
    task = Task(f"geo3k/{rng.randrange(1000)}", [], answer="42", source=rng.choice(["geo3k", "zoom"]))
    return [
        _trajectory(folder, rng, f"{group_id}/{member:02d}", group_id, task, image, turns) for member in range(size)
    ]


def _trajectory(
    folder: Path, rng: random.Random, name: str, group_id: str, task: Task, image: MediaItem, count: int
) -> Trajectory:
    reward, advantage = float(rng.random() < 0.5), rng.gauss(0, 1)
    turns = []
    for number in range(count):
        media = [image if number == 0 else _image(folder, rng, (64, 64))]
        question = "Find the angle <b>A</b>." if number == 0 else "Closer:"
        content = [{"type": "image"}, {"type": "text", "text": question}]
        ids = [rng.randrange(len(WORDS)) for _ in range(rng.randint(10, 60))]
        logprobs = [-rng.expovariate(2) for _ in ids]
        turn = Turn([1, 2, 3], media, ids, logprobs, [3] * len(ids), "stop", decode(ids))
        if turns:
            turn.parent, turn.kept, turn.kept_media = number - 1, turns[-1].length, turns[-1].num_images
        turn.messages = [{"role": "user", "content": content}]
        trainer = np.array(logprobs) + [rng.gauss(0, 0.01) for _ in ids]
        turn.trained = TrainedTokens(trainer, [advantage] * len(ids), [1] * len(ids))
        turn.logprob_mismatch = float(np.abs(trainer - logprobs).max())
        turn.engine_seconds, turn.env_seconds = rng.random(), rng.random() / 10
        turns.append(turn)
    turns[-1].reward = reward
    return Trajectory(name, group_id, task, turns, rng.choice(ENDINGS))


def _failed(like: Trajectory, error: str) -> Trajectory:
    return Trajectory(f"{like.id}.1", like.group_id, like.task, like.turns[:1], "error", error=error, retried=True)


def _image(folder: Path, rng: random.Random, size: tuple[int, int]) -> MediaItem:
    width, height = size
    ramp = np.linspace(0, 1, width)[None, :, None] * np.linspace(0.3, 1, height)[:, None, None]
    color = np.array([rng.randint(60, 255) for _ in range(3)])
    image = Image.fromarray((ramp * color).astype(np.uint8))
    item = item_of(content_hash(image), image, 4)
    (folder / "images" / f"{item.id}.png").write_bytes(encode_png(image))
    return item


def _train_row(step: int, played: list[Trajectory], rng: random.Random) -> dict[str, Any]:
    rewards = [each.reward or 0.0 for each in played]
    row = {"reward/mean": sum(rewards) / len(rewards), "reward/std": 0.5, "trajectories": float(len(played))}
    row |= {"turns/mean": 2.0, "sampled_tokens/mean": 70 + rng.random(), "failed": 1.0, "truncated": 0.2}
    row |= {"loss": rng.gauss(0, 0.1), "entropy": 1.0 / step, "grad_norm": rng.random(), "lr": 1e-4}
    row |= {"logprob_mismatch/mean": 0.005, "logprob_mismatch/max": 0.03 + rng.random() / 100}
    row |= {"time/rollout": 3 + rng.random(), "time/train": 2 + rng.random()}
    return {"step": step, "time": 1.8e9 + 5 * step, **row}
