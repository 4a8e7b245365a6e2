"""Fine-tuning on 200 recorded episodes, then reinforcement learning, on the quickstart's task.

    python datasets/zoom_episodes.py runs/zoom_episodes
    vlmrl sft recipes/sft_tiny.py
    vlmrl train recipes/sft_tiny.py --resume

`python recipes/sft_tiny.py` does both stages in one run. For your own conversations, set the path of `sft.data`.
"""

import vlmrl
from vlmrl import SFT, Checkpoint, Config, Conversations, Data, Eval, EvalData, Model, Optim, Rollout, Train


def config() -> Config:
    shapes = "../datasets/shapes.py:make_task"
    return Config(
        name="sft_tiny",
        model=Model(path="tiny:qwen3_vl"),
        sft=SFT(
            data={"zooms": Conversations(path="../runs/zoom_episodes", epochs=24, held_out=8)},
            rows_per_step=8,
            lr=1e-3,
        ),
        data=Data(generator=shapes, size=4096),
        env="../envs/zoom.py:ZoomEnv",
        env_options={"coarse": 32, "crop": 32, "tools_in_prompt": False},
        rollout=Rollout(group_size=8, max_turns=2, max_tokens=256, max_response_tokens=48),
        optim=Optim(lr=1e-4, betas=(0.9, 0.999), warmup_steps=10),
        train=Train(steps=200, groups_per_batch=16),
        eval=Eval(data=EvalData(generator=shapes, size=256, seed=1), every=50, chance=0.25),
        checkpoint=Checkpoint(every=50),
    )


if __name__ == "__main__":
    vlmrl.main(config)
