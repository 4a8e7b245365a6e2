"""Receives vlmrl's weight updates in vLLM's workers: by value, as a handle of GPU memory, by broadcast, or from a folder.

vLLM takes weights over its own HTTP API (`/start_weight_update`, `/update_weights`, `/finish_weight_update`) with the weight transfer
engine that `--weight-transfer-config` names. Its own engines need a GPU on both sides, and each server has one of them. This one is
registered as "vlmrl" when a worker imports :class:`WorkerExtension`, before it makes its engine.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed import distributed_c10d
from torch.multiprocessing import reductions
from vllm.config import ModelConfig
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


@dataclass
class GroupToJoin(WeightTransferInitInfo):
    """A process group: the trainer is rank 0 and listens at ``host`` and ``port``, the workers of all servers are the others."""

    name: str
    host: str
    port: int
    first_rank: int
    """Of this server's workers."""
    size: int
    backend: str
    timeout: float
    """Seconds to join it, and for a broadcast with gloo."""


@dataclass
class Weights(WeightTransferUpdateInfo):
    """Weights of one dtype, whose values lie one after the other in one tensor; or all weights, in a ``folder``.

    Without ``values``, ``handle`` and ``folder``, the tensor arrives as bytes by a broadcast in the group.
    """

    names: Sequence[str] = ()
    shapes: Sequence[Sequence[int]] = ()
    dtype: str = "float32"
    values: str | None = None
    """The tensor's bytes in base64."""
    handle: dict[str, Any] | None = None
    """The tensor as a handle of GPU memory: the UUID of its ``device``, its ``offset``, and the arguments of `rebuild_cuda_tensor`
    that follow the device, bytes in base64."""
    folder: str | None = None
    """Safetensors files, on this machine."""


class VlmrlWeightTransferEngine(WeightTransferEngine[GroupToJoin, Weights]):
    """Loads weights under their published names, as vLLM does at its start, layer by layer."""

    init_info_cls = GroupToJoin
    update_info_cls = Weights

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._group: Any = None
        self._open = False
        self.updated = False
        """Whether the weights are no longer those that vLLM loaded at its start."""

    def init_transfer_engine(self, init_info: GroupToJoin) -> None:
        self.shutdown()  # of the last group
        self._group = _joined(init_info, init_info.first_rank + self.parallel_config.rank)

    def start_weight_update(self) -> None:
        if self._open:  # the last update failed, and left layers without memory or with a part of its weights
            self.finish_weight_update()
        initialize_layerwise_reload(self.model)
        self._open = self.updated = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Weights) -> None:
        with disable_mtp_completeness_check():
            self.model.load_weights(self._named(update_info))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _repack(self.model)
        self._open = False

    def shutdown(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _named(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        if weights.folder is not None:
            yield from _in_folder(Path(weights.folder))
            return
        shapes = [torch.Size(shape) for shape in weights.shapes]
        sizes = [shape.numel() for shape in shapes]
        parts = self._flat(weights, sum(sizes)).split(sizes)
        for name, shape, part in zip(weights.names, shapes, parts, strict=True):
            yield name, part.view(shape)

    def _flat(self, weights: Weights, size: int) -> torch.Tensor:
        dtype = getattr(torch, weights.dtype)
        if weights.values is not None:
            return torch.frombuffer(bytearray(base64.b64decode(weights.values)), dtype=dtype)
        if weights.handle is not None:
            return _rebuilt(weights.handle, size, dtype)
        flat = torch.empty(size, dtype=dtype, device=self.device)
        self._group.broadcast([flat.view(torch.uint8)], dist.BroadcastOptions()).wait()
        return flat


def _repack(model: torch.nn.Module) -> None:
    """Bring weights into the layout of the CPU's kernels where vLLM does so only at its start.

    Heads that are tied to the embeddings get no weights of their own, and experts have the published layout now.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
        elif isinstance(module, RoutedExperts):
            module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)


def _in_folder(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)


def _rebuilt(handle: dict[str, Any], size: int, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in the trainer's GPU memory, which lives until this one is freed."""
    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    if handle["device"] not in uuids:
        raise ValueError(f"the weights are on GPU {handle['device']}, but this process sees {', '.join(uuids)}")
    memory = [base64.b64decode(value) if isinstance(value, str) else value for value in handle["memory"]]
    view = (size,), (1,), handle["offset"], torch.storage.TypedStorage, dtype
    return reductions.rebuild_cuda_tensor(torch.Tensor, *view, uuids.index(handle["device"]), *memory)


def _joined(group: GroupToJoin, rank: int) -> Any:
    """As :mod:`vlmrl.weight_sync.nccl` makes rank 0 of it. torch's public functions know only groups within the default one."""
    c10d: Any = distributed_c10d
    timeout = timedelta(seconds=group.timeout)
    store, _, _ = next(c10d.rendezvous(f"tcp://{group.host}:{group.port}", rank, group.size, timeout=timeout))
    store.set_timeout(timeout)
    store = c10d.PrefixStore(group.name, store)
    made, _ = c10d._new_process_group_helper(
        group.size, rank, [], c10d.Backend(group.backend), store, group_name=group.name, timeout=timeout
    )
    return made


class WorkerExtension:
    """Methods of each worker, for `/collective_rpc`."""

    model_config: Any
    weight_transfer_engine: VlmrlWeightTransferEngine

    def loaded_weights(self) -> dict[str, str | None]:
        """The folder that this worker loaded its weights from. None: an update has replaced them."""
        return {"folder": None if self.weight_transfer_engine.updated else self.model_config.model}


class RandomWeights(DummyModelLoader):
    """Draws the parameters of a `random:` model, and nothing else, until the trainer sends its own.

    vLLM's own loader also overwrites the buffers that a layer computes at its start, such as the mean and the deviation of images. No
    weight update brings them back.
    """

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        computed = {name: buffer.clone() for name, buffer in model.named_buffers()}
        super().load_weights(model, model_config)
        for name, buffer in model.named_buffers():
            buffer.copy_(computed[name])


WeightTransferEngineFactory.register_engine("vlmrl", VlmrlWeightTransferEngine)
register_model_loader("dummy")(RandomWeights)
