"""Gymnasium environments as Envs, with rendered frames as observations.

class CartPole(GymnasiumEnv):
    def make(self):
        return self.gymnasium.make("CartPole-v1", render_mode="rgb_array")

    def read_actions(self, response):
        if response not in ("left", "right"):
            raise ValueError("Say left or right.")
        return [int(response == "right")]
"""

from __future__ import annotations

import abc
import os
import threading
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from types import BuiltinFunctionType
from typing import Any

import numpy as np
from PIL import Image

from vlmrl.env.base import Env, obs
from vlmrl.types import Message
from vlmrl.utils.require import import_extra, moderate_number

_DRAWING = threading.Lock()


class GymnasiumEnv(Env):
    """The environment that :meth:`make` returns, seeded by the task. A response is one or more actions, the observation the
    last frame.

    The first frame comes before the text of the prompt's last message. A frame is the observation itself if that is an image (uint8,
    ``[height, width, channels]``, 1 or 3 channels), and otherwise, also for stacked frames, the result of ``render()``, so make the
    environment with ``render_mode="rgb_array"``.
    The reward is the sum of the environment's rewards, also if the episode is cut off.
    """

    unfinished_reward = 0.0  # beside the rewards so far

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # so that pygame, which many render with, needs no display
        os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")

    @classmethod
    def setup(cls, **options: Any) -> Any:
        return import_extra("gymnasium", "gymnasium")  # fails at startup if it is missing

    @property
    def gymnasium(self) -> Any:
        """The module ``gymnasium``."""
        return import_extra("gymnasium", "gymnasium")

    @abc.abstractmethod
    def make(self) -> Any:
        """The ``gymnasium.Env`` of this task, which may depend on ``self.task`` and ``self.seed``."""

    @abc.abstractmethod
    def read_actions(self, response: str) -> list[Any]:
        """The actions in a response. The text of a ValueError becomes the observation, and no action is taken."""

    def describe(self, info: dict[str, Any]) -> str:
        """The text after a frame, from the environment's ``info``."""
        return ""

    def reset(self) -> list[Message]:
        _draw_in_turn()
        self.gym = self.make()
        observation, _ = self.gym.reset(seed=self.seed)
        *before, last = self.task.prompt
        text = last["content"]
        parts = [{"type": "text", "text": text}] if isinstance(text, str) else text
        return [*before, {**last, "content": [{"type": "image", "image": self._frame(observation)}, *parts]}]

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        try:
            actions = self.read_actions(response_text)
        except ValueError as error:
            return self._refused(str(error))
        if not isinstance(actions, list | tuple):
            raise TypeError(
                f"read_actions of {type(self).__name__} must return a list of actions, but it returned {actions!r:.80}."
            )
        if not actions:
            return self._refused("The response names no action.")
        total, done, taken, observation, info = 0.0, False, 0, None, {}
        while taken < len(actions) and not done:
            observation, reward, terminated, truncated, info = self.gym.step(actions[taken])
            total, done, taken = total + float(reward), terminated or truncated, taken + 1
        total = moderate_number(total, f"the reward of {type(self).__name__}")  # actions may break a simulation
        frame = obs() if done else obs(self.describe(info), images=[self._frame(observation)])
        return frame, done, {"reward": total, "actions": taken, "invalid": 0}

    def _refused(self, why: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        return obs(why), False, {"reward": 0.0, "actions": 0, "invalid": 1}

    def close(self) -> None:
        if hasattr(self, "gym"):
            self.gym.close()

    def _frame(self, observation: Any) -> Image.Image:
        is_image = isinstance(observation, np.ndarray) and observation.dtype == np.uint8 and observation.ndim == 3
        frame = observation if is_image and observation.shape[2] in (1, 3) else self.gym.render()
        if not isinstance(frame, np.ndarray):
            raise ValueError(
                f"{type(self).__name__}: render() must return an array, but it returned {frame!r:.80}; "
                "make the environment with render_mode='rgb_array'."
            )
        return Image.fromarray(frame[:, :, 0] if frame.ndim == 3 and frame.shape[2] == 1 else frame)


def _draw_in_turn() -> None:
    """Let one thread at a time draw with ``pygame.gfxdraw``, where it is installed.

    All threads share its buffer of a polygon's lines, and it draws without the interpreter's lock: in frames of several episodes at
    once, some lines were those of another one.
    """
    try:
        gfxdraw = import_module("pygame.gfxdraw")  # of gymnasium's own extras
    except ImportError:
        return
    with _DRAWING:
        for name, draw in list(vars(gfxdraw).items()):
            if isinstance(draw, BuiltinFunctionType):
                setattr(gfxdraw, name, _in_turn(draw))


def _in_turn(draw: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(draw)
    def drawing(*args: Any, **options: Any) -> Any:
        with _DRAWING:
            return draw(*args, **options)

    return drawing
