"""Refuses, before a server starts, settings and models that its program cannot serve."""

from __future__ import annotations

import importlib.util

from vlmrl.config import Config
from vlmrl.engine.base import SamplingParams
from vlmrl.engine.server_backend import ServerBackend
from vlmrl.model.loading import Reader
from vlmrl.weight_sync import SENDERS


def is_installed(package: str) -> bool:
    """Whether ``package`` can be imported here. A folder of that name without an `__init__.py` does not count."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def check_installed(backend: ServerBackend) -> None:
    """Raises ValueError if servers are to be started and their program is not installed; the message says how to install it."""
    settings = backend.settings
    if settings.urls or settings.python is not None:
        return
    if not is_installed(backend.package):
        raise ValueError(
            f"engine {backend.name} starts {backend.title} servers, and {backend.title} is not installed: "
            f"{backend.install or f'install {backend.package}'}, or set server.python to an interpreter that has it, or server.urls "
            "to running servers."
        )


def check_sync(config: Config) -> None:
    """Raises ValueError if ``server.sync`` names no way to send weights. The recipe may have registered its own."""
    sync = config.server.sync
    if sync != "auto" and sync not in SENDERS:
        raise ValueError(f"server.sync must be one of {', '.join(['auto', *sorted(SENDERS)])}, but it is {sync!r}.")


def check_model(backend: ServerBackend, model: Reader, model_type: str) -> None:
    """Raises ValueError for a model that the program cannot serve, and for a limit of images that its image processor would undo.

    It does not know ``model.max_image_pixels``, and some processors scale small images up.
    """
    if reason := backend.unsupported_models.get(model_type):
        raise ValueError(
            f"engine {backend.name} cannot serve models of the type {model_type}: {reason}. Set engine to embedded."
        )
    if model.image_processor is None or model.max_image_pixels is None:
        return
    sent = model.family.resized(model.image_processor, (4096, 4096), model.max_image_pixels)
    read = model.family.resized(model.image_processor, sent, None)
    if sent != read:
        raise ValueError(
            f"model.max_image_pixels must be None with engine {backend.name} and this model, but it is {model.max_image_pixels}: the "
            f"server's image processor would scale images of {sent[0]}x{sent[1]} pixels to {read[0]}x{read[1]}. Lower the limits of "
            f"size in {model.path}/preprocessor_config.json instead."
        )


def check_capabilities(
    backend: ServerBackend, config: Config, *, method: str, colocated: bool, expert_routing: bool
) -> None:
    """Raises ValueError if ``config`` needs more than the program can do.

    ``method``: how weights are sent. ``expert_routing``: training replays the experts of a mixture-of-experts model.
    """
    able, rollout = backend.capabilities, config.rollout
    played = able.refusal(SamplingParams(1, rollout.temperature, rollout.top_p, rollout.top_k))
    evaluated = able.refusal(SamplingParams(1, config.eval.temperature))
    methods = ", ".join(sorted(SENDERS.keys() - {"tensor"}))
    rules = [
        (not played, f"rollout.{played}"),
        (not evaluated, f"eval.{evaluated}"),
        (
            able.expert_routing or not expert_routing,
            "train.replay_routing must be False: it returns no experts",
        ),
        (able.sleep or not colocated, "server.first_gpu must name other GPUs than the trainer's: it cannot sleep"),
        (
            able.tensor_handles or method != "tensor",
            f"server.sync must be one of {methods}: it takes no tensor handles",
        ),
    ]
    for kept, rule in rules:
        if not kept:
            raise ValueError(f"with engine {backend.name}, {rule}.")


def check_memory_is_set(backend: ServerBackend) -> None:
    """Raises ValueError unless a setting limits the memory of servers on the GPUs of a trainer that never leaves them."""
    if not backend.sets_memory:
        argument = backend.memory_args[0] if backend.memory_args else "their memory"
        raise ValueError(
            f"server.first_gpu must name GPUs without a trainer rank, but it is {backend.settings.first_gpu}: under torchrun, and "
            "with train.max_staleness above 0, servers on a rank's GPU do not sleep during training. Choose other GPUs, or set "
            f"{argument} in server.args to what the trainer leaves."
        )
