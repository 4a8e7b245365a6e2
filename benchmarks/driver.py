"""CPU time of the driver: 1,024 concurrent episodes, 20 turns each, an image a turn, with an engine that takes no time.

    python benchmarks/driver.py                                # 1,024 episodes of 20 turns
    python benchmarks/driver.py --images 1280x960 --turns 5    # pages of text in place of small images of noise
    python benchmarks/driver.py --profile                      # and a profile of the event loop

What is measured is the driver's own work: rendering, encoding, the env and its thread, images, requests. Prints CPU milliseconds a
turn of the event loop's thread and of the whole process, and the one-time cost of each distinct image (decoding, hashing, resizing).
``--shown png`` lets the env show encoded images, as a browser's screenshots are, in place of frames. With ``--distinct`` at least
episodes times turns, no image is shown twice. The profile is in seconds of the thread's own CPU time.

Without ``--images`` it also prints linear fits to the bytes of a request by turn and to the CPU time of episodes of 5 to 40 turns.
Data that is copied again at each turn would bend the second one upwards.
"""

import asyncio
import cProfile
import io
import itertools
import pstats
import resource
import time
from pathlib import Path
from typing import Literal

import numpy as np
import tyro
from PIL import Image, ImageDraw

from vlmrl import Env, Model, Rollout, Task, obs
from vlmrl.engine.base import Request
from vlmrl.env.base import resolve_env
from vlmrl.model.loading import LoadedModel, load_model
from vlmrl.model.tiny import build
from vlmrl.multimodal.images import data_uri, encode_png, frozen_image
from vlmrl.rollout.runner import Runner
from vlmrl.rollout.turn_loop import TurnLoop
from vlmrl.types import Completion

SIDE = 160


def noise(number: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8))


def page(number: int, size: tuple[int, int]) -> Image.Image:
    """Black text on white, as a screenshot of a document."""
    image = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(image)
    for line in range(size[1] // 16):
        draw.text((10, 8 + 15 * line), f"page {number} line {line} of a document " * 8, fill="black")
    return image


class Gallery(Env):
    """An image and a line of text after each response. Episodes begin at different places of the gallery."""

    images: list[Image.Image | bytes]
    episodes = itertools.count()

    def reset(self):
        self.first = next(self.episodes) * self.max_turns

    def step(self, response_text):
        image = self.images[(self.first + self.turn) % len(self.images)]
        return obs(f"Image {self.turn}: what is it?", images=[image]), False, {"reward": 0.0}


class Instant:
    """Answers at once, and notes by turn what a request to a server would send: ids, and images that are new there."""

    policy_version = 0

    def __init__(self, model: LoadedModel, counts_bytes: bool) -> None:
        self.counts_bytes = counts_bytes
        self.response = [
            *model.renderer.encode("It is an image of noise, in many colors."),
            model.renderer.end_of_turn_id,
        ]
        self.sent: dict[int, list[int]] = {}
        self.turns: dict[str, int] = {}

    async def generate(self, request: Request) -> Completion:
        turn = self.turns.get(request.trajectory_id, 0)
        self.turns[request.trajectory_id] = turn + 1
        if self.counts_bytes:
            size = len(request.prompt_ids) * 6 + sum(len(data_uri(i.image)) for i in request.media)
            self.sent.setdefault(turn, []).append(size)
        length = len(request.prompt_ids) + sum(item.num_tokens - 1 for item in request.media)
        size = len(self.response)
        return Completion(self.response, [0.0] * size, "stop", [0] * size, length)

    def release(self, trajectory_id: str) -> None:
        self.turns.pop(trajectory_id, None)


def cpu() -> float:
    """Seconds of all threads of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def images_cost(model: LoadedModel, images: list[Image.Image | bytes]) -> float:
    """CPU seconds that all distinct images need once."""
    store, began = model.new_store(), cpu()
    for image in images:
        store.load(frozen_image(image) if isinstance(image, Image.Image) else image)
    return cpu() - began


class Played:
    """One run: the engine, and seconds of CPU (of the process, of the event loop's thread) and by the clock."""

    def __init__(
        self,
        model: LoadedModel,
        episodes: int,
        turns: int,
        profiler: cProfile.Profile | None = None,
        *,
        counts_bytes: bool = False,
    ) -> None:
        self.engine = Instant(model, counts_bytes)
        config = Rollout(
            group_size=8,
            max_turns=turns,
            max_tokens=1_000_000,
            max_response_tokens=64,
            max_concurrent=episodes,
            env_timeout=600,
        )
        loop = TurnLoop(resolve_env(Gallery), self.engine, model.renderer, model.new_store(), config)
        tasks = (Task(str(n), [{"role": "user", "content": "Look."}], seed=n) for n in range(episodes // 8))

        async def go() -> None:  # its result must be small: asyncio.run takes the trouble to print it
            began = time.thread_time()
            if profiler is not None:
                profiler.enable()
            result = await Runner(loop).play(tasks, episodes // 8, "x")
            if profiler is not None:
                profiler.disable()
            self.loop_cpu = time.thread_time() - began
            assert not result.failed, result.failed[0].error

        began, clock = cpu(), time.perf_counter()
        asyncio.run(go())
        self.cpu, self.seconds = cpu() - began, time.perf_counter() - clock


def line(x: np.ndarray, y: np.ndarray) -> str:
    """The straight line through y, and how far it is off."""
    slope, start = np.polyfit(x, y, 1)
    error = np.abs(y - (start + slope * x)).max() / y.mean()
    return f"{start:.1f} (off by at most {100 * error:.0f}% of the mean) and {slope:.2f}"


def growth(model: LoadedModel, episodes: int, turns: int) -> None:
    """What a turn adds to a request, and to the CPU time of its episode."""
    engine = Played(model, episodes // 8, turns, counts_bytes=True).engine
    sent = np.array([np.mean(engine.sent[turn]) for turn in range(turns)])
    print(f"  a request sends, in kB, {line(np.arange(turns), sent / 1e3)} for each turn before it")
    lengths = np.array([5, 10, 20, 40])
    costs = [1000 * Played(model, episodes // 8, length).cpu / (episodes // 8) for length in lengths]
    print(f"  an episode takes, in ms of CPU, {line(lengths, np.array(costs))} for each of its turns")


def main(
    episodes: int = 1024,
    turns: int = 20,
    images: str = "",
    distinct: int = 64,
    shown: Literal["frame", "png"] = "frame",
    profile: bool = False,
) -> None:
    folder = build("runs/.models/driver", max_pixels=2**22 if images else 2**18)
    model = load_model(Model(path=str(folder), device="cpu"), Path(folder), seed=0)
    width, _, height = images.partition("x")
    made = [page(number, (int(width), int(height))) if images else noise(number) for number in range(distinct)]
    Gallery.images = [encode_png(image) for image in made] if shown == "png" else list(made)
    Played(model, 16, 2)  # a warm-up
    once = images_cost(model, Gallery.images)
    profiler = cProfile.Profile(time.thread_time) if profile else None
    played = Played(model, episodes, turns, profiler)
    count = episodes * turns
    print(f"{episodes} episodes of {turns} turns: {played.seconds:.0f} s by the clock; in ms of CPU a turn:")
    print(f"  the event loop {1000 * played.loop_cpu / count:.2f}, the process {1000 * played.cpu / count:.2f}")
    print(f"  beside {distinct} distinct images once: {1000 * (played.cpu - once) / count:.2f}")
    print(f"  a distinct image takes {1000 * once / distinct:.1f} ms, once")
    if profiler is not None:
        text = io.StringIO()
        pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(35)
        print(text.getvalue())
    elif not images:
        growth(model, episodes, turns)


if __name__ == "__main__":
    tyro.cli(main)
