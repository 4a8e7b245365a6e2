"""CPU time and memory of the endpoint for agents: 256 agents at once, in another process, and an engine that takes no time.

    python benchmarks/gateway.py                            # short conversations, 50 messages, images
    python benchmarks/gateway.py --agents 64 --turns 4
    python benchmarks/gateway.py --profile                  # and a profile of the server's thread

Each agent sends its whole conversation at each turn over a connection of its own, as clients of OpenAI's API do, and appends
the response
and a new message. With images, each message has a new one. Prints CPU milliseconds a request of the serving process, of its server's
thread (HTTP and JSON), of the run's event loop (rendering and recording) and of other threads (long bodies, images), and how far the
process's memory rose.
"""

import asyncio
import base64
import cProfile
import json
import pstats
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import tyro
from PIL import Image

from vlmrl import Model, Rollout, Task
from vlmrl.config import Gateway
from vlmrl.engine.scripted import ScriptedEngine
from vlmrl.gateway.episode import AgentEpisode
from vlmrl.gateway.gateway_server import GatewayServer
from vlmrl.model.loading import LoadedModel, load_model
from vlmrl.model.tiny import build
from vlmrl.multimodal.images import encode_png
from vlmrl.types import Trajectory

SIDE = 320
GALLERY = 64  # images; each agent begins at another one
KINDS = {"short": 0, "50 messages": 50, "images": 0}
"""Kinds of conversations, and how many messages are there before the first request."""


def noise(number: int) -> bytes:
    small = np.random.default_rng(number).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    return encode_png(Image.fromarray(small).resize((SIDE, SIDE), Image.Resampling.BICUBIC))


def beginning(count: int) -> list[dict[str, Any]]:
    """A conversation of ``count`` messages, about 200 characters each."""
    text = "What is there, and what was there before it? " * 4
    return [{"role": ("user", "assistant")[number % 2], "content": f"{number}: {text}"} for number in range(count)]


async def converse(number: int, url: str, key: str, kind: str, turns: int, gallery: list[str]) -> None:
    """An agent of the other process."""
    messages = beginning(KINDS[kind])
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}, timeout=600, verify=False) as client:
        for turn in range(turns):
            content: Any = f"Turn {turn}: what is it?"
            if gallery:
                image = gallery[(7 * number + turn) % len(gallery)]
                content = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": content}]
            messages.append({"role": "user", "content": content})
            response = await client.post(f"{url}/v1/chat/completions", json={"model": "policy", "messages": messages})
            response.raise_for_status()
            messages.append(response.json()["choices"][0]["message"])


async def client_process() -> None:
    order = json.loads(sys.stdin.readline())
    kind, turns = order["kind"], order["turns"]
    encoded = [base64.b64encode(noise(number)).decode() for number in range(GALLERY if kind == "images" else 0)]
    gallery = [f"data:image/png;base64,{text}" for text in encoded]
    print("ready", flush=True)
    sys.stdin.readline()
    agents = enumerate(order["agents"])
    await asyncio.gather(*(converse(number, url, key, kind, turns, gallery) for number, (url, key) in agents))


def thread_cpu(name: str) -> float:
    """Seconds of the thread of this process that has the name."""
    (ident,) = [thread.ident for thread in threading.enumerate() if thread.name == name]
    assert ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(ident))


def memory(name: str) -> float:
    """MiB of this process, on Linux: ``VmRSS`` now, ``VmHWM`` at the peak since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


async def measure(model: LoadedModel, kind: str, agents: int, turns: int, profiler: cProfile.Profile | None) -> str:
    engine = ScriptedEngine(lambda request, turn: "It is an image of noise, in many colors.", model.renderer)
    config = Rollout(max_turns=turns, max_tokens=1_000_000, max_response_tokens=64, samples="merged", env_timeout=600)
    store, server = model.new_store(), GatewayServer(Gateway())
    episodes = [
        AgentEpisode(Trajectory(f"{n}/00", str(n), Task(str(n), [])), engine, model.renderer, store, config, n)
        for n in range(agents)
    ]
    clients = [await server.open(episode) for episode in episodes]
    command = [sys.executable, __file__, "--as-client"]
    process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    order = {"kind": kind, "turns": turns, "agents": [(client.url, client.api_key) for client in clients]}
    process.stdin.write(json.dumps(order).encode() + b"\n")
    await process.stdout.readline()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    loop = server._thread.loop  # type: ignore[union-attr]
    if profiler is not None:
        loop.call_soon_threadsafe(profiler.enable)
    before = (time.process_time(), thread_cpu("vlmrl-gateway"), time.thread_time(), memory("VmRSS"))
    process.stdin.write(b"go\n")
    if await process.wait():
        raise SystemExit("the agents failed")
    after = (time.process_time(), thread_cpu("vlmrl-gateway"), time.thread_time(), memory("VmHWM"))
    if profiler is not None:
        loop.call_soon_threadsafe(profiler.disable)
    requests, counts = agents * turns, server.counts
    server.close()
    assert counts == {"answered": requests}, counts
    whole, http, run = (1000 * (end - start) / requests for start, end in zip(before[:3], after[:3], strict=True))
    for episode in episodes:
        episode.finish()
        assert len(episode.trajectory.turns) == turns and all(map(episode.trajectory.continues, range(1, turns)))
    rise = after[3] - before[3]
    return f"| {kind} | **{whole:.2f}** | {http:.2f} | {run:.2f} | {whole - http - run:.2f} | {rise:.0f} |"


def main(agents: int = 256, turns: int = 8, profile: bool = False, as_client: bool = False) -> None:
    if as_client:
        asyncio.run(client_process())
        return
    folder = build("runs/.models/gateway", max_pixels=2**16)
    model = load_model(Model(path=str(folder), device="cpu"), Path(folder), seed=0)
    asyncio.run(measure(model, "short", 4, 2, None))  # imports, caches
    print(f"{agents} agents at once, {turns} requests each; ms of CPU a request")
    print("| conversations | all | server's thread | run's event loop | other threads | memory, MiB |")
    print("| --- | --- | --- | --- | --- | --- |")
    for kind in KINDS:
        profiler = cProfile.Profile(time.thread_time) if profile else None
        print(asyncio.run(measure(model, kind, agents, turns, profiler)), flush=True)
        if profiler is not None:
            pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    tyro.cli(main)
