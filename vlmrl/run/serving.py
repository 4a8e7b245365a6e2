"""How a run samples from SGLang servers: the engine, the way weights get there, and the handshake before anything is played."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from vlmrl.checks.server_parity import ParityReport, ask_about, check_parity
from vlmrl.config import Config, Lora
from vlmrl.engine.servers import Server, Servers, planned
from vlmrl.engine.sglang.engine import SGLangEngine
from vlmrl.engine.sglang.receiver import SGLangWeights
from vlmrl.model.loading import LoadedModel, as_saved
from vlmrl.model.lora import named_weights
from vlmrl.model.policy import Policy
from vlmrl.multimodal.store import MediaStore
from vlmrl.train.controller import RunTrainer
from vlmrl.train.fsdp import forget_unused
from vlmrl.train.packing import response_logprobs
from vlmrl.types import Sample
from vlmrl.weight_sync.base import TransferResult, WeightUpdate
from vlmrl.weight_sync.server_sync import WeightSync


class ServerHost(Protocol):
    """Where servers are started, and where the weights are that they get.

    ``method`` is how these travel there, ``dtype`` what is trained in, and so what servers compute in. ``shares_gpus``: servers are on
    the trainer's GPUs.
    """

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def method(self) -> str: ...

    @property
    def shares_gpus(self) -> bool: ...

    def servers(self, args: dict[str, Any]) -> list[Server]:
        """The run's servers, which are given these arguments. Nothing is started yet."""
        ...

    def send(self, delivery: WeightUpdate) -> TransferResult:
        """Carry out a delivery of the weights as they are now."""
        ...

    def score(self, samples: Sequence[Sample], temperature: float) -> list[np.ndarray]:
        """The logprobs of each sample's response under these weights."""
        ...

    def free_gpus(self) -> bool:
        """Leave to the servers what the trainer needs of shared GPUs only while it trains. False: it cannot, the run is over."""
        ...

    def close(self) -> None:
        """The run is over, and the servers have stopped."""
        ...


@dataclass(frozen=True)
class ThisMachine:
    """The servers' processes beside this one, which has the weights in ``policy`` and is one of ``ranks``."""

    config: Config
    policy: Policy
    ranks: int

    @property
    def dtype(self) -> torch.dtype:
        return self.policy.dtype

    @property
    def method(self) -> str:
        return "group" if self.config.sglang.urls else "tensor"

    @property
    def shares_gpus(self) -> bool:
        sglang, device = self.config.sglang, self.policy.device
        taken = range(sglang.first_gpu, sglang.first_gpu + sglang.servers * sglang.tp)
        return device.type == "cuda" and (device.index or 0) in taken and self.ranks == 1 and not sglang.urls

    def servers(self, args: dict[str, Any]) -> list[Server]:
        logs = self.config.folder.absolute() / "servers"
        return planned(self.config.sglang, args, logs, self.policy.device.type == "cuda")

    def send(self, delivery: WeightUpdate) -> TransferResult:
        model = self.policy.model
        return delivery.send(as_saved(model, named_weights(model)))

    def score(self, samples: Sequence[Sample], temperature: float) -> list[np.ndarray]:
        return response_logprobs(self.policy, samples, temperature)

    def free_gpus(self) -> bool:
        forget_unused()
        return True

    def close(self) -> None:
        pass


@dataclass
class Serving:
    """The servers of one run, and what is needed to keep them at the trainer's weights."""

    config: Config
    model: LoadedModel
    engine: SGLangEngine
    sync: WeightSync
    home: ServerHost

    @classmethod
    def of(cls, config: Config, model: LoadedModel, home: ServerHost) -> Serving:
        """Plans the servers, whose logs and weights go to the run's folder. Nothing is started yet."""
        wanted = config.sglang
        if not wanted.urls and wanted.python is None and not is_installed():
            raise ValueError(
                "engine sglang starts servers of SGLang, which is not installed: pip install 'vlmrl[sglang]', or name an interpreter "
                "that has it (sglang.python), or servers that run already (sglang.urls)."
            )
        args: dict[str, Any] = {"model-path": model.path, "dtype": str(home.dtype).removeprefix("torch.")}
        if config.model.random_weights:
            args["load-format"] = "dummy"
        if adapters_apart(config.model.lora):
            args |= _lora_args(config.model.lora)
        routing = model.policy.routing if config.train.replay_routing else None
        if routing is not None:
            args["enable-return-routed-experts"] = True
        colocated = home.shares_gpus and not config.train.max_staleness
        if colocated:
            args["enable-memory-saver"] = True
        servers = Servers(wanted, home.servers(args), home.close, colocated)
        engine = SGLangEngine(servers, model.renderer, model.policy.banned_ids, routing, home.free_gpus)
        method = home.method if wanted.sync == "auto" else wanted.sync
        backend = SGLangWeights(wanted.sync_timeout)
        sync = WeightSync(engine, backend, config.folder.absolute() / "weights", method, wanted.bucket_mb * 2**20)
        return cls(config, model, engine, sync, home)

    async def connect(self, store: MediaStore | None) -> dict[str, ParityReport]:
        """Start or find the servers, give them the weights, and let them serve. Raises ParityError where they disagree with us."""
        config = self.config
        await self.engine.start()
        self._check_room()

        hands: dict[str, ParityReport] = {}
        if config.sglang.check:
            questions = await ask_about(self.model.renderer, store, config.rollout)
            ours = partial(self.home.score, temperature=config.rollout.temperature or 1.0)
            alike = await self._loaded_alike()
            hands = await check_parity(self.sync, self.home.send, ours, questions, loaded_alike=alike)
        else:
            await self.sync.first(self.home.send)
        await self.engine.serve()
        return hands

    async def push(self, trainer: RunTrainer, policy_version: int) -> dict[str, float]:
        """The weights that the model in this process has now for all servers, or the trainer's adapters where there are any.

        Returns metrics of it, and of the servers.
        """
        lora = self.config.model.lora
        if adapters_apart(lora):
            settings = {"peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.alpha, "bias": "none"}
            settings["target_modules"] = list(lora.targets)
            await self.sync.push_adapter(dict(trainer.named_adapters()), settings, policy_version)
        else:
            await self.sync.push(self.home.send, policy_version)
        return {
            "weight_sync/bytes": float(self.sync.bytes),
            "weight_sync/seconds": self.sync.seconds,
            "engine/restarts": float(self.engine.servers.restarts),
            "engine/retried": float(self.engine.retried),
        }

    def plan(self) -> str:
        """One line: what serves, and how weights get there."""
        wanted = self.config.sglang
        how = "adapters" if adapters_apart(self.config.model.lora) else f"weights by {self.sync.method}"
        if wanted.urls:
            return f"SGLang at {', '.join(wanted.urls)}; {how}"
        size, count = f" of {wanted.tp} GPUs" if wanted.tp > 1 else "", len(self.engine.servers.all)
        where = "placed by Ray" if self.config.cluster.on else "started here"
        return f"{count} SGLang server{'s' * (count > 1)}{size}, {where}; {how}"

    def _check_room(self) -> None:
        for server in self.engine.servers.all:
            room, wanted = server.info.get("max_req_input_len"), self.config.rollout.max_tokens
            if room is not None and room < wanted:
                raise ValueError(
                    f"rollout.max_tokens must be at most what the server {server.url} can hold, {room} tokens, but it is {wanted}: "
                    "lower it, or raise context-length or mem-fraction-static in sglang.args."
                )

    async def _loaded_alike(self) -> bool:
        """Whether all servers have the weights that they loaded from the trainer's own folder, and no earlier run's."""
        if self.config.model.random_weights:
            return False
        servers = self.engine.servers
        told = [await self.engine.thread.run(servers.call(server, "/model_info")) for server in servers.all]
        return all((info["model_path"], info["weight_version"]) == (self.model.path, "default") for info in told)


def is_installed() -> bool:
    """Whether SGLang can be imported here; a mere folder of that name is no package."""
    spec = importlib.util.find_spec("sglang")
    return spec is not None and spec.origin is not None


def adapters_apart(lora: Lora) -> bool:
    """Whether adapters are sent by themselves. SGLang has none for vision towers: then they are merged into the weights."""
    return lora.rank > 0 and not lora.vision


def _lora_args(lora: Lora) -> dict[str, Any]:
    return {
        "enable-lora": True,
        "max-lora-rank": lora.rank,
        "lora-target-modules": " ".join(lora.targets),
        "max-loras-per-batch": 4,  # the current one, and earlier ones that interrupted requests still use
        "max-loaded-loras": 8,
    }
