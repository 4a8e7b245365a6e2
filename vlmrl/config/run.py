"""All settings of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from vlmrl.config.checks import (
    check_asynchronous,
    check_data,
    check_order,
    check_rewards,
    check_samples,
    check_teacher,
    refuse_if,
)
from vlmrl.config.cluster import Cluster, check_servers, resolve_cluster
from vlmrl.config.data import Data, Part, check_env_or_reward
from vlmrl.config.fields import Agent, Code, Codes, Options, Settings
from vlmrl.config.gateway import Gateway
from vlmrl.config.model import Model
from vlmrl.config.rollout import Rollout
from vlmrl.config.servers import ServerSettings
from vlmrl.config.training import SFT, Algo, Checkpoint, Eval, Optim, Report, Teacher, Train, WarmStart
from vlmrl.utils.require import require


@dataclass(frozen=True)
class Config(Settings):
    """All settings of a run. A recipe sets them, and the command line overrides them."""

    name: str = "run"
    """Name of the run. Its files are written to `output_dir/name`."""
    output_dir: str = "runs"
    """Folder that contains the folders of all runs."""
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    env: Code = None
    """Env: `module:Name` or `file.py:Name` of an Env class, or of a function `build(task, **options)` that returns one."""
    env_options: Options = field(default_factory=dict)
    """Keyword arguments of the env, as pairs `NAME VALUE`."""
    reward: Codes = None
    """Reward function for single-turn tasks, instead of an env: `function(text, task) -> float`, also `async`.
    Several are a list, or a dict with their weights: the reward is their sum, and each is a metric.
    With an agent: one `function(trajectory) -> float`."""
    agent: Agent = None
    """Agent of your own, instead of an env: a function `run(task, client)`, async or not, that calls the OpenAI-compatible endpoint.
    It returns the reward, or a dict with `reward` and metrics, or nothing if `reward` or a request to the endpoint gives it.
    Or a command line, such as `python agent.py`. It runs without a shell, in a folder of its own.
    Its environment names the endpoint (`OPENAI_BASE_URL`) and the file of the task (`VLMRL_TASK`)."""
    gateway: Gateway = field(default_factory=Gateway)
    group_reward: Code = None
    """Reward function over a whole group, in addition to the env's rewards.
    `function(trajectories)` returns one number per trajectory, which is added to its reward for training."""
    mixture: dict[str, Part] = field(default_factory=dict)
    """Several datasets by name, instead of `data`. Each has a sampling weight and optionally an env of its own."""
    rollout: Rollout = field(default_factory=Rollout)
    engine: str = "embedded"
    """Inference engine. `embedded`: the model in this process. `sglang`: SGLang servers (`pip install 'vlmrl[sglang]'`).
    `vllm`: vLLM servers (`pip install 'vlmrl[vllm]'`). `file.py:Class`: servers of a program of your own (a `ServerBackend`)."""
    server: ServerSettings = field(default_factory=ServerSettings)
    algo: Algo = field(default_factory=Algo)
    teacher: Teacher = field(default_factory=Teacher)
    optim: Optim = field(default_factory=Optim)
    train: Train = field(default_factory=Train)
    eval: Eval = field(default_factory=Eval)
    warm_start: WarmStart = field(default_factory=WarmStart)
    sft: SFT = field(default_factory=SFT)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    cluster: Cluster = field(default_factory=Cluster)
    seed: int = 0
    """Seed of weight initialization, sampling and all other random draws outside `data.seed`: from 0 to 2**64 - 1."""
    deterministic: bool = False
    """Make runs reproducible bit by bit: batch rollouts in lockstep and in task order, which is slower.
    Episodes of a generator or an agent that samples several responses at the same time are not reproducible."""
    save_model: bool = True
    """At the end, save the trained model in Hugging Face format to the run's folder."""
    report: Report = field(default_factory=Report)

    @property
    def folder(self) -> Path:
        """The folder of this run's files."""
        return Path(self.output_dir) / self.name

    @property
    def only_sft(self) -> bool:
        """Whether the run only fine-tunes on recorded conversations: it has no tasks and plays no episodes."""
        return bool(self.sft.data) and not self.train.steps and not self.has_tasks

    @property
    def has_tasks(self) -> bool:
        """Whether there is a dataset or a generator of tasks."""
        return self.data.is_set or bool(self.mixture)

    @property
    def has_agent(self) -> bool:
        """Whether an agent plays the episodes."""
        return self.agent is not None

    @property
    def episode_setting(self) -> str:
        """The setting that names what plays the episodes; ``env`` also stands for a reward function."""
        if self.has_agent:
            return "agent"
        return "env" if self.rollout.generate is None else "rollout.generate"

    @property
    def resolved_cluster(self) -> Cluster:
        """``cluster`` with ``colocate`` and the number of servers set."""
        return resolve_cluster(self.cluster, self.server if self.has_servers else None, self.train.max_staleness > 0)

    @property
    def has_servers(self) -> bool:
        """Whether inference servers sample, with the settings in ``server``; otherwise the embedded engine does."""
        return self.engine != "embedded"

    @property
    def external_servers(self) -> bool:
        """Whether the run uses servers that are already running, on GPUs outside the run."""
        return self.has_servers and bool(self.server.urls)

    @property
    def colocated(self) -> bool:
        """Whether Ray places ranks and servers on the same GPUs."""
        cluster = self.resolved_cluster
        return bool(cluster.gpus and cluster.colocate and self.has_servers and not self.external_servers)

    @property
    def models_dir(self) -> Path:
        """Cache folder of tiny models."""
        return Path(self.output_dir) / ".models"

    def __post_init__(self) -> None:
        require(self.name not in ("", ".", "..") and "/" not in self.name, "name", "a plain folder name", self.name)
        require(0 <= self.seed < 2**64, "seed", "from 0 to 2**64 - 1, as torch and NumPy need", self.seed)
        check_data(self.data, self.eval.data, self.mixture)
        self._check_episodes()
        check_samples(self.algo, self.rollout, self.train)
        check_rewards(self.algo, self.rollout)
        check_teacher(self.algo, self.teacher, self.rollout)
        check_order(self.rollout, self.train, self.deterministic)
        _ = self.resolved_cluster  # raises if its numbers do not fit together
        check_asynchronous(self.algo, self.rollout, self.train, self.cluster)
        alone = not self.cluster.on and not self.has_servers
        require(
            self.cluster.engines is None or not alone, "cluster.gpus", "set with cluster.engines, or servers used", 0
        )
        if self.has_servers:
            check_servers(self.server, self.resolved_cluster, self.deterministic)

    def _check_episodes(self) -> None:
        """The env, reward function, agent or generator, and the limits of an episode."""
        check_env_or_reward("", self.env, self.reward)
        if self.has_agent:
            self._check_agent()
        rollout = self.rollout
        parts: list[Config | Part] = [self, *self.mixture.values()]
        has_env = any(part.env is not None or part.reward is not None for part in parts)
        message = "rollout.generate plays whole episodes itself, so env and reward must be unset."
        refuse_if(rollout.generate is not None and has_env, message)
        self._check_env_options()
        if self.reward is not None and not self.has_agent:
            require(rollout.max_turns == 1, "rollout.max_turns", "1 with a reward function", rollout.max_turns)
        response, total = rollout.max_response_tokens, rollout.max_tokens
        require(response < total, "rollout.max_response_tokens", f"less than rollout.max_tokens ({total})", response)

    def _check_env_options(self) -> None:
        """Options are given to an env only: what has none would ignore them."""
        rule = "must be unset without an env: reward functions, agents and rollout.generate take no options."
        refuse_if(bool(self.env_options) and self.env is None, f"env_options {rule}")
        for name, part in self.mixture.items():
            has_env = part.env is not None or (part.reward is None and self.env is not None)
            refuse_if(bool(part.env_options) and not has_env, f"mixture.{name}.env_options {rule}")

    def _check_agent(self) -> None:
        """An agent plays whole episodes, and its requests are turns of exact tokens that may form branches."""
        is_blank = isinstance(self.agent, str) and not self.agent.strip()
        require(not is_blank, "agent", "a function or a command line", self.agent)
        for part, settings in self.mixture.items():
            own = settings.env is not None or settings.reward is not None
            refuse_if(
                own, f"mixture.{part}.env and mixture.{part}.reward must be unset with agent, which plays all parts."
            )
        for other, value in (("env", self.env), ("rollout.generate", self.rollout.generate)):
            refuse_if(value is not None, f"{other} and agent exclude each other: both play the episodes.")
        samples, history = self.rollout.samples, self.rollout.history
        rule = "merged or step_wise with agent, whose requests may form branches"
        require(samples != "concat", "rollout.samples", rule, samples)
        require(history == "append", "rollout.history", "append with agent, which makes its own prompts", history)
