"""The trainer: samples in, one or more optimizer steps, metrics and logprobs out.

The loop calls :meth:`Trainer.step` on each audited batch whose samples have their advantages.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from vlmrl.algos import KL, LossInputs, choose, choose_all
from vlmrl.algos.corrections import mismatch
from vlmrl.config import Algo, Optim
from vlmrl.config.fields import short_name
from vlmrl.model.lora import named_adapters, named_weights
from vlmrl.model.policy import Policy, TokenScores
from vlmrl.train.checkpoint import (
    init_optimizer_state,
    load_random,
    load_tensors,
    optimizer_state,
    random_state,
    save_random,
    save_tensors,
    saved_shapes,
)
from vlmrl.train.finite_check import FiniteCheck
from vlmrl.train.master_weights import HOST, MasterWeights, make_optimizer, move_module, move_state, step_in_parts
from vlmrl.train.packing import Layout, MicroBatchPlan, count_unrecorded_experts, pack, per_token, split
from vlmrl.train.ranks import MetricAccumulator, Ranks
from vlmrl.types import MicroBatch, Sample, to_device
from vlmrl.utils.current_gpu import on_policy_gpu
from vlmrl.utils.host_memory import HostMemory

Scorer = Callable[[MicroBatch, float], TokenScores]


@dataclass(frozen=True)
class TrainerSpec:
    """The settings of a trainer, the same on every rank."""

    algo: Algo
    optim: Optim
    total_steps: int
    """Length of the learning-rate schedule, in optimizer steps."""
    tokens_per_micro_batch: int
    temperature: float = 1.0
    """The sampling temperature of the rollouts."""
    groups_per_step: int | None = None
    """Groups per optimizer step; ``None``: one step for all groups of a batch. Groups that remain join the other steps."""
    share_prefixes: bool = True
    """Compute shared prefixes once, if the model's family allows it."""
    replay_routing: bool = True
    """For mixture-of-experts models: use the experts that the engine recorded."""


@dataclass(frozen=True)
class StepOutput:
    """The result of :meth:`Trainer.step`."""

    metrics: dict[str, float]
    logprobs: list[np.ndarray]
    """For each sample the trainer's logprobs ``[response]``, in nats, before the update."""
    steps_done: int
    """Optimizer steps so far, including those before a resume."""


class Trainer:
    """Updates ``policy`` with the loss, the corrections and the reduction of ``spec.algo``.

    ``reference`` is a frozen policy, required if ``algo.kl_coef`` is above 0. With several ``ranks``, every rank calls every
    method with the same arguments and gets the same results.
    """

    def __init__(
        self, policy: Policy, spec: TrainerSpec, *, reference: Scorer | None = None, ranks: Ranks | None = None
    ) -> None:
        algo, optim = spec.algo, spec.optim
        if algo.kl_coef and reference is None:
            raise ValueError(f"algo.kl_coef is {algo.kl_coef}, so a reference policy must be given.")
        self.policy = policy
        self.reference = reference
        self.steps_done = 0
        self._left_out = 0  # optimizer steps of the schedule that were not taken
        self._schedule_end: int | None = None  # where the next batch ends in the schedule; None: after the last one
        self._spec = spec
        self._ranks = ranks or Ranks()
        self._algo = algo
        self._optim = optim
        self._loss = choose(algo, "loss")
        self._reduction = choose(algo, "reduction")
        self._corrections = dict(zip(map(short_name, algo.corrections), choose_all(algo, "corrections"), strict=True))
        self._layout = _layout(policy, spec.share_prefixes)
        self._replay_routing = spec.replay_routing and policy.routing is not None
        self._weights = MasterWeights(policy)
        self.optimizer = make_optimizer(self._weights.parameters, optim, policy.device)
        self._state_memory = HostMemory()  # of `optim.offload`

    @on_policy_gpu
    def step(self, samples: Sequence[Sample]) -> StepOutput:
        """Train once on each sample, with one optimizer step for each ``groups_per_step`` groups.

        The samples of one trajectory must be adjacent.
        """
        mini_batches = self._mini_batches(samples)
        if self._schedule_end is not None:
            self._left_out = self._schedule_end - len(mini_batches) - self.steps_done
            self._schedule_end = None
        parts = [[samples[index] for index in indices] for indices in mini_batches]
        # The first part's are those of its own forward pass: its weights have not moved yet.
        old = [None, *(self._score_all(part) for part in parts[1:])]
        logprobs, steps = [np.empty(0)] * len(samples), []
        for part, indices, old_logprobs in zip(parts, mini_batches, old, strict=True):
            metrics, before = self._update(part, old_logprobs)
            steps.append(metrics)
            for index, sample, row in zip(indices, part, before.cpu().numpy(), strict=True):
                logprobs[index] = _response(sample, row)
        self.policy.eval()  # in training mode, checkpointed layers take no cache, and an engine may share this model
        metrics = {name: _over_steps(name, [step[name] for step in steps]) for name in steps[0]}
        if self._replay_routing:
            metrics["routing/free_tokens"] = count_unrecorded_experts(samples)
        if self._algo.corrections:
            unknown = [sample for sample in samples if sample.rollout_logprobs is None]
            metrics["correction/uncorrected_tokens"] = float(sum(sum(sample.loss_mask) for sample in unknown))
        return StepOutput(metrics, logprobs, self.steps_done)

    def end_schedule_at(self, position: int) -> None:
        """Let the optimizer steps of the next batch end at this place of the learning-rate schedule, counted in optimizer steps.

        Otherwise the schedule would not end with the run where filters leave batches with fewer optimizer steps, or with none.
        """
        self._schedule_end = position

    def to(self, device: torch.device, memory: HostMemory) -> None:
        """Move the policy, the reference, master weights and optimizer state to ``device``; on the host they are in ``memory``."""
        move_module(self.policy, device, memory)
        if isinstance(self.reference, Policy):
            move_module(self.reference, device, memory)
        self._weights.to(device, memory)
        if not self._optim.offload:
            move_state(self.optimizer, device, memory)

    def close(self) -> None:
        """Release the policy after the last step, so that another trainer can train it."""
        self._weights.close()

    def _mini_batches(self, samples: Sequence[Sample]) -> list[list[int]]:
        """The sample indices of each optimizer step: ``groups_per_step`` groups, however many rows they have.

        If that does not divide the number of groups, they are split evenly into as many steps as come nearest to it: 9 groups, 4 a
        step, are 4 and 5, since a last group alone would move the weights as far as 4 others do.
        """
        groups: dict[str, list[int]] = defaultdict(list)
        for index, sample in enumerate(samples):
            groups[sample.group_id].append(index)
        members = list(groups.values())
        size = self._spec.groups_per_step or len(members)
        count = max(1, (len(members) + (size - 1) // 2) // size)
        edges = [number * len(members) // count for number in range(count + 1)]
        return [list(chain.from_iterable(members[first:last])) for first, last in pairwise(edges)]

    def _update(
        self, samples: list[Sample], old_logprobs: torch.Tensor | None
    ) -> tuple[dict[str, float], torch.Tensor]:
        """One optimizer step with gradient accumulation over micro-batches.

        Returns its metrics and the logprobs ``[rows, longest response]`` of the weights before the first step on the batch.
        """
        device, ranks = self.policy.device, self._ranks
        mask = per_token(samples, lambda sample: sample.loss_mask)
        tokens, mask = float(mask.sum()), to_device(mask, device)
        weights = self._reduction(mask, [s.group_id for s in samples])
        before = torch.zeros_like(mask)
        total, accumulator, check = torch.zeros((), device=device), MetricAccumulator(), FiniteCheck()
        self.policy.train()
        for plan, counts in ranks.shard(self._split(samples)):
            own, rows = [samples[row] for row in plan.rows], to_device(torch.tensor(plan.rows), device)
            length = max(len(sample.response_ids) for sample in own)
            scores = self._score(self.policy, samples, plan)
            reference = self._reference_logprobs(samples, plan)
            old = scores.logprobs.detach() if old_logprobs is None else old_logprobs[rows, :length]
            inputs = self._loss_inputs(own, scores.logprobs, old, reference)
            check.add(own, inputs)
            per_token_loss, metrics = self._per_token_loss(inputs, scores, old)
            loss = (per_token_loss * weights[rows, :length] * counts).sum()
            if loss.requires_grad:  # not of text alone where only the vision tower is trained
                (loss * ranks.size).backward()  # ranks average gradients, so this makes their sum
            total += loss.detach()
            for name, value in metrics.items():
                accumulator.add(name, value, inputs.loss_mask * counts)
            if counts:
                before[rows, :length] = old
        self._refuse_infinite(check)
        before = ranks.sum(before)
        means = accumulator.result(tokens, ranks, device)
        if "mismatch/k1" in means:  # the exponential of the mean, not the mean of the micro-batches' exponentials
            means["mismatch/perplexity_ratio"] = float(np.exp(means["mismatch/k1"]))
        return {"loss": float(ranks.sum(total)), "tokens": tokens, **means, **self._apply_gradient()}, before

    def _refuse_infinite(self, check: FiniteCheck) -> None:
        """Raise ValueError on every rank if one found a logprob that is not finite: the others would wait for it in a collective."""
        error, device = check.error(), self.policy.device if self._ranks.size > 1 else torch.device("cpu")
        if self._ranks.max(torch.tensor(float(error is not None), device=device)):
            self.optimizer.zero_grad(set_to_none=True)  # it is not finite either, and the next step would add to it
            raise ValueError(
                error or "another rank found a logprob that is not finite: its error names the trajectory."
            )

    def _per_token_loss(
        self, inputs: LossInputs, scores: TokenScores, before: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss with its corrections and penalties, and metrics that are per token ``[rows, length]`` or scalars.

        ``before``: as in :meth:`_loss_inputs`.
        """
        algo = self._algo
        outputs = self._loss(inputs)
        per_token_loss, metrics = outputs.per_token, {**outputs.metrics, "entropy": scores.entropy}
        probabilities = (before, inputs.rollout_logprobs, inputs.loss_mask)
        if algo.corrections or algo.old_policy == "rollout":
            metrics |= {f"mismatch/{name}": value for name, value in mismatch(*probabilities).items()}
        for name, correct in self._corrections.items():
            factors, extra = correct(*probabilities)
            per_token_loss = per_token_loss * factors
            metrics |= {f"correction/{name}/{key}": value for key, value in extra.items()}
        if inputs.ref_logprobs is not None:
            kl = KL[algo.kl](inputs.logprobs, inputs.ref_logprobs)
            per_token_loss, metrics["kl"] = per_token_loss + algo.kl_coef * kl, kl
        if algo.entropy_coef:
            per_token_loss = per_token_loss - algo.entropy_coef * scores.entropy
        return per_token_loss, metrics

    def rows_by_rank(self, samples: Sequence[Sample], in_steps: bool) -> list[set[int]]:
        """For each rank the indices of the samples that it computes: in the optimizer steps of :meth:`step`, or in :meth:`score`."""
        rows: list[set[int]] = [set() for _ in range(self._ranks.size)]
        for indices in self._mini_batches(samples) if in_steps else [list(range(len(samples)))]:
            plans = self._split([samples[index] for index in indices])
            for rank, own in enumerate(rows):
                shard = Ranks(rank, self._ranks.size).shard(plans)
                own |= {indices[row] for plan, _ in shard for row in plan.rows}
        return rows

    @on_policy_gpu
    def score(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """The logprobs ``[response]``, in nats, of each sample's response tokens under the current weights."""
        rows = list(samples)
        return [_response(each, row) for each, row in zip(rows, self._score_all(rows).cpu().numpy(), strict=True)]

    @on_policy_gpu
    @torch.no_grad()
    def token_kl(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """The KL to the reference ``[response]``, in nats, of each sample's response tokens; 0 where they are not trained."""
        assert self.reference is not None
        rows = list(samples)
        difference = KL[self._algo.kl](self._score_all(rows), self._score_all(rows, self.reference))
        masked = difference * per_token(rows, lambda sample: sample.loss_mask).to(difference.device)
        return [_response(sample, row) for sample, row in zip(rows, masked.cpu().numpy(), strict=True)]

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The policy's weights as :func:`~vlmrl.model.lora.named_weights` yields them. Every rank must iterate over them."""
        return named_weights(self.policy.model)

    def named_adapters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The adapters' weights. Every rank must iterate over them."""
        return named_adapters(self.policy.model)

    @on_policy_gpu
    def save(self, checkpoint: Path) -> None:
        """Write this rank's part of a checkpoint. Every rank calls it."""
        save_random(checkpoint, self._ranks.rank, random_state())
        save_tensors(checkpoint, self._tensors())

    @on_policy_gpu
    def restore(self, checkpoint: Path) -> int:
        """Load a checkpoint, which another number of ranks may have written. Returns the optimizer steps it had taken.

        Hyperparameters such as the learning rate are those of this trainer's spec.
        """
        init_optimizer_state(self.optimizer, self._weights.named, saved_shapes(checkpoint).keys())
        tensors = self._tensors()
        load_tensors(checkpoint, tensors)
        self.steps_done = int(tensors["steps_done"])
        self._weights.publish()
        if self._optim.offload:
            move_state(self.optimizer, HOST, self._state_memory)
        load_random(checkpoint, self._ranks.rank)
        return self.steps_done

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Everything that a checkpoint holds of this trainer, including a reference that is a copy of the initial weights."""
        named = self._weights.named
        tensors = {"steps_done": torch.tensor(self.steps_done), **optimizer_state(self.optimizer, named)}
        tensors |= {f"weight/{name}": weight.detach() for name, weight in named.items()}
        if isinstance(self.reference, Policy) and self._algo.reference is None:
            tensors |= {f"reference/{name}": weight.detach() for name, weight in self.reference.named_parameters()}
        return tensors

    def _apply_gradient(self) -> dict[str, float]:
        optim, done = self._optim, self.steps_done
        total: Any = torch.nn.utils.clip_grad_norm_(self._weights.parameters, optim.grad_clip)
        norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
        if not math.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)  # the next step would add to it
            raise FloatingPointError(
                f"optimizer step {self.steps_done}: the gradient norm is {norm}, so the weights were not updated."
            )
        rate = optim.lr * learning_rate_factor(optim, done, self._spec.total_steps, done + self._left_out)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if optim.offload:
            step_in_parts(self.optimizer, self.policy.device, self._state_memory)
        else:
            self.optimizer.step()
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
        """``before``: the trainer's logprobs before its first step on the samples. A row of unknown rollout logprobs has them in
        their place, so that it is not corrected; the other rows are.
        """
        device = logprobs.device
        unknown = [sample.trajectory_id for sample in samples if sample.rollout_logprobs is None]
        if unknown and self._algo.old_policy == "rollout":
            raise ValueError(
                f"trajectory {unknown[0]}: rollout_logprobs must be given with algo.old_policy rollout, but it is None."
            )
        rollout = to_device(per_token(samples, _rollout_logprobs), device)
        if unknown:
            is_unknown = to_device(torch.tensor([sample.rollout_logprobs is None for sample in samples]), device)
            rollout = torch.where(is_unknown[:, None], before, rollout)
        return LossInputs(
            logprobs=logprobs,
            old_logprobs=rollout if self._algo.old_policy == "rollout" else before,
            rollout_logprobs=rollout,
            advantages=to_device(per_token(samples, _advantages), device),
            loss_mask=to_device(per_token(samples, lambda sample: sample.loss_mask), device),
            ref_logprobs=reference,
        )

    @torch.no_grad()
    def _reference_logprobs(self, samples: list[Sample], plan: MicroBatchPlan) -> torch.Tensor | None:
        if not self._algo.kl_coef or self._algo.kl_in_reward:
            return None
        assert self.reference is not None
        return self._score(self.reference, samples, plan).logprobs

    def _split(self, samples: list[Sample]) -> list[MicroBatchPlan]:
        """The micro-batches of all ranks, which all ranks compute alike."""
        budget, image_token_id = self._spec.tokens_per_micro_batch, self.policy.image_token_id
        return split(samples, budget, self._layout, image_token_id, self._ranks.size)

    def _score(self, policy: Scorer, samples: list[Sample], plan: MicroBatchPlan) -> TokenScores:
        packed = pack(samples, plan, self.policy.family).to(self.policy.device)
        # Without any image on any rank, the vision tower stays out on all: zeros for a gradient would let Adam move it.
        blank_image = self._ranks.size > 1 and any(sample.media for sample in samples)
        batch = replace(packed.batch, blank_image=blank_image)
        if not self._replay_routing or policy is not self.policy:  # a reference uses its own routers
            batch = replace(batch, experts=None)
        return packed.by_sample(policy(batch, self._spec.temperature))

    @torch.no_grad()
    def _score_all(self, samples: list[Sample], policy: Scorer | None = None) -> torch.Tensor:
        """The logprobs ``[rows, longest response]`` of a mini-batch under ``policy``, by default the current weights."""
        width = max(len(sample.response_ids) for sample in samples)
        logprobs = torch.zeros(len(samples), width, device=self.policy.device)
        for plan, counts in self._ranks.shard(self._split(samples)):
            scores = self._score(policy or self.policy, samples, plan).logprobs
            if counts:
                logprobs[to_device(torch.tensor(plan.rows), logprobs.device), : scores.shape[1]] = scores
        return self._ranks.sum(logprobs)


def learning_rate_factor(optim: Optim, step: int, total_steps: int, position: int | None = None) -> float:
    """The factor on ``optim.lr`` at optimizer step ``step``, counted from 0.

    ``position``: the step's place in the schedule, after ``step`` if steps were left out; ``None``: ``step``. The warmup counts the
    steps that were taken, the decay the position.
    """
    warmup = (step + 1) / (optim.warmup_steps + 1) if step < optim.warmup_steps else 1.0
    place = step if position is None else position
    done = min(1.0, max(0.0, (place - optim.warmup_steps) / max(1, total_steps - optim.warmup_steps)))
    decay = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[optim.schedule]
    return min(warmup, decay)


def _layout(policy: Policy, share_prefixes: bool) -> Layout:
    """The layout of micro-batches that the model's family allows. On a CPU, padded rows are cheaper than packed ones."""
    if share_prefixes and policy.family.may_share:
        return "tree"
    return "packed" if policy.family.may_share and policy.device.type != "cpu" else "padded"


def _over_steps(name: str, values: list[float]) -> float:
    """A metric over several optimizer steps: the sum of ``tokens``, the maximum of names that end with ``max``, else the mean."""
    if name == "tokens":
        return sum(values)
    return max(values) if name.endswith("max") else sum(values) / len(values)


def _response(sample: Sample, row: np.ndarray) -> np.ndarray:
    """The row of the sample's response without padding."""
    return row[: len(sample.response_ids)]


def _rollout_logprobs(sample: Sample) -> list[float]:
    """The rollout logprobs; 0 where they are not known."""
    return sample.rollout_logprobs or [0.0] * len(sample.response_ids)


def _advantages(sample: Sample) -> list[float]:
    if sample.advantage is None:
        raise ValueError(
            f"trajectory {sample.trajectory_id}: sample.advantage must be set before Trainer.step, but it is None."
        )
    if isinstance(sample.advantage, list):
        return sample.advantage
    return [sample.advantage] * len(sample.response_ids)
