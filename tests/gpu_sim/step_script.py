"""Training steps of a model of a true shape on a simulated H100, by the trainer itself: real tensors, kernels that do nothing.

Arguments: a Hugging Face config as JSON, a JSON list of cases, each with ``vision_depth``, ``micro_batches``, ``mini_batches`` and
``corrections``, and a stance of torch's compiler.
Prints for each case how often the host waited in each of two steps, where, and the memory after it, as JSON.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from testing.gpu_sim import device_counts
from transformers import AutoConfig, AutoModelForImageTextToText

from vlmrl.config import Algo, Optim
from vlmrl.families import family_of
from vlmrl.model import tiny
from vlmrl.model.policy import Policy
from vlmrl.multimodal.store import MediaStore
from vlmrl.train.trainer import Trainer, TrainerSpec
from vlmrl.types import Sample

RESPONSE = 256


def policy_of(text: str, vision_depth: int) -> Policy:
    fields = json.loads(text)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    config.vision_config.depth = vision_depth
    with torch.device("cuda"):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    with tempfile.TemporaryDirectory() as folder:  # a processor of this family, without a download
        processor = family_of(config).load_processor(
            str(tiny.build(Path(folder) / "tiny", config.model_type, max_pixels=512**2))
        )
    policy = Policy(model, processor).eval()
    policy.enable_gradient_checkpointing()
    return policy


def a_group(policy: Policy, store: MediaStore, name: str) -> list[Sample]:
    """Four rows that share an image and a text."""
    dice, config = random.Random(name), policy.config
    pixels = np.random.default_rng(dice.randrange(99)).integers(0, 256, (512, 512, 3), dtype=np.uint8)
    image = store.load(Image.fromarray(pixels))
    visual = [config.vision_start_token_id, *[config.image_token_id] * image.num_tokens, config.vision_end_token_id]
    prompt = [*visual, *(dice.randrange(200) for _ in range(300))]
    return [
        Sample(
            prompt,
            [dice.randrange(200) for _ in range(RESPONSE)],
            [1] * RESPONSE,
            [-5.0] * RESPONSE,
            [0] * RESPONSE,
            name,
            f"{name}/{member}",
            is_last_step=True,
            stop_reason="stop",
            media=[image],
            advantage=1.0,
        )
        for member in range(4)
    ]


def steps_of(
    config: str, vision_depth: int, micro_batches: int, mini_batches: int, corrections: bool
) -> list[dict[str, Any]]:
    """What two steps of a new model did."""
    policy = policy_of(config, vision_depth)
    store = MediaStore(policy.family, policy.image_processor)
    samples = [sample for number in range(micro_batches) for sample in a_group(policy, store, f"g{number}")]
    algo = Algo(corrections=("token_truncation", "geometric_mask") if corrections else ())
    per_step = micro_batches // mini_batches
    spec = TrainerSpec(algo, Optim(), total_steps=9, tokens_per_micro_batch=2000, groups_per_step=per_step)
    trainer = Trainer(policy, spec)
    steps = []
    for _ in range(2):
        before = device_counts()["syncs"]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            trainer.step(samples)
            torch.cuda.set_sync_debug_mode("default")
        where = Counter(Path(warning.filename).name for warning in caught if "synchronizing" in str(warning.message))
        waits = device_counts()["syncs"] - before
        steps.append({"waits": waits, "where": dict(where), "after": torch.cuda.memory_allocated()})
    trainer.close()
    return steps


torch.compiler.set_stance(sys.argv[3])
print(json.dumps([steps_of(sys.argv[1], **case) for case in json.loads(sys.argv[2])]))
