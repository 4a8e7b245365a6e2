"""What `test_families_on_ranks.py` runs on one process and on two ranks: three steps of some models, on rows as trees."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from PIL import Image

from vlmrl.config import Algo, Config, Model, Optim, Train
from vlmrl.model.loading import LoadedModel, load_model
from vlmrl.multimodal.placeholders import image_ids
from vlmrl.train.controller import Commands, RunTrainer, join_process_group, run_commands
from vlmrl.train.rank import Rank
from vlmrl.train.ranks import Ranks
from vlmrl.train.trainer import TrainerSpec
from vlmrl.types import Sample


def rows_of(loaded: LoadedModel) -> list[Sample]:
    """Two groups of four rows, the second without an image: responses to one prompt, of which two branch off one another."""
    dice, store = random.Random(0), loaded.new_store()
    assert store is not None
    item = store.load(Image.effect_noise((64, 96), 90).convert("RGB"))
    shown = image_ids(item, loaded.policy.image_token_id)

    def text(size: int) -> list[int]:
        return [dice.randrange(200) for _ in range(size)]

    rows = []
    for group, begin in (("a", [*text(5), 7, *shown, 8]), ("b", text(len(shown) + 7))):
        first = text(70)
        for number, response in enumerate([first, [*first[:30], *text(9)], text(12), text(3)]):
            size = len(response)
            lists = (begin, response, [1] * size, [-6.0] * size, [0] * size)
            media = [item] if group == "a" else []
            rows.append(Sample(*lists, group, f"{group}/{number}", True, "stop", media, 1.0 - 0.6 * number))
    return rows


def train(folder: Path, out: Path, ranks: Ranks, commands: Commands | None) -> dict[str, Any]:
    """What the steps computed, and the weights after them; nothing on ranks other than 0."""
    config = Config(
        model=Model(path=str(folder), device="cpu"),
        train=Train(gradient_checkpointing=ranks.size > 1),
        output_dir=str(out),
    )
    loaded = load_model(config.model, out, 0)
    rank = Rank(config, ranks, loaded if ranks.size == 1 else None)
    if ranks.rank:
        assert commands is not None
        run_commands(rank, commands)
        return {}
    rows = rows_of(loaded)
    spec = TrainerSpec(Algo(loss="reinforce"), Optim(lr=1e-3), total_steps=20, tokens_per_micro_batch=10**4)
    trainer = RunTrainer(rank, commands).start(spec)
    outputs = [trainer.step(rows) for _ in range(3)]
    weights = {name: float(weight.double().square().sum()) for name, weight in trainer.named_weights()}
    images = [any(rows[row].media for row in own) for own in rank.trainer.rows_by_rank(rows, in_steps=True)]
    trainer.close()
    if commands is not None:
        commands.stop()
    logprobs = [[values.tolist() for values in output.logprobs] for output in outputs]
    return {
        "images": images,
        "metrics": [output.metrics for output in outputs],
        "logprobs": logprobs,
        "weights": weights,
    }


def main(*paths: str) -> None:
    out, *folders = map(Path, paths)
    ranks = join_process_group("gloo")
    commands = Commands() if ranks.size > 1 else None
    results = {folder.name: train(folder, out, ranks, commands) for folder in folders}
    if ranks.rank == 0:
        (out / f"of{ranks.size}.json").write_text(json.dumps(results))
    if commands is not None:
        commands.close()
