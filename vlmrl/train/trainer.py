"""The trainer: samples in, one or more optimizer steps, metrics and logprobs out.

The loop calls :meth:`Trainer.step` on each audited batch whose samples have their advantages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vlmrl.algos import KL, LossInputs, LossOutputs, choose, choose_all
from vlmrl.algos.corrections import mismatch
from vlmrl.config import Algo, Optim, Teacher
from vlmrl.config.fields import short_name
from vlmrl.model.lora import named_adapters, named_weights
from vlmrl.model.policy import Policy, TokenScores
from vlmrl.train.checkpoint import (
    SavedTensors,
    init_optimizer_state,
    load_random,
    optimizer_state,
    random_state,
    save_random,
    save_tensors,
)
from vlmrl.train.finite_check import FiniteCheck
from vlmrl.train.loss_inputs import loss_inputs
from vlmrl.train.master_weights import (
    HOST,
    MasterWeights,
    clip_gradient,
    make_optimizer,
    move_module,
    move_state,
    step_in_parts,
)
from vlmrl.train.packing import (
    MicroBatchPlan,
    count_unrecorded_experts,
    layout_of,
    mini_batches,
    pack,
    per_token,
    split,
    unpadded,
)
from vlmrl.train.ranks import MetricAccumulator, Ranks, over_steps
from vlmrl.train.schedule import learning_rate_factor
from vlmrl.train.served_teacher import ServedTeacher
from vlmrl.train.teacher import Taught, TeacherModel, TeacherTerms
from vlmrl.types import Sample, to_device
from vlmrl.utils.current_gpu import on_policy_gpu
from vlmrl.utils.host_memory import HostMemory

Scorer = Callable[..., TokenScores]
"""Of a micro-batch and a temperature, as :class:`Policy` is."""
OWN_METRICS = {"loss", "tokens", "entropy", "lr", "grad_norm", "row_tokens", "shared_tokens"}
"""Metrics of the trainer, whose names a loss may not give to others."""


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
    teacher: Teacher = field(default_factory=Teacher)


@dataclass(frozen=True)
class StepOutput:
    """The result of :meth:`Trainer.step`."""

    metrics: dict[str, float]
    logprobs: list[np.ndarray]
    """For each sample the trainer's logprobs ``[response]``, in nats, before the update."""
    steps_done: int
    """Optimizer steps so far, including those before a resume."""
    teacher_logprobs: list[np.ndarray] | None = None
    """For each sample the teacher's logprobs ``[response]``, NaN where it says nothing. None: there is no teacher."""


class Trainer:
    """Updates ``policy`` with the loss, the corrections and the reduction of ``spec.algo``.

    ``reference`` is a frozen policy, required if ``algo.kl_coef`` is above 0, and ``teacher`` the policy that ``spec.teacher`` names.
    With several ``ranks``, every rank calls every method with the same arguments and gets the same results.
    """

    def __init__(
        self,
        policy: Policy,
        spec: TrainerSpec,
        *,
        reference: Scorer | None = None,
        teacher: Policy | None = None,
        ranks: Ranks | None = None,
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
        self._layout = layout_of(policy, spec.share_prefixes)
        self._replay_routing = spec.replay_routing and policy.routing is not None
        self._weights = MasterWeights(policy)
        self.optimizer = make_optimizer(self._weights.parameters, optim, policy.device)
        self.teacher: TeacherTerms | None = None
        if spec.teacher.servers[0]:
            self.teacher = ServedTeacher(spec.teacher, policy.device)
        elif teacher is not None:
            limits = (self._layout, spec.tokens_per_micro_batch, spec.temperature, self._ranks)
            self.teacher = TeacherModel(spec.teacher, policy, teacher, *limits)
        self._state_memory = HostMemory()  # of `optim.offload`

    @on_policy_gpu
    @torch.enable_grad()  # a user's module may have turned it off for all code of its thread
    def step(self, samples: Sequence[Sample]) -> StepOutput:
        """Train once on each sample, with one optimizer step for each ``groups_per_step`` groups.

        The samples of one trajectory must be adjacent.
        """
        rows_by_step = mini_batches(samples, self._spec.groups_per_step)
        if self._schedule_end is not None:
            self._left_out = self._schedule_end - len(rows_by_step) - self.steps_done
            self._schedule_end = None
        parts = [[samples[index] for index in indices] for indices in rows_by_step]
        # The first part's are those of its own forward pass: its weights have not moved yet.
        old = [None, *(self._score_all(part) for part in parts[1:])]
        logprobs, theirs = ([np.empty(0)] * len(samples) for _ in range(2))
        steps = []
        for part, indices, old_logprobs in zip(parts, rows_by_step, old, strict=True):
            metrics, before, of_teacher = self._update(part, old_logprobs)
            steps.append(metrics)
            for index, row in zip(indices, unpadded(part, before), strict=True):
                logprobs[index] = row
            if of_teacher is not None:
                for index, row in zip(indices, unpadded(part, of_teacher), strict=True):
                    theirs[index] = row
        self.policy.eval()  # in training mode, checkpointed layers take no cache, and an engine may share this model
        names = dict.fromkeys(chain.from_iterable(steps))  # one with fewer turns lacks some of a teacher's
        metrics = {name: over_steps(name, [step[name] for step in steps if name in step]) for name in names}
        if self._replay_routing:
            metrics["routing/free_tokens"] = count_unrecorded_experts(samples)
        if self._algo.corrections:
            unknown = [sample for sample in samples if sample.rollout_logprobs is None]
            metrics["correction/uncorrected_tokens"] = float(sum(sum(sample.loss_mask) for sample in unknown))
        return StepOutput(metrics, logprobs, self.steps_done, None if self.teacher is None else theirs)

    def end_schedule_at(self, position: int) -> None:
        """Let the optimizer steps of the next batch end at this place of the learning-rate schedule, counted in optimizer steps.

        Otherwise the schedule would not end with the run where filters leave batches with fewer optimizer steps, or with none.
        """
        self._schedule_end = position

    def to(self, device: torch.device, memory: HostMemory) -> None:
        """Move the policy, the reference, the teacher, master weights and optimizer state to ``device``; on the host in ``memory``."""
        move_module(self.policy, device, memory)
        if isinstance(self.reference, Policy):
            move_module(self.reference, device, memory)
        if self.teacher is not None:
            self.teacher.to(device, memory)
        self._weights.to(device, memory)
        if not self._optim.offload:
            move_state(self.optimizer, device, memory)

    def close(self) -> None:
        """Release the policy after the last step, so that another trainer can train it."""
        self._weights.close()

    def _update(
        self, samples: list[Sample], old_logprobs: torch.Tensor | None
    ) -> tuple[dict[str, float], torch.Tensor, torch.Tensor | None]:
        """One optimizer step with gradient accumulation over micro-batches.

        Returns its metrics, the logprobs ``[rows, longest response]`` of the weights before the first step on the batch, and those of
        the teacher, if there is one: NaN where it says nothing.
        """
        device, ranks = self.policy.device, self._ranks
        mask = per_token(samples, lambda sample: sample.loss_mask)
        tokens, mask = float(mask.sum()), to_device(mask, device)
        weights = self._reduction(mask, [s.group_id for s in samples])
        before, theirs = torch.zeros_like(mask), None if self.teacher is None else torch.zeros_like(mask)
        total, accumulator, check = torch.zeros((), device=device), MetricAccumulator(), FiniteCheck()
        self.policy.train()
        plans, taught = self._split(samples), None
        if self.teacher is not None:
            done = (self.steps_done + self._left_out) / max(1, self._spec.total_steps - 1)
            self.teacher.begin(samples, plans, min(1.0, done))
        for plan, counts in ranks.shard(plans):
            own, rows = [samples[row] for row in plan.rows], to_device(torch.tensor(plan.rows), device)
            length = max(len(sample.response_ids) for sample in own)
            if self.teacher is not None:
                taught = self.teacher.next(own)
            scores = self._score(self.policy, samples, plan, taught)
            reference = self._reference_logprobs(samples, plan)
            old = scores.logprobs.detach() if old_logprobs is None else old_logprobs[rows, :length]
            inputs = loss_inputs(own, scores.logprobs, old, reference, self._algo.old_policy == "rollout")
            penalty, of_teacher = torch.zeros_like(old), dict[str, torch.Tensor]()
            if self.teacher is not None and taught is not None:
                inputs, penalty, of_teacher = self.teacher.apply(inputs, scores, taught)
            check.add(own, inputs)
            per_token_loss, metrics = self._per_token_loss(inputs, scores, old)
            loss = ((per_token_loss + penalty) * weights[rows, :length] * counts).sum()
            total += loss.detach()
            # A loss of one's own may be of constants here, but ranks wait for each other in backward.
            if ranks.size > 1 and not loss.requires_grad:
                loss = 0.0 * scores.logprobs.sum()
            if loss.requires_grad:  # not of text alone where only the vision tower is trained
                (loss * ranks.size).backward()  # ranks average gradients, so this makes their sum
            for name, value in (metrics | of_teacher).items():
                accumulator.add(name, value, inputs.loss_mask * counts)
            if counts:
                before[rows, :length] = old
                if theirs is not None and taught is not None:
                    theirs[rows, :length] = taught.logprobs.where(taught.known > 0, torch.nan)
        if error := check.error_on_any(ranks, device):
            self.optimizer.zero_grad(set_to_none=True)  # it is not finite either, and the next step would add to it
            raise ValueError(error)
        before = ranks.sum(before)
        theirs = None if theirs is None else ranks.sum(theirs)
        means = accumulator.result(tokens, ranks, device)
        means = means if self.teacher is None else self.teacher.over_known(means)
        if "mismatch/k1" in means:  # the exponential of the mean, not the mean of the micro-batches' exponentials
            means["mismatch/perplexity_ratio"] = float(np.exp(means["mismatch/k1"]))
        sizes = {"row_tokens": float(sum(map(len, samples))), "shared_tokens": float(sum(sum(p.shared) for p in plans))}
        means |= sizes | self._apply_gradient()
        return {"loss": float(ranks.sum(total)), "tokens": tokens, **means}, before, theirs

    def _per_token_loss(
        self, inputs: LossInputs, scores: TokenScores, before: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss with its corrections and penalties, and metrics that are per token ``[rows, length]`` or scalars.

        ``before``: as for :func:`~vlmrl.train.loss_inputs.loss_inputs`.
        """
        algo = self._algo
        outputs = self._loss(inputs)
        if not isinstance(outputs, LossOutputs):
            name, returned = short_name(algo.loss), type(outputs).__name__
            raise ValueError(
                f"algo.loss {name} must return LossOutputs(per_token, metrics), but it returned a {returned}."
            )
        if outputs.per_token.shape != inputs.logprobs.shape:  # it would be broadcast to tokens that it is not of
            shapes = f"{list(inputs.logprobs.shape)}, but it is {list(outputs.per_token.shape)}"
            raise ValueError(f"algo.loss {short_name(algo.loss)}: per_token must have the shape of logprobs, {shapes}.")
        if taken := sorted(OWN_METRICS & outputs.metrics.keys()):
            raise ValueError(
                f"algo.loss {short_name(algo.loss)}: metrics must not be called {taken}, as the trainer's are."
            )
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
        for indices in mini_batches(samples, self._spec.groups_per_step) if in_steps else [list(range(len(samples)))]:
            plans = self._split([samples[index] for index in indices])
            for rank, own in enumerate(rows):
                shard = Ranks(rank, self._ranks.size).shard(plans)
                own |= {indices[row] for plan, _ in shard for row in plan.rows}
        return rows

    @on_policy_gpu
    def score(self, samples: Sequence[Sample], by_teacher: bool = False) -> list[np.ndarray]:
        """The logprobs ``[response]``, in nats, of each sample's response tokens under the current weights, or under the teacher's."""
        rows = list(samples)
        return unpadded(rows, self._score_all(rows, self.teacher.model if by_teacher and self.teacher else None))

    @on_policy_gpu
    @torch.no_grad()
    def token_kl(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """The KL to the reference ``[response]``, in nats, of each sample's response tokens; 0 where they are not trained."""
        assert self.reference is not None
        rows = list(samples)
        difference = KL[self._algo.kl](self._score_all(rows), self._score_all(rows, self.reference))
        masked = difference * per_token(rows, lambda sample: sample.loss_mask).to(difference.device)
        return unpadded(rows, masked)

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
        saved = SavedTensors(checkpoint)
        init_optimizer_state(self.optimizer, self._weights.named, saved.shapes.keys())
        tensors = self._tensors()
        saved.load(tensors)
        self.steps_done = int(tensors["steps_done"])
        self._weights.publish()
        if self.teacher is not None:
            self.teacher.restored()
        if self._optim.offload:
            move_state(self.optimizer, HOST, self._state_memory)
        load_random(checkpoint, self._ranks.rank)
        return self.steps_done

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Everything that a checkpoint holds of this trainer, including a reference that is a copy of the initial weights."""
        named = self._weights.named
        tensors = {"steps_done": torch.tensor(self.steps_done), **optimizer_state(self.optimizer, named)}
        tensors |= {f"weight/{name}": weight.detach() for name, weight in named.items()}
        tensors |= {} if self.teacher is None else self.teacher.tensors()
        if isinstance(self.reference, Policy):
            tensors |= {f"reference/{name}": weight.detach() for name, weight in self.reference.named_parameters()}
        return tensors

    def _apply_gradient(self) -> dict[str, float]:
        optim = self._optim
        norm = clip_gradient(self._weights.parameters, optim.grad_clip)
        if not math.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)  # the next step would add to it
            raise FloatingPointError(
                f"optimizer step {self.steps_done}: the gradient norm is {norm}, so the weights were not updated. "
                "Lower optim.lr, or, if algo.loss is your own, check what it computes of these logprobs, which were finite."
            )
        position = self.steps_done + self._left_out
        rate = optim.lr * learning_rate_factor(optim, self.steps_done, self._spec.total_steps, position)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if optim.offload:
            step_in_parts(self.optimizer, self.policy.device, self._state_memory)
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._weights.publish()
        if self.teacher is not None:
            self.teacher.follow(self._weights.named)
        self.steps_done += 1
        return {"grad_norm": norm, "lr": rate}

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

    def _score(
        self, policy: Scorer, samples: list[Sample], plan: MicroBatchPlan, taught: Taught | None = None
    ) -> TokenScores:
        packed = pack(samples, plan, self.policy.family)
        more: dict[str, Any] = {}
        if taught is not None and taught.against is not None:
            more["against"] = replace(taught.against, tokens=packed.indices[packed.indices >= 0])
        packed = packed.to(self.policy.device)
        # Without any image on any rank, the vision tower stays out on all: zeros for a gradient would let Adam move it.
        blank_image = self._ranks.size > 1 and any(sample.media for sample in samples)
        batch = replace(packed.batch, blank_image=blank_image)
        if not self._replay_routing or policy is not self.policy:  # a reference uses its own routers
            batch = replace(batch, experts=None)
        return packed.by_sample(policy(batch, self._spec.temperature, **more))

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
