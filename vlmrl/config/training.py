"""What is learnt from the episodes, with which steps, and how it is evaluated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from vlmrl.config.data import Data
from vlmrl.config.fields import Code, Options, positive, require


@dataclass(frozen=True)
class Algo:
    advantage: str = "grpo"
    """A name in `vlmrl.algos.ADVANTAGES`."""
    advantage_options: Options = field(default_factory=dict)
    """Keyword options of the advantage."""
    credit: Literal["trajectory", "turn"] = "trajectory"
    """`turn`: each turn has its own advantage, from what is paid from it on; for envs that pay turn by turn."""
    loss: str = "ppo"
    """A name in `vlmrl.algos.LOSSES`."""
    loss_options: Options = field(default_factory=dict)
    """Such as `clip_low 0.2 clip_high 0.28`."""
    reduction: str = "token_mean"
    """A name in `vlmrl.algos.REDUCTIONS`."""
    reduction_options: Options = field(default_factory=dict)
    """Keyword options of the reduction."""
    old_policy: Literal["trainer", "rollout"] | None = None
    """Log-ratio baseline of the loss: the trainer's own logprobs before the batch, with the mismatch to the rollout policy left to
    `corrections`, or the rollout's. Unset: `rollout` if `train.max_staleness` is above 0, the loss has a ratio, rows have rollout
    logprobs and `corrections` is empty; else `trainer`."""
    corrections: tuple[str, ...] = ()
    """Names in `vlmrl.algos.CORRECTIONS`, for a rollout policy that is not the trainer's; their factors are multiplied."""
    correction_options: Options = field(default_factory=dict)
    """Such as `token_truncation.cap 2.0`."""
    kl_coef: float = 0.0
    """Weight of the KL penalty towards the reference; 0: no reference model is kept."""
    kl: Literal["k1", "k2", "k3", "abs"] = "k3"
    """How the KL is estimated from the logprobs of the sampled tokens."""
    kl_in_reward: bool = False
    """Take the KL off the trajectory's reward instead of adding it to the loss."""
    reference: str | None = None
    """The reference model's hub name or folder; unset: the weights training starts from, with `model.lora` without the adapters."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus."""
    filters: tuple[str, ...] = ()
    """Which groups are trained: names in `vlmrl.algos.FILTERS`, or `file.py:function` of a group's trajectories."""
    filter_options: Options = field(default_factory=dict)
    """Such as `reward_band.high 0.9`."""
    dynamic_sampling: Literal["off", "filter", "replace"] = "off"
    """What becomes of a batch that the filters left short: `filter`: sample on until it is full, `replace`: repeat kept groups."""
    mask_truncated: bool = False
    """Leave trajectories that a length limit cut off out of the loss; they still count in their group's baseline."""
    overlong_buffer: int = 0
    """Tokens before `rollout.max_tokens` over which the reward falls by up to 1; 0: off."""

    def __post_init__(self) -> None:
        require(self.kl_coef >= 0, "algo.kl_coef", "0 or more", self.kl_coef)
        require(self.overlong_buffer >= 0, "algo.overlong_buffer", "0 (off) or more", self.overlong_buffer)
        if self.old_policy == "rollout":
            rule = "unset with algo.old_policy rollout, whose ratios correct for the rollout's policy already"
            require(not self.corrections, "algo.corrections", rule, self.corrections)
        if "gae" in (self.advantage, self.loss):
            raise ValueError(
                "gae is not offered: it needs a critic, and vlmrl trains none. Take a group baseline, such as grpo."
            )
        if self.kl_in_reward:
            require(self.kl_coef > 0, "algo.kl_coef", "greater than 0 with kl_in_reward", self.kl_coef)
        if self.dynamic_sampling != "off":
            require(bool(self.filters), "algo.filters", "set with dynamic_sampling", self.filters)
        for options, names in (("correction_options", self.corrections), ("filter_options", self.filters)):
            for key in getattr(self, options):
                require(key.rpartition(".")[0] in names, f"algo.{options}", f"NAME.OPTION of one of {list(names)}", key)
        if self.credit == "turn":
            require(
                self.advantage != "reinforce_pp", "algo.advantage", "a group baseline with credit turn", self.advantage
            )
            require(not self.kl_in_reward, "algo.kl_in_reward", "False with credit turn", self.kl_in_reward)
            require(not self.overlong_buffer, "algo.overlong_buffer", "0 with credit turn", self.overlong_buffer)

    def options_of(self, name: str) -> Options:
        """The options of one correction or filter: those whose key is ``name.option``."""
        given = {**self.correction_options, **self.filter_options}
        return {key.rpartition(".")[2]: value for key, value in given.items() if key.rpartition(".")[0] == name}


@dataclass(frozen=True)
class Optim:
    lr: float = 1e-6
    """The learning rate of AdamW."""
    weight_decay: float = 0.0
    """How much of each weight a step takes away, times the learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """How slowly the averages of the gradient and of its square forget."""
    grad_clip: float = 1.0
    """The largest norm of the whole gradient."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls to 0 over the run, after the warm-up."""
    warmup_steps: int = 0
    """Optimizer steps over which the learning rate rises from 0."""
    offload: bool = False
    """Keep the optimizer's averages (8 bytes a parameter) in host memory except while it steps."""

    def __post_init__(self) -> None:
        positive("optim", self, "lr", "grad_clip")
        require(self.warmup_steps >= 0, "optim.warmup_steps", "0 or more", self.warmup_steps)


@dataclass(frozen=True)
class Train:
    steps: int = 100
    """RolloutBuffer to train on."""
    groups_per_batch: int = 16
    """Groups rolled out before each update."""
    groups_per_step: int | None = None
    """Groups per optimizer step; it divides `groups_per_batch`. Unset: one step a batch."""
    max_staleness: int = 0
    """0: synchronous. Above: rollouts go on while the trainer trains, so many weight updates ahead of it."""
    too_old: Literal["wait", "correct", "drop"] = "wait"
    """What becomes of groups that take so long that they would be older than `max_staleness`. `wait`: the trainer waits for them.
    `correct`: it goes on with what is ready, and trains them when they come, corrected by the loss's ratio or `algo.corrections`.
    `drop`: it goes on, and they are lost."""
    tokens_per_micro_batch: int = 16384
    """Tokens computed in one forward; gradients accumulate over as many as the batch needs."""
    share_prefixes: bool = True
    """Compute what the rows of a group begin with in common once: its prompt, and with step-wise rows all earlier turns."""
    replay_routing: bool = True
    """Mixtures of experts: compute each token with the experts it had when it was sampled, where the engine told them."""
    gradient_checkpointing: bool = False
    """Recompute activations for the gradient instead of keeping them: less memory, more time."""
    canary: bool = True
    """Before the first update, swap one image and demand that logprobs move."""
    shuffle_rewards: bool = False
    """A control: permute the rewards over each batch. Whatever is still learnt was not learnt from reward."""

    def __post_init__(self) -> None:
        positive("train", self, "groups_per_batch", "groups_per_step", "tokens_per_micro_batch")
        require(self.steps >= 0, "train.steps", "0 or more", self.steps)
        require(self.max_staleness >= 0, "train.max_staleness", "0 (synchronous) or more", self.max_staleness)
        per_step = self.groups_per_step or self.groups_per_batch
        rule = f"a divisor of train.groups_per_batch ({self.groups_per_batch})"
        require(self.groups_per_batch % per_step == 0, "train.groups_per_step", rule, per_step)


@dataclass(frozen=True)
class Checkpoint:
    every: int = 0
    """Write a checkpoint after each so many batches, and after the last one; 0: none. `--resume` goes on from the newest."""
    keep: int = 2
    """Of the newest, so many stay."""

    def __post_init__(self) -> None:
        require(self.every >= 0, "checkpoint.every", "0 (off) or more", self.every)
        require(self.keep >= 1, "checkpoint.keep", "1 or more", self.keep)


@dataclass(frozen=True)
class Eval:
    data: Data = field(default_factory=Data)
    """Held-out tasks; unset: those that `data.held_out` keeps back. Where there are none, there is no evaluation."""
    every: int = 0
    """Evaluate after each so many batches as well as before and after the run; 0: only then."""
    temperature: float = 1.0
    """Of sampling in evaluations; 0: always the likeliest token."""
    samples_per_task: int = 1
    """Episodes of each held-out task; their mean is one number."""
    blank_images: bool = False
    """At the end, evaluate once more with every image blanked: what is left was not learnt by seeing."""
    chance: float | None = None
    """The reward of guessing, if known: shown beside the others."""

    def __post_init__(self) -> None:
        require(self.every >= 0, "eval.every", "0 or more", self.every)
        require(self.temperature >= 0, "eval.temperature", "0 (greedy) or more", self.temperature)
        positive("eval", self, "samples_per_task")


@dataclass(frozen=True)
class WarmStart:
    """Supervised steps before reinforcement learning, on episodes played by a script."""

    demonstrate: Code = None
    """`file.py:function`, called as `function(task, turn)`: the reply to imitate at that turn. Unset: no warm start."""
    steps: int = 0
    """Optimizer steps."""
    trajectories_per_step: int = 64
    """Scripted episodes imitated in one step."""
    lr: float = 1e-3
    """The learning rate of these steps."""

    def __post_init__(self) -> None:
        require(self.steps >= 0, "warm_start.steps", "0 or more", self.steps)
        positive("warm_start", self, "trajectories_per_step", "lr")
        if self.steps:
            require(self.demonstrate is not None, "warm_start.demonstrate", "set when warm_start.steps is", None)
