"""Settings of SGLang servers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from vlmrl.config.fields import Options
from vlmrl.config.servers import ServerSettings


@dataclass(frozen=True)
class SGLang(ServerSettings):
    section: ClassVar[str] = "sglang"
    """Name of the section in the config."""
    args: Options = field(default_factory=dict)
    """Arguments of `sglang.launch_server` for servers that the run starts, such as `mem-fraction-static 0.6 quantization fp8`.
    They override those that vlmrl sets."""
