"""The quickstart's task, played by an agent on the `openai` package: it asks, zooms where the model says, and asks again.

The agent is an ordinary function with an ordinary loop. The run gives it a URL and records the tokens and images of its requests.
Messages, limits, warm start and seeds are those of `recipes/quickstart.py`, so that both give the same numbers (docs/agents.md).

    pip install 'vlmrl[agents]'
    python recipes/agents/zoom_openai.py
"""

from PIL import Image

import vlmrl
from vlmrl import Config, Data, Eval, EvalData, Model, Optim, Rollout, Train, WarmStart


def play(task, client):
    """The agent: it returns the reward, 1 for the right color."""
    openai, image = client.openai(), vlmrl.load_image(task.images[0])
    messages = [{"role": "user", "content": look(image, task.prompt[0]["content"][-1]["text"])}]
    for _ in range(2):
        choice = openai.chat.completions.create(model=client.model, messages=messages).choices[0]
        response = choice.message.content
        if choice.finish_reason == "length":
            break
        if answers := vlmrl.read_tags(response, "answer"):
            return float(answers[-1].strip().lower() == task.answer)
        try:
            answer = look(zoom(image, read_box(response)), "Closer:")
        except ValueError as error:
            answer = str(error)
        messages += [{"role": "assistant", "content": response}, {"role": "user", "content": answer}]
    return 0.0


def look(image, text):
    """Content of a message: the image, scaled so that its longest side has 32 pixels, and the text."""
    scale = 32 / max(image.size)
    how = Image.Resampling.BOX if scale < 1 else Image.Resampling.BICUBIC
    small = image.resize([max(1, round(length * scale)) for length in image.size], how)
    return [{"type": "image_url", "image_url": {"url": vlmrl.data_uri(small)}}, {"type": "text", "text": text}]


def read_box(response):
    """The box of the last whole call in a response. The model reads the text of the ValueError."""
    whole, end, _ = response.rpartition("</tool_call>")
    calls = vlmrl.read_tool_calls(whole + end)
    if not calls:
        raise ValueError("Call zoom, or give your answer as <answer>...</answer>.")
    try:
        box = [int(corner) for corner in calls[-1].arguments["bbox"]]
    except (ValueError, KeyError, TypeError, OverflowError):
        call = '{"name": "zoom", "arguments": {"bbox": [left, top, right, bottom]}}'
        raise ValueError(f"A call is {call}. Try again.") from None
    if calls[-1].name != "zoom":
        raise ValueError(f"There is no tool {calls[-1].name!r}; the only one is zoom. Try again.")
    if len(box) != 4 or not (0 <= box[0] < box[2] <= 1000 and 0 <= box[1] < box[3] <= 1000):
        raise ValueError(f"bbox must be left < right and top < bottom within 0 and 1000, but it is {box}. Try again.")
    return box


def zoom(image, box):
    """The part of the image in a box of thousandths."""
    left, top, right, bottom = (corner * image.width // 1000 for corner in box)  # the images are square
    width, height = max(1, right - left), max(1, bottom - top)
    if max(width, height) > 100 * min(width, height):  # the model's processor would refuse it
        raise ValueError(f"bbox is too thin: it has {width}x{height} pixels; the limit is 100:1. Try again.")
    return image.crop((left, top, left + width, top + height))


def config() -> Config:
    shapes = "../../datasets/shapes.py:make_task"
    return Config(
        name="zoom-openai",
        model=Model(path="tiny:qwen3_vl"),
        data=Data(generator=shapes, size=4096),
        agent=play,
        rollout=Rollout(group_size=8, max_turns=2, max_tokens=256, max_response_tokens=48, samples="merged"),
        warm_start=WarmStart(demonstrate="../quickstart.py:demonstrate", steps=400, trajectories_per_step=32, lr=1e-3),
        optim=Optim(lr=1e-4, betas=(0.9, 0.999), warmup_steps=10),
        train=Train(steps=200, groups_per_batch=16),
        eval=Eval(data=EvalData(generator=shapes, size=256, seed=1), every=50, blank_images=True, chance=0.25),
    )


if __name__ == "__main__":
    vlmrl.main(config)
