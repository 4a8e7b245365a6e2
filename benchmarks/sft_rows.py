"""Host memory of reading 10,000 conversations with images, as `vlmrl sft` reads them.

    OMP_NUM_THREADS=1 python benchmarks/sft_rows.py

Four datasets of one form each are mixed: ShareGPT's with images as bytes, LLaVA's with paths, TRL's with structs, OpenAI's with data
URIs. Each row shows two of ``--distinct`` images. Rows are read, rendered, audited and forgotten, a step's number at a time. Prints
the rise of the process's memory without files' caches, as a multiple of the distinct images' pixels at the model's size.
"""

import asyncio
import base64
import io
import json
import random
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import tyro
from PIL import Image

from vlmrl import SFT, Config, Conversations, Model, Train
from vlmrl.report.progress import RunProgress
from vlmrl.run.build import build_run
from vlmrl.run.sft import ConversationSource

FORMS = {"bytes": "parquet", "paths": "jsonl", "structs": "parquet", "uris": "jsonl"}


def photograph(number: int, side: int) -> bytes:
    """A JPEG of smooth random colors."""
    image = Image.fromarray(np.random.default_rng(number).integers(0, 255, (8, 8, 3), np.uint8))
    image.resize((side, side), Image.Resampling.BICUBIC).save(file := io.BytesIO(), "JPEG")
    return file.getvalue()


def row(form: str, number: int, images: list[bytes]) -> dict:
    """A conversation about two of the images."""
    places = random.Random(number).sample(range(len(images)), 2)
    question, answer, shown = (
        f"<image>Is {number} before <image>?",
        f"It is {places}.",
        [images[each] for each in places],
    )
    reply, paths = {"role": "assistant", "content": answer}, [f"{each}.jpg" for each in places]
    if form in ("bytes", "paths"):
        talk = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
        return {"conversations": talk, "image": shown if form == "bytes" else paths}
    if form == "structs":
        structs = [{"bytes": shown[0], "path": None}, {"bytes": None, "path": paths[1]}]
        return {"messages": [{"role": "user", "content": question}, reply], "images": structs}
    uris = ["data:image/jpeg;base64," + base64.b64encode(each).decode() for each in shown]
    parts = [{"type": "image_url", "image_url": {"url": uri}} for uri in uris]
    return {"messages": [{"role": "user", "content": parts}, reply]}


def write_dataset(folder: Path, form: str, numbers: range, images: list[bytes]) -> Conversations:
    lines, path = [row(form, number, images) for number in numbers], folder / f"{form}.{FORMS[form]}"
    if FORMS[form] == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(lines), path)
    else:
        path.write_text("\n".join(map(json.dumps, lines)))
    return Conversations(path=str(path))


class Memory(threading.Thread):
    """The process's bytes in memory that are no file's cache, over those at the beginning: now, and the most so far."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.start_bytes = self.peak = 0
        self.start_bytes = self.now()

    def now(self) -> int:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return sum(int(status[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem")) - self.start_bytes

    def run(self) -> None:
        while True:
            self.peak = max(self.peak, self.now())
            time.sleep(0.01)


def main(rows: int = 10_000, distinct: int = 400, side: int = 448, rows_per_step: int = 64) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder, images = Path(scratch), [photograph(number, side) for number in range(distinct)]
        for number, image in enumerate(images):
            (folder / f"{number}.jpg").write_bytes(image)
        data = {form: write_dataset(folder, form, range(n, rows, 4), images) for n, form in enumerate(FORMS)}
        sft = SFT(data, rows_per_step=rows_per_step)
        run = build_run(Config(model=Model("tiny:qwen3_vl", "cpu"), sft=sft, train=Train(steps=0)))
        source, read, memory, began = ConversationSource(run, RunProgress()), 0, Memory(), time.perf_counter()
        memory.start()
        for step in range(1, source.steps + 1):
            samples = asyncio.run(source.take(step))
            read, pixels = read + len(samples), distinct * samples[0].media[0].pixels.read().nbytes
            if step % (source.steps // 5) == 0:
                print(f"{read:>7} rows: {memory.now() / pixels:.2f}", flush=True)
        print(f"   peak: {memory.peak / pixels:.2f}; the distinct images have {pixels / 2**20:.0f} MiB of pixels")
        print(f"{read / (time.perf_counter() - began):.0f} rows a second, bad rows: {source.counts() or 'none'}")


if __name__ == "__main__":
    tyro.cli(main)
