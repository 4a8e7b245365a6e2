"""Settings of inference servers, common to all server programs."""

from __future__ import annotations

from dataclasses import dataclass, field

from vlmrl.config.fields import Options, Settings, positive
from vlmrl.utils.require import require


@dataclass(frozen=True)
class ServerSettings(Settings):
    section = "server"
    urls: tuple[str, ...] = ()
    """Addresses of running (external) servers, such as `http://node7:30000`. Unset: the run starts its own servers.
    If they want an API key, put it in the environment variable `VLMRL_SERVER_TOKEN`: it is sent to each of them."""
    tp: int = 1
    """GPUs per server (tensor parallel size). Raise it if the model's weights and KV cache do not fit one GPU."""
    first_gpu: int = 0
    """Index of the first GPU that the servers use. Set it to the first one without a trainer rank, to sample on GPUs of their own."""
    args: Options = field(default_factory=dict)
    """Command line arguments of the server program, such as `--server.args quantization fp8`.
    They override those that vlmrl sets, for servers that the run starts."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the servers that the run starts."""
    python: str | None = None
    """Python interpreter that runs the servers. Unset: the one that runs vlmrl.
    Set it if the server program is installed in an environment of its own."""
    sync: str = "auto"
    """How weights are sent, or a name registered in `vlmrl.weight_sync.SENDERS`.
    `tensor`: handles of GPU memory that both processes map (CUDA IPC); from a CPU, the values.
    `group`: a process group (NCCL or gloo).
    `disk`: a folder that both processes read.
    `auto`: `tensor` for servers on this machine without Ray, and for servers on the ranks' GPUs with Ray; otherwise `group`.
    A server program that takes no handles gets `group` instead of `tensor`, or `disk` on the trainer's GPUs."""
    check: bool = True
    """Startup parity check: compare weight checksums and logprobs with the trainer's, and refuse a server that differs."""
    start_timeout: float = 600.0
    """Time limit in seconds for a server to start or to load weights from a folder, and for a request to wait for a server.
    Raise it for a large model on a slow disk."""

    def __post_init__(self) -> None:
        positive(self.section, self, "tp", "start_timeout")
        require(self.first_gpu >= 0, "server.first_gpu", "0 or more", self.first_gpu)
        rule = "addresses with http:// or https://"
        for url in self.urls:
            require(url.startswith(("http://", "https://")), "server.urls", rule, url)
