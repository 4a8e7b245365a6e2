"""The embedded engine beside a bare loop over the same model and KV cache: `python benchmarks/decode.py`.

Both sample responses of equal length to the same prompts, ``groups`` groups of 8. The bare loop is the least that Hugging Face's model
and cache can do: it runs each prompt once, repeats its keys for the group's members, and then feeds one sampled token a row, without
padding, stops, seeds or logprobs. The two alternate. Prints medians of the process's CPU time, of one thread unless
`OMP_NUM_THREADS` says otherwise, and the bytes of keys and values at the end.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from transformers import DynamicCache

from vlmrl import Model
from vlmrl.engine.base import Request, SamplingParams
from vlmrl.engine.hf.batch import RunningBatch
from vlmrl.engine.hf.engine import HFEngine
from vlmrl.model.loading import LoadedModel, load_model

MEMBERS = 8


@dataclass(frozen=True)
class Settings:
    groups: int = 2
    prompt: int = 450
    """Tokens of a prompt, the same for the members of a group."""
    response: int = 64
    """Tokens of each response."""
    family: str = "qwen3_vl"
    rounds: int = 9


def bare_loop(model: LoadedModel, prompts: list[list[int]], response: int) -> int:
    """Returns the bytes of keys and values."""
    policy = model.policy
    with torch.inference_mode():
        cache = DynamicCache(config=policy.config.get_text_config())
        positions = torch.arange(len(prompts[0])).expand(3, len(prompts), -1)
        hidden = policy.hidden(torch.tensor(prompts), positions, cache=cache)
        cache.batch_repeat_interleave(MEMBERS)
        last = hidden[:, -1].repeat_interleave(MEMBERS, dim=0)
        for place in range(len(prompts[0]), len(prompts[0]) + response):
            tokens = policy.logits(last).softmax(-1).multinomial(1)
            last = policy.hidden(tokens, torch.full((3, len(tokens), 1), place), cache=cache)[:, -1]
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def engine_loop(engine: HFEngine, prompts: list[list[int]], response: int, seed: int) -> None:
    requests = [
        Request(
            f"{seed}/{number}/{member}",
            prompt,
            [],
            SamplingParams(response, seed=seed * 1000 + number * MEMBERS + member),
        )
        for number, prompt in enumerate(prompts)
        for member in range(MEMBERS)
    ]
    responses = asyncio.run(engine.generate_batch(requests))
    assert all(len(each.token_ids) == response for each in responses)


def watch_bytes() -> list[int]:
    """Grows by the bytes of the engine's keys and values at each token."""
    sizes, advance = [], RunningBatch.advance

    def watched(running: RunningBatch) -> None:
        assert running.cache is not None
        sizes.append(running.cache.nbytes)
        advance(running)

    RunningBatch.advance = watched  # type: ignore[method-assign]
    return sizes


def main(settings: Settings) -> None:
    model = load_model(
        Model(path=f"tiny:{settings.family}", device="cpu", dtype="float32"), Path("runs/.models"), seed=0
    )
    model.renderer.stop_ids = frozenset()  # responses end at their limit
    engine, sizes = HFEngine(model.policy, model.renderer, threads=torch.get_num_threads()), watch_bytes()
    ids = [id for id in range(200) if id not in model.policy.banned_ids]
    seconds: dict[str, list[float]] = {"bare loop": [], "engine": []}
    held: dict[str, Any] = {}
    for number in range(settings.rounds + 1):
        prompts = [
            random.Random(f"{number}/{group}").choices(ids, k=settings.prompt) for group in range(settings.groups)
        ]
        for name in seconds:
            began = time.process_time()
            if name == "engine":
                engine_loop(engine, prompts, settings.response, number)
                held[name] = max(sizes)
            else:
                held[name] = bare_loop(model, prompts, settings.response)
            if number:  # the first is a warm-up
                seconds[name].append(time.process_time() - began)
    engine.close()
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    print(
        f"{settings.groups} groups of {MEMBERS}, prompts of {settings.prompt} tokens, responses of {settings.response}"
    )
    for name, each in medians.items():
        print(
            f"{name:<10} {each * 1e3 / settings.response:6.2f} ms of CPU a token, {held[name] / 2**20:6.1f} MiB of keys and values"
        )
    print(f"engine / bare loop: {medians['engine'] / medians['bare loop']:.2f}")


if __name__ == "__main__":
    main(tyro.cli(Settings))
