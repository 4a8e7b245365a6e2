"""vlmrl: reinforcement learning for vision-language agents over many turns."""

from vlmrl.env import Env, RetryTurn, obs
from vlmrl.types import Message, Sample, Task, Trajectory, Turn

__version__ = "0.1.0"
__all__ = ["Env", "Message", "RetryTurn", "Sample", "Task", "Trajectory", "Turn", "obs"]
