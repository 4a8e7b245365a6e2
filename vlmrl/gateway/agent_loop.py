"""Plays episodes with an agent: opens a URL for each trajectory, runs the agent, and computes the reward."""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from vlmrl.config import Rollout, name_of
from vlmrl.engine.base import Engine
from vlmrl.gateway.agents import AgentError, Agents
from vlmrl.gateway.episode import AgentEpisode
from vlmrl.multimodal.images import copy_on_write
from vlmrl.multimodal.renderer import Renderer
from vlmrl.multimodal.store import MediaStore
from vlmrl.types import Task, Trajectory
from vlmrl.utils.threads import DaemonPool
from vlmrl.utils.user_loop import REWARDS
from vlmrl.utils.users_line import describe_error
from vlmrl.utils.work_pool import cpu_pool


@dataclass(eq=False, repr=False)
class AgentLoop:
    """Plays episodes with the user's agent; has the interface of the turn loop."""

    agents: Agents
    engine: Engine
    renderer: Renderer
    store: MediaStore | None
    config: Rollout
    seed: int

    async def play(self, task: Task, group_id: str, trajectory_id: str) -> Trajectory:
        """Play one episode. A failure of the agent makes the trajectory fail."""
        trajectory = Trajectory(trajectory_id, group_id, task)
        episode = AgentEpisode(trajectory, self.engine, self.renderer, self.store, self.config, self.seed)
        began = time.perf_counter()
        result, failure = None, None
        try:
            client = await self.agents.server.open(episode)
            try:
                own = await cpu_pool().run(math.inf, task.copy, copy_on_write)
                result = await self.agents.run(own, client, trajectory_id)
            except AgentError as error:
                failure = str(error)
            finally:
                self.agents.server.close_episode(client)
        finally:
            episode.finish()
            self.engine.release(trajectory_id)
        trajectory.metrics["agent_seconds"] = time.perf_counter() - began
        try:
            await self._end(trajectory, episode, result, failure)
        except AgentError as error:
            trajectory.ending = "aborted" if episode.aborted else "error"
            trajectory.error = f"agent {self.agents.spec.name}, task {task.id}: {error}"
        return trajectory

    async def _end(self, trajectory: Trajectory, episode: AgentEpisode, result: Any, failure: str | None) -> None:
        """Set the ending, the reward and the metrics. Raises AgentError if the trajectory failed.

        An agent that fails after a budget refused a request or cut a response has not failed: its episode is truncated.
        """
        if episode.failure is not None:
            raise AgentError(episode.failure)
        if failure is not None and episode.limit is None:
            raise AgentError(failure)
        if not trajectory.turns:
            raise AgentError(_no_response(episode))
        trajectory.ending = episode.limit or "env_done"
        try:
            returned, metrics = _outcome(result)
        except AgentError:
            raise
        except Exception as error:  # the agent's own objects, or a number beyond floats
            raise AgentError(f"what it returned cannot be read: {type(error).__name__}: {error}") from error
        trajectory.metrics |= metrics
        given = [reward for reward in (returned, episode.posted_reward) if reward is not None]
        trajectory.final_reward = sum(given) if given else None
        if self.agents.spec.reward is not None:
            trajectory.final_reward = await self._computed(trajectory)
        if trajectory.reward is None and episode.limit is not None:
            trajectory.final_reward = self.config.truncated_reward
        if trajectory.reward is None:
            raise AgentError(_no_reward(trajectory.ending, episode.limit is not None, failure))

    async def _computed(self, trajectory: Trajectory) -> float:
        """What the function ``reward`` returns for the trajectory, whose reward is what the agent gave."""
        function = self.agents.spec.reward
        assert function is not None
        thread = DaemonPool("reward")
        try:
            async with asyncio.timeout(self.config.env_timeout):
                reward = await thread.run(function, trajectory)
            if inspect.isawaitable(reward):
                reward = await REWARDS.run_within(self.config.env_timeout, reward)
        except Exception as error:
            what = describe_error(error)
            if isinstance(error, TimeoutError):
                what = str(error) or f"no answer in {self.config.env_timeout:g} s"
            raise AgentError(f"reward {name_of(function)}: {what}") from error
        finally:
            thread.close()
        return _number(f"reward {name_of(function)} must return", reward)


def _outcome(result: Any) -> tuple[float | None, dict[str, float]]:
    """The reward and the metrics of what an agent returned: ``{"reward": 1, "lines": 3}`` gives ``(1.0, {"lines": 3.0})``."""
    rule = "it must return a reward, a dict with `reward` and metrics, or None;"
    if not isinstance(result, Mapping):
        return None if result is None else _number(f"{rule} it returned", result), {}
    numbers = {
        str(name): _number(f"{rule} its {name!r} is", value) for name, value in result.items() if value is not None
    }
    return numbers.pop("reward", None), numbers


def _number(what: str, value: Any) -> float:
    """``value`` as a finite number; NumPy's and torch's scalars too."""
    plain = value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value
    if not isinstance(plain, Real) or not math.isfinite(plain):
        raise AgentError(f"{what} {value!r:.200}, which is not a finite number.")
    return float(plain)


def _no_response(episode: AgentEpisode) -> str:
    if episode.limit is not None:
        return f"its first request was refused ({episode.limit}): raise rollout.{episode.limit}, or send less."
    return "it got no response from the model: send requests to client.base_url (a command: OPENAI_BASE_URL)."


def _no_reward(ending: str, is_cut: bool, failure: str | None) -> str:
    remedy = "return one, post one to client.reward_url (a command: VLMRL_REWARD_URL), or set reward to a function of the trajectory"
    if is_cut:
        remedy += ", or set rollout.truncated_reward"
    cause = f" The agent failed then: {failure}" if failure else ""
    return f"the episode ended ({ending}) without a reward: {remedy}.{cause}"
