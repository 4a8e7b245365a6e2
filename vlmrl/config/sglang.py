"""Settings of SGLang servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from vlmrl.config.fields import Options
from vlmrl.config.servers import ServerSettings


@dataclass(frozen=True)
class SGLang(ServerSettings):
    section: ClassVar[str] = "sglang"
    """Name of the section in the config."""
    args: Options = field(default_factory=dict)
    """Arguments of `sglang.launch_server` for servers that the run starts, such as `mem-fraction-static 0.6 quantization fp8`.
    They override those that vlmrl sets."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("api-key", "admin-api-key"):
            if name in argument_names(self.args):
                raise ValueError(
                    f"sglang.args must not contain {name}: a secret does not belong into a recorded config. Servers that the run "
                    "starts get a token of their own if other machines can reach them; for running servers, set the environment "
                    "variable VLMRL_SERVER_TOKEN."
                )


def argument_names(args: Mapping[str, Any]) -> dict[str, Any]:
    """``args`` by the names that SGLang's help shows: ``{"mem_fraction_static": 0.4}`` as ``{"mem-fraction-static": 0.4}``."""
    return {name.lstrip("-").replace("_", "-"): value for name, value in args.items()}
