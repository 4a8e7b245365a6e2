"""SGLang: its command line, its environment, and its HTTP calls."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from vlmrl.config import Lora
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
from vlmrl.engine.sglang.receiver import SGLangReceiver, serialized
from vlmrl.engine.sglang.requests import parse_response, parse_scored, request_body, score_request_body

GIB = 2.0**30
KV_CACHE = {"tags": ["kv_cache"]}
WEIGHTS = {"tags": ["weights", "cuda_graph"]}  # of graphs the server keeps a copy in host memory
CHUNKS_AND_GRAPHS = (
    (20, 2048, 8),
    (35, 4096, 48),
    (60, 4096, 32),
    (160, 8192, 256),
    (math.inf, 16384, 512),
)
"""For GPUs of less than so many GiB: tokens of a prefill chunk, and sequences of the largest CUDA graph."""
CPU_ARGS = {
    "device": "cpu",
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "disable-cuda-graph": True,
    "disable-overlap-schedule": True,
    "mem-fraction-static": 0.3,
    "max-total-tokens": 65536,
    "sleep-on-idle": True,
}
# As the trainer computes them: logits of 20, rounded to bfloat16, move a logprob by 0.03 nats.
GPU_ARGS = {"enable-fp32-lm-head": True}
IMAGE_ARGS = {
    # Each image is decoded, resized and processed once. It takes 24 bytes a pixel: 4 GiB hold 145 images of 1280x960 pixels.
    "mm-preprocess-cache-size-mb": 4096,
    "trust-mm-content-hashes": True,
}
COLOCATED_ARGS = {
    "enable-memory-saver": True,
    # On large Hopper GPUs SGLang would reserve up to 1 GiB for image features, which a sleeping server keeps.
    "mm-feature-transport": "cpu",
    # The default processes images on the GPU, in a process with a CUDA context that no sleep releases.
    "image-processor-backend": "pil",
}
CPU_ENV = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # compilation takes minutes on a CPU and gains nothing
}

ON_SERVER = Path(__file__).parent / "on_server"
"""Folder of a package that SGLang imports: see `on_server/vlmrl_sglang/shared_images.py`."""

# Run in place of `-m sglang.launch_server`: the token is neither in the command line, which every user of the machine can read, nor
# in the log, where SGLang writes all of its arguments.
_LAUNCH_WITH_TOKEN = f"""
import logging, os, runpy, sys
token = os.environ.pop("{TOKEN_VARIABLE}")
new_record = logging.getLogRecordFactory()
def without_token(*args, **kwargs):
    record = new_record(*args, **kwargs)
    try:
        message = record.getMessage()
    except Exception:
        return record
    if token in message:
        record.msg, record.args = message.replace(token, "<token>"), ()
    return record
logging.setLogRecordFactory(without_token)
sys.argv += ["--api-key", token]
runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
"""


class SGLangBackend(ServerBackend):
    name = "sglang"
    title = "SGLang"
    package = "sglang"
    install = "pip install 'vlmrl[sglang]'"
    oldest = (0, 5, 23)
    oldest_reason = "decode ids that come with images, and encode the text again"
    capabilities = Capabilities(
        lora_targets=DECODER_LAYERS,
        expert_routing=True,
        image_files=True,
        tensor_handles=True,
        truncated_sampling=True,
        sleep=True,
        checksums=True,
        token=True,
    )
    unsupported_models = MappingProxyType(
        {
            "smolvlm": "SGLang runs it by transformers' processor, which takes texts with images, but no token ids",
            "glm46v": "SGLang knows this model under the type glm4v only",
        }
    )

    health = Call("/health")
    info = Call("/server_info")
    pause = Call("/pause_generation", {"mode": "retract"})
    resume = Call("/continue_generation", {})
    sleep = Call("/release_memory_occupation", KV_CACHE)
    wake = Call("/resume_memory_occupation", KV_CACHE)
    release_weights = Call("/release_memory_occupation", WEIGHTS)
    restore_weights = Call("/resume_memory_occupation", WEIGHTS)
    loaded_weights = Call("/model_info")
    checksums = Call("/weights_checker", {"action": "checksum"})

    own_args = MappingProxyType({"port": "each server gets a free one"})
    secret_args = MappingProxyType(dict.fromkeys(("api-key", "admin-api-key"), NO_API_KEY))
    memory_args = ("mem-fraction-static",)
    args_hint = "context-length or mem-fraction-static"
    routing_hint = "start it with --enable-return-routed-experts, or "
    image_cache_hint = "Start it with SGLANG_VLM_CACHE_SIZE_MB=0."
    logprobs_hint = "no SGLANG_RETURN_ORIGINAL_LOGPROB"

    def launch(self, model: ServedModel, log: Path, host: str, port: int, gpu: int | None) -> Launch:
        device = CPU_ARGS if gpu is None else {"base-gpu-id": gpu} | GPU_ARGS
        args = {"host": host, "port": port, "tp": self.settings.tp} | device | IMAGE_ARGS | _model_args(model)
        env = {"SGLANG_VLM_CACHE_SIZE_MB": "0"}  # its cache of image features would survive weight updates
        env |= {"SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE": "vlmrl_sglang"}
        env |= CPU_ENV if gpu is None else {}
        return Launch(self._command(args), self.environment(ON_SERVER, env, on_gpu=gpu is not None), log)

    def with_token(self, launch: Launch, token: str) -> Launch:
        python, _, _, *words = launch.command
        return replace(
            launch, command=[python, "-c", _LAUNCH_WITH_TOKEN, *words], env=launch.env | {TOKEN_VARIABLE: token}
        )

    @classmethod
    def runtime_memory(cls, gpu_bytes: float) -> float:
        """As SGLang estimates it by the size of the GPU.

        Source: SGLang 0.5.23, srt/arg_groups/memory_hook.py: 512 MiB, 1.5 MiB for each token of a prefill chunk, 2 MiB for each
        sequence of the largest graph; on GPUs over 60 GiB at least 10 GiB.
        """
        gib = gpu_bytes / GIB
        chunk, graph = next((chunk, graph) for limit, chunk, graph in CHUNKS_AND_GRAPHS if gib < limit)
        estimate = (512 + 1.5 * chunk + 2 * graph) * 2**20
        return max(estimate, 10 * GIB) if gib > 60 else estimate

    def parse_info(self, response: Any) -> ServerInfo:
        return ServerInfo(
            version=str(response.get("version", "unknown")),
            tp=response.get("tp_size", 1),
            device=response.get("device", "cpu"),
            dtype=response.get("dtype"),
            max_prompt_tokens=response.get("max_req_input_len"),
            holds_images=bool(response.get("trust_mm_content_hashes") and response.get("mm_preprocess_cache_size_mb")),
        )

    def generate(self, attempt: Attempt) -> Call:
        return Call("/generate", request_body(attempt))

    def parse(self, attempt: Attempt, response: Any) -> Response:
        return parse_response(attempt, response)

    def score(self, attempt: Attempt) -> Call:
        assert isinstance(attempt.request, ScoreRequest)
        return Call("/generate", score_request_body(attempt, attempt.request))

    def parse_scores(self, attempt: Attempt, response: Any) -> Scored:
        assert isinstance(attempt.request, ScoreRequest)
        return parse_scored(attempt.request, response)

    def abort(self, attempt_id: str) -> Call:
        return Call("/abort_request", {"rid": attempt_id})

    def load_adapter(self, name: str, settings: Mapping[str, Any], weights: str, tp: int) -> Call:
        body = {"lora_name": name, "config_dict": settings, "serialized_named_tensors": [weights] * tp}
        return Call("/load_lora_adapter_from_tensors", body)

    def has_adapter(self, refusal: ServerError) -> bool:
        return "already loaded" in str(refusal)

    def unload_adapter(self, name: str) -> Call:
        return Call("/unload_lora_adapter", {"lora_name": name})

    def receiver(self, server: Server) -> SGLangReceiver:
        return SGLangReceiver.of(server, self.settings.start_timeout)

    def serialize_adapter(self, weights: dict[str, torch.Tensor]) -> str:
        return serialized(weights)

    def parse_loaded_weights(self, response: Any) -> str | None:
        path: str = response["model_path"]
        return path if response["weight_version"] == "default" else None

    def parse_checksums(self, response: Any) -> list[Mapping[str, str]]:
        return [rank["checksums"] for rank in response["ranks"]]

    def _command(self, args: dict[str, Any]) -> list[str]:
        """SGLang's command line: ``args``, overridden by the arguments in the settings."""
        words = [self.python, "-m", "sglang.launch_server"]
        for name, value in (args | self.arguments).items():
            if value is True:
                words.append(f"--{name}")
            elif value is not None and value is not False:
                words += [f"--{name}", *(shlex.split(value) if isinstance(value, str) else [str(value)])]
        return words


def _model_args(model: ServedModel) -> dict[str, Any]:
    """Arguments of the value None are left out."""
    args = {
        "model-path": model.path,
        "dtype": model.dtype,
        "load-format": "dummy" if model.random_weights else None,
        "enable-return-routed-experts": model.expert_routing or None,
        "mem-fraction-static": model.memory_fraction,
    }
    return args | (_lora_args(model.lora) if model.lora else {}) | (COLOCATED_ARGS if model.sleep else {})


def _lora_args(lora: Lora) -> dict[str, Any]:
    return {
        "enable-lora": True,
        "max-lora-rank": lora.rank,
        "lora-target-modules": " ".join(lora.targets),
        "max-loras-per-batch": 4,  # the current adapter, and earlier ones that requests in flight still use
        "max-loaded-loras": 8,
    }
