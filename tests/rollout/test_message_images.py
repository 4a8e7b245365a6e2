"""Images that an env made in answer to a response and that cannot be shown: the model reads so, and its group lives."""

from __future__ import annotations

import asyncio
import io
import json
import random
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hostile.images import cases, outcome
from PIL import Image
from testing.episodes import a_task, decoded, image, play, play_audited, turn_loop

from vlmrl import Env, ToolEnv, obs
from vlmrl.rollout.runner import Runner

REFUSED = "which the model's image processor refuses: absolute aspect ratio must be smaller than 200, got 256.0"
THIN = f"[This image cannot be shown: it is 256x1 pixels, {REFUSED}]"


def shows(*images: Any) -> type[Env]:
    """Answers the first response with ``images`` and a text, and is done at the second."""

    class Shows(Env):
        def step(self, response_text: str):
            return obs("Closer:", images=list(images)), self.turn == 1, {"reward": 0.5}

    return Shows


def second_prompt(trajectory: Any) -> str:
    assert not trajectory.failed, trajectory.error
    return decoded(trajectory.turns[1].prompt_ids)


def png(size: tuple[int, int]) -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise(size, 50).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (image(size=(256, 1)), f"it is 256x1 pixels, {REFUSED}"),
        (image(size=(1, 256)), f"it is 1x256 pixels, {REFUSED}"),
        (image(size=(0, 5)), "it is 0x5 pixels, but it must have at least one."),
        (image().crop((3, 7, 3, 7)), "it is 0x0 pixels, but it must have at least one."),
        (Image.new("F", (64, 32)), "mode F holds more than 8 bits a channel; scale it to 0..255 first, for example"),
        (b"\x89PNG no image", "cannot identify image file: it has none of the formats PNG, JPEG"),
        (png((64, 64))[:900], "it does not decode."),
        (Image.open(io.BytesIO(png((64, 64))[:900])), "it does not decode."),
        ("/zoom.png", "there is no such file."),
        ("data:image/png;base64,AAAA", "cannot identify image file"),
    ],
    ids=["wide", "high", "flat", "empty", "float", "no image", "cut", "cut, opened lazily", "no file", "uri"],
)
def test_the_model_reads_why_an_image_cannot_be_shown(broken: Any, reason: str):
    trajectory = play_audited(shows(broken), ["zoom", "done"])
    prompt = second_prompt(trajectory)
    assert f"[This image cannot be shown: {reason}" in prompt and prompt.count("Closer:") == 1
    assert "0x7" not in prompt and "/zoom.png" not in prompt  # no address and no path: the same text in every run
    assert (trajectory.reward, trajectory.turns[1].media) == (1.0, [])
    assert [turn.metrics.get("images_not_shown") for turn in trajectory.turns] == [1.0, None]


@pytest.mark.parametrize("size", [(1, 1), (1, 200), (200, 1), (5, 1), (28, 1)])
def test_small_images_are_shown_as_the_processor_has_them(size: tuple[int, int]):
    trajectory = play_audited(shows(image(size=size)), ["zoom", "done"])
    assert "cannot be shown" not in second_prompt(trajectory)
    assert len(trajectory.turns[1].media) == 1 and not trajectory.turns[0].metrics


@pytest.mark.parametrize("history", ["append", "inline", "rerender"])
def test_the_other_images_stay_in_their_places(history: str):
    thin, red = image("blue", (256, 1)), image("red")
    options = {"history": history, "samples": "step_wise"} if history == "rerender" else {"history": history}
    trajectory = play(shows(thin, red, thin), ["zoom", "done"], a_task("What?", [image("green")]), **options)
    pads = "<|image_pad|><|image_pad|><|vision_end|>"
    assert f"{THIN}\n<|vision_start|>{pads}{THIN}\nCloser:" in second_prompt(trajectory)
    assert trajectory.turns[0].metrics["images_not_shown"] == 2.0
    colors = [item.image.getpixel((0, 0)) for item in trajectory.turns[1].media]
    assert colors[-1] == (255, 0, 0)


def test_a_tool_s_image_that_cannot_be_shown_is_its_result():
    def crop(width: int) -> Image.Image:
        """Crop.

        Args:
            width: In pixels.
        """
        return image(size=(width, 1))

    class Crops(ToolEnv):
        functions = (crop,)

        def judge(self, response: str) -> float:
            return 1.0

    call = '<tool_call>{"name": "crop", "arguments": {"width": 256}}</tool_call>'
    trajectory = play_audited(Crops, [call, "done"])
    assert f"<tool_response>\n{THIN}\n</tool_response>" in second_prompt(trajectory)


def test_a_policy_that_asks_for_a_thin_crop_does_not_kill_its_group():
    class Crops(Env):
        def step(self, response_text: str):
            if response_text == "done":
                return obs(), True, {"reward": 1.0}
            return obs("Closer:", images=[self.task.images[0].crop(json.loads(response_text))]), False, {}

    def response(request: Any, turn: int) -> str:
        return "done" if turn else "[0, 0, 256, 1]" if request.trajectory_id.endswith("03") else "[0, 0, 64, 64]"

    loop = turn_loop(Crops, response, group_size=4)
    task = a_task("Which?", [image("red", (256, 256))])
    played = asyncio.run(Runner(loop).play(iter([task]), 1, "x"))
    assert (len(played.groups), played.dropped_groups, played.failed) == (1, 0, [])
    assert [len(trajectory.turns) for trajectory in played.groups[0]] == [2] * 4


class Resets(Env):
    def reset(self):
        return [{"role": "user", "content": [{"type": "image", "image": image(size=(256, 1))}]}]

    def step(self, response_text: str):
        return obs(), True, {"reward": 1.0}


@pytest.mark.parametrize(
    ("env", "task"),
    [(shows(), a_task("?", [image(size=(256, 1))])), (Resets, a_task("?"))],
    ids=["the row's", "reset's"],
)
def test_an_image_of_the_task_is_a_data_error(env: type[Env], task: Any):
    trajectory = play(env, ["done"], task)
    assert (trajectory.ending, trajectory.non_retryable) == ("error", True)
    assert "size=256x1" in (trajectory.error or "") and REFUSED in (trajectory.error or "")


@pytest.mark.parametrize("broken", [5, None, {"bytes": None, "path": None}, [image()]])
def test_what_is_no_image_source_is_an_error_of_the_env(broken: Any):
    trajectory = play(shows(broken), ["zoom", "done"])
    assert (trajectory.ending, trajectory.non_retryable) == ("error", False)
    assert "task t, turn 1: an image does not load: " in (trajectory.error or "")
    assert "an image is a PIL image, bytes, a path, a URL or a data URI" in (trajectory.error or "")


@pytest.mark.parametrize("path", ["crops/none.png", "crops/zoom.png", "loop.png/x.png"])
def test_a_folder_that_does_not_exist_is_an_error_of_the_env(path: str, tmp_path: Path, monkeypatch):
    """Not even `crops/zoom.png` after the response "zoom": there is no folder of crops."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.png").write_bytes(png((64, 64)))
    trajectory = play(shows(path), ["zoom", "done"])
    assert (trajectory.ending, trajectory.non_retryable) == ("error", False)
    assert f"task t, turn 1: an image does not load: {path!r}: [Errno " in (trajectory.error or "")
    assert f", in step). Return a path that exists; a relative one starts in {tmp_path}." in (trajectory.error or "")


@pytest.mark.parametrize(
    ("path", "response"), [("pages/page_012.png", "next"), ("12/x.png", "next"), ("Gone/x.png", "gone, the first")]
)
def test_a_missing_file_that_a_response_may_have_chosen_is_a_text_to_it(
    path: str, response: str, tmp_path: Path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pages").mkdir()
    assert "there is no such file" in second_prompt(play_audited(shows(path), [response, "done"]))


def test_a_single_image_needs_no_list():
    for single in (image(), png((64, 64)), {"bytes": png((64, 64)), "path": None}):
        assert obs(images=single)["multi_modal_data"] == {"image": [single]}
    assert obs(images=(image() for _ in range(2)))["multi_modal_data"]["image"][1].size == image().size
    assert "multi_modal_data" not in obs(images=[]) and "multi_modal_data" not in obs(images=None)


def test_a_replay_compares_images_that_do_not_decode():
    """The replay's observations are compared, also those with images that cannot be decoded or that are not read."""
    failed = []

    class Fails(Env):
        def step(self, response_text: str):
            if self.turn == 1 and not failed:
                failed.append(True)
                raise OSError("for once")
            cut = Image.open(io.BytesIO(png((64, 64))[:900]))
            return obs("x", images=[cut]), self.turn == 1, {"reward": 0.5}

    trajectory = play(Fails, ["a", "b"])
    assert (trajectory.error, trajectory.reward, trajectory.metrics["env_retries"]) == (None, 1.0, 1.0)


def test_hostile_images_end_in_an_image_a_text_or_an_error_of_the_env(how_many):
    found = Counter(outcome(source) for source in islice(cases(random.Random(0)), how_many(120)))
    assert sum(found.values()) == how_many(120) and set(found) == {"shown", "told", "env error"}
