"""Images of an env's answers are frozen off the event loop, in the moment in which they are shown."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from PIL import Image, ImageDraw
from testing.episodes import a_task, decoded, play, play_audited, turn_loop

from vlmrl import Env, ToolEnv, obs
from vlmrl.env import answer
from vlmrl.env.answer import StepResult, freeze_answer, with_digest
from vlmrl.multimodal import images
from vlmrl.multimodal.images import DecodedImage

COLORS = ["red", "green", "blue"]
RGB = [(255, 0, 0), (0, 128, 0), (0, 0, 255)]


class Canvas(Env):
    """Draws every frame on one canvas, as games do."""

    def reset(self):
        self.canvas = Image.new("RGB", (64, 32))

    def step(self, response_text: str):
        ImageDraw.Draw(self.canvas).rectangle((0, 0, 64, 32), COLORS[self.turn])
        return obs("", images=[self.canvas]), self.turn == 2, {"reward": 1.0}


def test_messages_and_tokens_of_an_episode_show_each_frame():
    trajectory = play_audited(Canvas, ["a", "b", "c"])
    turns = trajectory.turns[1:]
    assert [turn.media[0].image.getpixel((0, 0)) for turn in turns] == RGB[:2]
    kept = [turn.messages[0]["content"][0]["image"] for turn in turns]
    assert [image.image.getpixel((0, 0)) for image in kept] == RGB[:2]


@pytest.mark.parametrize("history", ["append", "rerender"])
def test_messages_that_the_env_changes_later_stay_as_they_were_shown(history: str):
    class Changes(Env):
        """Shows the same message after each response, with another text."""

        def reset(self):
            self.message = {"role": "user", "content": [{"type": "text", "text": "Start."}]}
            return [self.message]

        def step(self, response_text: str):
            self.message["content"][0]["text"] = f"Frame {self.turn}."
            return obs(), self.turn == 2, {"reward": 1.0}

        def format_observation(self, observation: dict[str, Any]):
            return self.message

    trajectory = play_audited(Changes, ["a", "b", "c"], history=history, samples="step_wise")
    shown = ["Start.", "Frame 0.", "Frame 1."]
    assert [turn.messages[0]["content"][0]["text"] for turn in trajectory.turns] == shown
    last = decoded([*trajectory.prompts()][-1][0])
    assert all(text in last for text in shown)


def test_images_are_copied_hashed_and_resized_in_the_threads_for_such_work(monkeypatch: pytest.MonkeyPatch):
    class Opens(Canvas):
        def reset(self):
            super().reset()
            return [
                {"role": "user", "content": [{"type": "image", "image": self.canvas}, *self.task.prompt[-1]["content"]]}
            ]

    threads: dict[str, set[str]] = {}

    def noted(name: str, function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            threads.setdefault(name, set()).add(threading.current_thread().name)
            return function(*args, **options)

        return call

    loop = turn_loop(Opens, ["a", "b", "c"])
    for module, name in ((answer, "frozen_image"), (images, "_content_hash"), (images, "_loaded")):
        monkeypatch.setattr(module, name, noted(name, getattr(module, name)))
    monkeypatch.setattr(loop.store._family, "resize", noted("resize", loop.store._family.resize))
    task = a_task("?", [Image.new("RGB", (100, 40), "red")])
    trajectory = asyncio.run(loop.play(task, "g", "g/00"))
    assert not trajectory.failed and set(threads) == {"frozen_image", "_content_hash", "_loaded", "resize"}
    assert all(name.startswith("vlmrl-cpu-") for names in threads.values() for name in names), threads


def test_answers_are_read_and_digested_in_the_envs_thread(monkeypatch: pytest.MonkeyPatch):
    class Talks(Env):
        def step(self, response_text: str):
            return obs("long " * 10_000), True, {"reward": 1.0}

        def format_observation(self, observation: dict[str, Any]) -> Any:
            raise AssertionError("the last observation is not shown")

    threads: list[str] = []

    def digest_of(value: Any) -> str:
        threads.append(threading.current_thread().name)
        return "x"

    monkeypatch.setattr(answer, "digest_of", digest_of)
    assert play(Talks, ["a"]).ending == "env_done"
    assert threads == ["vlmrl-env-0"] * 2  # reset's and step's


def test_results_of_async_tools_are_shown_in_the_envs_thread():
    threads: list[str] = []

    async def look() -> str:
        """Look around."""
        threads.append(threading.current_thread().name)
        return "a door"

    class Tools(ToolEnv):
        functions = [look]  # noqa: RUF012

        def show_results(self, results: Any) -> Any:
            threads.append(threading.current_thread().name)
            return super().show_results(results)

        def judge(self, response: str) -> float:
            return 1.0

    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    trajectory = play(Tools, [call + call, "done"])
    assert trajectory.reward == 1.0 and "a door" in str(trajectory.turns[1].messages)
    assert threads == ["vlmrl-envs", "vlmrl-envs", "vlmrl-env-0"]


def test_the_results_of_several_calls_show_what_each_returned():
    """The first of two frames on one canvas was shown as the second, and a list as it was after the last call."""

    @dataclass
    class Seen:
        frame: Image.Image
        notes: list[str]

    class Sketch(ToolEnv):
        def reset(self):
            self.canvas, self.notes = Image.new("RGB", (64, 32)), []

        def draw(self, color: str) -> Any:
            """Draw on the canvas.

            Args:
                color: The color.
            """
            ImageDraw.Draw(self.canvas).rectangle((0, 0, 64, 32), color)
            self.notes.append(color)
            return {"red": obs(color, images=[self.canvas]), "green": [color, self.canvas]}.get(color, self.canvas)

        async def look(self, color: str) -> Any:
            """Draw, and tell all.

            Args:
                color: The color.
            """
            self.draw(color)
            if color == "red":
                return Seen(self.canvas, self.notes)
            return Counter({"frame": self.canvas, "notes": self.notes})  # a dict whose update() adds

        functions = [draw, look]  # noqa: RUF012

        def judge(self, response: str) -> float:
            return 1.0

    def calls(name: str) -> str:
        return "".join(
            f'<tool_call>{{"name": "{name}", "arguments": {{"color": "{color}"}}}}</tool_call>' for color in COLORS
        )

    trajectory = play_audited(Sketch, [calls("draw"), calls("look"), "done"], max_tokens=4000)
    drawn, looked = trajectory.turns[1:]
    assert [item.image.getpixel((0, 0)) for item in (*drawn.media, *looked.media)] == RGB + RGB
    texts = [message["content"][-1]["text"] for message in looked.messages]
    assert [json.loads(text)["notes"] for text in texts] == [[*COLORS, *COLORS[:count]] for count in (1, 2, 3)]


def test_an_image_that_does_not_decode_stays_as_it_is():
    broken, good = Image.new("I;16", (4, 4)), Image.new("RGB", (4, 4))
    parts = [{"type": "image", "image": image} for image in (broken, good, good)]
    before = StepResult([{"role": "user", "content": parts}], False, None, {})
    assert with_digest(before) == (before, None)  # there is something to freeze
    after, digest = freeze_answer(before)
    assert isinstance(after, StepResult)
    first, second, third = (part["image"] for part in after.messages[0]["content"])
    assert first is broken and isinstance(second, DecodedImage) and second is third
    assert parts[1]["image"] is good  # the env's own message is not changed
    assert digest == freeze_answer(before)[1]


def test_digests_tell_answers_apart():
    def digest(color: str, text: str = "", done: bool = False) -> str:
        content = [{"type": "image", "image": Image.new("RGB", (4, 4), color)}, {"type": "text", "text": text}]
        return freeze_answer(StepResult([{"role": "user", "content": content}], done, None, {}))[1]

    assert digest("red") == digest("red")
    assert len({digest("red"), digest("blue"), digest("red", "x"), digest("red", done=True)}) == 4
