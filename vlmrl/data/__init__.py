"""Datasets and generators become tasks, drawn in a reproducible order."""

from vlmrl.data.mixture import TaskMixture, Tasks, contents, load_run_tasks
from vlmrl.data.source import TaskSource, load_split, load_tasks, task_seed
from vlmrl.data.stream import Draw, PromptLength, TaskStream

__all__ = [
    "Draw",
    "PromptLength",
    "TaskMixture",
    "TaskSource",
    "TaskStream",
    "Tasks",
    "contents",
    "load_run_tasks",
    "load_split",
    "load_tasks",
    "task_seed",
]
