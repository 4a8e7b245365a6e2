"""MiniWoB++ with a real Qwen3-VL: a mixture of web tasks in Chromium, with the last two screenshots in the prompt.

    pip install 'vlmrl[browser]'                   # and Chromium: apt install chromium
    python recipes/miniwob.py                      # Qwen3-VL-2B-Instruct on one GPU
    python recipes/miniwob.py --model.path Qwen/Qwen3-VL-4B-Instruct --model.lora.rank 32 --optim.lr 1e-5
    vlmrl plan recipes/miniwob.py --gpu h100-80gb  # the memory, without the GPU

The model sees a screenshot of 320 x 420 pixels, reasons briefly and calls Qwen's tool `computer_use`, until the task is done or ten
responses are used. Before each response the conversation is rendered again with its last two screenshots only, so each response is
a row (`step_wise`) with exactly the prompt that the model saw. Evaluation uses other seeds of the trained tasks and six tasks that
are never trained, and reports each task.

No published run has these pages and this model, so the numbers are ours. Group-relative advantages for a Qwen-VL that uses a
computer are those of ARPO (Lu et al. 2025, arXiv 2505.16282), whose episodes have up to 15 responses.

Memory, computed by `vlmrl plan recipes/miniwob.py --gpu h100-80gb`: 45 GiB in training; in the rollout the KV cache takes what is
left. No full run of this recipe has been measured yet.
"""

import vlmrl
from vlmrl import Algo, Config, Data, Eval, EvalData, Model, Optim, Rollout, Task, Train

PROMPT = "You use a web page. Do what its instruction says. Think in a sentence or two, then call computer_use."
TRAINED = [
    *(
        "click-test",
        "click-test-2",
        "click-button",
        "click-button-sequence",
        "click-dialog",
        "click-color",
        "click-shape",
    ),
    *("click-option", "click-checkboxes", "click-tab", "click-link", "click-widget", "focus-text", "enter-text"),
    *("enter-password", "grid-coordinate", "identify-shape", "count-shape", "use-spinner", "navigate-tree"),
]
HELD_OUT = [
    "click-dialog-2",
    "click-checkboxes-large",
    "click-tab-2-easy",
    "focus-text-2",
    "enter-text-2",
    "login-user",
]


def pages(index: int, seed: int, held_out: bool = False) -> Task:
    """The tasks in turn, with those held out or without; the seed decides what a page shows."""
    names = [*TRAINED, *HELD_OUT] if held_out else TRAINED
    name = names[index % len(names)]
    prompt = [{"role": "user", "content": PROMPT}]
    return Task(f"{name}/{seed}", prompt, data={"miniwob": name}, seed=seed, source=name)


def config() -> Config:
    return Config(
        name="miniwob",
        model=Model(path="Qwen/Qwen3-VL-2B-Instruct", max_image_pixels=320 * 420),
        data=Data(generator=pages, size=20_000),
        env="vlmrl:MiniWobEnv",
        env_options={"reward": "success", "scale": 2.0},
        rollout=Rollout(
            group_size=8,
            max_turns=10,
            max_tokens=6144,
            max_response_tokens=384,
            max_concurrent=64,
            history="keep_last_images",
            history_options={"k": 2},
            samples="step_wise",
        ),
        algo=Algo(options={"ppo.clip_low": 0.2, "ppo.clip_high": 0.3}),
        optim=Optim(lr=1e-6),
        train=Train(steps=150, groups_per_batch=32, tokens_per_micro_batch=16384),
        eval=Eval(data=EvalData(generator=pages, size=260, seed=1, options={"held_out": True}), every=25),
    )


if __name__ == "__main__":
    vlmrl.main(config)
