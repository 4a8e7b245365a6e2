"""What turn t of an episode costs an inference server, where each turn shows a new image of the same size.

    python benchmarks/server_turns.py                                              # starts an SGLang server
    python benchmarks/server_turns.py --size 1280 960 --args mm-preprocess-cache-size-mb 0
    python benchmarks/server_turns.py --urls http://127.0.0.1:30000 --model /models/Qwen3-VL-2B-Instruct

Episodes of 20 turns run one after another, with responses of a few tokens. Prints, by turn, the request's bytes, the latency, and the
CPU time of each of the server's processes (of a server that the script starts), as medians over the episodes; and how much turn 20
takes of each beside turn 2. A server that decodes, resizes or moves the earlier images again takes more with each turn. So does
attention to a longer prompt: the last line is turn 20 less what turn 20 takes more than turn 2 in episodes of text of the same length.
"""

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from PIL import Image

from vlmrl import Config, Data, Env, Model, Rollout, obs
from vlmrl.config import Options, ServerSettings
from vlmrl.engine.base import Request, SamplingParams
from vlmrl.engine.server import Server
from vlmrl.engine.server_engine import ServerEngine
from vlmrl.model.tiny import build
from vlmrl.run.build import Run, build_run
from vlmrl.types import MediaItem

Cost = dict[str, float]
"""Of one request: kB sent, seconds by the clock, and seconds of CPU, in all and by process."""
SHIM = Path(__file__).parents[1] / "tests/sglang/shim"  # for a machine without a GPU driver


class NoEnv(Env):
    """The config names an env; the episodes here are plain requests."""

    def step(self, response_text):
        return obs(), True, {"reward": 0.0}


def screenshot(seed: Sequence[int], width: int, height: int) -> Image.Image:
    """Areas of one color with some noise: compresses about as well as a page with text and images."""
    random = np.random.default_rng(seed)
    areas = random.integers(0, 256, (height // 16 + 1, width // 16 + 1, 3), dtype=np.uint8)
    pixels = areas.repeat(16, 0).repeat(16, 1)[:height, :width].copy()
    pixels[: height // 3] ^= random.integers(0, 8, (height // 3, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def row(index: int, seed: int) -> dict[str, Any]:
    return {"prompt": "Look."}


async def play(run: Run, size: tuple[int, int], turns: int, episode: int, images: bool = True) -> list[Cost]:
    """One episode; without ``images``, of text with as many tokens."""
    engine, store, renderer = run.engine, run.store, run.model.renderer
    assert isinstance(engine, ServerEngine) and store is not None
    [server] = engine.servers.all
    name = f"{'images' if images else 'text'} {episode}"
    prompt: list[int] = []
    media: list[MediaItem] = []
    costs = []
    for turn in range(turns):
        item = await store.get(screenshot((episode, turn), *size))
        content = [{"type": "image", "image": item}, {"type": "text", "text": "What is it?"}]
        new = renderer.prompt([{"role": "user", "content": content}]).token_ids
        if images:
            media.append(item)
        else:
            words = np.random.default_rng((episode, turn)).integers(10, 200, item.num_tokens).tolist()
            new = [*words, *(token for token in new if token != renderer.image_token_id)]
        prompt = prompt + new
        request = Request(name, prompt, list(media), SamplingParams(4))
        await engine.prepare(request)
        before, sent, began = cpu_seconds(server), server.sent_bytes, time.perf_counter()
        completion = await engine.generate(request)
        cost = {"latency": time.perf_counter() - began, "kB sent": (server.sent_bytes - sent) / 1e3}
        used = {name: seconds - before.get(name, 0.0) for name, seconds in cpu_seconds(server).items()}
        costs.append(cost | {"CPU": sum(used.values())} | used)
        prompt = prompt + completion.token_ids
    engine.release(name)
    return costs


def cpu_seconds(server: Server) -> Mapping[str, float]:
    """Seconds of CPU that each process of a server used so far, by its name. Empty for a server that runs elsewhere."""
    group = getattr(server.process, "group", None)
    used: Counter[str] = Counter()
    for process in Path("/proc").glob("[0-9]*") if group is not None else ():
        try:
            if int(process.joinpath("stat").read_text().rpartition(")")[2].split()[2]) == group:
                name = process.joinpath("cmdline").read_bytes().split(b"\0")[0].decode().rpartition("/")[2]
                tasks = list(process.glob("task/*/schedstat"))
                used[name] += sum(int(task.read_text().split()[0]) for task in tasks) / 1e9
        except OSError:  # a process or thread that has ended
            continue
    return used


def table(episodes: list[list[Cost]], text: list[list[Cost]]) -> str:
    """Medians by turn, and the ratio of the last turn to the second; then without what text of the same length grows by."""
    names = list(episodes[0][1])
    values, control = medians(names, episodes), medians(names, text)
    growth = control[-1] - control[1]
    rows = [[str(turn + 1), *cells] for turn, cells in enumerate(cells_of(names, values))]
    rows.append([f"{len(values)} / 2", *ratios(values[-1], values[1])])
    rows.append(["less the growth of text", *ratios(values[-1] - growth, values[1])])
    heads = ["turn", *(name if name == "kB sent" else f"{name}, ms" for name in names)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads), *rows))


def medians(names: list[str], episodes: list[list[Cost]]) -> np.ndarray:
    """``[turn, name]``."""
    return np.median([[[turn.get(name, 0.0) for name in names] for turn in episode] for episode in episodes], axis=0)


def ratios(last: np.ndarray, second: np.ndarray) -> list[str]:
    return [f"{a / b:.2f}" if b > 0 else "" for a, b in zip(last, second, strict=True)]


def cells_of(names: list[str], values: np.ndarray) -> list[list[str]]:
    scale = [1.0 if name == "kB sent" else 1000.0 for name in names]
    return [[f"{value:.1f}" for value in row] for row in values * scale]


async def measure(run: Run, size: tuple[int, int], turns: int, episodes: int) -> tuple[list[list[Cost]], ...]:
    """Episodes with images and, in turn with them, without."""
    for line in await run.connect():
        print(line)
    await play(run, size, 2, episodes)  # a warm-up
    played = [[await play(run, size, turns, each, images) for images in (True, False)] for each in range(episodes)]
    return [images for images, _ in played], [text for _, text in played]


def main(
    size: tuple[int, int] = (320, 240),
    turns: int = 20,
    episodes: int = 5,
    model: str = "",
    urls: tuple[str, ...] = (),
    args: Options = {},  # noqa: B006
    images: str = "auto",
) -> None:
    """Measure.

    Args:
        size: width and height of the images.
        turns: of an episode.
        episodes: with images, and as many of text.
        model: a model's folder; a tiny Qwen3-VL by default.
        urls: of a running server, which gets the model's weights.
        args: of the server that is started.
        images: as sglang.images.
    """
    folder = model or str(build("runs/.models/server_turns", num_layers=1, max_pixels=2**21))
    env = {} if torch.cuda.is_available() else {"PYTHONPATH": str(SHIM)}
    with tempfile.TemporaryDirectory() as scratch:
        config = Config(
            name="server_turns",
            output_dir=scratch,
            model=Model(path=folder),
            data=Data(generator=row, size=episodes),
            env=NoEnv,
            rollout=Rollout(max_tokens=32_000),
            engine="sglang",
            server=ServerSettings(urls=urls, args=dict(args), env=env, images=images),  # type: ignore[arg-type]
        )
        run = build_run(config)
        try:
            costs = asyncio.run(measure(run, size, turns, episodes))
        finally:
            run.engine.close()
    print(table(*costs))


if __name__ == "__main__":
    tyro.cli(main)
