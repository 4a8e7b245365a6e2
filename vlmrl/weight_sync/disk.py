"""Weights as safetensors files in a folder that trainer and servers both see."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Protocol, runtime_checkable

from safetensors.torch import save_file

from vlmrl.weight_sync.base import Bucket, SenderState, ServerSender, WeightReceiver, WeightUpdate


@runtime_checkable
class FolderReceiver(WeightReceiver, Protocol):
    """A server that can load weights from a folder, outside of :meth:`begin` and :meth:`end`."""

    def load_folder(self, folder: Path, version: str) -> None: ...


class DiskSender(ServerSender[FolderReceiver]):
    """Writes one file per bucket into a folder for this update, and deletes the folder at the end."""

    needs = FolderReceiver

    def __init__(self, update: WeightUpdate, state: SenderState) -> None:
        super().__init__(update, state)
        assert update.folder is not None
        self._folder = update.folder / update.version
        self._files = 0

    def prepare(self, bucket: Bucket) -> Bucket:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._files += 1
        weights = {name: weight.cpu() for name, weight in bucket.tensors()}
        save_file(weights, self._folder / f"model-{self._files:05d}.safetensors")
        return bucket

    def deliver(self, receiver: FolderReceiver, bucket: Bucket, version: str | None) -> None:
        if version is not None:
            receiver.load_folder(self._folder, version)

    def finish(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
