"""Sets a thread's default GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, TypeVar, cast

import torch

Method = TypeVar("Method", bound=Callable[..., Any])


def current_gpu(device: torch.device) -> AbstractContextManager[Any]:
    """Within the context, ``device`` is this thread's current GPU, if it is one.

    In a new thread GPU 0 is. Whatever torch does without naming a device would give it a context of about 500 MiB.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def on_policy_gpu(method: Method) -> Method:
    """A method of an object with a ``policy`` that runs with the policy's GPU as the current one."""

    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with current_gpu(self.policy.device):
            return method(self, *args, **kwargs)

    return cast(Method, run)
