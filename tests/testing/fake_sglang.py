"""A fake SGLang server in this process: it speaks the protocol, and tests set what it does."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from PIL import Image

from vlmrl.utils.threads import LoopThread

INFO = {"version": "0.5.23", "tp_size": 1, "dtype": "float32", "device": "cpu", "max_req_input_len": 8192}
HOLDS_IMAGES = {"trust_mm_content_hashes": True, "mm_preprocess_cache_size_mb": 4096}
"""To add to the ``info`` of a server that keeps processed images."""
END = 258  # end-of-turn id of its responses
OPENING = 250  # id that opens an image; as SGLang, it fails to score rows that end with it


def logprob_of(token: int) -> float:
    """That of a given token, in whatever context."""
    return -(token % 7 + 1) / 8


class FakeSGLang:
    """Answers every request with the ids in ``response``. It has weights by name, and checks that an update is begun and ended."""

    def __init__(self, pad: int = -1, tokens_per_image: int = 4) -> None:
        self.response = [5, 6, END]
        self.finish: dict[str, Any] = {"type": "stop", "matched": END}
        self.meta: dict[str, Any] = {}
        self.info = dict(INFO)
        self.statuses: list[int] = []  # of the next requests, one each
        self.hangs = False  # hold all requests
        self.hangs_unread = False  # hold requests to sample before their bodies are read
        self.unread = 0  # number of those
        self.sick = False  # fail health checks
        self.calls: list[tuple[str, Any]] = []  # paths and bodies
        self.aborted: list[str] = []
        self.version = "default"
        self.weights: dict[str, torch.Tensor] = {"w": torch.zeros(2)}
        self.unreachable_weights: set[str] = set()  # names of weights that no update changes
        self.adapters: set[str] = set()  # names of those that are loaded
        self.images: set[str] = set()  # hashes of those that it holds
        self.read_images = 0
        self.sees_images = True  # logprobs of given tokens depend on the images
        self.scale = 1.0  # of the logprobs of given tokens
        self.encode: Callable[[str], list[int]] = lambda text: list(text.encode())  # its tokenizer
        self.token: str | None = None  # without which it answers only health checks
        self.paused = False
        self.released: set[str] = set()  # tags of memory
        self.dropping: set[str] = set()  # paths at which it drops the connection
        self.begun = False
        self.refuses = False  # all weight updates
        self.failing: set[str] = set()  # paths that fail with status 500
        self.pad, self.tokens_per_image = pad, tokens_per_image
        self._going = asyncio.Event()
        self.thread = LoopThread("fake-sglang")
        self.url = self.thread.wait(self._start())

    def bodies_of(self, path: str) -> list[Any]:
        """The bodies of all calls of ``path``."""
        return [body for where, body in self.calls if where == path]

    def close(self) -> None:
        self.thread.wait(self._runner.cleanup())
        self.thread.close()

    def release_requests(self) -> None:
        """Answer the held requests."""
        self.hangs = self.hangs_unread = False
        going, self._going = self._going, asyncio.Event()  # for those that are held later
        self.thread.loop.call_soon_threadsafe(going.set)

    async def _start(self) -> str:
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _serve(self, request: web.Request) -> web.Response:
        if self.hangs_unread and request.path == "/generate":
            self.unread += 1
            await self._going.wait()
        body = await request.json() if request.can_read_body else None
        path = request.path
        if path != "/health":
            self.calls.append((path, body))
        authorized = self.token is None or request.headers.get("Authorization") == f"Bearer {self.token}"
        if not authorized and path != "/health":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if path in self.dropping:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if path in self.failing:
            return web.Response(status=500)
        handler = getattr(self, "_" + path.strip("/"), None)
        if handler is None:
            return web.json_response({"message": f"there is no {path}"}, status=404)
        return await handler(body)

    async def _health(self, body: Any) -> web.Response:
        return web.Response(status=503 if self.sick or self.paused else 200)

    async def _server_info(self, body: Any) -> web.Response:
        return web.json_response(self.info)

    async def _generate(self, body: Any) -> web.Response:
        if self.statuses and (status := self.statuses.pop(0)) != 200:
            return web.Response(status=status, text="set by the test")
        if self.hangs:
            await self._going.wait()
        adapter = body.get("lora_path")
        if adapter is not None and adapter not in self.adapters:
            message = f"Got LoRA adapter that has never been loaded: {adapter}"
            return web.json_response({"error": {"message": message}}, status=400)
        for image, hash in zip(body.get("image_data", []), body.get("mm_content_hashes", []), strict=True):
            if not self._has(image, hash):
                return web.json_response({"error": {"message": "Non-base64 digit found"}}, status=400)
        if "logprob_start_len" in body:
            if body["input_ids"][-1] == OPENING:
                return web.Response(status=500)
            return web.json_response({"output_ids": [], "meta_info": self._scores(body)})
        expanded = len(body["input_ids"]) + body["input_ids"].count(self.pad) * (self.tokens_per_image - 1)
        count = len(self.response)
        meta = {
            "finish_reason": self.finish,
            "prompt_tokens": expanded,
            "output_token_logprobs": [[-0.25 * (i + 1), token, None] for i, token in enumerate(self.response)],
            "weight_versions": [{"version": self.version, "start": 0, "end": count}],
        }
        return web.json_response({"output_ids": self.response, "meta_info": meta | self.meta})

    def _scores(self, body: Any) -> dict[str, Any]:
        """A token's logprob is :func:`logprob_of` it, minus what the images make of it; its place's most likely ids begin with it."""
        ids: list[int] = []
        for token in body["input_ids"]:
            ids += [token] * (self.tokens_per_image if token == self.pad else 1)
        hashes = body.get("mm_content_hashes", []) if self.sees_images else []
        shift = sum(int(hash.removeprefix("sha256:")[:2], 16) for hash in hashes) / 1024
        own = [[self.scale * logprob_of(token) - shift, token, None] for token in ids[body["logprob_start_len"] :]]
        count = body["top_logprobs_num"]
        likely = [[[logprob - 3 * other, token + other, None] for other in range(count)] for logprob, token, _ in own]
        first = {"input_token_logprobs": [[None, own[0][1], None], *own[1:]]}
        return {"prompt_tokens": len(ids), "input_top_logprobs": [None, *likely[1:]]} | first | self.meta

    async def _tokenize(self, body: Any) -> web.Response:
        assert body["add_special_tokens"] is False
        return web.json_response({"tokens": self.encode(body["prompt"])})

    def _has(self, image: str, hash: str) -> bool:
        """Whether it has the image of this hash, or now reads it; it then has it if its ``info`` says that it holds images."""
        if hash in self.images:
            return True
        if not image.startswith(("/", "data:")):
            return False
        content = Path(image).read_bytes() if image.startswith("/") else base64.b64decode(image.partition(",")[2])
        assert hash == "sha256:" + hashlib.sha256(content).hexdigest()
        Image.open(io.BytesIO(content)).load()
        self.read_images += 1
        if self.info.get("trust_mm_content_hashes"):
            self.images.add(hash)
        return True

    async def _abort_request(self, body: Any) -> web.Response:
        self.aborted.append(body["rid"])
        return web.Response()

    async def _pause_generation(self, body: Any) -> web.Response:
        self.paused = True
        return web.json_response({"status": "ok"})

    async def _continue_generation(self, body: Any) -> web.Response:
        self.paused = False
        return web.json_response({"status": "ok"})

    async def _release_memory_occupation(self, body: Any) -> web.Response:
        assert self.paused and self.released.isdisjoint(body["tags"])
        self.released = self.released | set(body["tags"])
        if "weights" in body["tags"]:
            self.weights = {name: torch.full_like(weight, -1) for name, weight in self.weights.items()}
        return web.Response()

    async def _resume_memory_occupation(self, body: Any) -> web.Response:
        assert self.released.issuperset(body["tags"])
        self.released = self.released - set(body["tags"])
        return web.Response()

    async def _begin_weight_update(self, body: Any) -> web.Response:
        if self.begun:
            return web.json_response({"success": False, "message": "an update is open"}, status=400)
        self.begun = True
        return web.json_response({"success": True})

    async def _end_weight_update(self, body: Any) -> web.Response:
        self.begun = False
        return web.json_response({"success": True})

    async def _update_weights_from_tensor(self, body: Any) -> web.Response:
        assert "weights" not in self.released
        if not self.begun:
            return web.json_response({"success": False, "message": "no update is open"}, status=400)
        if self.refuses:
            return web.json_response({"success": False, "message": "there is no such weight"}, status=400)
        for name, weight in pickle.loads(base64.b64decode(body["serialized_named_tensors"][0])):
            if name not in self.unreachable_weights:
                self.weights[name] = weight
        self.version = body.get("weight_version", self.version)
        return web.json_response({"success": True})

    async def _load_lora_adapter_from_tensors(self, body: Any) -> web.Response:
        if body["lora_name"] in self.adapters:
            message = f"Failed to load LoRA adapter {body['lora_name']} because it is already loaded"
            return web.json_response({"success": False, "error_message": message}, status=400)
        self.adapters.add(body["lora_name"])
        return web.json_response({"success": True})

    async def _unload_lora_adapter(self, body: Any) -> web.Response:
        self.adapters.discard(body["lora_name"])
        return web.json_response({"success": True})

    async def _weights_checker(self, body: Any) -> web.Response:
        sums = {name: str(weight.double().sum().item()) for name, weight in self.weights.items()}
        return web.json_response({"success": True, "ranks": [{"checksums": sums}]})
