"""FrozenLake from rendered frames: look, think, walk a few steps, look again.

    pip install 'vlmrl[gymnasium]'
    python recipes/frozenlake.py                   # Qwen3-VL-2B-Instruct on one GPU
    python recipes/frozenlake.py --dry-run         # resolve everything, print the plan, stop

Group size, batch, learning rate, token limits, lakes and steps per turn are those of VAGEN's GRPO run on this task
(github.com/mll-lab-nu/VAGEN, examples/frozenlake/train_grpo_qwen25vl3b_vision.sh; Wang et al. 2025, arXiv 2510.16907): Qwen2.5-VL-3B,
32 lakes x 8 trajectories, lr 1e-6, no KL, 400 steps, on two GPUs. For that model: ``--model.path Qwen/Qwen2.5-VL-3B-Instruct``.
Theirs adds 0.02 for a well-formed response; ours rewards only the goal.

Memory, computed by ``vlmrl plan recipes/frozenlake.py --gpu h100-80gb``: 45 GiB in training; in the rollout the KV cache takes what is
left. No full run of this recipe has been measured yet.
"""

import vlmrl
from vlmrl import Config, Data, Eval, EvalData, Model, Optim, Rollout, Train

PROMPT = """You walk over a frozen lake. The image shows it from above: you, the ice, the holes and the goal (a flag or a gift). \
Reach the goal; falling into a hole ends the walk. You cannot leave the lake.
Think first, then name up to {steps} steps, each left, down, right or up, between answer tags: <answer>right, down</answer>"""


def lakes(index: int, seed: int, steps: int = 5) -> dict:
    """A task. The env generates its lake from its seed."""
    return {"prompt": PROMPT.format(steps=steps)}


def config() -> Config:
    return Config(
        name="frozenlake",
        model=Model(path="Qwen/Qwen3-VL-2B-Instruct"),
        data=Data(generator=lakes, size=10_000),
        env="../envs/frozenlake.py:FrozenLakeEnv",
        env_options={"size": 4, "frozen": 0.8, "slippery": False, "steps_per_turn": 5},
        rollout=Rollout(group_size=8, max_turns=5, max_tokens=5000, max_response_tokens=800),
        optim=Optim(lr=1e-6),
        train=Train(steps=400, groups_per_batch=32, tokens_per_micro_batch=16384),
        eval=Eval(data=EvalData(generator=lakes, size=128, seed=1), every=20),
    )


if __name__ == "__main__":
    vlmrl.main(config)
