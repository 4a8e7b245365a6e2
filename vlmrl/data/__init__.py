"""From datasets and generators to tasks, and the order in which they are drawn."""

from vlmrl.data.source import TaskSource, load_tasks, task_seed
from vlmrl.data.stream import TaskStream

__all__ = ["TaskSource", "TaskStream", "load_tasks", "task_seed"]
