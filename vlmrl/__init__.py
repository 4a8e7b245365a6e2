"""vlmrl: reinforcement learning for vision-language agents over many turns."""

from collections.abc import Callable

from vlmrl.adapters.gymnasium import GymnasiumEnv
from vlmrl.adapters.mcp import McpEnv
from vlmrl.adapters.openenv import OpenEnvEnv
from vlmrl.config import Algo, Checkpoint, Config, Data, Eval, Model, Optim, Part, Rollout, Train, WarmStart
from vlmrl.env import Env, RetryTurn, obs
from vlmrl.images import load_image
from vlmrl.judge import Judge, JudgeError, weighted_reward
from vlmrl.remote.client import RemoteEnv
from vlmrl.tools import ToolCall, ToolEnv, read_tool_calls
from vlmrl.types import Message, Sample, Task, Trajectory, Turn

__version__ = "0.1.0"
__all__ = [
    "Algo",
    "Checkpoint",
    "Config",
    "Data",
    "Env",
    "Eval",
    "GymnasiumEnv",
    "Judge",
    "JudgeError",
    "McpEnv",
    "Message",
    "Model",
    "OpenEnvEnv",
    "Optim",
    "Part",
    "RemoteEnv",
    "RetryTurn",
    "Rollout",
    "Sample",
    "Task",
    "ToolCall",
    "ToolEnv",
    "Train",
    "Trajectory",
    "Turn",
    "WarmStart",
    "load_image",
    "main",
    "obs",
    "read_tool_calls",
    "weighted_reward",
]


def main(config: Callable[[], Config]) -> None:
    """Run a recipe as a program: ``python recipe.py --optim.lr 1e-6`` is ``vlmrl train recipe.py --optim.lr 1e-6``."""
    from vlmrl.cli import run_recipe

    run_recipe(config)
