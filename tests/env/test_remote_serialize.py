"""Tasks and messages over the wire: what comes back is what was sent, images to the pixel."""

import io
import json
from pathlib import Path

import pytest
from PIL import Image
from testing.episodes import a_task, image

from vlmrl.env.remote.serialize import from_wire, task_from_wire, task_to_wire, to_wire
from vlmrl.multimodal.images import load_image
from vlmrl.types import Task


def sent(value):
    return from_wire(json.loads(json.dumps(to_wire(value, "value"))))


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "I;16"])
def test_a_image_keeps_its_mode_and_pixels(mode: str):
    image = Image.effect_noise((20, 10), 80).convert("L" if mode == "I;16" else mode)
    if mode == "I;16":
        image = Image.frombytes("I;16", (20, 10), bytes(range(200)) * 2)
    back = sent(image)
    assert (back.mode, back.size, back.tobytes()) == (image.mode, image.size, image.tobytes())


def test_a_turned_image_stays_turned_and_a_print_becomes_rgb():
    turned = image(size=(20, 10))
    turned.getexif()[0x0112] = 6
    assert load_image(sent(turned)).size == load_image(turned).size == (10, 20)
    assert sent(Image.new("CMYK", (4, 4))).mode == "RGB"


def test_plain_data_comes_back_as_it_was():
    value = {"a": [1, 2.5, None, True, "é"], "b": b"\x00\xff", "deep": [{"c": {}}]}
    assert sent(value) == value


def test_a_task_comes_back_whole_and_its_images_travel_once(tmp_path: Path):
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
    wire = json.loads(json.dumps(task_to_wire(task)))
    assert wire["images"] is None
    back = task_from_wire(wire)
    assert (back.id, back.answer, back.source, back.seed, back.data["n"]) == ("t", ["red", 1], "s", 7, 3)
    colors = [load_image(image).getpixel((0, 0)) for image in back.images]
    assert colors == [(255, 0, 0), (0, 128, 0), (0, 128, 0), (0, 128, 0)]
    assert [part["type"] for part in back.prompt[0]["content"]] == ["image"] * 4 + ["text"]
    assert back.data["map"].getpixel((0, 0)) == (0, 0, 255)


def test_images_that_the_prompt_does_not_show_travel_too():
    back = task_from_wire(task_to_wire(Task("t", [{"role": "user", "content": "?"}], [image("blue")])))
    assert back.images[0].getpixel((0, 0)) == (0, 0, 255)


def test_what_cannot_be_sent_is_named():
    with pytest.raises(ValueError, match=r"task.data.tags\[1\] is a set, which cannot be sent"):
        task_to_wire(a_task(data={"tags": ["a", {"b"}]}))
