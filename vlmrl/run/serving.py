"""A run's inference servers: the engine, weight updates, and the startup parity check."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from vlmrl.checks.server_parity import ParityReport, check_parity, parity_questions
from vlmrl.config import Config, Lora, ServerSettings
from vlmrl.engine.base import EngineError
from vlmrl.engine.server import UNREACHED, LocalProcess, Server, ServerError, external_servers
from vlmrl.engine.server_backend import ServedModel, ServerBackend, new_backend
from vlmrl.engine.server_checks import check_capabilities, check_installed, check_memory_is_set, check_model
from vlmrl.engine.server_engine import ServerEngine
from vlmrl.engine.server_environment import different_nccl, environment_of
from vlmrl.engine.server_pool import ServerPool
from vlmrl.engine.server_sync import WeightSync
from vlmrl.model.loading import LoadedModel, pick_dtype, shapes_of
from vlmrl.model.lora import adapted_targets
from vlmrl.multimodal.store import MediaStore
from vlmrl.plan.memory_plan import Sizes, server_memory_fraction
from vlmrl.train.controller import RunTrainer
from vlmrl.utils.http_server import free_ports
from vlmrl.utils.terminal import printable_log
from vlmrl.weight_sync.base import TransferResult, WeightUpdate

log = printable_log(__name__)


class ServerHost(Protocol):
    """Starts servers on its machines."""

    @property
    def method(self) -> str:
        """How weights are sent with ``sync`` auto."""
        ...

    @property
    def colocated(self) -> bool:
        """Whether servers use the ranks' GPUs, and all ranks offload while they are awake."""
        ...

    @property
    def shares_gpus(self) -> bool:
        """Whether a server is started on a GPU with a trainer rank. True also if neither of them offloads."""
        ...

    def servers(self, backend: ServerBackend, model: ServedModel) -> list[Server]:
        """The run's servers, which load ``model``, or the running ones at ``urls``. Nothing is started yet."""
        ...


@dataclass(frozen=True)
class LocalServerHost:
    """Servers on the machine of rank 0, whose GPU is ``device``; there are ``ranks`` trainer ranks."""

    settings: ServerSettings
    folder: Path
    """The run's folder."""
    device: torch.device
    ranks: int
    count: int = 1
    """Servers to start."""

    @property
    def method(self) -> str:
        return "group" if self.settings.urls else "tensor"

    @property
    def colocated(self) -> bool:
        return self.shares_gpus and self.ranks == 1

    @property
    def shares_gpus(self) -> bool:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", self.ranks))
        used = range(ranks) if self.ranks > 1 else [self.device.index or 0]
        return self.device.type == "cuda" and not self.settings.urls and any(gpu in self._gpus for gpu in used)

    @property
    def _gpus(self) -> range:
        """The indices of the servers' GPUs, among those that this process sees."""
        settings = self.settings
        return range(settings.first_gpu, settings.first_gpu + self.count * settings.tp)

    def servers(self, backend: ServerBackend, model: ServedModel) -> list[Server]:
        settings = self.settings
        if settings.urls:
            return external_servers(settings.urls)
        on_gpus = self.device.type == "cuda"
        if on_gpus and self._gpus.stop > torch.cuda.device_count():
            number = self.count * settings.tp
            raise ValueError(
                f"server.first_gpu must leave room for cluster.engines x server.tp = {number} GPUs of the {torch.cuda.device_count()} "
                f"that this process sees, but it is {settings.first_gpu}: start fewer servers, or lower it."
            )
        logs = self.folder.absolute() / "servers"
        servers = []
        for index, port in enumerate(free_ports(self.count)):
            gpu = settings.first_gpu + index * settings.tp if on_gpus else None
            token = backend.new_token("127.0.0.1")
            launch = backend.launch(model, logs / f"server-{index}.log", "127.0.0.1", port, gpu)
            process = LocalProcess(launch if token is None else backend.with_token(launch, token))
            servers.append(Server(f"http://127.0.0.1:{port}", process, reads_files=True, token=token))
        return servers


@dataclass
class Serving:
    """The servers of one run, and the weight updates to them."""

    config: Config
    model: LoadedModel
    engine: ServerEngine
    sync: WeightSync
    trainer: RunTrainer
    adapters: Lora | None
    """The adapters that are sent separately, as :func:`sent_adapters` gives them."""

    @classmethod
    def of(cls, config: Config, model: LoadedModel, trainer: RunTrainer, host: ServerHost) -> Serving:
        """Plans the servers, whose logs and weights are written to the run's folder. Nothing is started yet."""
        backend = new_backend(config)
        settings = backend.settings
        routing = model.policy.routing if config.train.replay_routing else None
        colocated = host.colocated and not config.train.max_staleness
        method = auto_method(backend, host) if settings.sync == "auto" else settings.sync
        check_model(backend, model, model.policy.config.model_type)
        check_installed(backend)
        check_capabilities(backend, config, method=method, colocated=colocated, expert_routing=routing is not None)
        if host.shares_gpus and not colocated:
            check_memory_is_set(backend)
        adapters = None
        if config.model.lora.rank:
            adapters = sent_adapters(
                config.model.lora, adapted_targets(shapes_of(config.model, config.models_dir)), backend
            )
        served = ServedModel(
            path=model.path,
            dtype=str(pick_dtype(config.model.dtype, trainer.rank.device)).removeprefix("torch."),
            random_weights=config.model.random_weights,
            lora=adapters,
            expert_routing=routing is not None,
            sleep=colocated,
            memory_fraction=_memory_fraction(config, trainer.gpu_bytes, backend)
            if colocated and not backend.sets_memory
            else None,
        )
        pool = ServerPool(backend, host.servers(backend, served), colocated=colocated)
        releases = colocated and backend.releases_weights(bool(config.model.lora.rank))
        policy, size = model.policy, model.policy.config.get_text_config().vocab_size
        engine = ServerEngine(pool, model.renderer, policy.banned_ids, routing, trainer.offload, releases, size)
        sync = WeightSync(engine, config.folder.absolute() / "weights", method)
        return cls(config, model, engine, sync, trainer, adapters)

    @property
    def colocated(self) -> bool:
        """Whether the servers sleep while the trainer, on the same GPUs, works; the trainer is offloaded while they are awake."""
        return self.engine.servers.colocated

    async def connect(self, store: MediaStore | None) -> dict[str, ParityReport]:
        """Start the servers, or connect to external ones; send them the weights, and let them serve.

        Raises ParityError if their logprobs differ from the trainer's.
        """
        config = self.config
        await self.engine.start()
        self._check_room()
        self._check_nccl()
        reports: dict[str, ParityReport] = {}
        if self.engine.backend.settings.check:
            questions = await parity_questions(self.model.renderer, store, config.rollout)
            score = partial(self.trainer.logprobs, temperature=config.rollout.temperature or 1.0)
            same = await self._have_same_weights()
            policy, timeout = self.model.policy, config.rollout.engine_timeout
            rounded = policy.family.float32_weights if policy.dtype != torch.float32 else ()
            reports = await check_parity(
                self.sync, self.send, score, questions, same_weights=same, timeout=timeout, rounded=rounded
            )
        else:
            async with self.engine.asleep():
                await self.sync.first(self.send)
        await self.engine.serve()
        return reports

    def send(self, update: WeightUpdate) -> TransferResult:
        """Send the trainer's weights, from the ranks that hold them."""
        return self.trainer.send(update, {server.url: server.beside for server in self.engine.servers.all})

    async def push(self, policy_version: int) -> dict[str, float]:
        """Send all servers the trainer's weights, or only its adapters if these are sent separately.

        Returns metrics of the update and of the servers.
        """
        lora = self.adapters
        if lora is not None:
            settings = {"peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.alpha, "bias": "none"}
            settings["target_modules"] = list(lora.targets)
            await self.sync.push_adapter(dict(self.trainer.named_adapters()), settings, policy_version)
        else:
            await self.sync.push(self.send, policy_version)
        return {
            "weight_sync/bytes": float(self.sync.bytes),
            "weight_sync/seconds": self.sync.seconds,
            "engine/restarts": float(self.engine.servers.restarts),
            "engine/retried": float(self.engine.retried),
            "engine/resent": float(self.engine.resent),
        }

    def plan(self) -> str:
        """One line: the servers, and how weights are sent to them."""
        backend = self.engine.backend
        settings, title = backend.settings, backend.title
        sent = "adapters" if self.adapters is not None else f"weights by {self.sync.method}"
        if settings.urls:
            return f"{title} at {', '.join(settings.urls)}; {sent}"
        size, count = f" of {settings.tp} GPUs" if settings.tp > 1 else "", len(self.engine.servers.all)
        where = "placed by Ray" if self.config.cluster.on else "started here"
        return f"{count} {title} server{'s' * (count > 1)}{size}, {where}; {sent}"

    def _check_room(self) -> None:
        wanted, backend = self.config.rollout.max_tokens, self.engine.backend
        for server in self.engine.servers.all:
            room = server.info.max_prompt_tokens
            if room is not None and room < wanted:
                raise ValueError(
                    f"rollout.max_tokens must be at most {room}, the tokens that the server {server.url} has room for, but it is "
                    f"{wanted}: lower it, or raise {backend.args_hint} in server.args."
                )

    def _check_nccl(self) -> None:
        """Send weights by `disk` instead of `group` if the servers' NCCL has another version than the trainer's.

        Raises ValueError if the settings say `group`.
        """
        backend, servers = self.engine.backend, self.engine.servers.all
        if self.sync.method != "group" or all(server.info.device != "cuda" for server in servers):
            return
        started = None if backend.settings.urls else environment_of(backend.python).nccl
        python = "PYTHON" if backend.settings.urls else backend.python
        different = different_nccl({server.url: server.info.nccl or started for server in servers}, python)
        if different and backend.settings.sync == "group":
            raise ValueError(f"server.sync must not be group: {different} Or set it to disk.")
        if different:
            log.warning(
                "weights are sent by disk, in %s, which the servers must see, because %s",
                self.config.folder.absolute() / "weights",
                different,
            )
            self.sync.method = "disk"

    async def _have_same_weights(self) -> bool:
        """Whether all servers have loaded their weights from the trainer's folder, and no update has replaced them since."""
        backend, servers = self.engine.backend, self.engine.servers
        if self.config.model.random_weights or not backend.capabilities.checksums:
            return False
        call, limit = backend.loaded_weights, backend.settings.start_timeout
        try:
            responses = [await self.engine.thread.run(servers.call(each, *call, timeout=limit)) for each in servers.all]
            return all(backend.parse_loaded_weights(response) == self.model.path for response in responses)
        except (*UNREACHED, ServerError, AttributeError, LookupError, TypeError) as error:
            raise EngineError(
                f"a server did not say which weights it has loaded: {type(error).__name__}: {error}"
            ) from error


def auto_method(backend: ServerBackend, host: ServerHost) -> str:
    """How weights are sent with ``sync`` auto. A process group (NCCL) needs GPUs of its own for each server."""
    if host.method != "tensor" or backend.capabilities.tensor_handles:
        return host.method
    return "disk" if host.colocated else "group"


def sent_adapters(lora: Lora, targets: tuple[str, ...], backend: ServerBackend) -> Lora | None:
    """``lora`` with the ``targets`` that have adapters, if the servers can load these; None: they are merged into the weights."""
    able = backend.capabilities
    loadable = able.lora_targets.issuperset(targets) and not lora.vision
    return replace(lora, targets=targets) if loadable else None


def _memory_fraction(config: Config, size: float | None, backend: ServerBackend) -> float | None:
    """The share of a colocated GPU of ``size`` bytes for the server's weights and KV cache. None: the size is not known."""
    if size is None:
        return None
    fraction = server_memory_fraction(config, Sizes.of(shapes_of(config.model, config.models_dir)), size)
    fraction += backend.runtime_memory(size) / size if backend.memory_includes_runtime else 0.0
    return math.floor(1000 * fraction) / 1000
