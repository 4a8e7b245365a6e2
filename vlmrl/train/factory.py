"""How a run gets its trainer: on this process, or spread over the ranks that ``torchrun`` started."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from vlmrl.config import Algo, Config, Lora, Model
from vlmrl.model.loading import LoadedModel, load_model, pick_device, pick_dtype
from vlmrl.model.policy import Policy, without_adapters
from vlmrl.train.fsdp import RankZeroTrainer, reshard, shard
from vlmrl.train.ranks import Ranks
from vlmrl.train.trainer import Scorer, Trainer
from vlmrl.types import Sample
from vlmrl.weight_sync.base import TransferResult, WeightSender


class RunTrainer(Protocol):
    """What a run asks of its trainer, wherever the policy is. See :class:`~vlmrl.train.trainer.Trainer`."""

    @property
    def steps_done(self) -> int: ...
    @property
    def scored(self) -> list[np.ndarray]: ...
    def step(self, samples: Sequence[Sample]) -> dict[str, float]: ...
    def kl_by_trajectory(self, samples: Sequence[Sample]) -> dict[str, float]: ...
    def score(self, samples: Sequence[Sample]) -> list[np.ndarray]: ...
    def send_weights(self, sender: WeightSender) -> TransferResult: ...
    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]: ...
    def named_adapters(self) -> Iterator[tuple[str, torch.Tensor]]: ...
    def save(self, checkpoint: Path) -> None: ...
    def restore(self, checkpoint: Path) -> None: ...
    def close(self) -> None: ...


class StartTrainer(Protocol):
    """Makes a run's trainers, one after the other."""

    def start(self, algo: Algo, **settings: Any) -> RunTrainer:
        """A trainer with these arguments of :class:`~vlmrl.train.trainer.Trainer`."""
        ...


@dataclass
class Trainers:
    """Makes trainers of one policy, one after the other: a warm start's, then the run's. Every rank has one of these."""

    config: Config
    base_dir: Path | None
    ranks: Ranks
    policy: Policy

    @classmethod
    def of(cls, config: Config, base_dir: Path | None, ranks: Ranks, loaded: LoadedModel | None = None) -> Trainers:
        """Trains ``loaded``'s own policy, if it is given, and otherwise its shard of one that all ranks load."""
        if loaded is not None:
            return cls(config, base_dir, ranks, loaded.policy)
        return cls(config, base_dir, ranks, _load(config, config.model, base_dir, ranks))

    def start(self, algo: Algo, **settings: Any) -> RunTrainer:
        """A trainer with these arguments of :class:`Trainer`, on all ranks. Called on rank 0."""
        settings = {"algo": algo, **settings}
        return self.make(**settings) if self.ranks.size == 1 else RankZeroTrainer(self.make, settings)

    def make(self, algo: Algo, **settings: Any) -> Trainer:
        """This rank's part of it."""
        reshard(self.policy)
        return Trainer(self.policy, algo, reference=self._reference(algo), ranks=self.ranks, **settings)

    def _reference(self, algo: Algo) -> Scorer | None:
        """The policy that a KL penalty pulls towards: the one that is named, or the weights as they are now."""
        if not algo.kl_coef:
            return None
        model = self.config.model
        if algo.reference is not None:
            named = replace(model, path=algo.reference, random_weights=False, lora=Lora(), freeze=())
            return _load(self.config, named, self.base_dir, self.ranks).requires_grad_(False).eval()
        if model.lora.rank:
            return without_adapters(self.policy)
        if self.ranks.size == 1:
            return self.policy.frozen_copy()
        copied = _load(self.config, model, self.base_dir, self.ranks).requires_grad_(False).eval()
        with torch.no_grad():
            for ours, theirs in zip(copied.parameters(), self.policy.parameters(), strict=True):
                ours.copy_(theirs)
        return copied


def _load(config: Config, model: Model, base_dir: Path | None, ranks: Ranks) -> Policy:
    """A policy, sharded where there are several ranks: then its weights are float32 and it computes in ``model.dtype``."""
    wanted = model if ranks.size == 1 else replace(model, dtype="float32")
    policy = load_model(wanted, base_dir, config.models_dir, config.seed).policy
    if config.train.gradient_checkpointing:
        policy.enable_gradient_checkpointing()
    return policy if ranks.size == 1 else shard(policy, pick_dtype(model.dtype, pick_device(model.device)))
