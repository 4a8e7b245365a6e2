"""Geometry3K over several turns: read a diagram, have an answer scored by a tool, answer in \\boxed{}.

    python datasets/geo3k.py --out data/geo3k      # once: from the hub, or --source FOLDER for a local copy
    python recipes/geo3k.py                        # Qwen3-VL-2B-Instruct on one GPU
    python recipes/geo3k.py --dry-run              # resolve everything, print the plan, stop

Any other Qwen-VL: ``--model.path Qwen/Qwen2.5-VL-3B-Instruct --model.chat-template chatml`` (Qwen2.5-VL's own template does not
show tools, and is refused with an env that has some). With ``--env-options.no-score-in-observation`` the
tool does not tell the score.

The group size, the rate and the clip range are those of common GRPO runs on this dataset; no full run of this recipe
has been measured yet.
"""

import vlmrl
from vlmrl import Algo, Config, Data, Eval, Model, Optim, Rollout, Train


def config() -> Config:
    return Config(
        name="geo3k",
        model=Model(path="Qwen/Qwen3-VL-2B-Instruct", max_image_pixels=512 * 512),
        data=Data(path="../data/geo3k/train.parquet"),
        env="../envs/geo3k.py:Geo3kEnv",
        env_options={"score_in_observation": True},
        rollout=Rollout(group_size=8, max_turns=3, max_tokens=4096, max_reply_tokens=1024),
        algo=Algo(advantage="grpo", loss="ppo", loss_options={"clip_low": 0.2, "clip_high": 0.28}),
        optim=Optim(lr=1e-6, warmup_steps=5),
        train=Train(steps=200, groups_per_batch=32, tokens_per_micro_batch=16384, gradient_checkpointing=True),
        eval=Eval(data=Data(path="../data/geo3k/validation.parquet", limit=128), every=20),
    )


if __name__ == "__main__":
    vlmrl.main(config)
