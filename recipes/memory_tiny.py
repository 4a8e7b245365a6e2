"""A tiny text model learns, on a laptop CPU in a few minutes, to keep in its summaries what it will need.

Four things are shown, one a turn, each with its color. Then the color of one of the first two is asked for. After every second
response the model's own summary replaces the conversation (`rollout.history compact`), so the last summary must hold the answer.
Warm-start steps teach the format: their summaries omit things at random. Reinforcement learning, with a reward for the answer alone,
teaches the rest.

    python recipes/memory_tiny.py
"""

import random

import vlmrl
from vlmrl import Config, Data, Env, Eval, EvalData, Model, Optim, Rollout, Task, Train, WarmStart, obs

COLORS = ["red", "green", "blue", "yellow"]
THINGS = ["square", "circle", "triangle", "picture", "letter", "number", "box", "image"]
SHOWN, ASKED = 4, 2  # by default; a window of the last two responses never has the answer


class Parade(Env):
    """Shows the next thing after each response, then asks for a color; the last word of the response to that is the answer."""

    def step(self, response_text):
        things = self.task.data["things"]
        if self.turn < len(things):
            thing, color = things[self.turn]
            return obs(f"The {thing} is {color}"), False, {}
        if self.turn == len(things):
            return obs(f"What color is the {self.task.data['asked']}"), False, {}
        return {}, True, {"reward": float(response_text.split()[-1:] == [self.task.answer])}


def make_task(index: int, seed: int, shown: int = SHOWN, asked: int = ASKED) -> dict:
    """``shown`` of eight things in random colors, and which of the first ``asked`` is asked for."""
    draw = random.Random(f"{seed}/{index}")
    things = [(thing, draw.choice(COLORS)) for thing in draw.sample(THINGS, shown)]
    thing, answer = things[draw.randrange(asked)]
    return {"prompt": "call", "answer": answer, "things": things, "asked": thing}


def demonstrate(task: Task, turn: int) -> str:
    """The response to imitate: `call`; each third request asks for a summary, and the last one for the answer.

    A summary has a new thing with probability 0.5, and one of the summary before it with probability 0.85.
    """
    luck = random.Random(task.seed)
    known: list[tuple[str, str]] = []
    summaries, things = [], task.data["things"]
    for end in range(1, len(things), 2):  # what is shown after the last response is not yet part of a summary
        new = [thing for thing in things[max(0, end - 2) : end] if luck.random() < 0.5]
        known = [thing for thing in known if luck.random() < 0.85] + new
        summaries.append(" ".join(f"{thing} {color}" for thing, color in known) or "no")
    if turn % 3 == 2:
        return f" {summaries[turn // 3]}"
    if turn <= len(things) + len(summaries):
        return "call"
    return f" {dict(known).get(task.data['asked'], luck.choice(COLORS))}"


def config() -> Config:
    return Config(
        name="memory_tiny",
        model=Model(path="tiny:qwen3"),
        data=Data(generator=make_task, size=20000),
        env=Parade,
        rollout=Rollout(
            group_size=8,
            max_turns=SHOWN + 2,
            max_tokens=128,
            max_response_tokens=24,
            history="compact",
            history_options={"turns": 2, "keep": 0, "request": "Which"},
            samples="merged",
            truncated_reward=0.0,
        ),
        warm_start=WarmStart(demonstrate=demonstrate, steps=500, trajectories_per_step=32, lr=1e-3),
        optim=Optim(lr=2e-4, betas=(0.9, 0.999), warmup_steps=10),
        train=Train(steps=60, groups_per_batch=16),
        eval=Eval(data=EvalData(generator=make_task, size=200, seed=1), every=20, chance=0.25),
    )


if __name__ == "__main__":
    vlmrl.main(config)
