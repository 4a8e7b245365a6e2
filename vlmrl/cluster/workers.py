"""What the processes of a cluster do: trainer ranks, embedded engines, keepers of servers. Plain classes, which `actors.py` makes
Ray's actors of."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from vlmrl.algos import CORRECTIONS, KL, LOSSES, REDUCTIONS
from vlmrl.cluster.payload import SamplePayload, SerializedImage, Weights, WireTensor
from vlmrl.config import Algo, Config
from vlmrl.engine.backend import ServedModel, ServerBackend
from vlmrl.engine.base import Request
from vlmrl.engine.hf.engine import HFEngine
from vlmrl.engine.server import LocalProcess, free_ports
from vlmrl.model.loading import as_saved, load_model
from vlmrl.model.lora import named_weights
from vlmrl.train.factory import Trainers
from vlmrl.train.fsdp import COLLECTIVE, backend_of, forget_unused, reshard
from vlmrl.train.packing import response_logprobs
from vlmrl.train.ranks import Ranks
from vlmrl.train.trainer import Receive
from vlmrl.types import Completion, MediaItem, Sample
from vlmrl.weight_sync.transfer import TransferResult, WeightUpdate

HOST = torch.device("cpu")

Code = list[tuple[str, str, Callable[..., Any]]]
"""The functions that an algorithm names: registry, name, function. A recipe's own are nowhere else on these processes."""


def code_of(algo: Algo) -> Code:
    names = [("losses", algo.loss), ("reductions", algo.reduction), ("kl", algo.kl)]
    names += [("corrections", name) for name in algo.corrections]
    return [(registry, name, REGISTRIES[registry][name]) for registry, name in names]


REGISTRIES: dict[str, dict[str, Any]] = {
    "losses": LOSSES,
    "reductions": REDUCTIONS,
    "kl": KL,
    "corrections": CORRECTIONS,
}


class RankWorker:
    """One trainer rank. All are told the same; rank 0 answers for all."""

    def __init__(self, config: Config, base_dir: Path | None, ranks: Ranks) -> None:
        self._config = config
        self._base_dir = base_dir
        self._ranks = ranks
        self._store: TCPStore | None = None
        self._trainer: Any = None
        self._away = False

    def host(self, address: str) -> int:
        """Rank 0 opens the ranks' meeting place on its own machine: the port."""
        self._store = TCPStore(address, 0, self._ranks.size, True, COLLECTIVE, wait_for_workers=False)
        return self._store.port

    def load(self, address: str, port: int) -> None:
        """Meet the other ranks, and load this one's share of the policy."""
        torch.manual_seed(self._config.seed)
        self._device = torch.device("cuda", 0) if torch.cuda.is_available() else HOST
        if self._ranks.size > 1:
            size, rank = self._ranks.size, self._ranks.rank
            store = self._store or TCPStore(address, port, size, False, COLLECTIVE)
            dist.init_process_group(
                backend_of(self._device), store=store, rank=rank, world_size=size, timeout=COLLECTIVE
            )
        self._trainers = Trainers.of(self._config, self._base_dir, self._ranks)
        forget_unused()  # the whole model was here, of which a share is left

    def start(self, algo: Algo, code: Code, settings: dict[str, Any]) -> None:
        """A new trainer, with these arguments of :class:`~vlmrl.train.trainer.Trainer`."""
        self._come()
        for registry, name, function in code:
            REGISTRIES[registry][name] = function
        self._trainer = self._trainers.make(algo, **settings)

    def call(self, method: str, *arguments: Any) -> Any:
        """What one of the trainer's methods gives."""
        self._come()
        result = getattr(self._trainer, method)(*arguments)
        return None if self._ranks.rank else result

    def call_on(self, method: str, crate: SamplePayload[Sample], *images: SerializedImage) -> Any:
        """The same of a method that takes rows."""
        return self.call(method, crate.unpack([image.item() for image in images]))

    def read(self, *names: str) -> list[Any]:
        """The trainer's attributes of these names."""
        return [None if self._ranks.rank else getattr(self._trainer, name) for name in names]

    def send_weights(self, receive: Receive) -> Any:
        """Walk through the weights on all ranks; what ``receive`` tells on rank 0."""
        self._come()
        return (_walk if self._ranks.rank else receive)(self._trainer.named_weights())

    def deliver(self, delivery: WeightUpdate | None) -> TransferResult | None:
        """The policy's weights for servers, from the ranks that are given a delivery. To repeat one is asked of rank 0 alone."""
        if delivery is not None and delivery.again:
            return delivery(())
        self._come()
        model = self._trainers.policy.model
        named = named_weights(model)
        if delivery is None:
            _walk(named)
            return None
        return delivery(as_saved(model, named))

    def logprobs(
        self, temperature: float, crate: SamplePayload[Sample], *images: SerializedImage
    ) -> list[np.ndarray] | None:
        """Of each row's response under the policy's weights, before there is a trainer."""
        scores = response_logprobs(self._trainers.policy, crate.unpack([image.item() for image in images]), temperature)
        return None if self._ranks.rank else scores

    def weights(self, method: str) -> Weights | None:
        """What ``named_weights`` or ``named_adapters`` gives, whole."""
        self._come()
        named = getattr(self._trainer, method)()
        if self._ranks.rank:
            _walk(named)
            return None
        return [(name, WireTensor.of(weight)) for name, weight in named]

    def leave(self) -> None:
        """Give the GPU's memory to others, until the next call."""
        if not self._away:
            self._move(HOST)
            self._away = True

    def _come(self) -> None:
        if self._away:
            self._move(self._device)
            self._away = False

    def _move(self, device: torch.device) -> None:
        reshard(self._trainers.policy)
        (self._trainer or self._trainers.policy).to(device)
        forget_unused()


class EngineWorker:
    """One embedded engine with weights of its own, on the GPU ``gpu`` where that is given."""

    def __init__(self, config: Config, base_dir: Path | None, keep_kv: bool, gpu: str | None) -> None:
        if gpu is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # CUDA reads it when it is first used
        model = load_model(config.model, base_dir, config.models_dir, config.seed)
        record_routes = config.train.replay_routing
        self._engine = HFEngine(model.policy, model.renderer, keep_kv=keep_kv, record_routes=record_routes)
        self._device = model.policy.device
        self._items: weakref.WeakValueDictionary[str, MediaItem] = weakref.WeakValueDictionary()
        self._shown: dict[str, list[MediaItem]] = {}  # by trajectory: its images live until it is released

    async def generate(self, crate: SamplePayload[Request], *images: SerializedImage) -> tuple[list[Completion], int]:
        """The replies to some requests as one batch, and how many images this engine has encoded so far."""
        requests = crate.unpack([self._item(image) for image in images])
        for request in requests:
            self._shown[request.trajectory_id] = list(request.media)
        return await self._engine.generate_batch(requests), self._engine.images_encoded

    async def release(self, trajectory_id: str) -> None:
        self._shown.pop(trajectory_id, None)
        self._engine.release(trajectory_id)

    async def pause(self, leave: bool) -> None:
        """Stop sampling; with ``leave``, give the GPU's memory to others."""
        await self._engine.pause()
        if leave:
            self._move(HOST)

    async def resume(self) -> None:
        self._move(self._device)
        await self._engine.resume()

    async def load_weights(self, weights: Weights) -> None:
        self._engine.policy.load_weights((name, weight.tensor()) for name, weight in weights)

    async def weights_changed(self, policy_version: int) -> None:
        self._engine.weights_changed(policy_version)

    def _item(self, image: SerializedImage) -> MediaItem:
        item = self._items.get(image.id)
        if item is None:
            item = self._items[image.id] = image.item()
        return item

    def _move(self, device: torch.device) -> None:
        self._engine.policy.to(device)
        forget_unused()


class ServerWorker:
    """Keeps the process of one server, on its machine and on the GPUs that it was given itself, or the ranks' ``shared``."""

    def __init__(self, backend: ServerBackend, model: ServedModel, log: Path, gpus: bool, shared: list[str]) -> None:
        if shared:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(shared)  # which the server inherits
        self._backend, self._model, self._log = backend, model, log
        self._gpu = 0 if gpus else None
        self._process: LocalProcess | None = None

    def plan(self, host: str) -> str:
        """Where it will listen. Nothing is started yet."""
        (port,) = free_ports(1, host)
        self._process = LocalProcess(self._backend.launch(self._model, self._log, host, port, self._gpu))
        return f"http://{host}:{port}"

    def alive(self) -> bool:
        return self._planned_process.alive

    def start(self) -> None:
        self._planned_process.start()

    def stop(self, gently: bool) -> None:
        self._planned_process.stop(gently)

    def log_tail(self) -> str:
        return self._planned_process.log_tail()

    @property
    def _planned_process(self) -> LocalProcess:
        assert self._process is not None
        return self._process


def _walk(weights: Any) -> None:
    """Take part in gathering each of the weights, and keep none."""
    for _ in weights:
        pass
