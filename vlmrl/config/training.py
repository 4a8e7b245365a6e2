"""Settings of the algorithm, the optimizer, the training loop, evaluation, checkpoints and trackers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from vlmrl.config.data import Conversations, EvalData
from vlmrl.config.fields import Code, Named, NamedOrNone, Options, Settings, positive, short_name
from vlmrl.utils.require import require


@dataclass(frozen=True)
class Algo(Settings):
    """The objective: advantages, loss, KL penalty, corrections and filters."""

    section = "algo"
    advantage: Named = "grpo"
    """Advantage estimator: `grpo`, `rloo`, `maxrl`, `reinforce_pp`, or `file.py:function`.
    `none`: rewards are only metrics, for a `teacher` alone."""
    credit: Named = "trajectory"
    """Credit assignment. `trajectory`: one advantage for all turns.
    `turn`: one per turn, from its return-to-go, against the same turn of the group's other members; for envs with rewards per turn.
    `gigpo`: the trajectory's advantage plus one per turn, against turns of the group that began in the same state; for long episodes.
    Or `file.py:function`."""
    loss: Named = "ppo"
    """Policy loss.
    Values: `ppo`, `dual_clip`, `gspo`, `cispo`, `sapo`, `dppo_tv`, `dppo_kl`, `reinforce`, `sft`, or `file.py:function`."""
    reduction: NamedOrNone = None
    """Loss aggregation over the tokens of a mini-batch.
    Unset: that of the loss's paper, `sequence_mean` for `gspo` and `sapo`, otherwise `token_mean`.
    Values: `token_mean`, `sequence_mean`, `seq_mean_token_sum_norm`, `prompt_mean`, or `file.py:function`."""
    old_policy: Literal["trainer", "rollout"] | None = None
    """Log-ratio baseline: `trainer` uses the trainer's own logprobs before the update, `rollout` the engine's logprobs from sampling.
    Unset: `rollout` with `train.max_staleness`, if the loss has a ratio and `corrections` is unset; otherwise `trainer`."""
    corrections: tuple[Named, ...] = ()
    """Off-policy corrections for the mismatch between rollout and trainer. The weights of several are multiplied.
    Values: `token_truncation`, `sequence_truncation`, `token_mask`, `geometric_mask`, `veto`, or `file.py:function`."""
    kl_coef: float = 0.0
    """Coefficient of the KL penalty against the initial policy; with LoRA, the base model without adapters.
    0 disables it, and no copy of the policy is kept. For another model, set `teacher.model`."""
    kl: Literal["k1", "k2", "k3", "abs"] = "k3"
    """KL estimator, from the logprobs of the sampled tokens.
    `k2`, `k3` and `abs` are added to the loss.
    `k1` is subtracted from the trajectory's reward: in the loss its gradient would not depend on the reference."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus. 0 disables it."""
    filters: tuple[Named, ...] = ()
    """Group filters. A group is trained on only if every filter returns True for its list of trajectories.
    Values: `zero_variance`, `reward_band`, or `file.py:function`."""
    dynamic_sampling: Literal["off", "filter", "replace"] = "off"
    """What to do when filters remove groups of a batch.
    `off`: train on the remaining groups.
    `filter`: sample more groups until the batch is full.
    `replace`: repeat groups that passed."""
    options: Options = field(default_factory=dict)
    """Keyword arguments of the functions that `algo` names, as pairs `FUNCTION.NAME VALUE`.
    For example `ppo.clip_low 0.2 token_truncation.cap 2.0`. Those of the recipe stay for other names."""
    mask_truncated: bool = False
    """Exclude truncated trajectories from the loss. They still count in the baseline of their group."""
    overlong_buffer: int = 0
    """Soft overlong penalty: the reward falls by up to 1 over this many tokens before `rollout.max_tokens`. 0 disables it.
    It must be at most `rollout.max_tokens`."""

    def __post_init__(self) -> None:
        require(self.kl_coef >= 0, "algo.kl_coef", "0 or more", self.kl_coef)
        require(self.overlong_buffer >= 0, "algo.overlong_buffer", "0 (off) or more", self.overlong_buffer)
        if self.advantage == "gae":
            raise ValueError(
                "algo.advantage must not be gae: it needs a critic, and vlmrl trains none. Use a group baseline, such as grpo, with "
                "algo.credit turn or gigpo for credit by turn (docs/algorithms.md#why-there-is-no-critic)."
            )
        self._check_options()
        if self.old_policy == "rollout":
            rule = "unset with algo.old_policy rollout, whose ratios correct for the rollout's policy already"
            require(not self.corrections, "algo.corrections", rule, self.corrections)
        if self.advantage == "maxrl":
            rule = "with algo.advantage maxrl, whose rewards must be 0 or more"
            require(not self.kl_in_reward, "algo.kl", f"k2, k3 or abs {rule}", self.kl)
            require(not self.overlong_buffer, "algo.overlong_buffer", f"0 {rule}", self.overlong_buffer)
        if self.dynamic_sampling != "off":
            require(bool(self.filters), "algo.filters", "set with dynamic_sampling", self.filters)
        if self.credit != "trajectory":
            rule = f"with credit {short_name(self.credit)}"
            require(self.advantage != "reinforce_pp", "algo.advantage", f"a group baseline {rule}", self.advantage)
            require(not self.kl_in_reward, "algo.kl", f"k2, k3 or abs {rule}", self.kl)
            require(not self.overlong_buffer, "algo.overlong_buffer", f"0 {rule}", self.overlong_buffer)

    def _check_options(self) -> None:
        """Each option belongs to one function that the settings name."""
        for setting in ("corrections", "filters"):
            names = [_name(code) for code in getattr(self, setting)]
            require(len(set(names)) == len(names), f"algo.{setting}", "functions of different names", names)
        named = [_name(code) for code in self.functions]
        for key in self.options:
            function = _function_of(key)
            require(function in named, "algo.options", f"FUNCTION.NAME of one of {named}", key)
            rule = f"of functions of different names, and two settings name {function!r}"
            require(named.count(function) == 1, "algo.options", rule, key)

    @property
    def kl_in_reward(self) -> bool:
        """Whether the KL penalty is subtracted from the reward; otherwise it is added to the loss."""
        return self.kl_coef > 0 and self.kl == "k1"

    @property
    def functions(self) -> list[str | Callable[..., Any]]:
        """All functions that the settings name. An unset reduction has no options."""
        credit = None if self.credit == "trajectory" else self.credit
        named = [self.advantage, credit, self.loss, self.reduction, *self.corrections, *self.filters]
        return [code for code in named if code is not None]

    def options_of(self, code: str | Callable[..., Any]) -> Options:
        """The keyword options of the function ``code``: ``{"clip_low": 0.2}`` of ``{"ppo.clip_low": 0.2}`` for ``"ppo"``."""
        name = _name(code)
        return {key.rpartition(".")[2]: value for key, value in self.options.items() if _function_of(key) == name}

    def with_options(self, given: Options) -> Algo:
        """With the options ``given`` of functions that the settings name, except those that are set already."""
        named = {_name(code) for code in self.functions}
        kept = {key: value for key, value in given.items() if _function_of(key) in named}
        return replace(self, options=kept | self.options)


def _name(code: object) -> str:
    """The name of a function in the keys of options: ``keep`` for ``/home/me/mine.py:keep`` and for a function ``keep``."""
    return short_name(code).rpartition("<locals>.")[2]


def _function_of(key: str) -> str:
    """``keep`` for ``mine.py:keep.most`` and for ``keep.most``."""
    return short_name(key.rpartition(".")[0])


OWN = ("self", "average")
"""Teachers that are made from the policy itself."""


@dataclass(frozen=True)
class Teacher(Settings):
    """A teacher whose distribution the policy learns to match on the tokens that the policy sampled."""

    section = "teacher"
    model: str | None = None
    """Who teaches. `self`: the policy with its current weights. `average`: an exponential average of the policy's weights.
    `sglang:URL` or `vllm:URL`: running servers, several separated by commas, of a model with the policy's tokenizer.
    Otherwise a frozen model of the policy's architecture and with its tokenizer: a name on the Hugging Face Hub or a folder.
    Unset: no teacher."""
    sees: Code = None
    """What the teacher sees: `function(task, trajectory, turn)` returns the messages before that turn's response, or None.
    None: the teacher says nothing about this turn. Unset: it sees what the policy saw; `self` would then agree with itself."""
    loss: Literal["reverse_kl", "forward_kl", "jensen_shannon", "sampled"] = "reverse_kl"
    """`reverse_kl`, `forward_kl` and `jensen_shannon` compare the distributions of each sampled token, over the whole vocabulary.
    `sampled` adds the teacher's logprob minus the policy's to the token's advantage, for `algo.loss`: cheaper, and noisier."""
    js_weight: float = 0.5
    """The teacher's weight in the mixture of `jensen_shannon`. Towards 1 it acts like `reverse_kl`, towards 0 like `forward_kl`."""
    top_k: int | None = None
    """Compare only this many of the teacher's most likely tokens, with all others as one class. Unset: the whole vocabulary.
    Set it with servers, which send no more than these, or to repeat a paper that does: in the trainer's process it costs the same."""
    coef: float = 1.0
    """Weight of the teacher beside the rewards. With `algo.advantage none` the teacher alone trains."""
    coef_end: float | None = None
    """Weight of the teacher at the end of the run: it changes linearly from `coef`. Set it to 0 to let rewards decide at the end.
    Unset: `coef` throughout."""
    image_share: float | None = None
    """Share of the teacher's loss for tokens whose logprobs its images raise more than the average. The other tokens have the rest.
    Set it, to 0.5, where few tokens of long responses depend on an image. It costs the teacher two more passes.
    Unset: all tokens count alike."""
    clip: float | None = None
    """Limit of a token's divergence, in nats, or of the absolute value that `sampled` adds. A token above it has no teacher gradient.
    Set it if few tokens, such as the first ones of a changed format, have most of the loss. Unset: no limit."""
    decay: float = 0.95
    """With `average`: the weight of the old average at each optimizer step. Raise it if teacher and policy drift together."""

    def __post_init__(self) -> None:
        positive("teacher", self, "coef", "top_k", "clip")
        require(0 < self.js_weight < 1, "teacher.js_weight", "between 0 and 1, both excluded", self.js_weight)
        require(0 <= self.decay < 1, "teacher.decay", "in [0, 1)", self.decay)
        require(0 <= (self.coef_end or 0) < math.inf, "teacher.coef_end", "0 or more", self.coef_end)
        if self.image_share is not None:
            rule = "between 0 and 1, both excluded"
            require(0 < self.image_share < 1, "teacher.image_share", rule, self.image_share)
        require(self.sees is None or self.model is not None, "teacher.sees", "unset without teacher.model", self.sees)
        if self.loss == "sampled":
            require(self.top_k is None, "teacher.top_k", "unset with teacher.loss sampled", self.top_k)
        program, urls = self.servers
        if urls:
            rule = "set with servers, which do not send whole distributions"
            require(self.loss == "sampled" or self.top_k is not None, "teacher.top_k", rule, self.top_k)
        rule = "self, average, a folder, a name on the Hub, or servers as PROGRAM:URL"
        require(bool(program) or "://" not in (self.model or ""), "teacher.model", rule, self.model)

    @property
    def servers(self) -> tuple[str, tuple[str, ...]]:
        """The program and the addresses of the servers that ``model`` names; empty where it names a model."""
        program, _, urls = (self.model or "").partition(":")
        return (program, tuple(urls.split(","))) if urls.startswith(("http://", "https://")) else ("", ())


@dataclass(frozen=True)
class Optim(Settings):
    """AdamW, its learning-rate schedule and gradient clipping."""

    section = "optim"
    lr: float = 1e-6
    """Peak learning rate of AdamW."""
    weight_decay: float = 0.0
    """Decoupled weight decay of AdamW."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Adam's betas (beta1, beta2)."""
    grad_clip: float = 1.0
    """Maximum norm of the gradient over all parameters."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning-rate schedule after warmup. `linear` and `cosine` decay to 0 at the end of the run, also if groups are filtered."""
    warmup_steps: int = 0
    """Optimizer steps of linear warmup from 0."""
    offload: bool = False
    """Keep the optimizer state (8 bytes per parameter) in host memory and load it onto the GPU only for the optimizer step."""

    def __post_init__(self) -> None:
        positive("optim", self, "lr", "grad_clip")
        require(self.weight_decay >= 0, "optim.weight_decay", "0 or more", self.weight_decay)
        require(all(0 <= beta < 1 for beta in self.betas), "optim.betas", "in [0, 1)", self.betas)
        require(self.warmup_steps >= 0, "optim.warmup_steps", "0 or more", self.warmup_steps)


@dataclass(frozen=True)
class Train(Settings):
    """The training loop: batch sizes, asynchronous rollouts, memory and checks."""

    section = "train"
    steps: int = 100
    """Training steps. Each one trains on one batch of groups."""
    groups_per_batch: int = 16
    """Groups per batch, the unit of one rollout phase."""
    groups_per_step: int | None = None
    """Groups per optimizer step (mini-batch). It must divide `groups_per_batch`. Unset: one optimizer step per batch.
    Groups that remain when filters make a batch smaller are spread over its other optimizer steps."""
    max_staleness: int = 0
    """Maximum number of weight updates between sampling and training.
    0: synchronous. Above 0: rollouts continue during training."""
    too_old: Literal["wait", "correct", "drop"] = "wait"
    """What to do about episodes that would exceed `max_staleness`.
    `wait`: the trainer waits for them.
    `correct`: train on them later, corrected by the loss's ratio or by `algo.corrections`.
    `drop`: discard them."""
    tokens_per_micro_batch: int = 16384
    """Maximum tokens per forward pass (a micro-batch). Smaller: less memory, the same gradient.
    Gradient accumulation: the number of micro-batches of an optimizer step follows from this and from its samples' lengths."""
    replay_routing: bool = True
    """For mixture-of-experts models: train each token with the experts that the engine used for it, if the engine reports them."""
    gradient_checkpointing: bool | None = None
    """Recompute activations in the backward pass instead of storing them: less memory, more time.
    Unset: True on a GPU, False on a CPU."""
    compile_layers: bool = False
    """Compile the decoder's layers by torch.compile in the trainer: fewer kernels, compiled in the first step.
    For long runs on GPUs: a step of a 2B on an H100 was a tenth faster. The embedded engine samples with the layers as they are."""
    image_check: bool = True
    """Before the first update, replace one image by noise and stop the run if logprobs do not change."""
    shuffle_rewards: bool = False
    """Control experiment: shuffle the rewards within each batch, so that nothing can be learned from them."""
    stop_after_idle: int = 0
    """Steps in a row without a gradient, or without a group whose rewards differ, after which the training ends. 0: never.
    Rewards count with an advantage that compares groups, and without a teacher.
    The run evaluates and saves as after its last step. Set it for unattended runs, for example to 20."""

    def __post_init__(self) -> None:
        require(self.stop_after_idle >= 0, "train.stop_after_idle", "0 (never) or more", self.stop_after_idle)
        positive("train", self, "groups_per_batch", "groups_per_step", "tokens_per_micro_batch")
        require(self.steps >= 0, "train.steps", "0 or more", self.steps)
        require(self.max_staleness >= 0, "train.max_staleness", "0 (synchronous) or more", self.max_staleness)
        per_step = self.groups_per_step or self.groups_per_batch
        rule = f"a divisor of train.groups_per_batch ({self.groups_per_batch})"
        require(self.groups_per_batch % per_step == 0, "train.groups_per_step", rule, per_step)

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps of a full batch."""
        return self.groups_per_batch // (self.groups_per_step or self.groups_per_batch)


@dataclass(frozen=True)
class Checkpoint(Settings):
    """When checkpoints are written and how many are kept."""

    section = "checkpoint"
    every: int = 0
    """Steps between checkpoints; a last one is written at the end. 0: one only if the run is stopped or fails.
    `--resume` continues from the newest."""
    keep: int = 2
    """Number of checkpoints to keep, the newest ones."""
    keep_best: bool = False
    """Also keep the model with the best held-out reward so far, in the run's folder `best`. Set `eval.every` with it."""

    def __post_init__(self) -> None:
        require(self.every >= 0, "checkpoint.every", "0 or more", self.every)
        require(self.keep >= 1, "checkpoint.keep", "1 or more", self.keep)


@dataclass(frozen=True)
class Eval(Settings):
    """Evaluation on held-out tasks, before, during and after training."""

    section = "eval"
    data: EvalData = field(default_factory=EvalData)
    """Held-out tasks. Unset: the rows that `data.held_out` selects. Without any, there is no evaluation."""
    every: int = 0
    """Steps between evaluations during training. 0: evaluate only before and after training.
    Without held-out tasks (`data.held_out 0` and no `eval.data`) nothing is evaluated."""
    temperature: float = 1.0
    """Sampling temperature in evaluations. 0 is greedy decoding."""
    samples_per_task: int = 1
    """Trajectories per held-out task. With n of them, pass@k is estimated for k = 1, 2, 4 and so on up to n."""
    solved: float = 1.0
    """Reward from which a trajectory counts as solved in pass@k."""
    blank_images: bool = False
    """After training, evaluate once more with blank images, to measure what the policy achieves without seeing."""
    chance: float | None = None
    """Expected reward of random guessing, shown in reports and plots. Unset: not shown."""

    def __post_init__(self) -> None:
        require(self.every >= 0, "eval.every", "0 or more", self.every)
        require(self.temperature >= 0, "eval.temperature", "0 (greedy) or more", self.temperature)
        positive("eval", self, "samples_per_task")


@dataclass(frozen=True)
class WarmStart(Settings):
    """Supervised fine-tuning on scripted episodes before reinforcement learning."""

    section = "warm_start"
    demonstrate: Code = None
    """Scripted policy: `function(task, turn)` returns the response to imitate at that turn, or to that request of an agent.
    Required if `steps` is above 0."""
    steps: int = 0
    """Optimizer steps. 0 disables the warm start."""
    trajectories_per_step: int = 64
    """Scripted trajectories per optimizer step."""
    lr: float = 1e-3
    """Learning rate of the warm start."""

    def __post_init__(self) -> None:
        require(self.steps >= 0, "warm_start.steps", "0 or more", self.steps)
        positive("warm_start", self, "trajectories_per_step", "lr")
        if self.steps:
            require(self.demonstrate is not None, "warm_start.demonstrate", "set when warm_start.steps is", None)


@dataclass(frozen=True)
class SFT(Settings):
    """Supervised fine-tuning on recorded conversations, before reinforcement learning or, by `vlmrl sft`, alone."""

    section = "sft"
    data: dict[str, Conversations] = field(default_factory=dict)
    """Conversations to imitate, by names of your own. Unset: no fine-tuning."""
    rows_per_step: int = 64
    """Maximum conversations per optimizer step; steps have about as many. Raise it if the loss is noisy, lower it for more steps."""
    lr: float = 1e-5
    """Peak learning rate of the fine-tuning, after a warmup over the first twentieth. Raise it for LoRA and for tiny models."""

    def __post_init__(self) -> None:
        positive("sft", self, "rows_per_step", "lr")
        for name in self.data:
            require(name.isidentifier(), "sft.data", "named by identifiers", name)


@dataclass(frozen=True)
class Report(Settings):
    """What a run reports besides the metrics in its folder."""

    section = "report"
    to: tuple[str, ...] = ()
    """Trackers that get the metrics, the config, the curve and some trajectories, besides the files in the run's folder:
    `tensorboard`, `wandb`, or `file.py:Class` (see docs/metrics.md)."""
