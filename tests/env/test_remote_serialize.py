"""Tasks and messages as JSON and back, images pixel by pixel."""

import io
import json
from pathlib import Path

import pytest
from PIL import Image
from testing.episodes import a_task, image

from vlmrl.env.remote.serialize import deserialize, deserialize_task, serialize, serialize_task
from vlmrl.multimodal.images import load_image
from vlmrl.types import Task


def round_trip(value):
    return deserialize(json.loads(json.dumps(serialize(value, "value"))), "value")


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "I;16"])
def test_an_image_keeps_its_mode_and_pixels(mode: str):
    image = Image.effect_noise((20, 10), 80).convert("L" if mode == "I;16" else mode)
    if mode == "I;16":
        image = Image.frombytes("I;16", (20, 10), bytes(range(200)) * 2)
    back = round_trip(image)
    assert (back.mode, back.size, back.tobytes()) == (image.mode, image.size, image.tobytes())


def test_a_turned_image_stays_turned_and_a_print_becomes_rgb():
    turned = image(size=(20, 10))
    turned.getexif()[0x0112] = 6
    assert load_image(round_trip(turned)).size == load_image(turned).size == (10, 20)
    assert round_trip(Image.new("CMYK", (4, 4))).mode == "RGB"


def test_plain_data_comes_back_as_it_was():
    value = {"a": [1, 2.5, None, True, "é"], "b": b"\x00\xff", "deep": [{"c": {}}]}
    assert round_trip(value) == value


def test_a_task_is_restored_and_its_images_are_sent_once(tmp_path: Path):
    buffer = io.BytesIO()
    image("green").save(buffer, format="PNG")
    (tmp_path / "green.png").write_bytes(buffer.getvalue())
    sources = [
        image("red"),
        buffer.getvalue(),
        str(tmp_path / "green.png"),
        {"bytes": None, "path": str(tmp_path / "green.png")},
    ]
    task = a_task("Which?", sources, answer=["red", 1], data={"n": 3, "map": image("blue")}, source="s", seed=7)
    payload = json.loads(json.dumps(serialize_task(task)))
    assert payload["images"] is None
    back = deserialize_task(payload)
    assert (back.id, back.answer, back.source, back.seed, back.data["n"]) == ("t", ["red", 1], "s", 7, 3)
    colors = [load_image(image).getpixel((0, 0)) for image in back.images]
    assert colors == [(255, 0, 0), (0, 128, 0), (0, 128, 0), (0, 128, 0)]
    assert [part["type"] for part in back.prompt[0]["content"]] == ["image"] * 4 + ["text"]
    assert back.data["map"].getpixel((0, 0)) == (0, 0, 255)


def test_images_outside_the_prompt_are_sent_too():
    back = deserialize_task(serialize_task(Task("t", [{"role": "user", "content": "?"}], [image("blue")])))
    assert back.images[0].getpixel((0, 0)) == (0, 0, 255)


def test_a_value_that_is_not_plain_data_is_an_error_that_names_it():
    with pytest.raises(ValueError, match=r"task.data.tags\[1\] must be plain data .* it is a set"):
        serialize_task(a_task(data={"tags": ["a", {"b"}]}))
