"""What a window of screenshots costs: the same short run in a browser, with the last one, the last two, and all of them in the prompt.

    python benchmarks/history_windows.py

MiniWoB++'s click-button-sequence in Chromium, a tiny Qwen3-VL, episodes of at most 6 responses. All three have the same tasks and the
same warm start, whose clicks are right half of the time. The audit compares every row with what the model saw, and this script counts
the images of every prompt once more. Printed are means over the trajectories that were trained on.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import tyro

from vlmrl import Config, Data, Model, Optim, Rollout, Task, Train, WarmStart
from vlmrl.config.code import load_object
from vlmrl.model.tiny import tokenizer
from vlmrl.run.program import run_training
from vlmrl.samples import step_wise
from vlmrl.train.prefix_tree import PrefixOrder, atoms_of
from vlmrl.types import Trajectory

ROOT = Path(__file__).parents[1]
MAX_TURNS = 6
button_centers = load_object(f"{ROOT}/datasets/miniwob_pages.py:click_button_sequence")


def make_task(index: int, seed: int) -> dict:
    return {"prompt": ""}


def demonstrate(task: Task, turn: int) -> str:
    """Click ONE, then TWO; half of the clicks go anywhere."""
    luck = random.Random(f"{task.seed}/{turn}")
    x, y = (
        button_centers(task.seed)[turn % 2] if luck.random() < 0.5 else (luck.randrange(160), luck.randrange(50, 210))
    )
    return f"! {round(10 * x / 160) * 100} {round(10 * y / 210) * 100}"  # a button is larger than a tenth of the screen


@dataclass
class Counts:
    """What was seen and computed in the runs' trajectories, collected where a group is scored."""

    window: int | None
    rows: dict[str, list[float]] = field(default_factory=dict)

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[float]:
        samples = [sample for trajectory in trajectories for sample in step_wise(trajectory)]
        for trajectory in trajectories:
            shown = 1
            for turn, (_, media) in zip(trajectory.turns, trajectory.prompts(), strict=True):
                assert len(media) == min(shown, self.window or shown), "a prompt has other images than its window"
                shown += not turn.metrics.get("invalid")  # a click is followed by a screenshot, an error by a text
        order = PrefixOrder(atoms_of(samples, tokenizer().convert_tokens_to_ids("<|image_pad|>")))
        whole = sum(map(len, samples))
        shared = sum(order.shared_lengths(order.sort(range(len(samples)))))
        self._add(
            responses=len(samples) / len(trajectories),
            images=np.mean([len(sample.media) for sample in samples]),
            seen=whole / len(trajectories),
            computed=(whole - shared) / len(trajectories),
            reward=np.mean([trajectory.reward for trajectory in trajectories]),
        )
        return [0.0] * len(trajectories)

    def _add(self, **values: float) -> None:
        for name, value in values.items():
            self.rows.setdefault(name, []).append(float(value))


def config(window: int | None, counts: Counts, steps: int, warm_steps: int) -> Config:
    rollout = Rollout(
        group_size=4,
        max_turns=MAX_TURNS,
        max_tokens=1024,
        max_response_tokens=16,
        max_concurrent=16,
        history="rerender",
        samples="step_wise",
    )
    if window is not None:
        rollout = replace(rollout, history="keep_last_images", history_options={"k": window})
    return Config(
        name=f"history_windows-{window or 'all'}",
        model=Model(path="tiny:qwen3_vl"),
        data=Data(generator=make_task, size=1024),
        env=f"{ROOT}/recipes/miniwob_tiny.py:ClickEnv",
        env_options={"tasks": "click-button-sequence", "reward": "success", "scale": 0.4, "tools_in_prompt": False},
        rollout=rollout,
        group_reward=counts,
        warm_start=WarmStart(demonstrate=demonstrate, steps=warm_steps, trajectories_per_step=8),
        optim=Optim(lr=1e-4),
        train=Train(steps=steps, groups_per_batch=4),
        save_model=False,
    )


def main(steps: int = 10, warm_steps: int = 40) -> None:
    table = [
        "| images kept | responses | images in a prompt | tokens in prompts and responses | computed in training | reward |"
    ]
    table.append("| --- | --- | --- | --- | --- | --- |")
    for window in (1, 2, None):
        counts = Counts(window)
        run_training(config(window, counts, steps, warm_steps))
        mean = {name: np.mean(values) for name, values in counts.rows.items()}
        table.append(
            f"| {window or 'all'} | {mean['responses']:.2f} | {mean['images']:.2f} | {mean['seen']:.0f} | {mean['computed']:.0f} | "
            f"{mean['reward']:.2f} |"
        )
    print("\n".join(table))


if __name__ == "__main__":
    tyro.cli(main)
