"""The settings of a run: frozen dataclasses, checked when they are made.

A recipe returns one :class:`Config`; the command line overrides any field of it (``--optim.lr 1e-6``). The docstring of
a field is its help text. Every complaint names the field, the rule and the value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.constructors import PrimitiveConstructorSpec

Options = dict[str, int | float | bool | None | str]  # noqa: RUF036  words are tried from left to right: str takes any


def name_of(code: object) -> str:
    """How a function, a class or a string that names one is shown."""
    return code if isinstance(code, str) else getattr(code, "__qualname__", str(code))


Code = Annotated[
    str | Callable[..., Any] | None,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="FILE.py:NAME",
        instance_from_str=lambda words: words[0],
        is_instance=lambda value: value is None or isinstance(value, str) or callable(value),
        str_from_instance=lambda value: [name_of(value)],
    ),
]
"""A function or class, or the string that names it: ``module:name`` or ``file.py:name``."""


def _require(ok: bool, name: str, rule: str, value: object) -> None:
    if not ok:
        raise ValueError(f"{name} must be {rule}, but it is {value!r}.")


def _positive(prefix: str, config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _require(value is None or (math.isfinite(value) and value > 0), f"{prefix}.{name}", "greater than 0", value)


@dataclass(frozen=True)
class Lora:
    rank: int = 0
    """Of the low-rank adapters that are trained in place of the weights; 0: no adapters. Needs `pip install 'vlmrl[lora]'`."""
    alpha: int = 32
    """What the adapters add is scaled by `alpha / rank`."""
    dropout: float = 0.0
    """Of what goes into the adapters, while they are trained."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """The linear layers that get adapters, by the last part of their names."""
    vision: bool = False
    """Adapt the vision tower's layers of these names, too."""

    def __post_init__(self) -> None:
        _require(self.rank >= 0, "model.lora.rank", "0 (off) or more", self.rank)
        _require(0 <= self.dropout < 1, "model.lora.dropout", "at least 0 and less than 1", self.dropout)
        _require(bool(self.targets), "model.lora.targets", "names of linear layers", self.targets)
        _positive("model.lora", self, "alpha")


@dataclass(frozen=True)
class Model:
    path: str = "tiny:qwen3_vl"
    """A hub name, a folder in Hugging Face form, or `tiny:FAMILY`, such as `tiny:qwen3_vl`, which is built on the spot."""
    device: str = "auto"
    """`auto` (the first CUDA GPU, otherwise the CPU), or a torch device such as `cuda:1`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto`: bfloat16 on a GPU, float32 on a CPU. The optimizer's own copy is float32 either way."""
    chat_template: str | None = None
    """A Jinja file, or the name of one in `vlmrl/templates`; unset: the model's own."""
    random_weights: bool = False
    """Take only the configuration, the tokenizer and the processor from `path`, and draw the weights."""
    max_image_pixels: int | None = None
    """Shrink pictures to at most this many pixels; unset: the processor's own limit."""
    freeze: tuple[str, ...] = ()
    """What is not trained: `vision_tower`, `projector`, `language_model`, or patterns of parameter names."""
    lora: Lora = field(default_factory=Lora)

    def __post_init__(self) -> None:
        _require(bool(self.path), "model.path", "a hub name, a folder or tiny:FAMILY", self.path)
        _positive("model", self, "max_image_pixels")


@dataclass(frozen=True)
class Data:
    path: str | None = None
    """A hub name, a parquet, json or jsonl file, or a folder of them."""
    split: str = "train"
    """Which split; it may be a slice such as `train[:100]`."""
    columns: dict[str, str] = field(default_factory=dict)
    """Where prompt, images and answer are found, if not under these names: `prompt problem`. `source` and `id` can be named, too."""
    generator: Code = None
    """`file.py:function` or `module:function`, called as `function(index, seed, **options)` to make each task."""
    size: int | None = None
    """How many tasks the generator makes."""
    limit: int | None = None
    """Take only the first so many rows."""
    held_out: int | float = 0
    """Rows kept for the evaluation: a number of them, or below 1 a share. Chosen by id alone, or by place where rows have none."""
    max_prompt_tokens: int | None = None
    """Pass over rows whose prompt is longer, its pictures and the env's tools included."""
    shuffle: bool = True
    """Play each epoch in an order of its own; otherwise as the rows stand."""
    system_prompt: str | None = None
    """Put before every prompt that has no system message of its own."""
    seed: int = 0
    """Of the order, and of the tasks: a generator's pictures, an env's chances."""
    options: Options = field(default_factory=dict)
    """Keyword options of the generator."""

    def __post_init__(self) -> None:
        if self.path is not None and self.generator is not None:
            raise ValueError(
                f"data.path and data.generator exclude each other, but are {self.path!r} and {self.generator!r}."
            )
        if self.generator is not None:
            _require(self.size is not None, "data.size", "set when data.generator is", self.size)
        _positive("data", self, "size", "limit", "max_prompt_tokens")
        whole = self.held_out < 1 or self.held_out == int(self.held_out)
        _require(self.held_out >= 0 and whole, "data.held_out", "a share or a count of rows", self.held_out)
        known = {"prompt", "images", "answer", "id", "source"}
        _require(set(self.columns) <= known, "data.columns", f"a mapping from {sorted(known)}", self.columns)

    @property
    def is_set(self) -> bool:
        return self.path is not None or self.generator is not None


@dataclass(frozen=True)
class Part:
    """One of the datasets that a run mixes, and who plays it."""

    data: Data = field(default_factory=Data)
    eval_data: Data = field(default_factory=Data)
    """Its held-out tasks; unset: those that `data.held_out` keeps back, if any."""
    env: Code = None
    """Its env; with neither env nor reward the run's own plays it."""
    env_options: Options = field(default_factory=dict)
    """Keyword options of its env."""
    reward: Code = None
    """For a single turn, instead of an env: `function(text, task) -> float`."""
    weight: float = 1.0
    """Its share of the draws, beside the other parts' weights."""

    def __post_init__(self) -> None:
        _require(self.data.is_set, "mixture.NAME.data", "given a path or a generator", self.data)
        _positive("mixture.NAME", self, "weight")
        _check_player("mixture.NAME.", self)
        _check_held_out("mixture.NAME.data", self.data, "mixture.NAME.eval_data", self.eval_data)


def _check_player(prefix: str, config: Part | Config) -> None:
    if config.env is not None and config.reward is not None:
        raise ValueError(
            f"{prefix}env and {prefix}reward cannot both be set: a reward function stands for a whole single-turn env."
        )


def _check_held_out(name: str, data: Data, other: str, eval_data: Data) -> None:
    if data.held_out and eval_data.is_set:
        raise ValueError(f"{name}.held_out and {other} exclude each other: both say what the run is evaluated on.")


@dataclass(frozen=True)
class Rollout:
    group_size: int = 8
    """Trajectories per task: the group of a GRPO baseline."""
    max_turns: int = 1
    """Replies in one episode; an env may end it sooner."""
    max_tokens: int = 4096
    """The budget of a whole trajectory: prompt, pictures, replies and observations."""
    max_reply_tokens: int = 1024
    """The most tokens one reply may take."""
    temperature: float = 1.0
    """Of sampling; 0: always the likeliest token."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that make up this share; 1: from all."""
    top_k: int = 0
    """0: off."""
    stop: tuple[str, ...] = ()
    """Stop strings; the matched one stays in the reply."""
    max_concurrent: int = 256
    """Trajectories in play at once."""
    over_sampling: float = 1.0
    """Start so many times the groups a batch needs, keep the first that finish, and stop the stragglers."""
    max_env_retries_per_turn: int = 1
    """Fresh envs tried after an env error, each replaying the turns so far."""
    env_timeout: float = 60.0
    """Seconds that one call of an env may take."""
    engine_timeout: float = 600.0
    """Seconds that one reply may take."""
    max_refills: int = 2
    """Failed members of a group are played anew, so many times; then the group is dropped and counted."""
    max_failed_fraction: float = 0.25
    """The run stops when more of a step's trajectories fail."""
    generate: Code = None
    """An async function of client, renderer and task that plays an episode in place of the turn loop; env is then unset."""
    history: Literal["append", "inline", "rerender"] = "append"
    """`append`: replies stay as sampled and observations follow, as the template writes them. `inline`: the episode is one
    assistant message, observations are bare text inside it. `rerender`: the messages are templated anew before each reply."""
    history_policy: Code = None
    """For `rerender`: `keep_last_images`, `drop_thinking`, `last_turns`, or a function from messages to messages."""
    history_options: Options = field(default_factory=dict)
    """Keyword options of the policy, such as `k 2`."""
    samples: Literal["concat", "step_wise", "merged"] = "concat"
    """What is trained: `concat`: one row per trajectory. `step_wise`: one row per turn, with exactly the prompt it had. `merged`:
    step-wise rows joined wherever one's prompt goes on from the one before."""
    truncated_reward: float | None = None
    """What a truncated trajectory counts that got no reward from its env; unset: that is an error."""

    def __post_init__(self) -> None:
        positive = ("group_size", "max_turns", "max_tokens", "max_reply_tokens", "max_concurrent", "env_timeout")
        _positive("rollout", self, *positive, "engine_timeout")
        _require(self.temperature >= 0, "rollout.temperature", "0 (greedy) or more", self.temperature)
        _require(self.over_sampling >= 1, "rollout.over_sampling", "1 (off) or more", self.over_sampling)
        _require(0 < self.top_p <= 1, "rollout.top_p", "in (0, 1]", self.top_p)
        _require(self.top_k >= 0, "rollout.top_k", "0 (off) or more", self.top_k)
        _require(
            0 <= self.max_failed_fraction <= 1, "rollout.max_failed_fraction", "in [0, 1]", self.max_failed_fraction
        )
        if self.history_policy is not None:
            _require(self.history == "rerender", "rollout.history", "rerender with a history_policy", self.history)
        if self.history_options:
            _require(self.history_policy is not None, "rollout.history_policy", "set when history_options are", None)
        for name in ("max_env_retries_per_turn", "max_refills"):
            _require(getattr(self, name) >= 0, f"rollout.{name}", "0 or more", getattr(self, name))

    @property
    def needs_rendered_rows(self) -> bool:
        """One row of a history that is rendered anew: its tokens are encoded again, so it has no rollout logprobs."""
        return self.history == "rerender" and self.samples == "concat"


@dataclass(frozen=True)
class SGLang:
    urls: tuple[str, ...] = ()
    """Servers that run already, such as `http://node7:30000`; unset: servers are started here."""
    servers: int = 1
    """How many to start."""
    tp: int = 1
    """GPUs of each server, tensor parallel."""
    first_gpu: int = 0
    """The servers take their GPUs from this one on."""
    args: Options = field(default_factory=dict)
    """Arguments of the servers we start, any that SGLang knows: `mem-fraction-static 0.6 quantization fp8 log-requests True`."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of theirs."""
    python: str | None = None
    """The interpreter that runs them; unset: this one."""
    port: int = 0
    """Of the first server, the others follow; 0: any that are free."""
    sync: Literal["auto", "tensor", "group", "disk"] = "auto"
    """How weights get there: `tensor`: as handles of GPU memory that both see (CUDA IPC), or by value from a CPU. `group`: by a
    process group (NCCL or gloo). `disk`: by a folder both see. `auto`: tensor to servers started here, group to others."""
    bucket_mb: int = 512
    """Weights that are on their way at once."""
    sync_timeout: float = 300.0
    """Seconds that a server may take for one bucket, or for all of a folder."""
    pictures: Literal["auto", "inline", "file"] = "auto"
    """`inline`: every request holds its pictures. `file`: each is written once and named by its path. `auto`: file for servers
    started here."""
    check: bool = True
    """At the start, compare checksums and logprobs with the trainer's, and refuse a server that disagrees."""
    retries: int = 8
    """A request that no server answered is sent again so often, with growing pauses, to another server where there is one."""
    start_timeout: float = 600.0
    """Seconds that a server may take to start, or that none may serve."""
    health_every: float = 10.0
    """Seconds between two looks at a server's health."""
    health_timeout: float = 120.0
    """Seconds without a sign of life after which a server is taken for dead: one that we started is then restarted."""

    def __post_init__(self) -> None:
        _positive("sglang", self, "servers", "tp", "bucket_mb", "start_timeout", "health_every", "health_timeout")
        _positive("sglang", self, "sync_timeout")
        _require(self.retries >= 0, "sglang.retries", "0 or more", self.retries)
        for url in self.urls:
            _require(url.startswith(("http://", "https://")), "sglang.urls", "addresses with http:// or https://", url)


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
        _require(self.kl_coef >= 0, "algo.kl_coef", "0 or more", self.kl_coef)
        _require(self.overlong_buffer >= 0, "algo.overlong_buffer", "0 (off) or more", self.overlong_buffer)
        if "gae" in (self.advantage, self.loss):
            raise ValueError(
                "gae is not offered: it needs a critic, and vlmrl trains none. Take a group baseline, such as grpo."
            )
        if self.kl_in_reward:
            _require(self.kl_coef > 0, "algo.kl_coef", "greater than 0 with kl_in_reward", self.kl_coef)
        if self.dynamic_sampling != "off":
            _require(bool(self.filters), "algo.filters", "set with dynamic_sampling", self.filters)
        for options, names in (("correction_options", self.corrections), ("filter_options", self.filters)):
            for key in getattr(self, options):
                _require(
                    key.rpartition(".")[0] in names, f"algo.{options}", f"NAME.OPTION of one of {list(names)}", key
                )
        if self.credit == "turn":
            _require(
                self.advantage != "reinforce_pp", "algo.advantage", "a group baseline with credit turn", self.advantage
            )
            _require(not self.kl_in_reward, "algo.kl_in_reward", "False with credit turn", self.kl_in_reward)
            _require(not self.overlong_buffer, "algo.overlong_buffer", "0 with credit turn", self.overlong_buffer)

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
        _positive("optim", self, "lr", "grad_clip")
        _require(self.warmup_steps >= 0, "optim.warmup_steps", "0 or more", self.warmup_steps)


@dataclass(frozen=True)
class Train:
    steps: int = 100
    """Batches to train on."""
    groups_per_batch: int = 16
    """Groups rolled out before each update."""
    groups_per_step: int | None = None
    """Groups per optimizer step; it divides `groups_per_batch`. Unset: one step a batch."""
    max_staleness: int = 0
    """0: synchronous. Above: rollouts go on while the trainer trains, so many weight updates ahead of it."""
    too_old: Literal["wait", "correct", "drop"] = "wait"
    """What becomes of groups that take so long that they would be older than `max_staleness`. `wait`: the trainer waits for them.
    `correct`: it goes on with what is ready, and trains them when they come, corrected by `algo.corrections`. `drop`: it goes on,
    and they are lost."""
    tokens_per_micro_batch: int = 16384
    """Tokens computed in one forward; gradients accumulate over as many as the batch needs."""
    share_prefixes: bool = True
    """Compute what the rows of a group begin with in common once: its prompt, and with step-wise rows all earlier turns."""
    replay_routing: bool = True
    """Mixtures of experts: compute each token with the experts it had when it was sampled, where the engine told them."""
    gradient_checkpointing: bool = False
    """Recompute activations for the gradient instead of keeping them: less memory, more time."""
    canary: bool = True
    """Before the first update, swap one picture and demand that logprobs move."""
    shuffle_rewards: bool = False
    """A control: permute the rewards over each batch. Whatever is still learnt was not learnt from reward."""

    def __post_init__(self) -> None:
        _positive("train", self, "groups_per_batch", "groups_per_step", "tokens_per_micro_batch")
        _require(self.steps >= 0, "train.steps", "0 or more", self.steps)
        _require(self.max_staleness >= 0, "train.max_staleness", "0 (synchronous) or more", self.max_staleness)
        per_step = self.groups_per_step or self.groups_per_batch
        rule = f"a divisor of train.groups_per_batch ({self.groups_per_batch})"
        _require(self.groups_per_batch % per_step == 0, "train.groups_per_step", rule, per_step)


@dataclass(frozen=True)
class Checkpoint:
    every: int = 0
    """Write a checkpoint after each so many batches, and after the last one; 0: none. `--resume` goes on from the newest."""
    keep: int = 2
    """Of the newest, so many stay."""

    def __post_init__(self) -> None:
        _require(self.every >= 0, "checkpoint.every", "0 (off) or more", self.every)
        _require(self.keep >= 1, "checkpoint.keep", "1 or more", self.keep)


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
    """At the end, evaluate once more with every picture blanked: what is left was not learnt by seeing."""
    chance: float | None = None
    """The reward of guessing, if known: shown beside the others."""

    def __post_init__(self) -> None:
        _require(self.every >= 0, "eval.every", "0 or more", self.every)
        _require(self.temperature >= 0, "eval.temperature", "0 (greedy) or more", self.temperature)
        _positive("eval", self, "samples_per_task")


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
        _require(self.steps >= 0, "warm_start.steps", "0 or more", self.steps)
        _positive("warm_start", self, "trajectories_per_step", "lr")
        if self.steps:
            _require(self.demonstrate is not None, "warm_start.demonstrate", "set when warm_start.steps is", None)


def _check_samples(algo: Algo, rollout: Rollout) -> None:
    """Algorithms that the form of the samples makes wrong or impossible."""
    if rollout.samples == "step_wise" and algo.advantage == "reinforce_pp":
        raise ValueError(
            "algo.advantage reinforce_pp is defined over batches of one row per episode, and step-wise rows count an episode once "
            "per turn: set rollout.samples to concat or merged, or take grpo or rloo."
        )
    if rollout.needs_rendered_rows and algo.corrections:
        raise ValueError(
            f"algo.corrections {list(algo.corrections)} need the rollout's logprobs, and rows rendered anew (rollout.history rerender "
            "with samples concat) have none: set rollout.samples to step_wise."
        )
    if rollout.needs_rendered_rows and algo.credit == "turn":
        raise ValueError(
            "algo.credit turn needs to know each turn's tokens: set rollout.samples to step_wise with rerender."
        )


def _check_asynchronous(config: Config) -> None:
    """What makes no sense, or is wrong, while rollouts and training go on at once."""
    if config.deterministic:
        raise ValueError("train.max_staleness must be 0 with deterministic: what is ready first, no run repeats.")
    if config.rollout.over_sampling > 1:
        raise ValueError(
            "rollout.over_sampling must be 1 with train.max_staleness above 0: nobody waits for stragglers, so none are stopped."
        )
    if config.train.too_old == "correct":
        rule = "set with train.too_old correct, such as token_truncation"
        _require(bool(config.algo.corrections), "algo.corrections", rule, config.algo.corrections)
    if config.cluster.gpus and config.cluster.colocate:
        raise ValueError(
            "cluster.colocate must be False with train.max_staleness above 0: engines sample while the trainer trains, so they "
            "cannot take turns on one GPU."
        )


@dataclass(frozen=True)
class Cluster:
    """Trainer ranks and engines in processes that Ray places; by default there is one process and no Ray."""

    gpus: int = 0
    """GPUs in all that Ray spreads the run over; 0: none, and no Ray unless `ranks` is set. Needs `pip install 'vlmrl[ray]'`."""
    ranks: int | None = None
    """Trainer processes (FSDP2). Unset: one a GPU, or one for every second GPU without `colocate`. With 0 GPUs: a trial on CPUs."""
    engines: int | None = None
    """Unset: one for each rank's GPU, or for each GPU that is no rank's; without GPUs one."""
    colocate: bool = True
    """Ranks and engines take turns on the same GPUs, their memory released in between; otherwise each has a GPU of its own."""
    nodes: int = 1
    """Machines that ranks and engines are spread over evenly."""
    address: str | None = None
    """Of a Ray cluster that runs already, such as `auto`; unset: Ray is started on this machine, and ends with the run."""

    @property
    def on(self) -> bool:
        return self.gpus > 0 or self.ranks is not None

    @property
    def num_ranks(self) -> int:
        if self.ranks is not None:
            return self.ranks
        return self.gpus if self.colocate else self.gpus // 2

    @property
    def num_engines(self) -> int:
        if self.engines is not None:
            return self.engines
        if not self.gpus:
            return 1
        return self.num_ranks if self.colocate else self.gpus - self.num_ranks

    def __post_init__(self) -> None:
        _require(self.gpus >= 0, "cluster.gpus", "0 (off) or more", self.gpus)
        _positive("cluster", self, "ranks", "engines", "nodes")
        if not self.on:
            given = [name for name in ("engines", "address") if getattr(self, name) is not None]
            _require(not given and self.nodes == 1, "cluster.gpus", f"set with cluster.{(given or ['nodes'])[0]}", 0)
            return
        for name, value in (("gpus", self.gpus), ("ranks", self.num_ranks)):
            _require(value % self.nodes == 0, f"cluster.{name}", f"a multiple of cluster.nodes ({self.nodes})", value)
        if self.gpus and self.colocate:
            _require(
                self.num_ranks <= self.gpus, "cluster.ranks", f"at most cluster.gpus ({self.gpus})", self.num_ranks
            )
            rule = f"a divisor of cluster.ranks ({self.num_ranks}), whose GPUs they share"
            _require(self.num_ranks % self.num_engines == 0, "cluster.engines", rule, self.num_engines)
        elif self.gpus:
            _require(
                self.num_ranks > 0 and self.num_ranks + self.num_engines <= self.gpus,
                "cluster.ranks and cluster.engines",
                f"together at most cluster.gpus ({self.gpus}) without cluster.colocate",
                (self.num_ranks, self.num_engines),
            )


@dataclass(frozen=True)
class Config:
    """Everything a run needs. A recipe fills it in; the command line overrides it."""

    name: str = "run"
    """The run's folder is `output_dir/name`."""
    output_dir: str = "runs"
    """Where runs leave their folders."""
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    env: Code = None
    """`module:Name` or `file.py:Name` of an env class or of a factory `build(task, **options)`."""
    env_options: Options = field(default_factory=dict)
    """Keyword options of the env."""
    reward: Code = None
    """For a single turn, instead of an env: `function(text, task) -> float`."""
    group_reward: Code = None
    """`function(trajectories) -> numbers`, asked once for each whole group: what is added to each member's reward in training."""
    mixture: dict[str, Part] = field(default_factory=dict)
    """Several datasets in one run, by name, instead of `data`: each with its weight and, if it has one, an env of its own."""
    rollout: Rollout = field(default_factory=Rollout)
    algo: Algo = field(default_factory=Algo)
    optim: Optim = field(default_factory=Optim)
    train: Train = field(default_factory=Train)
    eval: Eval = field(default_factory=Eval)
    warm_start: WarmStart = field(default_factory=WarmStart)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    cluster: Cluster = field(default_factory=Cluster)
    seed: int = 0
    """Of random weights, of sampling, and of whatever else is drawn."""
    deterministic: bool = False
    """Rollouts in waves in task order: the same run twice gives the same numbers, at some cost in speed."""
    save_model: bool = True
    """Write the trained weights to the run's folder, in Hugging Face form."""

    @property
    def models_dir(self) -> Path:
        """Where models that are built on the spot are kept."""
        return Path(self.output_dir) / ".models"

    def __post_init__(self) -> None:
        _require(self.name not in ("", ".", "..") and "/" not in self.name, "name", "a plain folder name", self.name)
        _check_player("", self)
        _check_held_out("data", self.data, "eval.data", self.eval.data)
        self._check_mixture()
        _check_samples(self.algo, self.rollout)
        if self.train.max_staleness:
            _check_asynchronous(self)
        parts: list[Config | Part] = [self, *self.mixture.values()]
        plays = any(part.env is not None or part.reward is not None for part in parts)
        if self.rollout.generate is not None and plays:
            raise ValueError("rollout.generate plays whole episodes by itself, so env and reward must be unset.")
        if self.reward is not None:
            _require(
                self.rollout.max_turns == 1, "rollout.max_turns", "1 with a reward function", self.rollout.max_turns
            )
        if self.train.shuffle_rewards and self.algo.credit == "turn":
            raise ValueError(
                "train.shuffle_rewards permutes whole episodes' rewards: set algo.credit to trajectory for that control."
            )
        if self.deterministic and self.rollout.over_sampling > 1:
            raise ValueError(
                "rollout.over_sampling keeps what finishes first, which no run repeats: set deterministic to False."
            )
        budget = f"less than rollout.max_tokens ({self.rollout.max_tokens})"
        _require(
            self.rollout.max_reply_tokens < self.rollout.max_tokens,
            "rollout.max_reply_tokens",
            budget,
            self.rollout.max_reply_tokens,
        )

    def _check_mixture(self) -> None:
        if self.mixture and self.data.is_set:
            raise ValueError(
                "data and mixture exclude each other: make data a part of the mixture, or leave one unset."
            )
        if self.mixture and self.eval.data.is_set:
            raise ValueError(
                "eval.data and mixture exclude each other: set mixture.NAME.eval_data, which has NAME's env."
            )
        for name in self.mixture:
            _require(name.isidentifier(), "mixture", "named by plain words", name)
