"""Tasks and messages as JSON and back, images pixel by pixel."""

import base64
import io
import json
import math
import tracemalloc
from pathlib import Path

import pytest
from PIL import Image
from testing.episodes import a_task, image

from vlmrl.env.remote.serialize import (
    checked_tools,
    deserialize,
    deserialize_messages,
    deserialize_task,
    serialize,
    serialize_task,
)
from vlmrl.multimodal.images import encode_png, load_image
from vlmrl.multimodal.messages import values_of
from vlmrl.types import Task
from vlmrl.utils.kept import Kept


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


@pytest.mark.parametrize("mode", ["RGBa", "PA"])
def test_a_mode_that_png_lacks_keeps_its_transparency(mode: str):
    clear = Image.new("RGBA", (6, 4), (255, 0, 0, 0))
    shown = clear.convert(mode) if mode == "RGBa" else Image.frombytes("PA", (6, 4), bytes(2 * 6 * 4))
    assert load_image(shown).getpixel((0, 0)) == load_image(round_trip(shown)).getpixel((0, 0)) == (255, 255, 255)


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


def test_numbers_that_json_lacks_come_back_as_they_were():
    data = {"difficulty": math.nan, "bounds": [math.inf, {"low": -math.inf}], "plain": 0.5}
    payload = json.loads(json.dumps(serialize_task(a_task(data=data)), allow_nan=False))
    back = deserialize_task(payload).data
    assert math.isnan(back["difficulty"]) and back["bounds"] == [math.inf, {"low": -math.inf}] and back["plain"] == 0.5


@pytest.mark.parametrize("marker", ["$image", "$bytes", "$float", "$dict"])
def test_data_that_looks_like_a_marker_stays_data(marker: str):
    for value in ({marker: "nan"}, {marker: {marker: "x"}}, {marker: 1, "b": 2}, {"a": {marker: None}}):
        assert round_trip(value) == value


def test_half_a_surrogate_pair_in_a_column_is_sent():
    assert round_trip({"name": "a\ud800"}) == {"name": "a\ud800"}


def test_a_url_is_sent_as_the_bytes_behind_it_which_are_fetched_once(monkeypatch: pytest.MonkeyPatch):
    fetched, content = [], encode_png(image())

    async def fetch(url: str) -> bytes:
        fetched.append(url)
        return content

    monkeypatch.setattr("vlmrl.multimodal.embedded.fetch", fetch)
    monkeypatch.setattr("vlmrl.multimodal.embedded._DOWNLOADED", Kept(2**20, len))
    task = a_task("?", ["http://images.invalid/a.png"])
    for _ in range(4):  # the members of a group
        assert deserialize_task(serialize_task(task)).images == [content]
    assert fetched == ["http://images.invalid/a.png"]


def test_a_data_uri_is_sent_as_it_is():
    uri = "data:image/png;base64," + base64.b64encode(encode_png(image())).decode()
    assert deserialize_task(serialize_task(a_task("?", [uri]))).images == [uri]


def test_a_file_that_is_no_image_is_not_sent(tmp_path: Path):
    (tmp_path / "secret.txt").write_text("TOP-SECRET")
    with pytest.raises(ValueError, match=r"an image does not load: .*secret.txt"):
        serialize_task(a_task("?", [str(tmp_path / "secret.txt")]))


def test_messages_and_tools_of_many_values_are_refused():
    """Writing them as JSON holds the interpreter: a million numbers in a call of an env server's step, for seconds."""
    call = {"name": "f", "arguments": {"a": [1e308] * 2**15}}
    with pytest.raises(ValueError, match="messages must have at most 32768 values"):
        deserialize_messages([{"role": "assistant", "content": "", "tool_calls": [call]}], "messages")
    with pytest.raises(ValueError, match="tools must have at most 32768 values"):
        checked_tools([{"name": "f", "parameters": {"enum": [1e308] * 2**15}}])


def test_the_names_of_values_in_errors_take_no_memory():
    """A key of 30 MB, which the names of all 400,000 values within had, held up other clients for 45 s; deep keys took gigabytes."""
    value = {"k" * 10_000: 0}
    for _ in range(200):
        value = {"k" * 10_000: value}
    tracemalloc.start()
    try:
        for read in (serialize, deserialize):
            assert read(value, "task.data") == value
        with pytest.raises(ValueError, match=r"^tools\[0\]\.k{200} must be text"):
            checked_tools([{"name": "x", "k" * 10_000: b"no text"}])
        assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
    finally:
        tracemalloc.stop()
    assert list(serialize({"a": {"b": [1]}}, "value")) == ["a"]
    with pytest.raises(ValueError, match=r"^value\.a\.b\[1\] must be plain data"):
        serialize({"a": {"b": [1, object()]}}, "value")
    deep: object = object()
    for _ in range(100):
        deep = {"k" * 100: deep}
    with pytest.raises(ValueError, match=r"^value(\.k{100}){2} must be plain data"):
        serialize(deep, "value")


def test_texts_that_lie_deep_are_looked_at_once_each():
    """A body of 4 MB, of empty texts 400 lists deep, kept a thread for 20 s."""
    value = [[str(number) for number in range(3)], {"a": "b"}]
    for _ in range(5000):
        value = [value]
    assert sorted(each for each in values_of(value) if isinstance(each, str)) == ["0", "1", "2", "a", "b"]
