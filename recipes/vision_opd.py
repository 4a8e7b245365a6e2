"""Vision-OPD: the teacher sees a crop, the policy the whole image, downscaled; no tool, no reward.

    python recipes/vision_opd.py                   # Qwen3.5-4B; the images are drawn, nothing to download
    python recipes/vision_opd.py --dry-run         # resolve everything, print the plan, stop

Batch, learning rate, top-k, the teacher's average and the number of steps are those of the paper (arXiv 2605.18740; Qwen3.5-4B on
eight GPUs): 96 tasks x 8 episodes, 2e-6, 100 tokens, 65 steps; its rate of 0.05 for new weights is a decay of 0.95. Divergence, token
limits and data are ours. With your own images: ``--data.path FILE`` with the columns prompt, images (one image), answer (a word) and
box (left, top, right and bottom in pixels). No full run of this recipe has been measured yet.
"""

import vlmrl
from vlmrl import (
    Algo,
    Config,
    Data,
    Eval,
    EvalData,
    Message,
    Model,
    Optim,
    Rollout,
    Task,
    Teacher,
    Train,
    load_image,
    read_tags,
)


def show_crop(task: Task, trajectory, turn: int) -> list[Message]:
    """What the teacher sees: the same question about the part of the image that matters."""
    crop = load_image(task.images[0]).crop(task.data["box"])
    messages = []
    for message in task.prompt:
        content = message["content"]
        if not isinstance(content, str):
            content = [{"type": "image", "image": crop} if part["type"] == "image" else part for part in content]
        messages.append({**message, "content": content})
    return messages


def reward(text: str, task: Task) -> float:
    """For the curve; with ``algo.advantage none`` it trains nothing."""
    given = [answer.strip().lower() for answer in read_tags(text, "answer")]
    return float(given[-1:] == [str(task.answer).strip().lower()])


def config() -> Config:
    letters = "../datasets/letters.py:make_question"
    return Config(
        name="vision_opd",
        model=Model(path="Qwen/Qwen3.5-4B", max_image_pixels=384 * 384),
        data=Data(generator=letters, size=20_000),
        reward=reward,
        rollout=Rollout(group_size=8, max_tokens=2048, max_response_tokens=1024, truncated_reward=0.0),
        teacher=Teacher(model="average", sees=show_crop, top_k=100, decay=0.95),
        algo=Algo(advantage="none"),
        optim=Optim(lr=2e-6),
        train=Train(steps=65, groups_per_batch=96),
        eval=Eval(data=EvalData(generator=letters, size=256, seed=1), every=13, blank_images=True, chance=1 / 26),
    )


if __name__ == "__main__":
    vlmrl.main(config)
