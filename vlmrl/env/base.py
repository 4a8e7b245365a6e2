"""The environment contract: the class that users write, and the checks of an env before the first episode.

To write an env, read :class:`Env` and :func:`obs`. `session.py` runs it.
"""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import mul
from typing import Any

from vlmrl.config import Config, Part
from vlmrl.config.code import check_options, find_function, load_code, resolve_function
from vlmrl.config.data import check_env_or_reward
from vlmrl.config.fields import Codes, weights_of
from vlmrl.env.tool_schema import check_tools
from vlmrl.types import TRUNCATED, ImageSource, Message, Task
from vlmrl.utils.threads import DaemonPool


class RetryTurn(Exception):
    """Raised in ``step`` to sample the turn again: the response is discarded before training, and counted as ``turns_resampled``.

    After an env error, the new env gets the discarded response again, and must reject it again. In other methods, it is an env error.
    """


class Observation(dict[str, Any]):
    """What :func:`obs` returns. A tool's result that is a dict of this form, such as a server's JSON, opens no image."""


def obs(text: str = "", images: list[ImageSource] | ImageSource | None = None) -> dict[str, Any]:
    """An observation: ``obs("Closer:", images=[crop])``. A single image needs no list.

    The model reads the images before the text, in which ``<image>`` marks nothing, unlike in a prompt.

    An image that cannot be shown, for example one of 256x1 pixels or bytes that do not decode, is an error that the model reads:
    ``[This image cannot be shown: ...]`` in the image's place, counted as ``images_not_shown``. So is a missing file that a response
    named. Another missing file, an address that does not answer in time, or a value that is no image source, is an error of the env.
    Half surrogate pairs in ``text``, which no tokenizer encodes, become question marks.
    """
    observation = Observation(obs_str=encodable(text) if isinstance(text, str) else text)
    if isinstance(images, str | bytes | dict) or not isinstance(images, Iterable | None):
        images = [images]
    if images:
        observation["multi_modal_data"] = {"image": list(images)}
    return observation


def encodable(text: str) -> str:
    """``text`` with a question mark for each half surrogate pair, which come from file names, web pages and broken JSON."""
    return text.encode(errors="replace").decode()


class Env(abc.ABC):
    """One episode of one task. Subclass it, write ``step``, and override the other methods you need.

    Each method may be ``async``; plain methods all run in one thread, which belongs to this env. The turn loop sets ``self.turn``
    (0 for the first response), ``self.max_turns``, ``self.seed``, ``self.last_response`` and, unless the class sets it,
    ``self.tool_format``, the chat template's format of tool calls (see `tool_calls.py`). ``self.shared`` is the result of the optional
    classmethod ``setup(cls, **options)``, which is called once per process.
    """

    tools: list[dict[str, Any]] = []  # noqa: RUF012  JSON schemas for the chat template
    replayable: bool = True  # the same seed and responses give the same observations
    unfinished_reward: float | None = None
    """Added to the reward of an episode that a budget ended before ``step`` returned done. Unset: ``step``, an own ``finish`` or
    ``rollout.truncated_reward`` must give such an episode its reward."""

    turn: int = 0
    max_turns: int = 1
    seed: int = 0
    last_response: str = ""
    tool_format: str | None = None
    shared: Any = None
    own_thread: DaemonPool | None = None
    """The thread of the plain methods, where an async one may run slow calls. ``None``: the env is not played by a session."""
    ends_late_calls: bool = False
    """The env limits the time of its calls, and ``rollout.env_timeout`` does not apply: for work that waits in a queue elsewhere."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def reset(self) -> list[Message] | None:
        """The messages the episode starts with; ``None`` for the task's own prompt."""
        return None

    @abc.abstractmethod
    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        """Play one response. Returns the observation (see :func:`obs`), whether the episode is done, and ``info``.

        ``info["reward"]`` is added to the trajectory's reward; the other numbers in ``info`` become metrics.
        ``info["points"]``, ``[{"label": "click", "at": [[0.5, 0.25]]}]``, are where the response acted on the last image before it, in
        fractions of its width and height; they are drawn on the page of trajectories.
        ``info["state"]`` names the state after the step, a string or an integer, for ``algo.credit gigpo``.
        ``info["compact"]`` true asks ``rollout.history compact`` to summarize the conversation before the next response.
        """

    def finish(self, ending: str) -> float | None:
        """Called once per episode, unless it failed; the return value is added to the reward.

        ``ending`` is ``env_done``, or the budget that ended the episode: ``max_turns``, ``max_tokens`` or ``length``.
        """
        return None if ending == "env_done" else self.unfinished_reward

    def format_observation(self, observation: dict[str, Any]) -> Message | list[Message]:
        """The message that the model reads: role ``user``, images first, then the text."""
        images = observation.get("multi_modal_data", {}).get("image", [])
        text = observation.get("obs_str", "")
        if not images:
            return {"role": "user", "content": text}
        parts: list[dict[str, Any]] = [{"type": "image", "image": image} for image in images]
        return {"role": "user", "content": [*parts, {"type": "text", "text": text}] if text else parts}

    def close(self) -> None:
        """Release the env's resources. Called once, also after an error."""


class RewardEnv(Env):
    """A single turn scored by functions ``reward(text, task) -> float``, each with its weight, also if the response was cut off.

    They may be ``async``: then ``step`` and ``finish`` return coroutines.
    """

    def __init__(self, task: Task, functions: Mapping[Callable[[str, Task], Any], float]) -> None:
        super().__init__(task)
        self.functions = functions
        self.info_of_cut: dict[str, Any] = {}
        """The ``info`` of a response that was cut off, which ``step`` does not get."""

    def step(self, response_text: str) -> Any:
        return self._scored(response_text, lambda info: (obs(), True, info))

    def finish(self, ending: str) -> Any:
        return self._scored(self.last_response, self._reward_of_cut) if ending in TRUNCATED else None

    def _reward_of_cut(self, info: dict[str, Any]) -> Any:
        self.info_of_cut = info
        return info["reward"]

    def _scored(self, text: str, result: Callable[[dict[str, Any]], Any]) -> Any:
        """The ``result`` of the scores of a text, or a coroutine of it."""
        scores = [function(text, self.task) for function in self.functions]
        return self._awaited(scores, result) if any(map(inspect.isawaitable, scores)) else result(self._info(scores))

    async def _awaited(self, scores: list[Any], result: Callable[[dict[str, Any]], Any]) -> Any:
        return result(self._info([await score if inspect.isawaitable(score) else score for score in scores]))

    def _info(self, scores: list[Any]) -> dict[str, Any]:
        """The reward, and with several functions or a weight the score of each."""
        weights = list(self.functions.values())
        if weights == [1.0]:
            return {"reward": scores[0]}
        total = None if None in scores else sum(map(mul, weights, scores))
        # The sum last, and not one of the functions, which may have the name, too.
        return {**dict(zip(map(_name, self.functions), scores, strict=True)), "reward": total}


@dataclass(frozen=True)
class EnvSpec:
    """An env class or factory with checked options: ``spec.build(task)`` makes the env of one trajectory.

    ``tools`` and ``replayable`` are the class's attributes; an instance may set its own. ``parts`` are the specs of a mixture by part.
    """

    name: str
    build: Callable[[Task], Env]
    tools: list[dict[str, Any]] = field(default_factory=list)
    parts: Mapping[str, EnvSpec] = field(default_factory=dict)
    replayable: bool = True

    def of(self, task: Task) -> EnvSpec:
        """The spec of the task's part."""
        return self.parts[task.part] if self.parts else self


def resolve_envs(config: Config) -> EnvSpec:
    """The spec of a run's env, or that of its mixture, where each part has its own or else the run's."""

    def resolved(player: Config | Part, options: dict[str, Any]) -> EnvSpec:
        return resolve_env(player.env, player.reward, options)

    if not config.mixture:
        return resolved(config, config.env_options)
    own = resolved(config, config.env_options) if config.env is not None or config.reward is not None else None
    parts: dict[str, EnvSpec] = {}
    for name, part in config.mixture.items():
        if part.env is not None or part.reward is not None:
            parts[name] = resolved(part, part.env_options)
        elif own is None:
            raise ValueError(f"mixture.{name}.env must be set, or else env, for all parts that have none of their own.")
        else:
            parts[name] = resolved(config, config.env_options | part.env_options) if part.env_options else own
    names = ", ".join(f"{name}: {spec.name}" for name, spec in parts.items())
    tools = [tool for spec in parts.values() for tool in spec.tools]
    return EnvSpec(names, lambda task: parts[task.part].build(task), tools, parts)


def _reward_function(code: str | Callable[..., Any]) -> Callable[[str, Task], float]:
    function = find_function("reward", code, ["text", "task"], {})
    signature = inspect.signature(function)
    if foreign := {"completions", "solution_str"} & set(signature.parameters):
        raise ValueError(
            f"reward {_name(function)}{signature} has the parameter {min(foreign)!r} of TRL's or verl's reward functions. vlmrl calls "
            "function(text, task) with one response: wrap it (docs/porting.md#reward-functions)."
        )
    return resolve_function("reward", function, ["text", "task"])


def resolve_env(
    env: str | Callable[..., Any] | None,
    reward: Codes = None,
    options: dict[str, Any] | None = None,
) -> EnvSpec:
    """The spec of ``env`` (a class, a factory, ``module:Name`` or ``file.py:Name``) or of a ``reward`` function.

    Checks what can be checked before anything is played: that it exists, that it is an Env with a ``step``, that ``options`` fit
    its signature. Calls its ``setup(**options)`` once. Raises ValueError naming what is wrong.
    """
    options = options or {}
    if env is None and reward is None:
        raise ValueError("env must be set, or in its place reward, agent or rollout.generate: none of them is.")
    check_env_or_reward("", env, reward)
    if reward is not None:
        named = {_reward_function(code): weight for code, weight in weights_of(reward).items()}
        return EnvSpec(" + ".join(map(_name, named)), partial(RewardEnv, functions=named))
    target = load_code("env", env)
    name = _name(target)
    if not callable(target):
        raise ValueError(
            f"env {name} must be a class or a function that builds an env, but it is a {type(target).__name__}."
        )
    if isinstance(target, type):
        _check_class(target, name)
    check_options("env_options", target, 1, options)
    shared = _set_up(target, options, name) if hasattr(target, "setup") else None
    tools, replayable = getattr(target, "tools", []), getattr(target, "replayable", True)
    build = partial(_build, target, options, name, shared)
    tools = [] if isinstance(tools, property) else tools  # of an instance: the session checks them
    check_tools(tools, f"env {name}")
    return EnvSpec(name, build, tools, replayable=replayable is not False)


def _set_up(target: Any, options: dict[str, Any], name: str) -> Any:
    shared = target.setup(**options)
    if not inspect.isawaitable(shared):
        return shared
    if inspect.iscoroutine(shared):
        shared.close()
    raise ValueError(
        f"env {name}: setup must be a plain classmethod: it runs once, before there is an event loop. Call asyncio.run in it, and "
        "make objects of an event loop (a client, a lock) in reset."
    )


def _build(target: Callable[..., Any], options: dict[str, Any], name: str, shared: Any, task: Task) -> Env:
    if isinstance(target, type):
        env: Env = target.__new__(target)  # type: ignore[call-overload]
        env.task, env.shared, env.seed = task, shared, task.seed  # there already when __init__ runs
        env.__init__(task, **options)  # type: ignore[misc]
        return env
    env = target(task, **options)
    if not isinstance(env, Env):
        raise ValueError(f"env factory {name} must return a vlmrl.Env, but it returned a {type(env).__name__}.")
    env.shared, env.seed = shared, task.seed
    return env


def _check_class(cls: type, name: str) -> None:
    if not callable(getattr(cls, "step", None)):
        raise ValueError(f"env {name} must define step(self, response_text), but it does not.")
    for method in sorted(getattr(cls, "__abstractmethods__", ())):
        arguments = ", ".join(inspect.signature(getattr(cls, method)).parameters)
        raise ValueError(f"env {name} must define {method}({arguments}), but it does not.")
    if not issubclass(cls, Env):
        raise ValueError(
            f"env {name} must subclass vlmrl.Env, but its bases are {[base.__name__ for base in cls.__bases__]}."
        )


def _name(target: Any) -> str:
    return getattr(target, "__qualname__", repr(target))
