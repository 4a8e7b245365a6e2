"""Tokens a second of fine-tuning on conversations with images, in vlmrl and in TRL's SFTTrainer, on this machine.

    pip install -e '.[bench]'
    OMP_NUM_THREADS=1 python benchmarks/sft_vs_trl.py

Both train the same tiny Qwen3-VL on the same rows of TRL's form, with our chat template and a loss on the assistant's tokens. A row
has four responses, each to a question about an image. In the first dataset no two rows have anything in common; in the second, eight
rows at a time continue the same three responses. A step is a whole dataset: it reads the rows, loads their images and updates the
weights, at a rate so small that both sides must report one loss, which is checked. The sides alternate; medians over
the rounds are printed.
"""

import asyncio
import json
import os
import random
import tempfile
import time
from pathlib import Path

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}

import numpy as np
import tyro
from datasets import Image as ImageFeature
from datasets import List, load_dataset
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, PrinterCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer

from vlmrl import SFT, Config, Conversations, Model, Train
from vlmrl.config import Algo, Optim
from vlmrl.model.loading import TEMPLATES, load_model
from vlmrl.report.progress import RunProgress
from vlmrl.run.build import build_run
from vlmrl.run.sft import ConversationSource
from vlmrl.train.trainer import TrainerSpec

TURNS, MEMBERS, TINY_LR = 4, 8, 1e-12
TEMPLATE = TEMPLATES / "chatml.jinja"
WORDS = ["the", "red", "square", "is", "left", "of", "a", "small", "green", "circle", "and", "above", "two", "lines"]
TRL = {"assistant_only_loss": True, "max_length": None, "learning_rate": TINY_LR, "gradient_checkpointing": False}
TRL |= {
    "use_cpu": True,
    "bf16": False,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "logging_steps": 1,
}


def write_rows(folder: Path, rows: int, side: int, shared: bool) -> Path:
    """The rows as JSON lines with their images beside them. ``shared``: eight at a time differ in their last turn alone."""
    folder.mkdir()
    lines = []
    for number in range(rows):
        messages, images = [], []
        for turn in range(TURNS):
            owner = number - number % MEMBERS if shared and turn < TURNS - 1 else number
            dice, path = random.Random(f"{owner} {turn}"), folder / f"{owner}_{turn}.png"
            Image.fromarray(np.random.default_rng([owner, turn]).integers(0, 255, (side, side, 3), np.uint8)).save(path)
            images.append(str(path))
            messages.append({"role": "user", "content": "<image>" + " ".join(dice.choices(WORDS, k=16))})
            messages.append({"role": "assistant", "content": " ".join(dice.choices(WORDS, k=16))})
        lines.append(json.dumps({"messages": messages, "images": images}))
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return folder / "rows.jsonl"


def clocks() -> tuple[float, float]:
    """The time, and the CPU time of this process, in seconds."""
    return time.perf_counter(), time.process_time()


def ours(rows: Path, model: Path, count: int, steps: int) -> tuple[np.ndarray, list[float], int]:
    """The median times of a step by both clocks without the first, the steps' losses, and the rows' tokens."""
    sft = SFT({"rows": Conversations(str(rows))}, rows_per_step=count)
    settings = Model(str(model), "cpu", dtype="float32", chat_template=str(TEMPLATE))
    run = build_run(Config(model=settings, sft=sft, train=Train(steps=0)))
    budget = run.config.train.tokens_per_micro_batch
    trainer = run.trainer.start(TrainerSpec(Algo(loss="sft"), Optim(lr=TINY_LR), steps, budget))
    source, losses, ended, tokens = ConversationSource(run, RunProgress()), [], [], 0
    for step in range(1, steps + 1):
        samples = asyncio.run(source.take(step))
        losses.append(trainer.step(samples).metrics["loss"])
        ended.append(clocks())
        tokens = sum(map(len, samples))
    run.close()
    return np.median(np.diff(ended, axis=0), axis=0), losses, tokens


class Ends(TrainerCallback):
    """When each step ended, and its loss."""

    def __init__(self) -> None:
        self.ended: list[tuple[float, float]] = []
        self.losses: list[float] = []

    def on_log(self, args, state, control, logs, **kwargs) -> None:  # type: ignore[no-untyped-def]
        if "loss" in logs:
            self.ended.append(clocks())
            self.losses.append(logs["loss"])


def theirs(rows: Path, model: Path, count: int, steps: int, micro_batch: int) -> tuple[np.ndarray, list[float]]:
    """As :func:`ours`."""
    processor = AutoProcessor.from_pretrained(model)
    processor.chat_template = processor.tokenizer.chat_template = TEMPLATE.read_text()
    data = load_dataset("json", data_files=str(rows), split="train").cast_column("images", List(ImageFeature()))
    network = AutoModelForImageTextToText.from_pretrained(model, dtype="float32", attn_implementation="sdpa")
    sizes = {"per_device_train_batch_size": micro_batch, "gradient_accumulation_steps": count // micro_batch}
    args, ends = SFTConfig(output_dir=str(rows.parent / "trl"), max_steps=steps, **sizes, **TRL), Ends()
    trainer = SFTTrainer(network, args, train_dataset=data, processing_class=processor, callbacks=[ends])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return np.median(np.diff(ends.ended, axis=0), axis=0), ends.losses


def main(rows: int = 64, side: int = 128, steps: int = 3, rounds: int = 3, micro_batch: int = 16) -> None:
    """Print tokens a second of both sides. ``micro_batch``: TRL's rows of one forward pass."""
    print(f"{rows} rows a step, of {TURNS} images of {side} x {side}; medians of {rounds} rounds of {steps - 1} steps")
    print(f"{'':<20}{'tokens a row':>14}{'TRL, tokens/s':>16}{'vlmrl, tokens/s':>18}{'ratio':>8}{'of CPU times':>15}")
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        load_model(Model("tiny:qwen3_vl", device="cpu"), Path(scratch), 0).save(model)
        for name, shared in (("nothing shared", False), ("beginnings shared", True)):
            file = write_rows(Path(scratch) / name, rows, side, shared)
            found = []
            for _ in range(rounds):
                own, losses, tokens = ours(file, model, rows, steps)
                trl, losses_trl = theirs(file, model, rows, steps, micro_batch)
                assert np.allclose([*losses, *losses_trl], losses[0], rtol=1e-3), (losses, losses_trl)
                found.append([tokens / trl[0], tokens / own[0], *(trl / own)])
            rates = "{:>16.0f}{:>18.0f}{:>8.2f}{:>15.2f}".format(*np.median(found, axis=0))
            print(f"{name:<20}{tokens / rows:>14.0f}{rates}", flush=True)


if __name__ == "__main__":
    tyro.cli(main)
