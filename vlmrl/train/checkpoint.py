"""Checkpoints: all that a run needs to go on, in a folder that appears whole or not at all.

    runs/geo3k/checkpoints/step000020/
      run.json       where the loop is: its step, its place in the data and in the log
      trainer/       trained weights and the optimizer's averages (torch.distributed.checkpoint), each rank's part in a file
      random0.pt     rank 0's random number generators

The folder is filled under another name, written out to the disk, and renamed. With many ranks all of them must see it.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader

Tensors = dict[str, torch.Tensor]


class Checkpoints:
    """The checkpoints of one run, of which the last ``keep`` stay."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def all(self) -> list[Path]:
        """The whole ones, oldest first."""
        return sorted(self.folder.glob("step*"))

    def newest(self) -> Path | None:
        return next(reversed(self.all()), None)

    @contextmanager
    def new(self, step: int) -> Iterator[Path]:
        """A folder to fill, which is a checkpoint once the block ends without an error."""
        whole, partial = self.folder / f"step{step:06d}", self.folder / f".step{step:06d}"
        shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed here
        partial.mkdir(parents=True)
        yield partial
        for path in (*partial.rglob("*"), partial):
            _write_out(path)
        self._remove(whole)  # of a run that was resumed from before it
        partial.rename(whole)
        _write_out(self.folder)
        for old in self.all()[: -self.keep]:
            self._remove(old)

    def _remove(self, checkpoint: Path) -> None:
        """Never leaves a part of it under its name."""
        if checkpoint.exists():
            going = checkpoint.with_name(f".{checkpoint.name}.old")
            shutil.rmtree(going, ignore_errors=True)
            checkpoint.rename(going)
            shutil.rmtree(going)


def save_json(checkpoint: Path, values: Mapping[str, Any]) -> None:
    (checkpoint / "run.json").write_text(json.dumps(values, indent=2) + "\n")


def load_json(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "run.json").read_text())


def save_tensors(checkpoint: Path, tensors: Tensors) -> None:
    """Every rank calls this with its own shards of the same tensors."""
    with warnings.catch_warnings():  # that a process alone is alone
        warnings.simplefilter("ignore")
        state_dict_saver.save(dict(tensors), checkpoint_id=checkpoint / "trainer")


def load_tensors(checkpoint: Path, tensors: Tensors) -> None:
    """Fill ``tensors`` in place; they may be sharded over other numbers of ranks than those that were saved.

    Raises ValueError where the checkpoint holds tensors of other names.
    """
    other = saved_names(checkpoint) ^ tensors.keys()
    if other:
        raise ValueError(
            f"checkpoint {checkpoint}: it was made by another model or with other trained parts; {len(other)} tensors are only on "
            f"one side, such as {min(other)!r}. Resume with the settings it was made with."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state_dict_loader.load(dict(tensors), checkpoint_id=checkpoint / "trainer")


def saved_names(checkpoint: Path) -> set[str]:
    return set(FileSystemReader(checkpoint / "trainer").read_metadata().state_dict_metadata)


def averages(optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter]) -> Tensors:
    """Adam's averages and its counts of steps, as ``exp_avg/NAME`` and so on."""
    return {
        f"{kind}/{name}": value
        for name, parameter in named.items()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def make_averages(optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter], wanted: set[str]) -> None:
    """Zeros in the place of those that are ``wanted``; a parameter that never had a gradient has none."""
    for name, parameter in named.items():
        if f"exp_avg/{name}" in wanted:
            zeros = {kind: torch.zeros_like(parameter, requires_grad=False) for kind in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.zeros(()), **zeros}


def save_random(checkpoint: Path, rank: int | str) -> None:
    """The state of this process's random number generators: Python's, NumPy's and torch's."""
    numbers: dict[str, Any] = dict(np.random.get_state(legacy=False))
    numbers["state"] = {"key": numbers["state"]["key"].tolist(), "pos": numbers["state"]["pos"]}
    state = {
        "python": random.getstate(),
        "numpy": numbers,
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }
    torch.save(state, checkpoint / f"random{rank}.pt")


def load_random(checkpoint: Path, rank: int | str) -> None:
    """A rank that had no part in the checkpoint draws on as it is."""
    path = checkpoint / f"random{rank}.pt"
    if not path.exists():
        return
    state = torch.load(path)
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])


def _write_out(path: Path) -> None:
    """Have the system write a file, or a folder's list of names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
