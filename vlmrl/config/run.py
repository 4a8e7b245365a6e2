"""The settings of a whole run, and what must not be set together."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from vlmrl.config.data import Data, Part, check_held_out, check_player
from vlmrl.config.fields import Code, Options, positive, require
from vlmrl.config.model import Model
from vlmrl.config.rollout import Rollout
from vlmrl.config.servers import ServerSettings
from vlmrl.config.sglang import SGLang
from vlmrl.config.training import Algo, Checkpoint, Eval, Optim, Train, WarmStart


def _check_samples(algo: Algo, rollout: Rollout) -> None:
    """Algorithms that the form of the samples makes wrong or impossible."""
    if rollout.samples == "step_wise" and algo.advantage == "reinforce_pp":
        raise ValueError(
            "algo.advantage reinforce_pp is defined over batches of one row per episode, and step-wise rows count an episode once "
            "per turn: set rollout.samples to concat or merged, or take grpo or rloo."
        )
    if rollout.needs_rendered_rows and (algo.corrections or algo.old_policy == "rollout"):
        name = f"algo.corrections {list(algo.corrections)}" if algo.corrections else "algo.old_policy rollout"
        raise ValueError(
            f"{name} must be unset where rows are rendered anew (rollout.history rerender with samples concat), since these have no "
            "rollout logprobs: set rollout.samples to step_wise."
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
        if config.rollout.needs_rendered_rows:
            raise ValueError(
                "train.too_old correct needs the rollout's logprobs, and rows rendered anew (rollout.history rerender with samples "
                "concat) have none: set rollout.samples to step_wise."
            )
        rule = "set with train.too_old correct, such as token_truncation, or algo.old_policy must be rollout"
        corrected = bool(config.algo.corrections) or config.old_policy == "rollout"
        require(corrected, "algo.corrections", rule, config.algo.corrections)
    if config.cluster.gpus and config.cluster.colocate:
        raise ValueError(
            "cluster.colocate must be False or unset with train.max_staleness above 0: engines sample while the trainer trains, so "
            "they cannot take turns on one GPU."
        )


def _check_servers(config: Config) -> None:
    """What does not go together with inference servers."""
    if config.deterministic:
        raise ValueError("deterministic needs engine embedded: what a server samples, no run repeats.")
    cluster, servers = config.placed, config.server_settings
    if not cluster.on or servers is None:
        return
    section, tp = servers.section, servers.tp
    rule = "left alone on a cluster: cluster.engines counts servers"
    require(servers.servers == 1, f"{section}.servers", rule, servers.servers)
    require(
        servers.first_gpu == 0, f"{section}.first_gpu", "left alone on a cluster: Ray gives out GPUs", servers.first_gpu
    )
    require(
        servers.port == 0, f"{section}.port", "left alone on a cluster: each machine has ports of its own", servers.port
    )
    if cluster.gpus and not config.attached:
        free = _room_for_servers(cluster, tp)
        whose, most = "of the ranks'", cluster.num_ranks // cluster.nodes
        if not cluster.colocate:
            whose, most = "beside the ranks'", (cluster.gpus - cluster.num_ranks) // cluster.nodes
        require(tp <= most, f"{section}.tp", f"at most {most}, the GPUs of one machine {whose}", tp)
        rule = f"at most {free}: for more there are not {section}.tp ({tp}) GPUs each on one machine, {whose}"
        require(cluster.num_engines <= free, "cluster.engines", rule, cluster.num_engines)
        if cluster.colocate:
            rule = f"a multiple of cluster.nodes ({cluster.nodes}), where servers share the ranks' GPUs"
            require(cluster.num_engines % cluster.nodes == 0, "cluster.engines", rule, cluster.num_engines)
            rule = "tensor, disk or auto where servers share the ranks' GPUs: no process group (NCCL) has a GPU twice"
            require(servers.sync != "group", f"{section}.sync", rule, servers.sync)


def _room_for_servers(cluster: Cluster, tp: int) -> int:
    """How many servers have ``tp`` GPUs each on one machine: as many of the ranks' for each, or of those beside the ranks'."""
    if not cluster.colocate:
        return (cluster.gpus - cluster.num_ranks) // cluster.nodes // tp * cluster.nodes
    ranks = cluster.num_ranks // cluster.nodes
    return cluster.nodes * max((count for count in range(1, ranks // tp + 1) if ranks % count == 0), default=0)


@dataclass(frozen=True)
class Cluster:
    """Trainer ranks and engines in processes that Ray places; by default there is one process and no Ray."""

    gpus: int = 0
    """GPUs in all that Ray spreads the run over; 0: none, and no Ray unless `ranks` is set. Needs `pip install 'vlmrl[ray]'`."""
    ranks: int | None = None
    """Trainer processes (FSDP2). Unset: one a GPU, or one for every second where engines have theirs. With 0 GPUs: a trial on CPUs."""
    engines: int | None = None
    """Unset: one for each rank's GPU, or for each GPU that is no rank's; without GPUs one."""
    colocate: bool | None = None
    """Ranks and engines take turns on the same GPUs, their memory released in between, or each has a GPU of its own, as rollouts ahead
    of the trainer need it. Unset: turns wherever that is possible."""
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
        return self.gpus // 2 if self.colocate is False else self.gpus

    @property
    def num_engines(self) -> int:
        if self.engines is not None:
            return self.engines
        if not self.gpus:
            return 1
        return self.gpus - self.num_ranks if self.colocate is False else self.num_ranks

    def __post_init__(self) -> None:
        require(self.gpus >= 0, "cluster.gpus", "0 (off) or more", self.gpus)
        positive("cluster", self, "ranks", "engines", "nodes")
        if not self.on:
            given = [name for name in ("engines", "address") if getattr(self, name) is not None]
            require(not given and self.nodes == 1, "cluster.gpus", f"set with cluster.{(given or ['nodes'])[0]}", 0)
            return
        for name, value in (("gpus", self.gpus), ("ranks", self.num_ranks)):
            require(value % self.nodes == 0, f"cluster.{name}", f"a multiple of cluster.nodes ({self.nodes})", value)
        if self.gpus and self.colocate:
            require(self.num_ranks <= self.gpus, "cluster.ranks", f"at most cluster.gpus ({self.gpus})", self.num_ranks)
            rule = f"a divisor of cluster.ranks ({self.num_ranks}), whose GPUs they share"
            require(self.num_ranks % self.num_engines == 0, "cluster.engines", rule, self.num_engines)
        elif self.gpus and self.colocate is False:
            require(
                self.num_ranks > 0 and self.num_ranks + self.num_engines <= self.gpus,
                "cluster.ranks and cluster.engines",
                f"together at most cluster.gpus ({self.gpus}), where engines have GPUs of their own",
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
    engine: str = "embedded"
    """Inference engine. `embedded`: the model in this process. `sglang`: SGLang servers (`pip install 'vlmrl[sglang]'`)."""
    sglang: SGLang = field(default_factory=SGLang)
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
    def folder(self) -> Path:
        """Where the run leaves everything."""
        return Path(self.output_dir) / self.name

    @property
    def placed(self) -> Cluster:
        """``cluster``, with ``colocate`` chosen where it is unset, and as many servers as their ``tp`` GPUs leave room for."""
        cluster = self.cluster
        if cluster.colocate is None:
            cluster = replace(cluster, colocate=self.attached or not self.train.max_staleness)
        if self.server_settings is not None and not self.attached and cluster.gpus and cluster.engines is None:
            cluster = replace(cluster, engines=max(1, _room_for_servers(cluster, self.server_settings.tp)))
        return cluster

    @property
    def server_settings(self) -> ServerSettings | None:
        """The settings of the inference servers: the section that ``engine`` names. None: the engine is embedded."""
        section = getattr(self, self.engine, None)
        return (
            None if self.engine == "embedded" else section if isinstance(section, ServerSettings) else ServerSettings()
        )

    @property
    def attached(self) -> bool:
        """Whether servers sample that run already, on none of this run's GPUs."""
        return self.server_settings is not None and bool(self.server_settings.urls)

    @property
    def colocated(self) -> bool:
        """Whether Ray places ranks and engines on the same GPUs."""
        return bool(self.placed.gpus and self.placed.colocate and not self.attached)

    @property
    def old_policy(self) -> Literal["trainer", "rollout"]:
        """``algo.old_policy``, or what it is where it is unset."""
        able = self.algo.has_ratio and not self.rollout.needs_rendered_rows  # whose rows have no rollout logprobs
        wanted = self.train.max_staleness > 0 and not self.algo.corrections
        return self.algo.old_policy or ("rollout" if able and wanted else "trainer")

    @property
    def models_dir(self) -> Path:
        """Where models that are built on the spot are kept."""
        return Path(self.output_dir) / ".models"

    def __post_init__(self) -> None:
        require(self.name not in ("", ".", "..") and "/" not in self.name, "name", "a plain folder name", self.name)
        check_player("", self.env, self.reward)
        check_held_out("data", self.data, "eval.data", self.eval.data)
        self._check_mixture()
        _check_samples(self.algo, self.rollout)
        _ = self.placed  # raises where its numbers do not go together
        if self.train.max_staleness:
            _check_asynchronous(self)
        if self.server_settings is not None:
            _check_servers(self)
        parts: list[Config | Part] = [self, *self.mixture.values()]
        plays = any(part.env is not None or part.reward is not None for part in parts)
        if self.rollout.generate is not None and plays:
            raise ValueError("rollout.generate plays whole episodes by itself, so env and reward must be unset.")
        if self.reward is not None:
            require(
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
        require(
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
            require(name.isidentifier(), "mixture", "named by plain words", name)
