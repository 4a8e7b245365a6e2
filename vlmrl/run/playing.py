"""The interface of the parts that play a recipe's episodes, and the parts that play them with a model behind an API."""

from __future__ import annotations

import abc
from dataclasses import dataclass, replace

from vlmrl.config import Config, Rollout
from vlmrl.data import PromptLength, Tasks, TaskStream, load_run_tasks
from vlmrl.engine.base import Engine
from vlmrl.engine.chat_engine import ApiModel, ChatEngine
from vlmrl.env.base import EnvSpec, resolve_envs
from vlmrl.model.loading import Reader, load_reader
from vlmrl.multimodal.store import MediaStore
from vlmrl.rollout.chat_loop import ChatLoop
from vlmrl.rollout.history import HistoryPolicy, resolve_policy
from vlmrl.rollout.runner import Runner


@dataclass(frozen=True, kw_only=True)
class Playing(abc.ABC):
    """The parts that episodes are played with."""

    config: Config
    tasks: Tasks
    held_out: Tasks | None
    model: Reader
    store: MediaStore | None
    spec: EnvSpec | None
    """The env that plays the episodes; ``None``: a generator or agents play them."""
    history_policy: HistoryPolicy | None
    engine: Engine

    @abc.abstractmethod
    def runner(
        self, *, group_size: int | None = None, store: MediaStore | None = None, rollout: Rollout | None = None
    ) -> Runner:
        """A runner of these episodes. Each argument replaces a part."""

    def stream(self, tasks: Tasks, *, store: MediaStore | None = None, once: bool = False) -> TaskStream:
        """The draws of ``tasks``, or each task ``once``. ``store`` replaces the run's in measuring prompts."""
        return TaskStream(tasks, self.prompt_length(store), timeout=self.config.rollout.env_timeout, once=once)

    def prompt_length(self, store: MediaStore | None = None) -> PromptLength:
        """Counts the tokens of prompts, with the tools of the env. ``store`` replaces the run's."""
        spec = self.spec
        return PromptLength(self.model.renderer, store or self.store, lambda task: spec.of(task).tools if spec else [])

    async def connect(self) -> list[str]:
        """Make the engine ready. Returns a line for each server."""
        return []

    def close(self) -> None:
        self.engine.close()


@dataclass(frozen=True, kw_only=True)
class ApiRun(Playing):
    """Episodes of a recipe's env with a model behind a chat API. Of the recipe's model only tokenizer and image sizes are loaded."""

    spec: EnvSpec
    engine: ChatEngine

    def runner(
        self, *, group_size: int | None = None, store: MediaStore | None = None, rollout: Rollout | None = None
    ) -> Runner:
        parts = (self.spec, self.engine, self.model.renderer, store or self.store, rollout or self.config.rollout)
        return Runner(ChatLoop(*parts, self.history_policy), group_size=group_size)


def build_api_run(config: Config, model: ApiModel) -> ApiRun:
    """The parts of a run whose episodes ``model`` plays. Raises ValueError for what it cannot play."""
    if config.has_agent or config.rollout.generate is not None:
        kind = "agent sends requests of its own" if config.has_agent else "rollout.generate samples token ids"
        raise ValueError(f"--api needs a recipe with an env or a reward function: this one's {kind}.")
    spec = resolve_envs(config)
    tasks, held_out = load_run_tasks(config)
    reader = load_reader(replace(config.model, device="meta"), config.models_dir)
    return ApiRun(
        config=config,
        tasks=tasks,
        held_out=held_out,
        model=reader,
        store=reader.new_store(),
        spec=spec,
        history_policy=resolve_policy(config.rollout),
        engine=ChatEngine(model),
    )
