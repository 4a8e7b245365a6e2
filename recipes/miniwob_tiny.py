"""MiniWoB++ in a real browser on a laptop CPU: a tiny vision-language model learns which of four boxes to click, from screenshots.

    pip install 'vlmrl[browser]'                            # and Chromium: apt install chromium
    python recipes/miniwob_tiny.py
    python recipes/miniwob_tiny.py --train.shuffle-rewards  # a control: rewards without information

The page is click-color: four boxes of different colors, and "Click on the red colored box." or the blue one. The agent sees a
screenshot of 64 x 84 pixels and the instruction. It names each box's color, says whether it is the wanted one, and clicks the last
box that it named, in thousandths of the screen: ` pink:no blue:no red:yes! 300 800`. Supervised warm-start steps teach this format,
but click a random box, so reward begins at guessing, 0.25. Reinforcement learning teaches where to click. Held-out pages have
combinations of colors that never occur in training.
"""

import random
import re

import vlmrl
from vlmrl import Algo, Config, Data, Eval, EvalData, MiniWobEnv, Model, Optim, Rollout, Task, Train, WarmStart
from vlmrl.env.browser.computer_use import Action

CENTERS = [(300, 500), (700, 500), (300, 800), (700, 800)]
"""Of the boxes, in reading order, in thousandths of the screen."""


class ClickEnv(MiniWobEnv):
    """MiniWoB++ with responses that end with where to click, which are shorter than tool calls: ``! 300 800``."""

    def read_actions(self, response: str) -> list[Action]:
        place = re.search(r"! (\d{1,3}) (\d{1,3})$", response)
        if place is None:
            raise ValueError("End with where to click: ! 300 800")
        return [Action("left_click", ((int(place[1]) / 1000, int(place[2]) / 1000),))]


def demonstrate(task: Task, turn: int) -> str:
    """The response to imitate: what each box is, up to a box that is chosen at random and clicked."""
    chosen = random.Random(task.seed).randrange(4)
    named = task.data["boxes"][: chosen + 1]
    x, y = CENTERS[chosen]
    return "".join(f" {color}:{'yes' if color == task.answer else 'no'}" for color in named) + f"! {x} {y}"


def config() -> Config:
    pages = "../datasets/miniwob_pages.py:color_task"
    options = {
        "tasks": "click-color",
        "reward": "success",
        "scale": 0.4,
        "tools_in_prompt": False,
        "step_seconds": 0.1,
        "reload": False,
    }
    return Config(
        name="miniwob_tiny",
        model=Model(path="tiny:qwen3_vl"),
        data=Data(generator=pages, size=8192),
        env=ClickEnv,
        env_options=options,
        rollout=Rollout(group_size=8, max_turns=1, max_tokens=128, max_response_tokens=48, max_concurrent=16),
        warm_start=WarmStart(demonstrate=demonstrate, steps=400, trajectories_per_step=32, lr=1e-3),
        optim=Optim(lr=2e-4, betas=(0.9, 0.999), warmup_steps=10),
        algo=Algo(kl_coef=0.2),  # the colors stay learned while reward is still rare
        train=Train(steps=60, groups_per_batch=16),
        eval=Eval(
            data=EvalData(generator=pages, size=200, seed=1, options={"held_out": True}),
            every=20,
            blank_images=True,
            chance=0.25,
        ),
    )


if __name__ == "__main__":
    vlmrl.main(config)
