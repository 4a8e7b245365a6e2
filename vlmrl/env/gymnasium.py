"""A Gymnasium environment whose observation is a frame, as an Env.

class CartPole(GymnasiumEnv):
    def make(self):
        return self.gymnasium.make("CartPole-v1", render_mode="rgb_array")

    def read_actions(self, reply):
        if reply not in ("left", "right"):
            raise ValueError("Say left or right.")
        return [int(reply == "right")]
"""

from __future__ import annotations

import abc
import os
from typing import Any

import numpy as np
from PIL import Image

from vlmrl.config.code import import_extra
from vlmrl.env.base import Env, obs
from vlmrl.types import Message


class GymnasiumEnv(Env):
    """Plays the environment of :meth:`make`, seeded by the task: each reply is one or more actions, each answer the frame after.

    The first frame stands before the text of the prompt's last message. A frame is the observation itself where that is an RGB
    image (uint8, ``[height, width, 3]``), and otherwise what ``render()`` gives, so make it with ``render_mode="rgb_array"``.
    The reward is the sum of the environment's own, also where the episode is cut off.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        os.environ.setdefault(
            "SDL_VIDEODRIVER", "dummy"
        )  # pygame, which renders for many of them, then needs no display

    @classmethod
    def setup(cls, **options: Any) -> Any:
        return import_extra("gymnasium", "gymnasium")  # found missing at the start, not in the first episode

    @property
    def gymnasium(self) -> Any:
        """The module."""
        return import_extra("gymnasium", "gymnasium")

    @abc.abstractmethod
    def make(self) -> Any:
        """The ``gymnasium.Env`` of this task; what varies from task to task may depend on ``self.seed``."""

    @abc.abstractmethod
    def read_actions(self, reply: str) -> list[Any]:
        """The actions a reply asks for. What a ValueError says is told to the model, and nothing is played."""

    def describe(self, info: dict[str, Any]) -> str:
        """The text beside a frame, from the environment's ``info``."""
        return ""

    def reset(self) -> list[Message]:
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame, which draws for many of them, then needs no display
        self.gym = self.make()
        observation, _ = self.gym.reset(seed=self.seed)
        *before, last = self.task.prompt
        text = last["content"]
        parts = [{"type": "text", "text": text}] if isinstance(text, str) else text
        return [*before, {**last, "content": [{"type": "image", "image": self._frame(observation)}, *parts]}]

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        try:
            actions = self.read_actions(response_text)
            if not actions:
                raise ValueError("The reply names no action.")
        except ValueError as error:
            return obs(str(error)), False, {"reward": 0.0, "actions": 0, "invalid": 1}
        total, over, played, observation, info = 0.0, False, 0, None, {}
        while played < len(actions) and not over:
            observation, reward, terminated, truncated, info = self.gym.step(actions[played])
            total, over, played = total + float(reward), terminated or truncated, played + 1
        shown = obs() if over else obs(self.describe(info), images=[self._frame(observation)])
        return shown, over, {"reward": total, "actions": played, "invalid": 0}

    def finish(self, ending: str) -> float | None:
        return 0.0  # what was earned until then stands

    def close(self) -> None:
        if hasattr(self, "gym"):
            self.gym.close()

    def _frame(self, observation: Any) -> Image.Image:
        is_image = isinstance(observation, np.ndarray) and observation.dtype == np.uint8 and observation.ndim == 3
        frame = observation if is_image else self.gym.render()
        if not isinstance(frame, np.ndarray):
            raise ValueError(
                f"{type(self).__name__}: render() gave {frame!r:.80}, no frame: make it with render_mode='rgb_array'."
            )
        return Image.fromarray(frame)
