"""What `test_fsdp.py` runs on one process and under torchrun on two: five steps on fixed samples, for each case."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image

from vlmrl.config import Algo, Config, Lora, Model, Optim, Train
from vlmrl.model.loading import load_model
from vlmrl.train.controller import destroy_process_group, join_process_group, run_commands, stop_commands
from vlmrl.train.make_trainer import Trainers
from vlmrl.train.ranks import Ranks
from vlmrl.train.trainer import TrainerSpec
from vlmrl.types import Sample


def samples_of(loaded, images: list[bool]) -> list[Sample]:
    """One row for each of ``images``, in groups of two, of different lengths; True: the row shows one."""
    store = loaded.new_store()
    rows = []
    for number, seen in enumerate(images):
        noise = Image.effect_noise((64, 96), 50 + number).convert("RGB") if seen else None
        media = [store.load(noise)] if noise is not None else []
        prompt = [5, 6, *[loaded.policy.image_token_id] * sum(item.num_tokens for item in media), 7 + number]
        response = [20 + (number + place) % 9 for place in range(4 + 3 * number)]
        size = len(response)
        row = Sample(
            prompt,
            response,
            [1] * size,
            [-6.0] * size,
            [0] * size,
            f"g{number // 2}",
            f"t{number}",
            True,
            "stop",
        )
        rows.append(replace(row, media=media, advantage=1.0 - 0.7 * number))
    return rows


CASES = {
    "images on both ranks": ("pppp", 0, 0.0),
    "images on one rank only": ("pttt", 0, 0.0),
    "no images": ("tttt", 0, 0.0),
    "LoRA, an image, and a KL penalty towards the model without adapters": ("tptt", 4, 0.1),
    "a KL penalty towards a sharded copy": ("pttt", 0, 0.1),
    "three micro-batches on two ranks": ("ptt", 0, 0.0),
}
"""Which of the samples show an image, LoRA's rank, and the KL coefficient."""


def train(folder: str, out: Path, ranks: Ranks, name: str) -> dict[str, Any]:
    """The results of five steps, and of the sixth before and after a checkpoint; nothing on ranks other than 0."""
    images, lora, kl = CASES[name]
    recomputed = Train(gradient_checkpointing=ranks.size > 1)
    config = Config(model=Model(path=folder, lora=Lora(rank=lora)), train=recomputed, output_dir=str(out))
    loaded = load_model(config.model, out, 0)
    trainers = Trainers.of(config, ranks, loaded if ranks.size == 1 else None)
    if ranks.rank:
        run_commands(trainers.make)
        return {}
    rows = samples_of(loaded, [letter == "p" for letter in images])
    algo = Algo(loss="ppo", kl_coef=kl, corrections=("token_truncation",)) if kl else Algo(loss="sft")
    spec = TrainerSpec(algo, Optim(lr=1e-3), total_steps=20, tokens_per_micro_batch=40, groups_per_step=2)
    trainer = trainers.start(spec)
    outputs = [trainer.step(rows) for _ in range(5)]
    weights = {name: float(weight.double().square().sum()) for name, weight in trainer.named_weights()}
    penalties = [float(value) for values in trainer.token_kl(rows) for value in values] if kl else []
    logprobs = [row.tolist() for row in outputs[-1].logprobs]
    checkpoint = out / name / str(ranks.size)
    checkpoint.mkdir(parents=True)
    trainer.save(checkpoint)
    following = [trainer.step(rows).metrics]
    trainer.close()
    for sizes in sorted({ranks.size, 2}):  # one process also goes on from what two ranks have saved
        restored = trainers.start(spec)
        restored.restore(out / name / str(sizes))
        following.append(restored.step(rows).metrics)
        restored.close()
    if ranks.size > 1:
        stop_commands()
    steps = [output.metrics for output in outputs]
    return {"steps": steps, "weights": weights, "logprobs": logprobs, "kl": penalties, "following": following}


def main(folder: str, out: Path) -> None:
    ranks = join_process_group("gloo")
    results = {name: train(folder, out, ranks, name) for name in CASES}
    if ranks.rank == 0:
        (out / f"of{ranks.size}.json").write_text(json.dumps(results))
    if ranks.size > 1:
        destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
