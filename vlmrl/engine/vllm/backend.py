"""vLLM: its command line, its environment, and its HTTP calls."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save

from vlmrl.config import Lora
from vlmrl.engine.image_files import shared_folder
from vlmrl.engine.server import TOKEN_VARIABLE, Launch, Server, ServerError, ServerInfo
from vlmrl.engine.server_backend import (
    DECODER_LAYERS,
    NO_API_KEY,
    Attempt,
    Call,
    Capabilities,
    Scored,
    ScoreRequest,
    ServedModel,
    ServerBackend,
)
from vlmrl.engine.server_response import Response
from vlmrl.engine.vllm.receiver import VLLMReceiver
from vlmrl.engine.vllm.requests import generate_body, response_of, score_body, scored_of

LOGPROBS = "processed_logprobs"
SERVE_ARGS = {
    "runner": "generate",  # never guessed: a config that names no architecture would be served for embeddings
    "enable-scale-out": True,  # /inference/v1/generate, which takes token ids
    "logprobs-mode": LOGPROBS,  # after temperature and banned ids
    "generation-config": "vllm",  # no sampling parameters from the model's folder
    "max-model-len": -1,  # as much as the model and the memory allow
    "worker-extension-cls": "vlmrl_vllm.weight_updates.WorkerExtension",
    "weight-transfer-config.backend": "vlmrl",
}
GIB = 2**30
CPU_ARGS = {
    "enforce-eager": True,
    "skip-mm-profiling": True,  # on a CPU, the largest possible image takes minutes
    "kv-cache-memory-bytes": GIB,
    "max-num-batched-tokens": 4096,
}
# As the trainer computes them: logits of 20, rounded to bfloat16, move a logprob by 0.03 nats.
GPU_ARGS = {"hf-overrides": json.dumps({"head_dtype": "float32"})}
CPU_ENV = {"TORCHDYNAMO_DISABLE": "1"}  # compilation takes minutes on a CPU and gains nothing
SERVE_ENV = {
    "VLLM_SERVER_DEV_MODE": "1",  # opens the calls of weight updates, pauses and caches
    "VLLM_NO_USAGE_STATS": "1",
}
NO_VALUES = hashlib.sha256(b"").hexdigest()  # of a weight that vLLM keeps only in its CPU kernel's own layout
EXPERTS_ARG, V2_RUNNER = "enable-return-routed-experts", "VLLM_USE_V2_MODEL_RUNNER"
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the choices of --max-lora-rank
ON_SERVER = Path(__file__).parent / "on_server"
"""Folder of a package that runs in vLLM's processes."""
OWN_TRANSFER = "weights arrive by vlmrl's own transfer engine"
OWN_ARGS = {
    "data-parallel-size": "weights are sent to server.tp ranks; set cluster.engines",
    "enable-scale-out": "requests contain token ids",
    "logprobs-mode": "logprobs must be those of the distribution that tokens are sampled from",
    "model": "set model.path",
    "pipeline-parallel-size": "weights are sent to server.tp ranks; set server.tp",
    "port": "each server gets a free one",
    "tensor-parallel-size": "set server.tp",
    "weight-transfer-config": OWN_TRANSFER,
    "weight-transfer-config.backend": OWN_TRANSFER,
    "worker-extension-cls": OWN_TRANSFER,
}


class VLLMBackend(ServerBackend):
    name = "vllm"
    title = "vLLM"
    package = "vllm"
    install = "pip install 'vlmrl[vllm]'"
    oldest = (0, 32, 0)
    oldest_reason = "do not report the weights that sampled each token"
    capabilities = Capabilities(
        lora_targets=DECODER_LAYERS,
        expert_routing=True,
        image_files=True,
        tensor_handles=True,
        temperatures=(0.01, 2.0),  # it raises lower ones above 0 to 0.01
        sleep=True,
        checksums=True,
        token=True,
    )

    unsupported_models = MappingProxyType({"glm46v": "vLLM knows this model under the type glm4v only"})

    health = Call("/health")
    info = Call("/server_info?config_format=json")
    pause = Call("/pause?mode=keep&clear_cache=false", {})  # a weight update clears the caches: see VLLMReceiver.end
    resume = Call("/resume", {})
    sleep = Call("/release_kv_cache_memory", {})
    wake = Call("/wake_up?tags=kv_cache", {})
    loaded_weights = Call("/collective_rpc", {"method": "loaded_weights"})
    checksums = Call("/weight_checker", {"action": "checksum"})

    own_args = MappingProxyType(OWN_ARGS)
    secret_args = MappingProxyType({"api-key": NO_API_KEY, "hf-token": "set the environment variable HF_TOKEN"})
    memory_args = ("gpu-memory-utilization", "kv-cache-memory-bytes")
    memory_includes_runtime = True
    default_host = "0.0.0.0"
    args_hint = "max-model-len or gpu-memory-utilization"
    routing_hint = f"start it with --{EXPERTS_ARG}, or "
    image_cache_hint = "It must serve /reset_encoder_cache: start it with VLLM_SERVER_DEV_MODE=1."
    logprobs_hint = f"vLLM's --logprobs-mode {LOGPROBS}"

    def launch(self, model: ServedModel, log: Path, host: str, port: int, gpu: int | None) -> Launch:
        args = {"host": host, "port": port, "tensor-parallel-size": self.settings.tp} | SERVE_ARGS
        args |= {"allowed-local-media-path": str(shared_folder())}
        args |= (CPU_ARGS if gpu is None else GPU_ARGS) | _model_args(model)
        if model.expert_routing and gpu is None and self.settings.env.get(V2_RUNNER) != "1":
            raise ValueError(
                "with engine vllm on a CPU, train.replay_routing must be False: vLLM returns experts only with its second model "
                f"runner, which needs Triton with a backend for CPUs. If yours has one, set {V2_RUNNER} to 1 in server.env."
            )
        env = SERVE_ENV | (CPU_ENV if gpu is None else {"CUDA_VISIBLE_DEVICES": self._devices(gpu)})
        command = self._command(args)
        if model.lora is not None:
            command += ["--middleware", "vlmrl_vllm.adapters.LoadsAdapters"]  # beside one of the settings
        return Launch(command, self.environment(ON_SERVER, env, on_gpu=gpu is not None), log)

    def with_token(self, launch: Launch, token: str) -> Launch:
        """vLLM calls its last middleware first."""
        words = [*launch.command, "--middleware", "vlmrl_vllm.require_token.RequireToken"]
        return replace(launch, command=words, env=launch.env | {TOKEN_VARIABLE: token})

    @classmethod
    def runtime_memory(cls, gpu_bytes: float) -> float:
        """An assumption for all models: a 2B's server needed 3 GiB on an H100. vLLM measures it at its start."""
        return (4.0 if gpu_bytes < 60 * GIB else 8.0) * GIB

    def parse_info(self, response: Any) -> ServerInfo:
        config, system = response["vllm_config"], response["system_env"]
        model = config["model_config"]
        if model["logprobs_mode"] != LOGPROBS:
            raise ValueError(
                f"a vLLM server reports logprobs in the mode {model['logprobs_mode']}, which are not those of the distribution that "
                f"tokens are sampled from: start it with --logprobs-mode {LOGPROBS}."
            )
        return ServerInfo(
            version=str(system.get("vllm_version", "unknown")),
            tp=config["parallel_config"]["tensor_parallel_size"],
            device=str(config["device_config"]["device"]),
            dtype=str(model["dtype"]).removeprefix("torch."),
            max_prompt_tokens=model["max_model_len"],
            nccl=next(iter(re.findall(r"nvidia-nccl-cu\d+==([\d.]+)", str(system.get("pip_packages")))), None),
        )

    def generate(self, attempt: Attempt) -> Call:
        return Call("/inference/v1/generate", generate_body(attempt))

    def parse(self, attempt: Attempt, response: Any) -> Response:
        return response_of(attempt, response)

    def score(self, attempt: Attempt) -> Call:
        assert isinstance(attempt.request, ScoreRequest)
        return Call("/inference/v1/generate", score_body(attempt, attempt.request))

    def parse_scores(self, attempt: Attempt, response: Any) -> Scored:
        assert isinstance(attempt.request, ScoreRequest)
        return scored_of(attempt.request, response)

    def abort(self, attempt_id: str) -> Call:
        return Call("/inference/v1/abort_requests", {"request_ids": [f"generate-tokens-{attempt_id}"]})

    def load_adapter(self, name: str, settings: Mapping[str, Any], weights: str, tp: int) -> Call:
        """A folder is made of it on the server: see `on_server/vlmrl_vllm/adapters.py`."""
        return Call("/vlmrl/load_adapter", {"name": name, "settings": settings, "weights": weights})

    def has_adapter(self, refusal: ServerError) -> bool:
        return "has already been loaded" in str(refusal)

    def unload_adapter(self, name: str) -> Call:
        return Call("/vlmrl/unload_adapter", {"name": name})

    def receiver(self, server: Server) -> VLLMReceiver:
        return VLLMReceiver.of(server, self.settings.start_timeout)

    def serialize_adapter(self, weights: dict[str, torch.Tensor]) -> str:
        return base64.b64encode(save({name: weight.contiguous() for name, weight in weights.items()})).decode()

    def parse_loaded_weights(self, response: Any) -> str | None:
        folders: set[str | None] = {rank["folder"] for rank in response["results"]}
        return folders.pop() if len(folders) == 1 else None

    def parse_checksums(self, response: Any) -> list[Mapping[str, str]]:
        """Of all ranks together: vLLM adds the rank to the names."""
        return [{name: value for name, value in response["checksums"].items() if value != NO_VALUES}]

    def _devices(self, first: int) -> str:
        """The GPUs of a server, by their names in this process's `CUDA_VISIBLE_DEVICES`, then the others: weights may lie there."""
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        names = visible or [str(index) for index in range(max(first + self.settings.tp, torch.cuda.device_count()))]
        return ",".join(names[first:] + names[:first])

    def _command(self, args: dict[str, Any]) -> list[str]:
        """vLLM's command line: ``args``, overridden by the arguments in the settings."""
        words = [self.python, "-m", "vlmrl_vllm.start_server"]
        for name, value in (args | self.arguments).items():
            if isinstance(value, bool) and "." not in name:
                words.append(f"--{name}" if value else f"--no-{name}")  # many of vLLM's are on by default
            elif value is not None:
                words += [f"--{name}", json.dumps(value) if isinstance(value, dict | bool) else str(value)]
        return words


def _model_args(model: ServedModel) -> dict[str, Any]:
    """Arguments of the value None are left out."""
    args = {
        "model": model.path,
        "dtype": model.dtype,
        "load-format": "dummy" if model.random_weights else None,
        EXPERTS_ARG: model.expert_routing or None,
        "enable-sleep-mode": model.sleep or None,
        "gpu-memory-utilization": model.memory_fraction,
    }
    return args | (_lora_args(model.lora) if model.lora else {})


def _lora_args(lora: Lora) -> dict[str, Any]:
    return {
        "enable-lora": True,
        "max-lora-rank": min((rank for rank in LORA_RANKS if rank >= lora.rank), default=lora.rank),
        "max-loras": 4,  # the current adapter, and earlier ones that requests in flight still use
        "max-cpu-loras": 16,
    }
