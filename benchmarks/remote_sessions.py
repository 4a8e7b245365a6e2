"""Many sessions at once with `vlmrl env serve`, each with an image of its own a turn: which are lost, and what a turn costs.

    python benchmarks/remote_sessions.py                                # 512 sessions of 3 turns, pages of text of 1280x960
    python benchmarks/remote_sessions.py --shown photo --sessions 128

Server and client are two processes on this machine, with their default limits. The env takes no time beside drawing. Prints how the
episodes ended, how many requests failed and were played again, and CPU milliseconds a turn of the server, of the client's process
and of the client's event loop.
"""

import asyncio
import os
import resource
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Literal

import httpx
import numpy as np
import tyro
from PIL import Image, ImageDraw

from vlmrl import Env, Model, Rollout, Task, obs
from vlmrl.engine.scripted import ScriptedEngine
from vlmrl.env.base import resolve_env
from vlmrl.model.loading import load_model
from vlmrl.model.tiny import build
from vlmrl.rollout.turn_loop import TurnLoop
from vlmrl.types import Trajectory

SIZE = (1280, 960)


def background(shown: str) -> Image.Image:
    if shown == "photo":
        colors = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)
        return Image.fromarray(colors).resize(SIZE, Image.Resampling.BICUBIC)
    image = Image.new("RGB", SIZE, "white")
    for line in range(SIZE[1] // 16):
        ImageDraw.Draw(image).text((10, 8 + 15 * line), f"line {line} of a document " * 8, fill="black")
    return image


class Frames(Env):
    """A frame that no other session and no other turn shows."""

    def __init__(self, task: Task, shown: str) -> None:
        super().__init__(task)

    @classmethod
    def setup(cls, shown):
        return background(shown)

    def step(self, response_text):
        frame = self.shared.copy()
        ImageDraw.Draw(frame).text((10, SIZE[1] - 20), f"task {self.task.id}, turn {self.turn}", fill="red")
        return obs("", images=[frame]), self.turn == self.max_turns - 1, {"reward": 0.0}


def start_server(port: int, shown: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "vlmrl", "env", "serve", f"{__file__}:Frames", "--port", str(port)]
    server = subprocess.Popen([*command, "--env-options", "shown", shown], stdout=subprocess.DEVNULL)
    while server.poll() is None:
        try:
            httpx.get(f"http://127.0.0.1:{port}/health")
            return server
        except httpx.TransportError:
            time.sleep(0.2)
    raise SystemExit(f"the server ended with status {server.returncode}")


def cpu_of(process: int) -> float:
    """Seconds of all threads of another process, on Linux."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def own_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main(
    sessions: int = 512, turns: int = 3, shown: Literal["page", "photo"] = "page", port: int = 18100
) -> list[Trajectory]:
    folder = build("runs/.models/remote", max_pixels=2**16)
    model = load_model(Model(path=str(folder), device="cpu"), Path(folder), seed=0)
    server = start_server(port, shown)
    try:
        spec = resolve_env("vlmrl:RemoteEnv", options={"url": f"http://127.0.0.1:{port}"})
        config = Rollout(max_turns=turns, max_tokens=100_000, max_response_tokens=16)
        engine = ScriptedEngine(lambda request, turn: "next", model.renderer)
        loop = TurnLoop(spec, engine, model.renderer, model.new_store(), config)
        played: list[Trajectory] = []

        async def play() -> float:
            began = time.thread_time()
            tasks = [Task(str(number), [{"role": "user", "content": "Look."}]) for number in range(sessions)]
            played.extend(await asyncio.gather(*(loop.play(task, task.id, f"{task.id}/00") for task in tasks)))
            return time.thread_time() - began

        clock, theirs, ours = time.perf_counter(), cpu_of(server.pid), own_cpu()
        in_loop = asyncio.run(play())
        used = {"server": cpu_of(server.pid) - theirs, "client": own_cpu() - ours, "its event loop": in_loop}
        clock = time.perf_counter() - clock
    finally:
        server.terminate()
        server.wait()
    retries = sum(trajectory.metrics.get("env_retries", 0) for trajectory in played)
    print(f"{sessions} sessions of {turns} turns ({shown}): {clock:.0f} s by the clock")
    print(f"  endings {dict(Counter(trajectory.ending for trajectory in played))}, {retries:.0f} played again")
    costs = [f"{name} {1000 * seconds / (sessions * turns):.1f}" for name, seconds in used.items()]
    print(f"  ms of CPU a turn: {', '.join(costs)}")
    return played


if __name__ == "__main__":
    tyro.cli(main)
