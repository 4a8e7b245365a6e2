"""Trains, samples, saves and restores a tiny model on ``cuda:1``, in new threads, as the loop does. Nothing may touch ``cuda:0``."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import torch
from PIL import Image
from testing.gpu_sim import device_counts

from vlmrl.config import Algo, Lora, Model, Optim
from vlmrl.engine.base import Request, SamplingParams
from vlmrl.engine.hf.engine import HFEngine
from vlmrl.model.loading import load_model
from vlmrl.train.fsdp import forget_unused
from vlmrl.train.trainer import Trainer, TrainerSpec
from vlmrl.types import Sample
from vlmrl.utils.host_memory import HostMemory

GPU, CPU = torch.device("cuda", 1), torch.device("cpu")
folder = Path(sys.argv[1])


async def run(lora: int) -> None:
    config = Model(path="tiny:qwen3_vl", device="cuda:1", lora=Lora(rank=lora))
    loaded = await asyncio.to_thread(load_model, config, folder, 0)
    assert loaded.policy.device == GPU and loaded.policy.dtype == torch.bfloat16
    store = loaded.new_store()
    assert store is not None
    image, ids = store.load(Image.new("RGB", (64, 64))), loaded.policy.config
    prompt = [ids.vision_start_token_id, *[ids.image_token_id] * image.num_tokens, ids.vision_end_token_id, 5, 6]
    samples = [
        Sample(prompt, [7, 8, 9], [1] * 3, [-5.0] * 3, [0] * 3, "g", f"g/{name}", True, "stop", [image], 1.0)
        for name in range(2)
    ]
    # without adapters also with rows that are packed, and optimizer state in host memory between steps
    spec = TrainerSpec(
        Algo(), Optim(offload=not lora), total_steps=9, tokens_per_micro_batch=1000, share_prefixes=bool(lora)
    )
    trainer = Trainer(loaded.policy, spec)
    output = await asyncio.to_thread(trainer.step, samples)
    assert [len(row) for row in output.logprobs] == [3, 3]
    await asyncio.to_thread(trainer.score, samples)
    await check_random_state(trainer, lora)
    engine = HFEngine(loaded.policy, loaded.renderer)
    request = Request("t", [ids.image_token_id, 5, 6], [image], SamplingParams(max_tokens=4))
    assert len((await engine.generate(request)).token_ids) == 4
    engine.close()
    memory = HostMemory()
    await asyncio.to_thread(trainer.to, CPU, memory)
    await asyncio.to_thread(forget_unused)
    await asyncio.to_thread(trainer.to, GPU, memory)
    trainer.close()


async def check_random_state(trainer: Trainer, lora: int) -> None:
    """A checkpoint has the state of the policy's GPU, not of GPU 0."""
    checkpoint = folder / f"checkpoint{lora}"
    checkpoint.mkdir()
    torch.cuda.default_generators[1].manual_seed(5)
    await asyncio.to_thread(trainer.save, checkpoint)
    torch.cuda.default_generators[1].manual_seed(6)
    await asyncio.to_thread(trainer.restore, checkpoint)
    assert torch.cuda.default_generators[1].initial_seed() == 5


for rank in (0, 8):
    asyncio.run(run(rank))
assert device_counts(0)["contexts"] == 0 and device_counts(0)["mallocs"] == 0
assert device_counts(1)["contexts"] == 1 and device_counts(1)["launches"] > 100
