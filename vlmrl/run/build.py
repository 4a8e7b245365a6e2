"""The parts of one run, made from its config: what can be wrong with a config is found here, before anything is played."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vlmrl.algos import ADVANTAGES, CORRECTIONS, LOSSES, REDUCTIONS
from vlmrl.config import Algo, Config, Lora, Model, Options
from vlmrl.config.code import check_options
from vlmrl.data import Tasks, load_run_tasks
from vlmrl.data.lengths import prompt_tokens
from vlmrl.engine.backend import backend_class
from vlmrl.engine.base import BatchEngine, Engine, RunEngine
from vlmrl.engine.hf.engine import HFEngine
from vlmrl.engine.lockstep import LockstepBatching
from vlmrl.env.base import EnvSpec, resolve_envs
from vlmrl.model.loading import LoadedModel, load_model
from vlmrl.multimodal.store import MediaStore
from vlmrl.rollout.batches import Filter, resolve_filters
from vlmrl.rollout.generator import Generate, GeneratorLoop, resolve_generate
from vlmrl.rollout.group_reward import GroupReward, resolve_group_reward
from vlmrl.rollout.history import HistoryPolicy, resolve_policy
from vlmrl.rollout.runner import Runner
from vlmrl.rollout.turn_loop import TurnLoop
from vlmrl.run.serving import LocalServerHost, Serving
from vlmrl.train.checkpoint import Checkpoints
from vlmrl.train.factory import StartTrainer, Trainers
from vlmrl.train.ranks import Ranks
from vlmrl.train.trainer import Receive, choose


@dataclass
class Run:
    """The parts of one run, made from ``config``. Paths in it were resolved from ``base_dir``, the recipe's folder.

    Episodes are played by the env of ``spec``, or by ``generate``. ``receive`` takes the trainer's weights to the engine; ``None``:
    it samples from the very same ones, or, with ``serving``, servers get them.
    """

    config: Config
    base_dir: Path | None
    spec: EnvSpec | None
    generate: Generate | None
    tasks: Tasks
    held_out: Tasks | None
    model: LoadedModel
    store: MediaStore | None
    engine: RunEngine
    history_policy: HistoryPolicy | None
    filters: list[Filter]
    trainers: StartTrainer
    receive: Receive | None
    group_reward: GroupReward | None
    serving: Serving | None

    @property
    def folder(self) -> Path:
        return self.config.folder

    async def connect(self) -> list[str]:
        """Before anything is sampled: servers, if they do it, come up, get the weights, and agree with the trainer; a line of each."""
        hands = {} if self.serving is None else await self.serving.connect(self.store)
        return [f"server    {url}: {hand}" for url, hand in hands.items()]

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.folder / "checkpoints", self.config.checkpoint.keep)

    def runner(
        self, *, group_size: int | None = None, engine: Engine | None = None, store: MediaStore | None = None
    ) -> Runner:
        """A runner of this run's episodes; ``engine`` and ``store`` may be others than the run's own.

        With a ``group_size`` of its own it plays for no training, and there is no group reward.
        """
        config = self.config
        rollout = config.rollout
        single = rollout.max_turns == 1 and self.generate is None and rollout.over_sampling == 1
        one_batch = single and not config.train.max_staleness
        lockstep = config.deterministic or one_batch  # unless nobody waits for the last
        own: Engine = (
            LockstepBatching(self.engine) if lockstep and isinstance(self.engine, BatchEngine) else self.engine
        )
        parts = (engine or own, self.model.renderer, store or self.store, config.rollout, config.seed)
        group_reward = self.group_reward if group_size is None else None
        if self.spec is None:
            assert self.generate is not None
            return Runner(GeneratorLoop(self.generate, *parts), group_size=group_size, group_reward=group_reward)
        turn_loop = TurnLoop(self.spec, *parts, self.history_policy)
        return Runner(turn_loop, group_size=group_size, group_reward=group_reward)


def build_run(config: Config, base_dir: Path | None = None, ranks: Ranks | None = None) -> Run:
    """Everything a run needs, on rank 0 of its trainers. What can be wrong with a config is found here, cheap things first."""
    generate = resolve_generate(config.rollout, base_dir)
    spec = resolve_envs(config, base_dir) if generate is None else None
    history_policy = resolve_policy(config.rollout, base_dir)
    if config.server_settings is not None:
        backend_class(config.engine)  # raises for a name that is none
    _check_algo(config.algo)
    filters = resolve_filters(config.algo, base_dir)
    group_reward = resolve_group_reward(config, base_dir)
    tasks, held_out = load_run_tasks(config, base_dir)
    torch.manual_seed(config.seed)
    ranks = ranks or Ranks()
    model = load_model(_sampled(config, ranks), base_dir, config.models_dir, config.seed)
    if spec is not None:
        model.renderer.check_tools(spec.tools)
    if config.rollout.needs_rendered_rows and not model.renderer.marks_replies:
        raise ValueError(
            "rollout.history rerender with rollout.samples concat needs a chat template with {% generation %} markers; set "
            "rollout.samples step_wise, or model.chat_template (`chatml` and `chatml_drop_thinking` have them)."
        )
    store = model.new_store()
    length = prompt_tokens(model.renderer, store, lambda task: spec.of(task).tools if spec else [])
    tasks, held_out = tasks.measured(length), held_out and held_out.measured(length)
    keep_kv = config.rollout.max_turns > 1 or generate is not None
    place = _on_cluster if config.cluster.on else _here
    engine, trainers, receive, serving = place(config, base_dir, ranks, model, keep_kv)
    played = (config, base_dir, spec, generate, tasks, held_out, model, store, engine, history_policy, filters)
    return Run(*played, trainers, receive, group_reward, serving)


def _sampled(config: Config, ranks: Ranks) -> Model:
    """The model that is sampled from, or whose weights servers get: on a cluster engines have it, and here are only its shapes."""
    if _shared(config, ranks):
        return config.model
    device = "meta" if config.cluster.on else config.model.device
    return replace(config.model, device=device, lora=Lora(), freeze=())  # gets merged weights


def _shared(config: Config, ranks: Ranks) -> bool:
    """Whether the engine, which may be servers with weights of their own, gets by with the very weights that are trained."""
    samples_meanwhile = config.train.max_staleness > 0 and config.engine == "embedded"
    return ranks.size == 1 and not samples_meanwhile and not config.cluster.on


Placed = tuple[RunEngine, StartTrainer, Receive | None, Serving | None]


def _here(config: Config, base_dir: Path | None, ranks: Ranks, model: LoadedModel, keep_kv: bool) -> Placed:
    """The trainer in this process, which may be one of several that ``torchrun`` started, and the engine too unless it is servers."""
    trainers = Trainers.of(config, base_dir, ranks, model if _shared(config, ranks) else None)
    if config.train.gradient_checkpointing:
        model.policy.enable_gradient_checkpointing()
    receive = None if trainers.policy is model.policy else model.policy.load_weights
    if config.server_settings is not None:
        host = LocalServerHost(config.server_settings, config.folder, model.policy, ranks.size)
        serving = Serving.of(config, model, host)
        return serving.engine, trainers, receive, serving
    record_routes = config.train.replay_routing
    engine = HFEngine(model.policy, model.renderer, keep_kv=keep_kv, record_routes=record_routes)
    return engine, trainers, receive, None


def _on_cluster(config: Config, base_dir: Path | None, ranks: Ranks, model: LoadedModel, keep_kv: bool) -> Placed:
    """Both in processes that Ray places."""
    if ranks.size > 1:
        raise ValueError("cluster starts processes by itself: run the recipe without torchrun.")
    try:
        from vlmrl.cluster.engines import RemoteEngine
        from vlmrl.cluster.ray_cluster import RayCluster
        from vlmrl.cluster.trainers import RemoteTrainers
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ValueError("cluster needs Ray: pip install 'vlmrl[ray]'") from error
    cluster = RayCluster(config, base_dir, keep_kv)
    if config.server_settings is not None:
        try:
            serving = Serving.of(config, model, cluster)
        except BaseException:
            cluster.close()
            raise
        return serving.engine, RemoteTrainers(cluster), None, serving
    engine = RemoteEngine(cluster, config)
    return engine, RemoteTrainers(cluster), engine.receive, None


def _check_algo(algo: Algo) -> None:
    """Every name is in its registry, and its options fit the function's signature."""
    chosen: list[tuple[str, str, dict[str, Any], int, Options]] = [
        ("advantage", algo.advantage, ADVANTAGES, 2, algo.advantage_options),
        ("loss", algo.loss, LOSSES, 1, algo.loss_options),
        ("reduction", algo.reduction, REDUCTIONS, 2, algo.reduction_options),
        *(("correction", name, CORRECTIONS, 3, algo.options_of(name)) for name in algo.corrections),
    ]
    for kind, name, registry, arguments, options in chosen:
        field = "algo.corrections" if kind == "correction" else f"algo.{kind}"
        check_options(f"algo.{kind}_options", choose(field, name, registry), arguments, options)
