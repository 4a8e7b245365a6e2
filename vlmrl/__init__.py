"""vlmrl: reinforcement learning for vision-language agents over many turns.

The names for recipes and environments; :mod:`vlmrl.parts` has those for a training loop of your own.
"""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vlmrl.config import (
    SFT,
    Algo,
    Checkpoint,
    Cluster,
    Config,
    Conversations,
    Data,
    Eval,
    EvalData,
    Gateway,
    Lora,
    Model,
    Optim,
    Part,
    Report,
    Rollout,
    ServerSettings,
    Teacher,
    Train,
    WarmStart,
)
from vlmrl.env.base import Env, RetryTurn, obs
from vlmrl.env.browser.browser_env import BrowserEnv
from vlmrl.env.browser.miniwob import MiniWobEnv
from vlmrl.env.gymnasium import GymnasiumEnv
from vlmrl.env.judge import Judge, JudgeError, weighted_reward
from vlmrl.env.mcp import McpEnv
from vlmrl.env.openenv import OpenEnvEnv
from vlmrl.env.remote.client import RemoteEnv
from vlmrl.env.tool_calls import ToolCall, read_tags, read_tool_calls
from vlmrl.env.tools import ToolEnv, ToolResult
from vlmrl.multimodal.images import data_uri, load_image
from vlmrl.multimodal.openai_messages import openai_messages
from vlmrl.report.run_data import load_run
from vlmrl.types import Message, Sample, Task, Trajectory, Turn
from vlmrl.utils.bounded import BoundedFunction, LimitError

if TYPE_CHECKING:
    from vlmrl.run.library import TrainResult
    from vlmrl.run.library import train_config as train
else:
    from vlmrl import train

__version__ = "0.1.0"
__all__ = [
    "SFT",
    "Algo",
    "BoundedFunction",
    "BrowserEnv",
    "Checkpoint",
    "Cluster",
    "Config",
    "Conversations",
    "Data",
    "Env",
    "Eval",
    "EvalData",
    "Gateway",
    "GymnasiumEnv",
    "Judge",
    "JudgeError",
    "LimitError",
    "Lora",
    "McpEnv",
    "Message",
    "MiniWobEnv",
    "Model",
    "OpenEnvEnv",
    "Optim",
    "Part",
    "RemoteEnv",
    "Report",
    "RetryTurn",
    "Rollout",
    "Sample",
    "ServerSettings",
    "Task",
    "Teacher",
    "ToolCall",
    "ToolEnv",
    "ToolResult",
    "Train",
    "Trajectory",
    "Turn",
    "WarmStart",
    "data_uri",
    "load_image",
    "load_run",
    "main",
    "obs",
    "openai_messages",
    "read_tags",
    "read_tool_calls",
    "train",
    "weighted_reward",
]


def main(config: Callable[[], Config]) -> None:
    """Run a recipe as a program: ``python recipe.py --optim.lr 1e-6`` is ``vlmrl train recipe.py --optim.lr 1e-6``.

    It reads the command line and ends the process. From Python, and in a notebook, call :func:`vlmrl.train`.
    """
    if "ipykernel" in sys.modules:
        raise ValueError("vlmrl.main(config) is for programs. In a notebook call vlmrl.train(config()).")
    from vlmrl.cli.train import run_recipe

    run_recipe(config)


class _TrainRoom(ModuleType):
    """The package ``vlmrl.train``, callable as the function of that name: an import of its modules binds the name to it."""

    def __call__(self, config: Config, **options: Any) -> "TrainResult":
        from vlmrl.run.library import train_config

        return train_config(config, **options)


sys.modules["vlmrl.train"].__class__ = _TrainRoom


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
