"""The trainer: samples in, one or more optimizer steps, metrics out.

The loop calls :meth:`Trainer.step` on each audited batch whose samples have their advantages.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from vlmrl.algos import KL, LOSSES, REDUCTIONS, LossInputs
from vlmrl.config import Algo, Optim
from vlmrl.model.policy import Policy, TokenScores
from vlmrl.train.gaps import TurnGap, summarise, turn_gaps
from vlmrl.train.master_weights import MasterWeights
from vlmrl.train.packing import collate, per_token, split
from vlmrl.types import Sample


class Trainer:
    """Updates ``policy`` with one loss of :data:`vlmrl.algos.LOSSES`.

    ``total_steps`` is the length of the learning-rate schedule, in optimizer steps. ``temperature`` is the rollouts'. ``reference``,
    a frozen policy, is needed where ``algo.kl_coef`` is above 0.
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
        reference: Policy | None = None,
    ) -> None:
        self.policy = policy
        self.reference = reference
        self.steps_done = 0
        self.gaps: list[TurnGap] = []  # of the last batch
        self._algo = algo
        self._loss = choose("algo.loss", algo.loss, LOSSES)
        self._reduction = choose("algo.reduction", algo.reduction, REDUCTIONS)
        self._temperature = temperature
        self._micro_tokens = tokens_per_micro_batch
        self._groups_per_step = groups_per_step
        self._grad_clip = optim.grad_clip
        self._weights = MasterWeights(policy)
        self.optimizer = torch.optim.AdamW(
            self._weights.parameters, lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: learning_rate_factor(optim, step, total_steps)
        )
        if algo.kl_coef and reference is None:
            raise ValueError(f"algo.kl_coef is {algo.kl_coef}, so a reference policy must be given.")

    def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Train once on each sample: one optimizer step for each ``groups_per_step`` groups (all, where that is unset).

        The samples of one trajectory stand in a row.
        """
        mini_batches = list(self._mini_batches(samples))
        old = [self._score_all(mini_batch) for mini_batch in mini_batches] if len(mini_batches) > 1 else [None]
        totals: dict[str, float] = defaultdict(float)
        self.gaps = []
        for mini_batch, old_logprobs in zip(mini_batches, old, strict=True):
            for name, value in self._update(mini_batch, old_logprobs).items():
                totals[name] += value / len(mini_batches)
        self.policy.eval()  # in training mode, checkpointed layers take no cache, and an engine may share this model
        return {**totals, **summarise(self.gaps)}

    def _mini_batches(self, samples: Sequence[Sample]) -> Iterator[list[Sample]]:
        groups: dict[str, list[Sample]] = defaultdict(list)
        for sample in samples:
            groups[sample.group_id].append(sample)
        names = list(groups)
        size = self._groups_per_step or len(names)
        for first in range(0, len(names), size):
            yield [sample for name in names[first : first + size] for sample in groups[name]]

    def _update(self, samples: list[Sample], old_logprobs: torch.Tensor | None) -> dict[str, float]:
        """One optimizer step, its gradient gathered over micro-batches under weights fixed for all of them."""
        weights = self._reduction(per_token(samples, lambda sample: sample.loss_mask), [s.group_id for s in samples])
        sums: dict[str, float] = defaultdict(float)
        scored: dict[int, np.ndarray] = {}
        self.policy.train()
        for rows in split(samples, self._micro_tokens):
            part = [samples[row] for row in rows]
            length = max(map(len, part))
            scores = self._score(self.policy, part)
            inputs = self._loss_inputs(part, scores, None if old_logprobs is None else old_logprobs[rows, :length])
            outputs = self._loss(inputs, **self._algo.loss_options)
            per_token_loss, metrics = outputs.per_token, dict(outputs.metrics)
            if inputs.ref_logprobs is not None:
                kl = KL[self._algo.kl](inputs.logprobs, inputs.ref_logprobs)
                per_token_loss, metrics["kl"] = per_token_loss + self._algo.kl_coef * kl, kl
            loss = (per_token_loss * weights[rows, :length].to(per_token_loss.device)).sum()
            loss.backward()
            metrics["entropy"] = scores.entropy
            for name, value in metrics.items():
                sums[name] += float((value.detach() * inputs.loss_mask).sum())
            sums["tokens"] += float(inputs.loss_mask.sum())
            sums["loss"] += float(loss.detach())
            old = inputs.old_logprobs.cpu().numpy()
            scored |= {
                row: old[i, len(samples[row].prompt_token_ids) : len(samples[row])] for i, row in enumerate(rows)
            }
        self.gaps += turn_gaps(samples, [scored[row] for row in range(len(samples))])
        tokens, loss_sum = sums.pop("tokens"), sums.pop("loss")
        means = {name: value / max(1.0, tokens) for name, value in sums.items()}
        return {"loss": loss_sum, "tokens": tokens, **means, **self._apply_gradient()}

    def _apply_gradient(self) -> dict[str, float]:
        norm = float(torch.nn.utils.clip_grad_norm_(self._weights.parameters, self._grad_clip))
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"optimizer step {self.steps_done}: the gradient's norm is {norm}; nothing was updated."
            )
        rate = float(self.scheduler.get_last_lr()[0])
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.scheduler.step()
        self._weights.publish()
        self.steps_done += 1
        return {"grad_norm": norm, "lr": rate}

    def _loss_inputs(self, samples: list[Sample], scores: TokenScores, old_logprobs: torch.Tensor | None) -> LossInputs:
        device = scores.logprobs.device
        reference = None
        if self._algo.kl_coef:
            assert self.reference is not None
            with torch.no_grad():
                reference = self._score(self.reference, samples).logprobs
        old = scores.logprobs.detach() if old_logprobs is None else old_logprobs
        rollout = old  # the best there is where the rollout's are not known
        if all(sample.rollout_logprobs is not None for sample in samples):
            rollout = per_token(samples, lambda sample: sample.rollout_logprobs or ()).to(device)
        return LossInputs(
            logprobs=scores.logprobs,
            old_logprobs=old,
            rollout_logprobs=rollout,
            advantages=per_token(samples, _advantages).to(device),
            loss_mask=per_token(samples, lambda sample: sample.loss_mask).to(device),
            ref_logprobs=reference,
        )

    def _score(self, policy: Policy, samples: list[Sample]) -> TokenScores:
        batch = collate(samples, policy.image_token_id, policy.merge_size).to(policy.device)
        return policy(batch, self._temperature)

    @torch.no_grad()
    def _score_all(self, samples: list[Sample]) -> torch.Tensor:
        """The current logprobs ``[rows, length]`` of a mini-batch: the old policy of the updates to come."""
        logprobs = torch.zeros(len(samples), max(map(len, samples)), device=self.policy.device)
        for rows in split(samples, self._micro_tokens):
            part = [samples[row] for row in rows]
            logprobs[rows, : max(map(len, part))] = self._score(self.policy, part).logprobs
        return logprobs


def learning_rate_factor(optim: Optim, step: int, total_steps: int) -> float:
    """The share of ``optim.lr`` that optimizer step ``step`` (from 0) uses."""
    if step < optim.warmup_steps:
        return (step + 1) / (optim.warmup_steps + 1)
    done = min(1.0, (step - optim.warmup_steps) / max(1, total_steps - optim.warmup_steps))
    return {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[optim.schedule]


def choose(field: str, name: str, registry: dict[str, Any]) -> Any:
    """The registry's entry. Raises ValueError listing the names there are."""
    if name not in registry:
        raise ValueError(f"{field} must be one of {', '.join(sorted(registry))}, but it is {name!r}.")
    return registry[name]


def _advantages(sample: Sample) -> list[float]:
    if sample.advantage is None:
        raise ValueError(f"trajectory {sample.trajectory_id}: its advantage was never computed.")
    return [sample.advantage] * len(sample.response_ids)
