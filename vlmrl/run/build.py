"""The parts of one run, built from its config. Errors of a config are found here, before anything is sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from vlmrl.algos import choose, choose_all, is_per_token
from vlmrl.checks.teacher_check import check_reader
from vlmrl.config import Algo, Config, Lora, Model, Rollout
from vlmrl.config.code import resolve_function
from vlmrl.config.training import OWN
from vlmrl.data import TaskMixture, TaskSource, contents, load_run_tasks
from vlmrl.data.conversations import load_conversations
from vlmrl.engine.base import BatchEngine, Engine, RunEngine
from vlmrl.engine.hf.engine import HFEngine
from vlmrl.engine.lockstep import LockstepBatching
from vlmrl.engine.server_backend import new_backend, teacher_backend
from vlmrl.engine.server_checks import check_sync
from vlmrl.env.base import resolve_envs
from vlmrl.gateway.agent_loop import AgentLoop
from vlmrl.gateway.agents import Agents, resolve_agent
from vlmrl.model.loading import LoadedModel, chat_template_text, load_model, load_reader
from vlmrl.model.policy import Policy
from vlmrl.multimodal.masks import check_masks
from vlmrl.multimodal.renderer import OUR_TEMPLATES
from vlmrl.multimodal.store import MediaStore
from vlmrl.plan.memory_plan import plan_memory
from vlmrl.report.trackers import tracker_classes
from vlmrl.rollout.asking_loop import AskingLoop
from vlmrl.rollout.batches import Filter
from vlmrl.rollout.generator import Generate, GeneratorLoop, resolve_generate
from vlmrl.rollout.group_reward import GroupReward, resolve_group_reward
from vlmrl.rollout.history import asks, resolve_policy
from vlmrl.rollout.runner import Runner
from vlmrl.rollout.turn_loop import TurnLoop
from vlmrl.run.off_policy import check_off_policy
from vlmrl.run.playing import Playing
from vlmrl.run.serving import LocalServerHost, ServerHost, Serving
from vlmrl.run.teacher_servers import TeacherServers
from vlmrl.train.checkpoint import Checkpoints
from vlmrl.train.controller import Commands, RunTrainer
from vlmrl.train.rank import Rank
from vlmrl.train.ranks import Ranks
from vlmrl.types import Task
from vlmrl.utils.part_seconds import PartSeconds
from vlmrl.utils.require import require

NO_TASKS = TaskSource(make=lambda row: Task(str(row), []), rows=())
"""Of a run that only fine-tunes on recorded conversations."""


@dataclass(frozen=True, kw_only=True)
class Run(Playing):
    """The parts of one run."""

    conversations: tuple[TaskMixture, TaskMixture | None] | None
    """Those of `sft.data` to train on, and those held out to measure the loss on."""
    model: LoadedModel
    generate: Generate | None
    agents: Agents | None
    filters: Sequence[Filter]
    group_reward: GroupReward | None
    trainer: RunTrainer
    engine: RunEngine
    copied: Policy | None
    """The engine's own copy of the weights. ``None``: it samples from the trainer's, or ``serving`` sends them."""
    serving: Serving | None
    """The inference servers of the run, if it has any."""
    teachers: TeacherServers | None
    """The servers that teach, if any do."""
    seconds: PartSeconds = field(default_factory=PartSeconds)
    """Of ``audit``, ``update``, ``transfer`` and ``checkpoint`` since the last step was logged."""

    @property
    def folder(self) -> Path:
        return self.config.folder

    @property
    def colocated(self) -> bool:
        """Whether the engine must sleep while the trainer works, since they share GPUs."""
        return self.serving is not None and self.serving.colocated

    async def connect(self) -> list[str]:
        """Start and load servers, if the run has any, and check that they agree with the trainer. Returns a line for each."""
        reports = {} if self.serving is None else await self.serving.connect(self.store)
        return [f"server    {url}: {parity}" for url, parity in reports.items()]

    def close(self) -> None:
        """End the agents, their endpoint and the engine."""
        try:
            if self.agents is not None:
                self.agents.close()
        finally:
            self.engine.close()
            if self.teachers is not None:
                self.teachers.scorer.close()

    @property
    def contents(self) -> dict[str, str]:
        """How many rows each dataset has, and a hash of some of them, to notice at a resume that they are others."""
        found = contents("data", self.tasks) | contents("held-out data", self.held_out)
        return found | (contents("sft.data", self.conversations[0]) if self.conversations is not None else {})

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.folder / "checkpoints", self.config.checkpoint.keep, self.config.checkpoint.every)

    def runner(
        self,
        *,
        group_size: int | None = None,
        engine: Engine | None = None,
        store: MediaStore | None = None,
        rollout: Rollout | None = None,
    ) -> Runner:
        """A runner of this run's episodes. Each argument replaces a part of the run.

        Episodes with a ``group_size`` of their own are not trained on and get no group reward.
        """
        rollout, group_reward = rollout or self.config.rollout, self.group_reward if group_size is None else None
        engine = engine or self._sampling_engine()
        parts = (engine, self.model.renderer, store or self.store, rollout, self.config.seed)
        if self.agents is not None:
            return Runner(AgentLoop(self.agents, *parts), group_size=group_size, group_reward=group_reward)
        if self.spec is None:
            assert self.generate is not None
            return Runner(GeneratorLoop(self.generate, *parts), group_size=group_size, group_reward=group_reward)
        loop = AskingLoop if asks(self.history_policy) else TurnLoop
        return Runner(loop(self.spec, *parts, self.history_policy), group_size=group_size, group_reward=group_reward)

    def _sampling_engine(self) -> Engine:
        """The engine, with lockstep batching in deterministic runs and if all requests arrive at once anyway."""
        config, rollout = self.config, self.config.rollout
        single = rollout.max_turns == 1 and self.spec is not None and rollout.over_sampling == 1
        lockstep = config.deterministic or (single and not config.train.max_staleness)
        return LockstepBatching(self.engine) if lockstep and isinstance(self.engine, BatchEngine) else self.engine


def build_run(config: Config, ranks: Ranks | None = None, commands: Commands | None = None) -> Run:
    """Build everything that a run needs, on trainer rank 0. Cheap checks come first. ``commands`` reach the other ``ranks``."""
    generate = resolve_generate(config.rollout)
    agent = resolve_agent(config)
    spec = resolve_envs(config) if generate is None and agent is None and not config.only_sft else None
    history_policy = resolve_policy(config.rollout)
    check_names(config)
    check_off_policy(config)
    filters = choose_all(config.algo, "filters")
    group_reward = resolve_group_reward(config)
    tasks, held_out = (NO_TASKS, None) if config.only_sft else load_run_tasks(config)
    conversations = load_conversations(config) if config.sft.data else None
    if config.checkpoint.keep_best and held_out is None:
        raise ValueError(
            "checkpoint.keep_best compares held-out rewards: set eval.data or data.held_out, and eval.every."
        )
    torch.manual_seed(config.seed)
    ranks = ranks or Ranks()
    model = load_model(_model_settings(config, ranks), config.models_dir, config.seed)
    check_saving(model)
    has_servers = bool(config.teacher.servers[0])
    if config.teacher.model not in (None, *OWN) and not has_servers:
        check_reader(model, load_reader(replace(config.model, path=config.teacher.model), config.models_dir))
    if spec is not None:
        model.renderer.check_tools(spec.tools)
    if config.rollout.needs_rendered_rows and not model.renderer.marks_responses:
        raise ValueError(
            "rollout.history rerender with rollout.samples concat needs a chat template with {% generation %} markers; set "
            f"rollout.samples step_wise, or model.chat_template (ours have them: {OUR_TEMPLATES})."
        )
    if conversations is not None:
        check_masks(model.renderer, config.model.chat_template or f"of {config.model.path}")
    store = model.new_store()
    if store is None:
        _check_needs_no_images(config)
    shared = _shares_weights(config, ranks)
    trainer = RunTrainer(Rank(config, ranks, model if shared else None), commands)
    serving = None
    if config.has_servers:
        serving = Serving.of(config, model, trainer, _server_host(config, trainer.rank))
    keep_kv = config.rollout.max_turns > 1 or spec is None
    return Run(
        config=config,
        tasks=tasks,
        held_out=held_out,
        conversations=conversations,
        model=model,
        store=store,
        spec=spec,
        generate=generate,
        agents=None if agent is None else Agents(agent, config.gateway, config.folder / "agents"),
        history_policy=history_policy,
        filters=filters,
        group_reward=group_reward,
        trainer=trainer,
        engine=_embedded_engine(config, ranks, model, keep_kv) if serving is None else serving.engine,
        copied=None if shared or serving is not None else model.policy,
        serving=serving,
        teachers=TeacherServers(config, model) if has_servers else None,
    )


def _check_needs_no_images(config: Config) -> None:
    """The settings of a text model."""
    if config.eval.blank_images:
        raise ValueError("eval.blank_images must be False with a text model: its tasks have no images to blank.")
    share = config.teacher.image_share
    require(share is None, "teacher.image_share", "unset with a text model, whose tasks have no images", share)


def _model_settings(config: Config, ranks: Ranks) -> Model:
    """The settings of the model that this process loads beside the trainer's: the engine's copy, or for servers its shapes alone."""
    if _shares_weights(config, ranks):
        return config.model
    device = "meta" if config.has_servers else config.model.device
    return replace(config.model, device=device, lora=Lora(), freeze=())  # receives merged weights


def _shares_weights(config: Config, ranks: Ranks) -> bool:
    """Whether the trainer's policy is the one that this process loads for the engine or for the servers' settings."""
    samples_during_training = config.train.max_staleness > 0 and config.engine == "embedded"
    return ranks.size == 1 and not samples_during_training


def _server_host(config: Config, rank: Rank) -> ServerHost:
    """Where servers run: beside this process, or where Ray places them."""
    if not config.cluster.on:
        return LocalServerHost(config.server, config.folder, rank.device, rank.ranks.size, config.cluster.num_engines)
    from vlmrl.cluster.server_host import RayServerHost

    return RayServerHost(config)


def _embedded_engine(config: Config, ranks: Ranks, model: LoadedModel, keep_kv: bool) -> HFEngine:
    return HFEngine(
        model.policy,
        model.renderer,
        keep_kv=keep_kv,
        record_expert_routing=config.train.replay_routing,
        kv_cache_bytes=_kv_cache_bytes(config, ranks, model.policy.device),
        threads=torch.get_num_threads() if config.deterministic else None,  # a choice by time cannot be repeated
    )


def _kv_cache_bytes(config: Config, ranks: Ranks, device: torch.device) -> float | None:
    """The embedded engine's limit: the setting, or in an asynchronous run on a GPU what the plan leaves.

    The engine must not take what is free between two steps, since the trainer needs it while the engine samples on.
    """
    limit = config.rollout.kv_cache_bytes
    if limit is not None or device.type != "cuda" or not config.train.max_staleness:
        return limit
    plan = plan_memory(config, ranks)
    if plan.gpu is None or not plan.fits:
        return None
    # The plan gives it no more than the responses take, without any copy.
    return plan.cache + plan.gpu.memory - plan.peak


def check_saving(model: LoadedModel) -> None:
    """Raises ValueError if what belongs to the weights cannot be saved, which is better known before the training than after it."""
    with TemporaryDirectory(prefix="vlmrl-") as folder:
        try:
            model.save(Path(folder), weights=())
        except Exception as error:  # transformers takes settings of any name from a model's files
            if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
                raise  # this machine's error, such as a full disk
            raise ValueError(
                f"model.path {model.path!r}: its config, tokenizer and processor must be such that they can be saved with the "
                f"trained model, but saving them failed: {type(error).__name__}: {error}. Remove what does not belong there from "
                "its config.json and tokenizer_config.json."
            ) from error


def check_names(config: Config) -> None:
    """Raises ValueError unless all names in the settings exist and their options fit. No model is loaded, no user code is called."""
    tracker_classes(config.report.to)
    chat_template_text(config.model.chat_template)
    if config.has_servers:
        new_backend(config)
        check_sync(config)
    if config.teacher.servers[0]:
        teacher_backend(config.teacher)
    if config.teacher.sees is not None:
        resolve_function("teacher.sees", config.teacher.sees, ["task", "trajectory", "turn"])
    _check_algo(config.algo)


def _check_algo(algo: Algo) -> None:
    per_token = is_per_token(choose(algo, "advantage").func)
    rule = "trajectory with an advantage per token"
    require(not per_token or algo.credit == "trajectory", "algo.credit", rule, algo.credit)
    choose(algo, "loss")
    choose(algo, "reduction")
    choose_all(algo, "corrections")
    choose_all(algo, "filters")
