"""The zoom env by hand: crops in thousandths, explaining observations, one reward."""

import asyncio
import random
from pathlib import Path

import pytest
from PIL import Image

from vlmrl.config.code import load_object
from vlmrl.types import Task

ROOT = Path(__file__).parents[2]
ZoomEnv = load_object(f"{ROOT / 'envs/zoom.py'}:ZoomEnv")
make_task = load_object(f"{ROOT / 'datasets/shapes.py'}:make_task")


def quarters() -> Image.Image:
    """200 x 100: red top left, green top right, blue bottom left, yellow bottom right."""
    image = Image.new("RGB", (200, 100), "yellow")
    for color, box in (("red", (0, 0, 100, 50)), ("green", (100, 0, 200, 50)), ("blue", (0, 50, 100, 100))):
        image.paste(color, box)
    return image


def env(**options):
    prompt = [
        {"role": "user", "content": [{"type": "image", "image": quarters()}, {"type": "text", "text": "What color?"}]}
    ]
    made = ZoomEnv(Task("t", prompt, [quarters()], answer="Blue"), **options)
    made.max_turns = 4
    return made


def step(made, response):
    return asyncio.run(made.step(response))


def call(box):
    return f'I look. <tool_call>\n{{"name": "zoom", "arguments": {{"bbox": {box}}}}}\n</tool_call>'


def test_the_first_image_is_coarse():
    (message,) = env(coarse=20).reset()
    image, text = message["content"]
    assert image["image"].size == (20, 10) and text["text"] == "What color?"


@pytest.mark.parametrize(
    ("box", "size", "color"),
    [
        ([0, 500, 500, 1000], (64, 32), (0, 0, 255)),  # the blue quarter, 100 x 50 pixels
        ([500, 0, 1000, 500], (64, 32), (0, 128, 0)),
        ([0, 0, 1, 1], (64, 64), (255, 0, 0)),  # less than a pixel is one pixel
        ([999, 999, 1000, 1000], (64, 64), (255, 255, 0)),  # also at the edge
    ],
)
def test_a_call_returns_the_crop(box, size, color):
    observation, done, info = step(env(crop=64), call(box))
    (crop,) = observation["multi_modal_data"]["image"]
    assert observation["obs_str"] == "Closer:" and not done and info == {"zooms": 1}
    assert crop.size == size and crop.getpixel((size[0] // 2, size[1] // 2)) == color


def test_the_model_reads_the_crop_then_a_word_and_no_tool_tags():
    made = env(crop=64)
    message = made.format_observation(step(made, call([0, 0, 500, 500]))[0])
    assert message["role"] == "user"
    assert [part["type"] for part in message["content"]] == ["image", "text"]
    assert message["content"][1]["text"] == "Closer:"


def test_of_several_calls_the_last_whole_one_counts_and_an_answer_comes_first():
    red, blue = call([0, 0, 500, 500]), call([0, 500, 500, 1000])
    (crop,) = step(env(), red + blue + "<tool_call>{")[0]["multi_modal_data"]["image"]
    assert crop.getpixel((100, 50)) == (0, 0, 255)
    assert step(env(), red + "<answer>blue</answer>")[1:] == (True, {"reward": 1.0, "answered": 1})


def test_a_schema_is_in_the_prompt_unless_it_is_turned_off():
    assert [tool["function"]["name"] for tool in env().tools] == ["zoom"]
    hidden = env(tools_in_prompt=False)
    assert hidden.tools == [] and step(hidden, call([0, 0, 500, 500]))[2] == {"zooms": 1}


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ("Blue, I think.", "Call zoom, or give your answer"),
        ("<tool_call>{</tool_call>", "A call is {"),
        ('<tool_call>{"name": "crop", "arguments": {"bbox": [0, 0, 1, 1]}}</tool_call>', "There is no tool 'crop'"),
        (call([0, 0, 1001, 5]), "bbox must be left < right"),
        (call([5, 0, 5, 5]), "bbox must be left < right"),
        (call([1, 2, 3]), "bbox must be left < right"),
        (call('"abc"'), "A call is {"),
        ("<tool_call>[]</tool_call>", "A call is {"),
        (call("[0, 0, Infinity, 5]"), "A call is {"),
    ],
)
def test_a_wrong_call_is_explained_and_goes_on(response, text):
    observation, done, info = step(env(), response)
    assert text in observation["obs_str"] and not done and "reward" not in info


def photo(size):
    return ZoomEnv(Task("t", [{"role": "user", "content": "Which?"}], [Image.new("RGB", size)], answer="red"))


@pytest.mark.parametrize(
    ("size", "box", "thin"),
    [
        ((640, 480), [0, 0, 1000, 1], "640x1"),
        ((640, 480), [0, 500, 1000, 505], "640x2"),
        ((1280, 960), [500, 0, 501, 1000], "1x960"),
        ((101, 300), [0, 0, 1000, 1], "101x1"),
    ],
)
def test_a_box_that_is_too_thin_for_a_crop_is_explained(size, box, thin):
    observation, done, info = step(photo(size), call(box))
    assert observation["obs_str"] == f"bbox is too thin: it has {thin} pixels; the limit is 100:1. Try again."
    assert "multi_modal_data" not in observation and not done and info == {"zooms": 0}


def test_every_crop_is_one_that_the_processor_takes():
    rng, crops = random.Random(0), 0
    for _ in range(300):
        made = photo((rng.choice([1, 3, 100, 640, 1999]), rng.choice([1, 7, 480, 1500])))
        made.crop = rng.choice([1, 32, 64, 256, 1000])
        corners = [sorted(rng.sample(range(1001), 2)) for _ in "xy"]
        observation, _, info = step(made, call([corners[0][0], corners[1][0], corners[0][1], corners[1][1]]))
        if info["zooms"]:
            (crop,) = observation["multi_modal_data"]["image"]
            assert max(crop.size) <= 200 * min(crop.size)  # the limit of Qwen's processors
            crops += 1
    assert crops > 200


def test_the_last_answer_is_judged_without_regard_to_case():
    assert step(env(), "<answer>red</answer> no, <answer> blue </answer>")[1:] == (True, {"reward": 1.0, "answered": 1})
    assert step(env(), "<answer>red</answer>")[2]["reward"] == 0.0


def test_an_episode_without_an_answer_counts_zero():
    assert env().finish("max_turns") == 0.0 and env().finish("length") == 0.0 and env().finish("env_done") is None


def test_shapes_are_the_same_for_the_same_seed_and_show_their_answer():
    one, two, other = make_task(3, 0), make_task(3, 0), make_task(3, 1)
    assert one["prompt"] == two["prompt"] and one["images"][0].tobytes() == two["images"][0].tobytes()
    assert one["images"][0].tobytes() != other["images"][0].tobytes()
    colors = {"red": (220, 40, 40), "green": (40, 170, 70), "blue": (50, 80, 220), "yellow": (240, 200, 40)}
    column, row = {"top left": (0, 0), "top right": (1, 0), "bottom left": (0, 1), "bottom right": (1, 1)}[
        one["quarter"]
    ]
    quarter = one["images"][0].crop((column * 128, row * 128, column * 128 + 128, row * 128 + 128))
    assert {color for _, color in quarter.getcolors()} == {(128, 128, 128), colors[one["answer"]]}
