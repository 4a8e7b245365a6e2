"""What `test_sharded_loading.py` runs on ranks: each rank loads a sharded policy, and writes its weights and its peak memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from testing.tensor_memory import LiveBytes
from vlmrl.config import Config, Lora, Model
from vlmrl.model.loading import load_model
from vlmrl.train import sharded_loading
from vlmrl.train.controller import Commands, join_process_group
from vlmrl.train.rank import Rank

CASES: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "moe": {},
    "text": {},
    "random": {},
    "adapters": {"lora": Lora(rank=4, vision=True), "freeze": ("model.language_model.layers.0.*",)},
}
"""The settings of each case's model. Its folder has the same name; random and adapters use that of bfloat16."""


def on_host(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, DTensor) and tensor.device.type == "cpu"


def model_of(folder: Path, case: str) -> Model:
    name = case if (folder / case).exists() else "bfloat16"
    prefix = "random:" if case == "random" else ""
    return Model(path=f"{prefix}{folder / name}", device="cpu", **CASES[case])


def main(path: str) -> None:
    folder = Path(path)
    ranks, commands = join_process_group("gloo"), Commands()
    read: list[str] = []
    _record_reads(read)
    result: dict[str, Any] = {}
    for case in CASES:
        config = Config(model=model_of(folder, case), output_dir=str(folder))
        with LiveBytes(on_host) as live:
            policy = Rank(config, ranks).policy
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
    commands.close()


def _record_reads(read: list[str]) -> None:
    """Note the dtype in which this process reads a checkpoint."""
    original = sharded_loading.read_weights

    def noted(*arguments: Any) -> Any:
        model = original(*arguments)
        read.append(str(next(model.parameters()).dtype))
        return model

    sharded_loading.read_weights = noted
