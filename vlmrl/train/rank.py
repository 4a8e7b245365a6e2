"""One trainer rank of a run: this process's part of the policy, its trainer, and where their memory is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from vlmrl.config import Algo, Config, Lora, Model, Teacher
from vlmrl.model.loading import LoadedModel, as_saved, load_model, prepare_layers
from vlmrl.model.lora import named_adapters, named_weights
from vlmrl.model.policy import Policy, without_adapters
from vlmrl.train.fsdp import forget_unused
from vlmrl.train.master_weights import HOST, move_module
from vlmrl.train.packing import response_logprobs
from vlmrl.train.ranks import Ranks
from vlmrl.train.sharded_loading import load_sharded, sharded_copy
from vlmrl.train.trainer import Scorer, Trainer, TrainerSpec
from vlmrl.types import Sample
from vlmrl.utils.host_memory import HostMemory
from vlmrl.utils.machine_memory import keep_freed_memory
from vlmrl.weight_sync.base import SenderState, TransferResult, WeightUpdate


class Rank:
    """This process's trainer rank. All ranks call its methods in the same order, except for :meth:`resend`.

    While an engine on the same GPU samples, its memory is on the host; each method moves it back first.
    """

    def __init__(self, config: Config, ranks: Ranks | None = None, loaded: LoadedModel | None = None) -> None:
        """With ``loaded`` the policy is its policy; without it, all ranks load and shard one."""
        keep_freed_memory()  # here, since every process that trains passes here
        self.config = config
        self.ranks = ranks or Ranks()
        self.policy = _load(config, config.model, self.ranks) if loaded is None else loaded.policy
        if loaded is None:
            forget_unused()  # rank 0 had each whole weight for a moment
        else:
            prepare_layers(loaded.policy, config.train, loaded.policy.device)
        self.device = self.policy.device
        self.trainer: Trainer | None = None
        self.offloaded = False
        self.sent = SenderState(collect=self.ranks.collect)
        self._memory = HostMemory()

    def start(self, spec: TrainerSpec) -> Trainer:
        """A new trainer. The last one is released first: both might not fit on the GPU."""
        self.trainer = None
        self.onload()
        self._memory = HostMemory()  # without that of the last trainer
        reference, teacher = self._reference(spec.algo), self._teacher(spec.teacher)
        self.trainer = Trainer(self.policy, spec, reference=reference, teacher=teacher, ranks=self.ranks)
        return self.trainer

    def call(self, method: str, *arguments: Any) -> Any:
        """Call one of the trainer's methods."""
        assert self.trainer is not None
        self.onload()
        return getattr(self.trainer, method)(*arguments)

    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight under its Hugging Face name, gathered from all ranks, in ``dtype`` where :func:`named_weights` can."""
        self.onload()
        return named_weights(self.policy.model, dtype)

    def named_adapters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The same for LoRA's weights alone, under their names in peft's files."""
        self.onload()
        return named_adapters(self.policy.model)

    def logprobs(self, samples: Sequence[Sample], temperature: float) -> list[np.ndarray]:
        """The policy's logprobs of each sample's response, in nats. No trainer is needed."""
        self.onload()
        return response_logprobs(self.policy, samples, temperature)

    def send(self, updates: Sequence[WeightUpdate | None]) -> TransferResult | None:
        """Gather the policy's weights on all ranks. A rank that has one of the ``updates`` (one for each rank) sends it."""
        update, whole = updates[self.ranks.rank], updates[0]
        weights = as_saved(self.policy.model, self.named_weights(whole.dtype if whole else None))
        if update is None:
            exhaust(weights)
            return None
        try:
            return update.send(weights, self.sent)
        finally:
            exhaust(weights)  # the other ranks still gather, whatever a custom sender does

    def resend(self, update: WeightUpdate) -> TransferResult:
        """Send the weights that this rank has kept, also while its trainer works."""
        return update.send((), self.sent)

    def offload(self) -> None:
        """Move everything to the host, until the next call."""
        if not self.offloaded:
            self._move(HOST)
            self.offloaded = True

    def onload(self) -> None:
        """Move everything back to the GPU. An engine that shares it must be asleep."""
        if self.offloaded:
            self._move(self.device)
            self.offloaded = False

    def _move(self, device: torch.device) -> None:
        if self.trainer is None:
            move_module(self.policy, device, self._memory)
        else:
            self.trainer.to(device, self._memory)
        forget_unused()

    def _reference(self, algo: Algo) -> Scorer | None:
        """The reference policy of a KL penalty: a copy of the current weights, or with LoRA the base model."""
        if not algo.kl_coef:
            return None
        return without_adapters(self.policy) if self.config.model.lora.rank else self._copy()

    def _teacher(self, teacher: Teacher) -> Policy | None:
        """The policy that ``teacher.model`` names; none for servers."""
        name = teacher.model
        if name is None or name == "self" or teacher.servers[0]:
            return self.policy if name == "self" else None
        return self._copy() if name == "average" else self._frozen(name)

    def _frozen(self, path: str) -> Policy:
        named = replace(self.config.model, path=path, lora=Lora(), freeze=())
        return _load(self.config, named, self.ranks).requires_grad_(False).eval()

    def _copy(self) -> Policy:
        if self.ranks.size == 1:
            return self.policy.frozen_copy()
        return sharded_copy(self.policy, self.config.model, self.config.models_dir, self.config.train)


def exhaust(weights: Iterator[Any]) -> None:
    """Take part in gathering the weights that are left, and keep none."""
    for _ in weights:
        pass


def gpu_bytes(device: torch.device) -> float | None:
    """Memory of a GPU. None for another device."""
    return float(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None


def _load(config: Config, model: Model, ranks: Ranks) -> Policy:
    """A policy; with several ranks it is sharded, keeps float32 weights and computes in ``model.dtype``."""
    if ranks.size > 1:
        return load_sharded(model, config.models_dir, config.seed, config.train)
    policy = load_model(model, config.models_dir, config.seed).policy
    prepare_layers(policy, config.train, policy.device)
    return policy
