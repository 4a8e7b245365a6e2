"""Replaces the forward of Hugging Face modules; class names and parameters stay."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from torch import nn

Forward = Callable[..., Any]


def use_forward(modules: Iterable[nn.Module], ours: Callable[[Forward], Forward]) -> None:
    """Make each module one of a subclass with the forward ``ours(its class's own forward)``. A second call replaces the first.

    All modules of a class share one function: torch.compile would compile the code that calls them again for each further one.
    """
    for module in modules:
        kind: Any = type(module)
        module.__class__ = _subclass(getattr(kind, "replaced_class", kind), ours)


@cache
def _subclass(kind: type[nn.Module], ours: Callable[[Forward], Forward]) -> type[nn.Module]:
    fields = {"forward": ours(kind.forward), "replaced_class": kind, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), fields)
