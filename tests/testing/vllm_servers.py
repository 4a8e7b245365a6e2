"""A run with a real vLLM server on the CPU: its config, and what it reports about its load."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import Request as UrlRequest
from urllib.request import urlopen

from testing import real_servers
from vlmrl.config import Config, ServerSettings
from vlmrl.engine.server import Server
from vlmrl.utils.tokens import bearer

SHIM = Path(__file__).parents[1] / "vllm/shim"


def vllm_config(model: Path, folder: Path, dtype: str = "float32", **settings: Any) -> Config:
    """The config of the tests with real servers, for vLLM."""
    env = {"PYTHONPATH": str(SHIM), "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    args = {"max-model-len": 4096}
    server = ServerSettings(**({"args": args, "env": env, "start_timeout": 900.0} | settings))
    return replace(real_servers.config_of(model, folder, dtype), engine="vllm", server=server)


def gauge(server: Server, name: str) -> float:
    """The sum of one of the server's Prometheus gauges: ``gauge(server, "num_requests_running")`` is 2.0."""
    request = UrlRequest(f"{server.url}/metrics", headers=bearer(server.token))
    text = urlopen(request, timeout=60).read().decode()
    return sum(map(float, re.findall(rf"^vllm:{name}(?:{{[^}}]*}})? (\S+)$", text, re.M)))
