"""A middleware of vLLM's HTTP server: loads LoRA adapters whose weights are in the request, and unloads them.

vLLM's own calls exist only with `VLLM_ALLOW_RUNTIME_LORA_UPDATING`, and name a folder, which a trainer on another machine cannot
write. The folder that is written here lives until vLLM has answered: its workers have read it by then, and keep the last
`--max-cpu-loras` adapters in memory.
"""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest

LOAD = "/vlmrl/load_adapter"
UNLOAD = "/vlmrl/unload_adapter"


class LoadsAdapters:
    """An ASGI application around ``app``. To load: ``name``, peft's ``settings``, ``weights``, a safetensors file in base64.

    To unload: ``name``. Requests that have begun with an adapter keep it.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] not in (LOAD, UNLOAD):
            await self.app(scope, receive, send)
            return
        adapter = await Request(scope, receive).json()
        models: OpenAIServingModels = scope["app"].state.openai_serving_models
        if scope["path"] == LOAD:
            outcome = await _load(models, adapter)
        else:
            outcome = await models.unload_lora_adapter(UnloadLoRAAdapterRequest(lora_name=adapter["name"]))
        if isinstance(outcome, ErrorResponse):
            response = JSONResponse(outcome.model_dump(), outcome.error.code)
        else:
            response = JSONResponse({"message": outcome})
        await response(scope, receive, send)


async def _load(models: OpenAIServingModels, adapter: dict[str, Any]) -> Any:
    with TemporaryDirectory(prefix="vlmrl-adapter-") as folder:
        await asyncio.to_thread(_write, Path(folder), adapter)
        return await models.load_lora_adapter(LoadLoRAAdapterRequest(lora_name=adapter["name"], lora_path=folder))


def _write(folder: Path, adapter: dict[str, Any]) -> None:
    (folder / "adapter_config.json").write_text(json.dumps(adapter["settings"]))
    (folder / "adapter_model.safetensors").write_bytes(base64.b64decode(adapter["weights"]))
