"""Zoom: find a small sign in a downscaled image, look closer with a tool, and read the letter on the sign.

    python recipes/zoom.py                         # Qwen3-VL-2B-Instruct on one GPU; the images are drawn, nothing to download
    vlmrl data check recipes/zoom.py               # what the model will read
    python recipes/zoom.py --dry-run               # resolve everything, print the plan, stop

The letter cannot be read in the 192 pixels that the agent sees first: it must call the tool, whose crops are new images in the middle
of the episode. A guessed letter is right once in 26 times. With your own images: ``--data.path FILE``, with the columns prompt,
images (one image) and answer (a word).

Batch, group, turns and learning rate are those of verl's DeepEyes recipe, the published run with this kind of tool
(github.com/volcengine/verl, recipe/deepeyes/run_deepeyes_grpo.sh; Zheng et al. 2025, arXiv 2505.14362): 128 tasks x 8 episodes of
at most 5 responses, one step a batch, 1e-6, no KL, on eight GPUs with Qwen2.5-VL-7B. Its token limits are larger, since its photos
are larger and its answers longer, and a language model grades them; ours are graded by comparing letters.

Memory, computed by ``vlmrl plan recipes/zoom.py --gpu h100-80gb``: 45 GiB in training; in the rollout the KV cache takes what is
left. No full run of this recipe has been measured yet.
"""

import vlmrl
from vlmrl import Config, Data, Eval, EvalData, Model, Optim, Rollout, Train


def config() -> Config:
    letters = "../datasets/letters.py:make_task"
    return Config(
        name="zoom",
        model=Model(path="Qwen/Qwen3-VL-2B-Instruct"),
        data=Data(generator=letters, size=20_000),
        env="../envs/zoom.py:ZoomEnv",
        env_options={"coarse": 192, "crop": 512},
        rollout=Rollout(group_size=8, max_turns=5, max_tokens=4096, max_response_tokens=512),
        optim=Optim(lr=1e-6),
        train=Train(steps=80, groups_per_batch=128, tokens_per_micro_batch=16384),
        eval=Eval(data=EvalData(generator=letters, size=256, seed=1), every=20, blank_images=True, chance=1 / 26),
    )


if __name__ == "__main__":
    vlmrl.main(config)
