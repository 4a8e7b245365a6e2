"""A small inference server for tests: a real model behind an HTTP API of its own. ``python policy_program.py MODEL DTYPE PORT``.

It samples with the embedded engine. Weights arrive in buckets, and take effect together when their update is closed.
"""

from __future__ import annotations

import asyncio
import base64
import io
import sys
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from PIL import Image

from vlmrl.config import Model
from vlmrl.engine.base import Request, SamplingParams
from vlmrl.engine.hf.engine import HFEngine
from vlmrl.model.loading import load_model
from vlmrl.types import MediaItem

SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "seed")


class PolicyProgram:
    """The handlers of all calls. ``names`` are those of the weights that it has had, by policy version."""

    def __init__(self, model: str, dtype: str) -> None:
        settings = Model(path=model, device="cpu", dtype=dtype)  # type: ignore[arg-type]
        self.model = load_model(settings, Path(model), seed=0)
        store = self.model.new_store()
        assert store is not None
        self.store = store
        self.policy = self.model.policy
        self.engine = HFEngine(self.policy, self.model.renderer, threads=1)
        self.names = ["loaded"]
        self.frozen = False
        self.failures = 0  # of the next requests to sample
        self.update: dict[str, torch.Tensor] | None = None  # the open one
        self.running: dict[str, asyncio.Task[Any]] = {}
        self.images: dict[str, MediaItem] = {}  # all that it has read, by their data

    async def get_state(self, body: Any) -> Any:
        return {"release": "1.0", "running": len(self.running), "weights": self.names[-1], "frozen": self.frozen}

    async def complete(self, body: Any) -> Any:
        if self.failures:
            self.failures -= 1
            raise web.HTTPInternalServerError(text="set by the test")
        self.policy.banned_ids = body["banned"]
        for data in body["images"]:
            if data not in self.images:
                self.images[data] = await self.store.get(Image.open(io.BytesIO(base64.b64decode(data))))
        media = [self.images[data] for data in body["images"]]
        sampling = SamplingParams(**{name: body[name] for name in SAMPLING}, stop=tuple(body["stop"]))
        request = Request(body["trajectory"], body["tokens"], media, sampling)
        task = self.running[body["id"]] = asyncio.create_task(self.engine.generate(request))
        try:
            response = await task
        except asyncio.CancelledError:
            raise web.HTTPServiceUnavailable(text="aborted") from None
        finally:
            del self.running[body["id"]]
        pairs = zip(response.token_ids, response.logprobs, response.policy_versions, strict=True)
        tokens = [
            {"id": token, "logprob": logprob, "weights": self.names[version]} for token, logprob, version in pairs
        ]
        return {"tokens": tokens, "why": response.stop_reason, "read": response.prompt_tokens}

    async def abort(self, body: Any) -> Any:
        if task := self.running.get(body["id"]):
            task.cancel()

    async def freeze(self, body: Any) -> Any:
        await self.engine.pause()
        self.frozen = True

    async def thaw(self, body: Any) -> Any:
        self.frozen = False
        await self.engine.resume()

    async def fail(self, body: Any) -> Any:
        self.failures = body["times"]

    async def open_update(self, body: Any) -> Any:
        if self.update is not None:
            raise ValueError("an update is open")
        self.update = {}

    async def bucket(self, body: Any) -> Any:
        if self.update is None:
            raise ValueError("no update is open")
        own = dict(self.policy.model.named_parameters())
        weights = torch.load(io.BytesIO(base64.b64decode(body["weights"])))
        for name, weight in weights.items():
            if name not in own or own[name].shape != weight.shape:
                raise ValueError(f"there is no {name} of shape {list(weight.shape)}")
        self.update |= weights
        if body["version"] is None:
            return
        await self.engine.pause()  # a server that is resynced is not paused
        self.policy.load_weights(self.update.items())
        self.engine.weights_changed(len(self.names))
        self.names.append(body["version"])
        if not self.frozen:
            await self.engine.resume()

    async def close_update(self, body: Any) -> Any:
        self.update = None

    async def serve(self, request: web.Request) -> web.Response:
        handler = getattr(self, request.path.strip("/"))
        try:
            return web.json_response(await handler(await request.json() if request.can_read_body else None))
        except ValueError as error:
            return web.json_response({"error": str(error)}, status=400)


if __name__ == "__main__":
    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{path}", PolicyProgram(*sys.argv[1:3]).serve)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[3]), print=None, shutdown_timeout=0.1)
