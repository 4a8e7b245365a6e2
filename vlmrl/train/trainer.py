"""The trainer: samples in, one or more optimizer steps, metrics out.

The loop calls :meth:`Trainer.step` on each audited batch whose samples have their advantages.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from vlmrl.algos import CORRECTIONS, KL, LOSSES, REDUCTIONS, LossInputs
from vlmrl.algos.corrections import mismatch
from vlmrl.config import Algo, Optim
from vlmrl.model.lora import named_adapters, named_weights
from vlmrl.model.policy import Policy, TokenScores
from vlmrl.train.checkpoint import (
    averages,
    load_random,
    load_tensors,
    make_averages,
    save_random,
    save_tensors,
    saved_names,
)
from vlmrl.train.expert_replay import routed_freely
from vlmrl.train.master_weights import MasterWeights, move_state
from vlmrl.train.metric_accumulator import MetricAccumulator
from vlmrl.train.packing import Layout, MicroBatchPlan, pack, per_token, split
from vlmrl.train.ranks import Ranks
from vlmrl.types import MicroBatch, Sample
from vlmrl.weight_sync.base import TransferResult, WeightSender

Scorer = Callable[[MicroBatch, float], TokenScores]


class Trainer:
    """Updates ``policy`` with one loss of :data:`vlmrl.algos.LOSSES`.

    ``total_steps`` is the length of the learning-rate schedule, in optimizer steps. ``temperature`` is the rollouts'. ``reference``,
    a frozen policy, is needed where ``algo.kl_coef`` is above 0. With more than one of ``ranks`` each calls every method with
    the same arguments, and gets the same results.
    """

    def __init__(
        self,
        policy: Policy,
        algo: Algo,
        optim: Optim,
        *,
        total_steps: int,
        tokens_per_micro_batch: int,
        temperature: float = 1.0,
        groups_per_step: int | None = None,
        reference: Scorer | None = None,
        share_prefixes: bool = True,
        replay_routing: bool = True,
        ranks: Ranks | None = None,
    ) -> None:
        self.policy = policy
        self.reference = reference
        self.steps_done = 0
        self.scored: list[np.ndarray] = []  # before the last batch's update, its responses' logprobs
        self._ranks = ranks or Ranks()
        self._algo = algo
        self._loss = choose("algo.loss", algo.loss, LOSSES)
        self._reduction = choose("algo.reduction", algo.reduction, REDUCTIONS)
        self._temperature = temperature
        self._micro_tokens = tokens_per_micro_batch
        self._groups_per_step = groups_per_step
        self._layout = _layout(policy, share_prefixes)
        self._replay_routing = replay_routing and policy.routing is not None
        self._optim = optim
        self._total_steps = total_steps
        self._weights = MasterWeights(policy)
        self.optimizer = torch.optim.AdamW(
            self._weights.parameters, lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay
        )
        if algo.kl_coef and reference is None:
            raise ValueError(f"algo.kl_coef is {algo.kl_coef}, so a reference policy must be given.")

    def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Train once on each sample: one optimizer step for each ``groups_per_step`` groups (all, where that is unset).

        The samples of one trajectory stand in a row.
        """
        mini_batches = self._mini_batches(samples)
        parts = [[samples[index] for index in indices] for indices in mini_batches]
        old = [self._score_all(part) for part in parts] if len(parts) > 1 else [None]
        self.scored = [np.empty(0)] * len(samples)
        steps = [self._update(*step) for step in zip(parts, mini_batches, old, strict=True)]
        self.policy.eval()  # in training mode, checkpointed layers take no cache, and an engine may share this model
        told = {name: _over_steps(name, [metrics[name] for metrics in steps]) for name in steps[0]}
        return told | ({"routing/free_tokens": routed_freely(samples)} if self._replay_routing else {})

    def to(self, device: torch.device) -> None:
        """Take all that is kept between two steps to ``device``, the policy and the reference included."""
        self.policy.to(device)
        if isinstance(self.reference, Policy):
            self.reference.to(device)
        self._weights.to(device)
        if not self._optim.offload:
            move_state(self.optimizer, device)

    def close(self) -> None:
        """The last step was taken: another trainer may take over the policy."""
        self._weights.close()

    def _mini_batches(self, samples: Sequence[Sample]) -> list[list[int]]:
        """The indices of each optimizer step's samples: a fixed number of groups, however many rows they have."""
        groups: dict[str, list[int]] = defaultdict(list)
        for index, sample in enumerate(samples):
            groups[sample.group_id].append(index)
        members = list(groups.values())
        size = self._groups_per_step or len(members)
        return [list(chain.from_iterable(members[first : first + size])) for first in range(0, len(members), size)]

    def _update(self, samples: list[Sample], indices: list[int], old_logprobs: torch.Tensor | None) -> dict[str, float]:
        """One optimizer step, its gradient gathered over micro-batches under weights fixed for all of them."""
        device, ranks = self.policy.device, self._ranks
        mask = per_token(samples, lambda sample: sample.loss_mask).to(device)
        weights = self._reduction(mask, [s.group_id for s in samples], **self._algo.reduction_options)
        before = torch.zeros_like(mask)
        total, tally = torch.zeros((), device=device), MetricAccumulator()
        self.policy.train()
        for part, counts in ranks.deal(self._split(samples)):
            rows, length = part.rows, max(len(samples[row]) for row in part.rows)
            scores = self._score(self.policy, samples, part)
            reference = self._reference_logprobs(samples, part)
            old = scores.logprobs.detach() if old_logprobs is None else old_logprobs[rows, :length]
            inputs = self._loss_inputs([samples[row] for row in rows], scores.logprobs, old, reference)
            per_token_loss, metrics = self._per_token_loss(inputs, scores, old)
            loss = (per_token_loss * weights[rows, :length] * counts).sum()
            (loss * ranks.size).backward()  # the gradient's mean over ranks is then its sum
            total += loss.detach()
            for name, value in metrics.items():
                tally.add(name, value, inputs.loss_mask * counts)
            if counts:
                before[rows, :length] = old
        self._note_scored(samples, indices, ranks.sum(before))
        tokens = float(mask.sum())
        told = tally.result(tokens, ranks, device)
        return {"loss": float(ranks.sum(total)), "tokens": tokens, **told, **self._apply_gradient()}

    def _note_scored(self, samples: list[Sample], indices: list[int], logprobs: torch.Tensor) -> None:
        for index, sample, row in zip(indices, samples, logprobs.cpu().numpy(), strict=True):
            self.scored[index] = _response(sample, row)

    def _per_token_loss(
        self, inputs: LossInputs, scores: TokenScores, before: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The policy's loss, corrected, with the penalties that are set; metrics per token ``[rows, length]`` or single.

        ``before``: as in :meth:`_loss_inputs`.
        """
        algo = self._algo
        outputs = self._loss(inputs, **algo.loss_options)
        per_token_loss, metrics = outputs.per_token, {**outputs.metrics, "entropy": scores.entropy}
        probabilities = (before, inputs.rollout_logprobs, inputs.loss_mask)
        if algo.corrections or algo.old_policy == "rollout":
            metrics |= {f"mismatch/{name}": value for name, value in mismatch(*probabilities).items()}
        for name in algo.corrections:
            factors, told = CORRECTIONS[name](*probabilities, **algo.options_of(name))
            per_token_loss = per_token_loss * factors
            metrics |= {f"correction/{name}/{key}": value for key, value in told.items()}
        if inputs.ref_logprobs is not None:
            kl = KL[algo.kl](inputs.logprobs, inputs.ref_logprobs)
            per_token_loss, metrics["kl"] = per_token_loss + algo.kl_coef * kl, kl
        if algo.entropy_coef:
            per_token_loss = per_token_loss - algo.entropy_coef * scores.entropy
        return per_token_loss, metrics

    def score(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """The logprobs, in nats, of each sample's response tokens under the current weights."""
        rows = list(samples)
        logprobs = self._score_all(rows).cpu().numpy()
        return [_response(sample, row) for sample, row in zip(rows, logprobs, strict=True)]

    @torch.no_grad()
    def kl_by_trajectory(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Each trajectory's KL to the reference, in nats, summed over its trained tokens: what a penalty on rewards takes off."""
        assert self.reference is not None
        rows = list(samples)
        difference = KL[self._algo.kl](self._score_all(rows), self._score_all(rows, self.reference))
        masked = difference * per_token(rows, lambda sample: sample.loss_mask).to(difference.device)
        total: dict[str, float] = defaultdict(float)
        for sample, value in zip(samples, masked.sum(1).tolist(), strict=True):
            total[sample.trajectory_id] += value
        return dict(total)

    def send_weights(self, sender: WeightSender) -> TransferResult:
        """Send the weights of :meth:`named_weights` from this process."""
        return sender.send(self.named_weights())

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The policy's weights as :func:`~vlmrl.model.lora.named_weights` gives them; every rank walks through them."""
        return named_weights(self.policy.model)

    def named_adapters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The adapters' weights; every rank walks through them."""
        return named_adapters(self.policy.model)

    def save(self, checkpoint: Path) -> None:
        """Write this rank's part of a checkpoint; every rank calls it."""
        save_random(checkpoint, self._ranks.rank)
        save_tensors(checkpoint, self._tensors())

    def restore(self, checkpoint: Path) -> None:
        """Go on from a checkpoint, which may be one of another number of ranks. Rates and the like are this trainer's own."""
        make_averages(self.optimizer, self._weights.named, saved_names(checkpoint))
        tensors = self._tensors()
        load_tensors(checkpoint, tensors)
        self.steps_done = int(tensors["steps_done"])
        self._weights.publish()
        if self._optim.offload:
            move_state(self.optimizer, torch.device("cpu"))
        load_random(checkpoint, self._ranks.rank)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """All that a checkpoint holds of this trainer: also a reference that is a copy of what training started from."""
        named = self._weights.named
        tensors = {"steps_done": torch.tensor(self.steps_done), **averages(self.optimizer, named)}
        tensors |= {f"weight/{name}": weight.detach() for name, weight in named.items()}
        if isinstance(self.reference, Policy) and self._algo.reference is None:
            tensors |= {f"reference/{name}": weight.detach() for name, weight in self.reference.named_parameters()}
        return tensors

    def _apply_gradient(self) -> dict[str, float]:
        optim = self._optim
        total: Any = torch.nn.utils.clip_grad_norm_(self._weights.parameters, optim.grad_clip)
        norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"optimizer step {self.steps_done}: the gradient's norm is {norm}; nothing was updated."
            )
        rate = optim.lr * learning_rate_factor(optim, self.steps_done, self._total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if optim.offload:
            move_state(self.optimizer, self.policy.device)
        self.optimizer.step()
        if optim.offload:
            move_state(self.optimizer, torch.device("cpu"))
        self.optimizer.zero_grad(set_to_none=True)
        self._weights.publish()
        self.steps_done += 1
        return {"grad_norm": norm, "lr": rate}

    def _loss_inputs(
        self,
        samples: list[Sample],
        logprobs: torch.Tensor,
        before: torch.Tensor,
        reference: torch.Tensor | None,
    ) -> LossInputs:
        """``before``: the trainer's own logprobs before its first step on these samples."""
        device, rollout = logprobs.device, before  # the best there is where the rollout's are not known
        unknown = [sample.trajectory_id for sample in samples if sample.rollout_logprobs is None]
        if not unknown:
            rollout = per_token(samples, lambda sample: sample.rollout_logprobs or ()).to(device)
        elif self._algo.old_policy == "rollout":
            raise ValueError(
                f"trajectory {unknown[0]}: rollout_logprobs must be given with algo.old_policy rollout, but it is None."
            )
        return LossInputs(
            logprobs=logprobs,
            old_logprobs=rollout if self._algo.old_policy == "rollout" else before,
            rollout_logprobs=rollout,
            advantages=per_token(samples, _advantages).to(device),
            loss_mask=per_token(samples, lambda sample: sample.loss_mask).to(device),
            ref_logprobs=reference,
        )

    @torch.no_grad()
    def _reference_logprobs(self, samples: list[Sample], part: MicroBatchPlan) -> torch.Tensor | None:
        if not self._algo.kl_coef or self._algo.kl_in_reward:
            return None
        assert self.reference is not None
        return self._score(self.reference, samples, part).logprobs

    def _split(self, samples: list[Sample]) -> list[MicroBatchPlan]:
        """Micro-batches, of which every rank has at least one where there are so many samples."""
        budget, image_token_id = self._micro_tokens, self.policy.image_token_id
        parts = split(samples, budget, self._layout, image_token_id)
        while len(parts) < min(self._ranks.size, len(samples)):
            budget = min(budget, sum(map(len, samples))) // 2
            parts = split(samples, budget, self._layout, image_token_id)
        return parts

    def _score(self, policy: Scorer, samples: list[Sample], part: MicroBatchPlan) -> TokenScores:
        packed = pack(samples, part, self.policy.image_token_id, self.policy.merge_size).to(self.policy.device)
        batch = packed.batch
        if not self._replay_routing or policy is not self.policy:  # a reference routes as it would by itself
            batch = replace(batch, experts=None)
        return packed.by_sample(policy(batch, self._temperature))

    @torch.no_grad()
    def _score_all(self, samples: list[Sample], policy: Scorer | None = None) -> torch.Tensor:
        """The logprobs ``[rows, length]`` of a mini-batch: by default the current ones, the old policy of the updates to come."""
        logprobs = torch.zeros(len(samples), max(map(len, samples)), device=self.policy.device)
        for part, counts in self._ranks.deal(self._split(samples)):
            scores = self._score(policy or self.policy, samples, part).logprobs
            if counts:
                logprobs[part.rows, : scores.shape[1]] = scores
        return self._ranks.sum(logprobs)


def learning_rate_factor(optim: Optim, step: int, total_steps: int) -> float:
    """The share of ``optim.lr`` that optimizer step ``step`` (from 0) uses."""
    if step < optim.warmup_steps:
        return (step + 1) / (optim.warmup_steps + 1)
    done = min(1.0, (step - optim.warmup_steps) / max(1, total_steps - optim.warmup_steps))
    return {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[optim.schedule]


def _layout(policy: Policy, share_prefixes: bool) -> Layout:
    """How rows lie in a micro-batch, by what the model's family allows; unshared ones cost the least padded on a CPU."""
    if share_prefixes and policy.family.may_share:
        return "tree"
    return "packed" if policy.family.may_pack and policy.device.type != "cpu" else "padded"


def choose(field: str, name: str, registry: dict[str, Any]) -> Any:
    """The registry's entry. Raises ValueError listing the names there are."""
    if name not in registry:
        raise ValueError(f"{field} must be one of {', '.join(sorted(registry))}, but it is {name!r}.")
    return registry[name]


def _over_steps(name: str, values: list[float]) -> float:
    """One number of a metric's values over optimizer steps: their mean, but the number of tokens adds up and a maximum stays one."""
    if name == "tokens":
        return sum(values)
    return max(values) if name.endswith("max") else sum(values) / len(values)


def _response(sample: Sample, row: np.ndarray) -> np.ndarray:
    """The part of a padded row that belongs to the response."""
    return row[len(sample.prompt_token_ids) : len(sample)]


def _advantages(sample: Sample) -> list[float]:
    if sample.advantage is None:
        raise ValueError(f"trajectory {sample.trajectory_id}: its advantage was never computed.")
    if isinstance(sample.advantage, list):
        return sample.advantage
    return [sample.advantage] * len(sample.response_ids)
