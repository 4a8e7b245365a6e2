"""What the checks share: results, models, samples."""

from __future__ import annotations

import asyncio
import gc
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from shapes import write_2b

from vlmrl.config import Lora, Model
from vlmrl.engine.base import Request, SamplingParams
from vlmrl.engine.hf.engine import HFEngine
from vlmrl.model import tiny
from vlmrl.model.loading import LoadedModel, load_model, shapes_of
from vlmrl.multimodal.renderer import expand
from vlmrl.types import Sample

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


class NotTried(Exception):
    """Why a check cannot be run here."""


class Report:
    """Writes the results of one check, a JSON line each, so that a crash loses none.

    ``check("title", function)`` passes if the function returns its numbers as text, fails if it raises, and was not tried if it
    raises NotTried.
    """

    def __init__(self, path: Path | None, tiny: bool) -> None:
        self.path = path
        self.tiny = tiny
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else CPU
        self.scratch = Path(tempfile.mkdtemp(prefix="gpu-acceptance-"))

    def check(self, title: str, function: Callable[[], str]) -> None:
        began, result = time.perf_counter(), "pass"
        try:
            numbers = function()
        except NotTried as error:
            result, numbers = "not tried", str(error)
        except Exception as error:
            traceback.print_exc()
            result, numbers = "FAIL", f"{type(error).__name__}: {error}"[:600]
        finally:
            free()
        row = {"title": title, "result": result, "numbers": numbers, "seconds": time.perf_counter() - began}
        print(row, flush=True)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def need_gpu(self) -> None:
        if self.device.type != "cuda":
            raise NotTried("needs a CUDA GPU")

    def model(self, **settings: Any) -> LoadedModel:
        """The 2B's shape with random weights on the device, or with ``tiny`` a tiny model; ``settings`` are those of Model."""
        settings = {"device": str(self.device), "dtype": "bfloat16", "random_weights": True, **settings}
        return load_model(Model(path=str(self.folder()), **settings), self.scratch, seed=0)

    def folder(self) -> Path:
        """The folder of that model: with ``random_weights`` its config, tokenizer and processor are used."""
        folder = self.scratch / ("tiny" if self.tiny else "2b")
        if not folder.exists():
            tiny.build(folder) if self.tiny else write_2b(folder)
        return folder

    def parameters(self) -> int:
        """Their number, without loading the model."""
        shapes = shapes_of(Model(path=str(self.folder()), random_weights=True), self.scratch)
        return sum(weight.numel() for weight in shapes.parameters())


def free() -> None:
    """Free the GPU memory that the caching allocator keeps and no tensor uses."""
    gc.collect()
    if torch.cuda.is_available():
        with suppress(RuntimeError):  # after a kernel failed, every call does
            torch.cuda.empty_cache()


def need(*packages: str) -> None:
    """Raise NotTried unless these distributions are installed."""
    missing = []
    for package in packages:
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
    if missing:
        raise NotTried(f"not installed: {', '.join(missing)}")


def require(is_met: bool, rule: str) -> None:
    if not is_met:
        raise AssertionError(rule)


def within(**numbers: tuple[float, float]) -> str:
    """``mean=(0.001, 0.01)`` as text, a value and its limit. Raises AssertionError if a value is above its limit or not finite."""
    text = ", ".join(
        f"{name.replace('_', ' ')} {value:.2e} (limit {limit:g})" for name, (value, limit) in numbers.items()
    )
    require(all(value <= limit for value, limit in numbers.values()), text)  # a NaN is not below any limit
    return text


def relative(value: torch.Tensor, wanted: torch.Tensor) -> float:
    """The norm of the difference over the norm of ``wanted``, in float64 on the CPU."""
    one, other = value.detach().to(CPU, torch.float64), wanted.detach().to(CPU, torch.float64)
    return float((one - other).norm() / other.norm())


def mismatch(one: Iterable[np.ndarray], other: Iterable[Any]) -> tuple[float, float]:
    """Mean and maximum of |one - other| over all tokens, in nats."""
    distances = np.abs(np.concatenate([*one]) - np.concatenate([np.asarray(each) for each in other]))
    return float(distances.mean()), float(distances.max())


def seconds_of(step: Callable[[], Any], device: torch.device, repeats: int = 10) -> float:
    """The mean seconds of a call, after three that are not measured."""
    for _ in range(3):
        step()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(repeats):
        step()
    synchronize(device)
    return (time.perf_counter() - began) / repeats


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def noise(seed: int, side: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8))


def sampled(
    loaded: LoadedModel, *, groups: int = 2, members: int = 4, reply: int = 32, side: int = 128
) -> list[Sample]:
    """Rows that the embedded engine samples, each group's about an image of noise; advantages are 1 and -1 in turn."""
    store = loaded.new_store()
    assert store is not None
    prompts, requests = [], []
    for group in range(groups):
        image = noise(group, side)
        content = [{"type": "image", "image": image}, {"type": "text", "text": "What is the answer?"}]
        item, rendered = store.load(image), loaded.renderer.prompt([{"role": "user", "content": content}])
        for member in range(members):
            sampling = SamplingParams(reply, seed=members * group + member)
            requests.append(Request(f"g{group}/{member}", rendered.token_ids, [item], sampling))
            prompts.append(expand(rendered.token_ids, loaded.renderer.image_token_id, [item]))
    engine = HFEngine(loaded.policy, loaded.renderer)
    try:
        replies = asyncio.run(engine.generate_batch(requests))
    finally:
        engine.close()
    rows = []
    for number, (request, prompt, completion) in enumerate(zip(requests, prompts, replies, strict=True)):
        size, group = len(completion.token_ids), request.trajectory_id.partition("/")[0]
        lists = (prompt, completion.token_ids, [1] * size, completion.logprobs, completion.policy_versions)
        end = (group, request.trajectory_id, True, completion.stop_reason, list(request.media))
        rows.append(Sample(*lists, *end, 1.0 if number % 2 else -1.0))
    return rows


def rollout_logprobs(rows: Sequence[Sample]) -> list[list[float]]:
    return [row.rollout_logprobs or [] for row in rows]


def lora() -> Lora:
    need("peft")
    return Lora(rank=32, alpha=64)


def gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def need_dependencies() -> None:
    """Raise NotTried unless all of vlmrl's own dependencies are installed."""
    need(*dependencies())


def dependencies() -> list[str]:
    """The names of pyproject.toml's dependencies, without extras."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return [re.split(r"[\[<>=!~ ]", each)[0] for each in wanted]


def run_script(command: Sequence[str]) -> str:
    """The output of a script of this checkout, which goes to the log, too. Raises AssertionError if it fails."""
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    print(done.stdout, flush=True)
    lines = [line for line in done.stdout.splitlines() if line.strip()] or ["no output"]
    require(done.returncode == 0, f"{command[0]} ended with exit status {done.returncode}: {lines[-1][:300]}")
    return done.stdout
