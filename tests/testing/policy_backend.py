"""The server program of `policy_program.py` as a :class:`ServerBackend`, as somebody outside the package would add one."""

from __future__ import annotations

import base64
import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch

from vlmrl.engine.server import Launch, Server, ServerInfo
from vlmrl.engine.server_backend import Attempt, Call, Capabilities, ServedModel, ServerBackend
from vlmrl.engine.server_response import BadResponse, Response
from vlmrl.weight_sync.base import Bucket, WeightsRefused

PROGRAM = Path(__file__).with_name("policy_program.py")


class PolicyBackend(ServerBackend):
    name, title, package = "policy", "Policy", "vlmrl"
    capabilities = Capabilities(tensor_handles=True, truncated_sampling=True)
    own_args = MappingProxyType({"port": "each server gets a free one"})
    health, info = Call("/get_state"), Call("/get_state")
    pause, resume = Call("/freeze", {}), Call("/thaw", {})

    def launch(self, model: ServedModel, log: Path, host: str, port: int, gpu: int | None) -> Launch:
        return Launch([sys.executable, str(PROGRAM), model.path, model.dtype, str(port)], {}, log)

    def parse_info(self, response: Any) -> ServerInfo:
        return ServerInfo(version=response["release"])

    def generate(self, attempt: Attempt) -> Call:
        request, sampling = attempt.request, attempt.request.sampling
        uris = [json.loads(image.json) for image in attempt.images if image.json is not None]
        body = {
            "id": attempt.id,
            "trajectory": request.trajectory_id,
            "tokens": list(request.prompt_ids),
            "images": [uri.partition(",")[2] for uri in uris],
            "banned": list(attempt.banned_ids),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop": list(sampling.stop),
            "seed": sampling.seed,
        }
        return Call("/complete", body)

    def parse(self, attempt: Attempt, response: Any) -> Response:
        if response["why"] not in ("stop", "length", "abort"):
            raise BadResponse(f"it ended by {response['why']}")
        tokens = response["tokens"]
        return Response(
            token_ids=[each["id"] for each in tokens],
            logprobs=[(each["logprob"], each["id"]) for each in tokens],
            stop_reason=response["why"],
            prompt_tokens=response["read"],
            weights=[(each["weights"], 1) for each in tokens],
        )

    def abort(self, attempt_id: str) -> Call:
        return Call("/abort", {"id": attempt_id})

    def receiver(self, server: Server) -> PolicyReceiver:
        return PolicyReceiver(server.url)


@dataclass
class PolicyReceiver:
    """Weights in the body of a request. An abort takes effect between two buckets."""

    url: str
    ranks: int = 1
    device: str = "cpu"
    dtype: torch.dtype | None = None
    timeout: float = 60.0
    aborted: bool = False

    def begin(self) -> None:
        try:
            self._post("/open_update", {})
        except WeightsRefused:  # an earlier sender left one open
            self._post("/close_update", {})
            self._post("/open_update", {})

    def receive(self, bucket: Bucket, version: str | None) -> None:
        buffer = io.BytesIO()
        torch.save({name: weight.clone() for name, weight in bucket.tensors()}, buffer)
        self._post("/bucket", {"weights": base64.b64encode(buffer.getvalue()).decode(), "version": version})

    def end(self) -> None:
        self._post("/close_update", {})

    def abort(self) -> None:
        self.aborted = True

    def _post(self, path: str, body: dict[str, Any]) -> None:
        if self.aborted:
            raise ConnectionAbortedError("the weight update was aborted")
        request = Request(self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            urlopen(request, timeout=self.timeout).close()
        except HTTPError as error:
            raise WeightsRefused(f"{error.url}: HTTP {error.code}: {error.read().decode()}") from error
