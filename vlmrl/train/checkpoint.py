"""Checkpoints: the state that a resumed run needs, in a folder that is written atomically.

    runs/geo3k/checkpoints/step000020/      of training; those of supervised stages before it are warm_start000020 and sft000020
      run.json       the loop's state: its step, its position in the data and in the log
      trainer/       trained weights and optimizer state (torch.distributed.checkpoint), each rank's part in a file
      random0.pt     rank 0's random number generators, and randomdriver.pt those of the loop's process when the step ended

The folder is written under a temporary name, flushed to the disk, and renamed. All ranks must share the file system.
"""

from __future__ import annotations

import json
import pickle
import random
import re
import shutil
import warnings
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar
from zipfile import ZipFile

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from vlmrl.utils.output_files import atomic_folder, open_regular, regular_file, remove_folder
from vlmrl.utils.require import require

Tensors = dict[str, torch.Tensor]

STAGES = {"warm_start": "warm_start", "sft": "sft", "train": "step"}
"""The stages of a run in order, with how the names of their checkpoints begin."""
KINDS = ("weight/", "reference/", "teacher/")
"""How the names of the tensors begin that are compared. Optimizer state has the weights' names, as far as they ever had a gradient."""

_METADATA = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))),
    "pathlib": ("PosixPath", "WindowsPath"),
}
"""All that the pickled metadata of a checkpoint of ours names, by module. Not BytesStorageMetadata: torch unpickles such an entry with
any code in it."""


class _MetadataUnpickler(pickle._Unpickler):  # in Python, since that in C has no `load_build` to override
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]

    def find_class(self, module: str, name: str) -> Any:
        module = "pathlib" if module == "pathlib._local" else module  # as Python 3.13 writes it
        if name not in _METADATA.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)

    def load_build(self) -> None:
        """Set the attributes of an object that was just made. Those of a class or a function would be set for the whole process."""
        changed = self.stack[-2]
        if isinstance(changed, type) or not is_dataclass(changed):
            raise pickle.UnpicklingError(f"it sets attributes of a {type(changed).__name__}, which no checkpoint needs")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build


class _OwnFiles(FileSystem):
    """Opens a file of a checkpoint. A link that took its place after the look at it is not followed."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with open_regular(Path(path), Path(path).parent.parent) as stream:  # the folder `trainer` may be a link, too
            yield stream


class _Reader(FileSystemReader):
    """As torch's, whose metadata are pickled: those of a checkpoint that somebody else made could run any code."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.fs = _OwnFiles()
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read once: a second reading may be of another file by now, and takes as long again (seconds for thousands of tensors)."""
        if self._metadata is None:
            with readable(Path(self.path).parent):
                self._metadata = self._read_metadata(Path(self.path))
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self._metadata

    def _read_metadata(self, folder: Path) -> Metadata:
        with self.fs.create_stream(_own_file(folder, ".metadata"), "rb") as file:
            # alone: torch would read what may be another file by now
            metadata: Metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise ValueError(f"its metadata is a {type(metadata).__name__}")
        ends: dict[str, int] = {}
        for part in (metadata.storage_data or {}).values():
            ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
        for name, end in ends.items():
            if _own_file(folder, name).stat().st_size < end:
                raise EOFError(f"{name} is cut")
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """As torch's, which does not compare the checksums that it wrote: changed bytes would be trained on."""
        places: dict[str, set[tuple[int, int]]] = {}
        for item in plan.items:
            part = self.storage_data[item.storage_index]
            places.setdefault(part.relative_path, set()).add((part.offset, part.length))
        for name, parts in places.items():
            with self.fs.create_stream(Path(self.path) / name, "rb") as file:
                for offset, length in sorted(parts):
                    file.seek(offset)
                    _check_sums(name, BytesIO(file.read(length)))
        return super().read_data(plan, planner)


def _own_file(folder: Path, name: str) -> Path:
    """A regular file of a checkpoint, which may name a file elsewhere, or a pipe. Raises FileNotFoundError or ValueError."""
    path = regular_file(folder.parent, folder.name, name)  # the folder `trainer` may be a link, too
    if path is None and not (folder / name).exists():
        raise FileNotFoundError(f"there is no {name}")
    if path is None:
        raise ValueError(f"it names {name[-80:]!r}, which is no regular file of its own")
    return path


def _check_sums(name: str, file: Path | BytesIO) -> None:
    """Raises ValueError if a file in torch's form, which is a ZIP archive, has other bytes than were written."""
    with ZipFile(file) as archive:
        if archive.testzip() is not None:
            raise ValueError(f"{name} has other bytes than were written")


@contextmanager
def readable(checkpoint: Path) -> Iterator[None]:
    """Raise whatever the files of a damaged checkpoint raise as a ValueError that names it."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        causes = error.failures.values() if isinstance(error, CheckpointException) else ()
        cause = next((cause for cause, _ in causes), error)
        raise ValueError(
            f"checkpoint {checkpoint} cannot be read: {type(cause).__name__}: {cause!s:.200}. Use one that is whole and that you "
            "trust: if you delete this one, the run continues from the one before, or from the start."
        ) from error


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run, one after each ``every`` steps if that is not 0. Only the newest ``keep`` are kept."""

    folder: Path
    keep: int
    every: int = 0

    def is_due(self, step: int, is_last: bool) -> bool:
        """Whether to write one after ``step``. If ``every`` is 0: only after the last step of a run that has one already."""
        if self.every:
            return is_last or step % self.every == 0
        return is_last and self.newest() is not None

    def newest(self) -> Path | None:
        return newest_checkpoint(self.folder)

    def path(self, step: int, stage: str) -> Path:
        """The folder of the checkpoint of ``step`` of one of :data:`STAGES`."""
        return self.folder / f"{STAGES[stage]}{step:06d}"

    @contextmanager
    def new(self, step: int, stage: str = "train") -> Iterator[Path]:
        """A folder to write to. It becomes a checkpoint if the block raises no error."""
        remove_parts(self.folder)
        with atomic_folder(self.path(step, stage)) as partial:
            yield partial
        for old in complete_checkpoints(self.folder)[: -self.keep]:
            remove_folder(old)


def remove_parts(folder: Path) -> None:
    """Delete what a run that was killed while it wrote or deleted a checkpoint has left in its folder ``checkpoints``."""
    for prefix in STAGES.values():
        for left in folder.glob(f".{prefix}*"):
            shutil.rmtree(left, ignore_errors=True)


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a run's folder ``checkpoints``, oldest first. Other names, such as those of copies, are none."""
    prefixes = list(STAGES.values())
    names = re.compile(f"({'|'.join(prefixes)})([0-9]+)")
    found = [(names.fullmatch(path.name), path) for path in folder.glob("*") if path.is_dir()]
    return [
        path for _, _, path in sorted((prefixes.index(name[1]), int(name[2]), path) for name, path in found if name)
    ]


def newest_checkpoint(folder: Path) -> Path | None:
    return next(reversed(complete_checkpoints(folder)), None)


def save_json(checkpoint: Path, values: Mapping[str, Any]) -> None:
    (checkpoint / "run.json").write_text(json.dumps(values, indent=2) + "\n")


def load_json(checkpoint: Path) -> dict[str, Any]:
    with readable(checkpoint):
        values = json.loads((checkpoint / "run.json").read_text())
        require(isinstance(values, dict), "run.json", "a JSON object", values)
    return dict(values)


def save_tensors(checkpoint: Path, tensors: Tensors) -> None:
    """Write the tensors, or this rank's shards of them. Every rank calls this with the same names."""
    with warnings.catch_warnings():  # a single process has no process group
        warnings.simplefilter("ignore")
        try:
            state_dict_saver.save(dict(tensors), checkpoint_id=checkpoint / "trainer")
        except CheckpointException as error:  # no Exception: it would end an event loop
            raise next(iter(error.failures.values()))[0] from error


class SavedTensors:
    """The tensors of a checkpoint, with their ``shapes`` by name.

    Raises:
        ValueError: the checkpoint is damaged, or holds what no checkpoint of ours does.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self._reader = _Reader(checkpoint / "trainer")
        metadata = self._reader.read_metadata()
        with readable(checkpoint):
            entries = metadata.state_dict_metadata.items()
            self.shapes: Mapping[str, tuple[int, ...]] = {
                name: tuple(entry.size) for name, entry in entries if isinstance(entry, TensorStorageMetadata)
            }

    def check(self, shapes: Mapping[str, Sequence[int]], kinds: tuple[str, ...] = KINDS) -> None:
        """Raises ValueError if the saved tensors of these ``kinds`` have other names or shapes than those of ``shapes``."""
        saved = {name: size for name, size in self.shapes.items() if name.startswith(kinds)}
        wanted = {name: tuple(shape) for name, shape in shapes.items() if name.startswith(kinds)}
        names = sorted({name for name, _ in saved.items() ^ wanted.items()})
        if names:
            name = names[0]
            raise ValueError(
                f"checkpoint {self._checkpoint}: it was made by another model or with other trained parts; {len(names)} tensors "
                f"differ or are only in one of them, such as {name!r}: {saved.get(name, 'none')} in the checkpoint, "
                f"{wanted.get(name, 'none')} in the run. Use the settings (model.path, model.lora, model.freeze, teacher.model) of "
                "the run that made it."
            )

    def load(self, tensors: Tensors, kinds: tuple[str, ...] = KINDS) -> None:
        """Fill ``tensors`` in place; another number of ranks may have saved them. Raises ValueError as :meth:`check`."""
        self.check({name: tensor.shape for name, tensor in tensors.items()}, kinds)
        with warnings.catch_warnings(), readable(self._checkpoint):
            warnings.simplefilter("ignore")
            state_dict_loader.load(dict(tensors), storage_reader=self._reader)


@torch.no_grad()
def load_weights(checkpoint: Path, policy: nn.Module) -> None:
    """Overwrite the trained parameters of ``policy`` with those of ``checkpoint``. Frozen ones stay as they are.

    ``policy`` is a :class:`~vlmrl.model.policy.Policy` that was loaded with the ``model`` settings of the checkpoint's run: the same
    base model, frozen parts and LoRA. Its dtype may differ: a checkpoint holds float32.

    Raises:
        ValueError: the checkpoint's trained parameters have other names or shapes.
    """
    weights = {f"weight/{name}": p.detach() for name, p in policy.named_parameters() if p.requires_grad}
    SavedTensors(checkpoint).load(weights, ("weight/",))


def optimizer_state(optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter]) -> Tensors:
    """Adam's moments and step counts as ``exp_avg/NAME``, ``exp_avg_sq/NAME`` and ``step/NAME``.

    torch's ``get_optimizer_state_dict`` does not fit: it accepts only parameters of the model, so no master weights; it includes
    hyperparameters, which a resumed run sets itself; and it creates state for parameters that never had a gradient.
    """
    return {
        f"{kind}/{name}": value
        for name, parameter in named.items()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def init_optimizer_state(
    optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter], saved: Container[str]
) -> None:
    """Zeros to load the ``saved`` optimizer state into; a parameter that never had a gradient has none."""
    for name, parameter in named.items():
        if f"exp_avg/{name}" in saved:
            zeros = {kind: torch.zeros_like(parameter, requires_grad=False) for kind in ("exp_avg", "exp_avg_sq")}
            # the fused kernel reads the step count on the parameter's device, all others on the host
            where = parameter.device if optimizer.defaults.get("fused") else torch.device("cpu")
            optimizer.state[parameter] = {"step": torch.zeros((), device=where), **zeros}


def random_state() -> dict[str, Any]:
    """The state of this process's random number generators: Python's, NumPy's and torch's."""
    numbers: dict[str, Any] = dict(np.random.get_state(legacy=False))
    numbers["state"] = {"key": numbers["state"]["key"].tolist(), "pos": numbers["state"]["pos"]}
    return {
        "python": random.getstate(),
        "numpy": numbers,
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


def save_random(checkpoint: Path, process: int | str, state: dict[str, Any]) -> None:
    """Write a :func:`random_state` of a rank, or of the driver."""
    torch.save(state, checkpoint / f"random{process}.pt")


def check_random(checkpoint: Path) -> None:
    """Raises ValueError if the generators of the loop or of rank 0 are missing or damaged: the numbers that follow would be others."""
    with readable(checkpoint):
        for process in ("driver", 0):
            path = checkpoint / f"random{process}.pt"
            with open_regular(path) as file:
                _check_sums(path.name, BytesIO(file.read()))


def load_random(checkpoint: Path, process: int | str) -> None:
    """Restore the generators. A rank that wrote no part of the checkpoint keeps its own."""
    path = checkpoint / f"random{process}.pt"
    if not path.exists():
        return
    with readable(checkpoint):
        _check_sums(path.name, path)
        state = torch.load(path, weights_only=True)  # numbers, and no pickled code
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
