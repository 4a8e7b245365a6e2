"""The trainer: samples in, one or more optimizer steps, metrics out.

The loop calls :meth:`Trainer.step` on each audited batch whose samples have their advantages.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from vlmrl.algos import CORRECTIONS, KL, LOSSES, REDUCTIONS, LossInputs
from vlmrl.algos.corrections import mismatch
from vlmrl.config import Algo, Optim
from vlmrl.model.policy import Policy, TokenScores
from vlmrl.train.master_weights import MasterWeights
from vlmrl.train.packing import Part, Sharing, pack, per_token, split
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
        share_prefixes: bool = True,
    ) -> None:
        self.policy = policy
        self.reference = reference
        self.steps_done = 0
        self.scored: list[
            np.ndarray
        ] = []  # logprobs of the last batch's responses, sample by sample, before its update
        self._algo = algo
        self._loss = choose("algo.loss", algo.loss, LOSSES)
        self._reduction = choose("algo.reduction", algo.reduction, REDUCTIONS)
        self._temperature = temperature
        self._micro_tokens = tokens_per_micro_batch
        self._groups_per_step = groups_per_step
        self._share_prefixes = share_prefixes
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
        mini_batches = self._mini_batches(samples)
        parts = [[samples[index] for index in indices] for indices in mini_batches]
        old = [self._score_all(part) for part in parts] if len(parts) > 1 else [None]
        totals: dict[str, float] = defaultdict(float)
        self.scored = [np.empty(0)] * len(samples)
        for indices, part, old_logprobs in zip(mini_batches, parts, old, strict=True):
            for name, value in self._update(part, indices, old_logprobs).items():
                totals[name] += value / len(mini_batches)
        self.policy.eval()  # in training mode, checkpointed layers take no cache, and an engine may share this model
        return dict(totals)

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
        mask = per_token(samples, lambda sample: sample.loss_mask)
        weights = self._reduction(mask, [s.group_id for s in samples], **self._algo.reduction_options)
        sums: dict[str, float] = defaultdict(float)
        self.policy.train()
        for micro_batch in self._split(samples):
            rows = micro_batch.rows
            part = [samples[row] for row in rows]
            length = max(map(len, part))
            scores = self._score(self.policy, samples, micro_batch)
            reference = self._reference_logprobs(samples, micro_batch)
            old = None if old_logprobs is None else old_logprobs[rows, :length]
            inputs = self._loss_inputs(part, scores, old, reference)
            per_token_loss, metrics = self._per_token_loss(inputs, scores)
            loss = (per_token_loss * weights[rows, :length].to(per_token_loss.device)).sum()
            loss.backward()
            tokens = float(inputs.loss_mask.sum())
            for name, value in metrics.items():
                sums[name] += float((value.detach() * inputs.loss_mask).sum() if value.dim() else value * tokens)
            sums["tokens"] += tokens
            sums["loss"] += float(loss.detach())
            before = inputs.old_logprobs.cpu().numpy()
            for i, row in enumerate(rows):
                self.scored[indices[row]] = before[i, len(samples[row].prompt_token_ids) : len(samples[row])]
        tokens, loss_sum = sums.pop("tokens"), sums.pop("loss")
        means = {name: value / max(1.0, tokens) for name, value in sums.items()}
        return {"loss": loss_sum, "tokens": tokens, **means, **self._apply_gradient()}

    def _per_token_loss(self, inputs: LossInputs, scores: TokenScores) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The policy's loss, corrected, with the penalties that are set; metrics per token ``[rows, length]`` or single."""
        algo = self._algo
        outputs = self._loss(inputs, **algo.loss_options)
        per_token_loss, metrics = outputs.per_token, {**outputs.metrics, "entropy": scores.entropy}
        if algo.corrections:
            probabilities = (inputs.old_logprobs, inputs.rollout_logprobs, inputs.loss_mask)
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

    def _loss_inputs(
        self,
        samples: list[Sample],
        scores: TokenScores,
        old_logprobs: torch.Tensor | None,
        reference: torch.Tensor | None,
    ) -> LossInputs:
        device = scores.logprobs.device
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

    @torch.no_grad()
    def _reference_logprobs(self, samples: list[Sample], part: Part) -> torch.Tensor | None:
        if not self._algo.kl_coef or self._algo.kl_in_reward:
            return None
        assert self.reference is not None
        return self._score(self.reference, samples, part).logprobs

    def _split(self, samples: list[Sample]) -> list[Part]:
        policy = self.policy
        sharing = Sharing(policy.image_token_id, policy.merge_size, policy.attention_balance)
        return split(samples, self._micro_tokens, sharing if self._share_prefixes else None)

    def _score(self, policy: Policy, samples: list[Sample], part: Part) -> TokenScores:
        packed = pack(samples, part, policy.image_token_id, policy.merge_size).to(policy.device)
        return packed.by_sample(policy(packed.batch, self._temperature))

    @torch.no_grad()
    def _score_all(self, samples: list[Sample], policy: Policy | None = None) -> torch.Tensor:
        """The logprobs ``[rows, length]`` of a mini-batch: by default the current ones, the old policy of the updates to come."""
        logprobs = torch.zeros(len(samples), max(map(len, samples)), device=self.policy.device)
        for part in self._split(samples):
            scores = self._score(policy or self.policy, samples, part).logprobs
            logprobs[part.rows, : scores.shape[1]] = scores
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
    if isinstance(sample.advantage, list):
        return sample.advantage
    return [sample.advantage] * len(sample.response_ids)
