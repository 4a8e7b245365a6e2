"""What `test_sharded_loading.py` runs under torchrun: each rank loads a sharded policy, and writes its weights and its peak memory."""

from __future__ import annotations

import json
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vlmrl.config import Config, Lora, Model
from vlmrl.model.loading import load_model
from vlmrl.train import make_trainer
from vlmrl.train.controller import destroy_process_group, join_process_group
from vlmrl.train.make_trainer import Trainers

CASES: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "moe": {},
    "text": {},
    "random": {"random_weights": True},
    "adapters": {"lora": Lora(rank=4, vision=True), "freeze": ("model.language_model.layers.0.*",)},
}
"""The settings of each case's model. Its folder has the same name; random and adapters use that of bfloat16."""


class LiveBytes(TorchDispatchMode):
    """The largest sum of the sizes of all tensors that operators made and that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._live: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.device.type == "cpu":
                self._add(value.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._live:
            return
        self._live.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._live.discard(key)
        self.now -= size


def model_of(folder: Path, case: str) -> Model:
    name = case if (folder / case).exists() else "bfloat16"
    return Model(path=str(folder / name), device="cpu", **CASES[case])


def main(folder: Path) -> None:
    ranks = join_process_group("gloo")
    read: list[str] = []
    if hasattr(make_trainer, "load_sharded"):
        _record_reads(read)
    result: dict[str, Any] = {}
    for case in CASES:
        config = Config(model=model_of(folder, case), output_dir=str(folder))
        with LiveBytes() as live:
            policy = Trainers.of(config, ranks).policy
        sizes = [weight.numel() * 4 for weight in policy.parameters()]
        shards = sum(4 * -(-len(weight) // ranks.size) * weight[0].numel() for weight in policy.parameters())  # padded
        whole = {name: weight.full_tensor().clone() for name, weight in policy.model.named_parameters()}
        trained = [name for name, weight in policy.model.named_parameters() if weight.requires_grad]
        one = load_model(config.model, folder, config.seed).policy.model
        wanted = dict(one.named_parameters())
        buffers = dict(one.named_buffers())
        result[case] = {
            "peak": live.peak,
            "total": sum(sizes),
            "largest": max(sizes),
            "shards": shards,
            "names": list(whole) == list(wanted),
            "dtypes": sorted({str(weight.dtype) for weight in whole.values()}),
            "trained": trained == [name for name, weight in wanted.items() if weight.requires_grad],
            "different": [name for name, weight in whole.items() if not torch.equal(weight, wanted[name])],
            "buffers": [name for name, each in policy.model.named_buffers() if not torch.equal(each, buffers[name])],
            "read": [*read],
        }
        read.clear()
    (folder / f"rank{ranks.rank}.json").write_text(json.dumps(result))
    destroy_process_group()


def _record_reads(read: list[str]) -> None:
    """Note the dtype in which this process reads a checkpoint."""
    from vlmrl.train import sharded_loading

    original = sharded_loading.read_weights

    def noted(*arguments: Any) -> Any:
        model = original(*arguments)
        read.append(str(next(model.parameters()).dtype))
        return model

    sharded_loading.read_weights = noted


if __name__ == "__main__":
    main(Path(sys.argv[1]))
