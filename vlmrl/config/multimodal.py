"""Settings of images in host memory."""

from __future__ import annotations

from dataclasses import dataclass

from vlmrl.config.fields import Settings, positive


@dataclass(frozen=True)
class Multimodal(Settings):
    """Images in host memory: how much of it they may take."""

    section = "multimodal"
    memory_gib: float | None = None
    """Host memory of each process for images' pixels in GiB.
    Beyond it, the least recently used images are moved to a file in the system's folder for temporary files (`TMPDIR`).
    Unset: a quarter of the memory of this machine or container. Processes that `torchrun` starts there share it."""

    def __post_init__(self) -> None:
        positive("multimodal", self, "memory_gib")
