"""Geometry3K over several turns: read a diagram, have answers scored by a tool, answer in \\boxed{}.

    python datasets/geo3k.py --out data/geo3k                  # once: from the hub, or --source FOLDER for a local copy
    vlmrl data check recipes/geo3k.py                          # what the model will read
    python recipes/geo3k.py                                    # Qwen3-VL-2B-Instruct, one row per episode
    python recipes/geo3k.py --rollout.samples step_wise        # one row per turn
    torchrun --nproc-per-node 4 recipes/geo3k.py               # the trainer on four GPUs
    python recipes/geo3k.py --engine sglang                    # an SGLang server beside the trainer: docs/sglang.md

Batch, group, optimizer, clip range and token limits are those of slime's run on this task with this model (github.com/THUDM/slime,
examples/geo3k_vlm_multi_turn/run_geo3k_vlm_multi_turn.py): 64 problems x 8 episodes, one step a batch, Adam (0.9, 0.98) at 1e-6
with weight decay 0.1, clip 0.2 to 0.28, no KL, 4096 tokens after the prompt, on four GPUs. Three turns are those of SkyRL's run
in github.com/NovaSky-AI/SkyRL, examples/train/geometry3k. Both grade answers differently, so curves differ.

Memory, computed by `vlmrl plan recipes/geo3k.py --gpu h100-80gb`: 44 GiB in training, 28 GiB with `--optim.offload`; in the
rollout the KV cache takes what is left. No full run of this recipe has been measured yet.

Any other Qwen-VL: `--model.path Qwen/Qwen2.5-VL-3B-Instruct --model.chat-template chatml` (Qwen2.5-VL's own template does not
show tools, and is refused with an env that has tools). With `--env-options.no-score-in-observation` the tool does not return the
score.
"""

import vlmrl
from vlmrl import Algo, Config, Data, Eval, EvalData, Model, Optim, Rollout, Train


def config() -> Config:
    return Config(
        name="geo3k",
        model=Model(path="Qwen/Qwen3-VL-2B-Instruct", max_image_pixels=512 * 512),
        data=Data(path="../data/geo3k/train.parquet", max_prompt_tokens=1024),
        env="../envs/geo3k.py:Geo3kEnv",
        env_options={"score_in_observation": True},
        rollout=Rollout(group_size=8, max_turns=3, max_tokens=1024 + 4096, max_response_tokens=2048),
        algo=Algo(advantage="grpo", loss="ppo", options={"ppo.clip_low": 0.2, "ppo.clip_high": 0.28}),
        optim=Optim(lr=1e-6, betas=(0.9, 0.98), weight_decay=0.1),
        train=Train(steps=200, groups_per_batch=64, tokens_per_micro_batch=16384),
        eval=Eval(data=EvalData(path="../data/geo3k/validation.parquet", size=128), every=20),
    )


if __name__ == "__main__":
    vlmrl.main(config)
