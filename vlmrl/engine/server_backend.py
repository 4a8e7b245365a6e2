"""The interface of a server program: one subclass of :class:`ServerBackend` for each program, in its own folder.

Supervision, restarts, retries, policy versions and the startup parity check are shared by all of them (`server_pool.py`,
`server_engine.py`, `vlmrl/checks/server_parity.py`). To add a program, write its subclass: ``--engine file.py:MyBackend`` uses it.
A line in SERVER_BACKENDS gives it a name.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch

from vlmrl.config import Config, Lora, ServerSettings, Teacher
from vlmrl.config.code import load_code
from vlmrl.engine.base import Request, SamplingParams
from vlmrl.engine.image_files import EncodedImage
from vlmrl.engine.server import TOKEN_VARIABLE, Launch, Server, ServerError, ServerInfo
from vlmrl.engine.server_environment import cuda_home, own_toolkit
from vlmrl.engine.server_response import Response
from vlmrl.utils.tokens import is_loopback
from vlmrl.weight_sync.base import WeightReceiver

BAN = -1e9
"""Bias on a banned token's logit: the token gets no probability, and the logprobs of the others are normalized without it."""
TOKEN_VALUES, OTHER_VALUES = 100, 10_000  # in a response: of each token, and beside them
DECODER_LAYERS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
"""The layers of every decoder of transformers without recurrent layers."""
NO_API_KEY = (
    f"each server that the run starts gets its own token; for external servers, set {TOKEN_VARIABLE} in the environment"
)


@dataclass(frozen=True)
class Capabilities:
    """What a server program can do. A setting that needs more is an error, unless the field names a fallback."""

    lora_targets: frozenset[str] = frozenset()
    """The decoder's layers, by the last part of their names, whose LoRA adapters it loads and unloads while it serves. With adapters
    of any other layer, or of the vision tower, all are merged into the weights."""
    expert_routing: bool = False
    """Return the experts of each token of a mixture-of-experts model."""
    image_files: bool = False
    """Read an image from a path in the request. False: requests contain the images as data URIs."""
    tensor_handles: bool = False
    """Receive weights as handles of GPU memory (CUDA IPC) or as values in the request. False: by a process group or from disk."""
    temperatures: tuple[float, float] = (0.0, math.inf)
    """Lowest and highest temperature that it samples with, besides 0."""
    truncated_sampling: bool = False
    """With top-p or top-k, return logprobs of the distribution before them."""
    sleep: bool = False
    """Release the memory of its KV cache and take it back, to share GPUs with the trainer."""
    checksums: bool = False
    """Return checksums of its weights. False: the startup parity check compares only logprobs."""
    token: bool = False
    """Answer only requests that contain its Bearer token. False: its servers are started on the loopback address only."""

    def refusal(self, sampling: SamplingParams) -> str:
        """Why it cannot sample like this: ``top_p must be 1 and top_k 0: ...``. Empty if it can."""
        least, most = self.temperatures
        if sampling.temperature and not least <= sampling.temperature <= most:
            return f"temperature must be 0 or from {least:g} to {most:g}, but it is {sampling.temperature:g}"
        if not self.truncated_sampling and (sampling.top_p < 1 or sampling.top_k > 0):
            given = f"they are {sampling.top_p:g} and {sampling.top_k}"
            return f"top_p must be 1 and top_k 0, but {given}: it returns logprobs of the distribution after them"
        return ""


@dataclass(frozen=True)
class EncodedBody:
    """JSON in ``parts``, which requests may share: it is sent without being joined or copied."""

    parts: Sequence[bytes]

    @classmethod
    def of(cls, fields: Mapping[str, Any], name: str, items: Sequence[Sequence[bytes]]) -> EncodedBody:
        """The ``fields``, and under ``name`` a list of ``items`` that are JSON in parts. Without items, ``name`` is left out."""
        head = json.dumps(fields, separators=(",", ":")).encode()
        if not items:
            return cls([head])
        parts = [head[:-1] + b',"%s":[' % name.encode()]
        for item in items:
            parts += [*item, b","]
        parts[-1] = b"]}"
        return cls(parts)

    @property
    def size(self) -> int:
        return sum(map(len, self.parts))


class Call(NamedTuple):
    """An HTTP call: GET ``path`` if ``body`` is None, else POST ``body``, which is JSON as Python objects or an EncodedBody."""

    path: str
    body: Any = None


@dataclass(frozen=True)
class ServedModel:
    """The model that a server has to load, and the features that the run needs of it."""

    path: str
    dtype: str
    """Such as ``bfloat16``."""
    random_weights: bool = False
    """Load no weights: the first update sends all of them."""
    lora: Lora | None = None
    """Adapters that are sent separately from the weights; ``targets`` are all the layers that have one."""
    expert_routing: bool = False
    sleep: bool = False
    """The server shares its GPUs with the trainer: it must be able to sleep, and hold no memory there but weights and KV cache."""
    memory_fraction: float | None = None
    """Share of the GPU's memory for its weights and KV cache, for the first of :attr:`ServerBackend.memory_args`. None: the program's
    default."""


@dataclass(frozen=True)
class Attempt:
    """One attempt to sample the response to ``request``, with everything that its HTTP call contains."""

    id: str
    """Unique, so that the call can be aborted."""
    request: Request
    images: Sequence[EncodedImage]
    """The images of the request, in order."""
    adapter: str | None
    """Name of the LoRA adapter to sample with."""
    stop_ids: frozenset[int]
    banned_ids: Sequence[int]
    """Ids with no probability; the logprobs of the others are normalized without them."""
    expert_routing: bool
    """Return the experts of all tokens from ``request.routing_from`` on."""
    device: str
    """On which the server computes: ``cuda`` or ``cpu``."""

    @property
    def most_values(self) -> int:
        """How many values the JSON of the response may have: those of each token, with its bytes and the likely ids at its place."""
        if isinstance(self.request, ScoreRequest):
            return OTHER_VALUES + self.request.length * (TOKEN_VALUES + 16 * self.request.most_likely)
        return OTHER_VALUES + self.request.sampling.max_tokens * TOKEN_VALUES


@dataclass(frozen=True)
class ScoreRequest(Request):
    """A request for the logprobs of given tokens, at temperature 1: those that end the prompt, images expanded."""

    tokens: Sequence[int] = ()
    """The last ids of the expanded prompt; -1 for one whose logprob is not needed."""
    most_likely: int = 0
    """How many of the most likely ids are wanted for each of these tokens."""

    @property
    def length(self) -> int:
        """The number of tokens of the whole prompt, images expanded."""
        return len(self.prompt_ids) + sum(item.num_tokens - 1 for item in self.media)


class Scored(NamedTuple):
    """A server's response to a :class:`ScoreRequest`: ``Scored(12, [(-0.1, 5)], [[(-0.1, 5), (-2.4, 6)]])``."""

    prompt_tokens: int
    """Length of the prompt as the server counts it, images expanded."""
    logprobs: Sequence[tuple[float | None, int]]
    """Per token of the request, its logprob and its id as the server reports it."""
    most_likely: Sequence[Sequence[tuple[float, int]]]
    """Per token, logprobs and ids of the most likely ones there, in any order."""


class ServerBackend(ABC):
    """A server program: how it is started, and its HTTP API. Has no state but the settings.

    Raises ValueError if ``settings.args`` contains an argument of :attr:`own_args` or :attr:`secret_args`.
    """

    name: ClassVar[str]
    """Name of the program in messages about settings. For a program in SERVER_BACKENDS also the value of ``config.engine``."""
    title: ClassVar[str]
    """Name of the program in other messages."""
    package: ClassVar[str]
    """Python package that must be installed to start a server."""
    install: ClassVar[str] = ""
    """The command that installs it, for an error."""
    oldest: ClassVar[tuple[int, ...]] = ()
    """The oldest version that can be used: ``(0, 5, 23)``."""
    oldest_reason: ClassVar[str] = ""
    """What earlier versions do wrong, for an error."""
    capabilities: ClassVar[Capabilities] = Capabilities()
    unsupported_models: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Model types that it cannot serve, each with the reason."""
    own_args: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Arguments that only vlmrl may set, each with the reason or the setting to use instead."""
    secret_args: ClassVar[Mapping[str, str]] = MappingProxyType({"api-key": NO_API_KEY})
    """Arguments with secrets, which do not belong into a recorded config, each with what to do instead."""

    health: ClassVar[Call]
    """Succeeds if the server can sample."""
    info: ClassVar[Call]
    """Its response is passed to :meth:`parse_info`."""
    pause: ClassVar[Call]
    """Stop sampling between two tokens, and put the requests in flight back into the queue."""
    resume: ClassVar[Call]
    """Continue. Requests that were put back are computed again with the current weights and keep their sampled tokens."""
    sleep: ClassVar[Call]
    """With ``capabilities.sleep``: release the memory of the KV cache."""
    wake: ClassVar[Call]
    """With ``capabilities.sleep``: take the memory of the KV cache back."""
    release_weights: ClassVar[Call | None] = None
    """With ``capabilities.sleep``: release the memory of the weights and CUDA graphs, too. The weights are lost until the next update.
    None: a sleeping server keeps them."""
    restore_weights: ClassVar[Call | None] = None
    """Take that memory back, before the update."""
    loaded_weights: ClassVar[Call]
    """With ``capabilities.checksums``: its response is passed to :meth:`parse_loaded_weights`."""
    checksums: ClassVar[Call]
    """With ``capabilities.checksums``: its response is passed to :meth:`parse_checksums`."""

    default_host: ClassVar[str] = "127.0.0.1"
    """The address at which it listens without an argument ``host``."""
    args_hint: ClassVar[str] = "the arguments that limit it"
    """For an error: the arguments that give a server room for longer prompts."""
    memory_args: ClassVar[tuple[str, ...]] = ()
    """The arguments that set the memory for weights and KV cache; the first is their share of a GPU."""
    memory_includes_runtime: ClassVar[bool] = False
    """That share also contains :meth:`runtime_memory`."""
    routing_hint: ClassVar[str] = ""
    """For an error: how to make a server return experts. Ends with "or "."""
    image_cache_hint: ClassVar[str] = ""
    """For an error: how to stop a server from reusing image features after a weight update."""
    logprobs_hint: ClassVar[str] = ""
    """For an error: a setting that changes the distribution of the logprobs that a server returns."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.check_arguments()

    def check_arguments(self) -> None:
        """Raises ValueError for an argument in ``settings.args`` that cannot be used. Called before anything is started."""
        for name, value in self.arguments.items():
            if name in self.secret_args and not isinstance(value, bool):
                why = f"a secret does not belong into a recorded config. Instead: {self.secret_args[name]}."
                raise ValueError(f"server.args must not contain {name}: {why}")
            if name in self.own_args:
                raise ValueError(f"server.args must not contain {name}, but it is {value!r}: {self.own_args[name]}.")

    @property
    def arguments(self) -> dict[str, Any]:
        """``settings.args`` by the names that the program's help shows: ``max_model_len`` is ``max-model-len``."""
        return {name.lstrip("-").replace("_", "-"): value for name, value in self.settings.args.items()}

    @property
    def python(self) -> str:
        """The interpreter that runs the servers."""
        return self.settings.python or sys.executable

    @abstractmethod
    def launch(self, model: ServedModel, log: Path, host: str, port: int, gpu: int | None) -> Launch:
        """How to start a server that listens at ``host:port``, on ``settings.tp`` GPUs from index ``gpu`` on. None: on the CPU."""

    def with_token(self, launch: Launch, token: str) -> Launch:
        """With ``capabilities.token``: as ``launch``, but the server refuses requests without ``token``.

        Pass the token on in the environment: every user of the machine can read a command line.
        """
        raise NotImplementedError(f"{self.title} checks no token")

    @classmethod
    def runtime_memory(cls, gpu_bytes: float) -> float:
        """Bytes that a server needs on a GPU of ``gpu_bytes`` beside weights and KV cache: activations and CUDA graphs."""
        return 0.1 * gpu_bytes

    @classmethod
    def graph_memory(cls, gpu_bytes: float) -> float:
        """What a sleeping server keeps of :meth:`runtime_memory`: its CUDA graphs. An assumption until it is measured."""
        return (0.5 if gpu_bytes < 60 * 2**30 else 1.0) * 2**30

    def releases_weights(self, lora: bool) -> bool:
        """Whether a sleeping server releases its weights. Updates must overwrite all: not with adapters (``lora``) or quantization."""
        return self.release_weights is not None and not lora and "quantization" not in self.arguments

    @property
    def sets_memory(self) -> bool:
        """Whether the settings contain one of :attr:`memory_args`."""
        return not self.arguments.keys().isdisjoint(self.memory_args)

    def environment(self, on_server: Path, env: Mapping[str, str], on_gpu: bool = False) -> dict[str, str]:
        """``env`` and the settings' variables. The server can import from the folder ``on_server``, before its PYTHONPATH.

        ``on_gpu``: it compiles kernels at its start, with the CUDA toolkit of this machine, or else of its own environment.
        """
        env = {**env, **self.settings.env}
        if on_gpu and cuda_home({**os.environ, **env}) is None and (toolkit := own_toolkit(self.python)):
            env["CUDA_HOME"] = toolkit
        path = env.get("PYTHONPATH", os.environ.get("PYTHONPATH"))
        return env | {"PYTHONPATH": os.pathsep.join(filter(None, [str(on_server), path]))}

    def listens_at(self, host: str) -> str:
        """The address at which a server listens that is launched with ``host``, or with the argument ``host`` of the settings."""
        own = self.arguments.get("host", host)
        return self.default_host if own is None or own is False else str(own)

    def new_token(self, host: str) -> str | None:
        """A new token of 256 bits for a server that is launched with ``host``. None: its program checks no token.

        Raises ValueError if other machines could reach a server that checks none.
        """
        if self.capabilities.token:
            return secrets.token_hex(32)
        address = self.listens_at(host)
        if not is_loopback(address):
            raise ValueError(
                f"with engine {self.name}, servers must listen on the loopback address, but one would listen at {address}, and it "
                "checks no token: it would answer everybody. Use one node, or set server.urls to servers that you start."
            )
        return None

    @abstractmethod
    def parse_info(self, response: Any) -> ServerInfo: ...

    def check_version(self, url: str, info: ServerInfo) -> None:
        """Raise ValueError for a server that is older than :attr:`oldest`."""
        if tuple(int(number) for number in re.findall(r"\d+", info.version)[:3]) < self.oldest:
            oldest = ".".join(map(str, self.oldest))
            raise ValueError(
                f"the server {url} is {self.title} {info.version}, but it must be {oldest} or newer: earlier versions "
                f"{self.oldest_reason}."
            )

    @abstractmethod
    def generate(self, attempt: Attempt) -> Call: ...

    @abstractmethod
    def parse(self, attempt: Attempt, response: Any) -> Response:
        """Raises BadResponse if another attempt may succeed, ValueError if none can."""

    def tokenize(self, text: str) -> Call:
        """Encode ``text``, special tokens in it included: the ids are the field ``tokens`` of the response."""
        return Call("/tokenize", {"prompt": text, "add_special_tokens": False})

    def score(self, attempt: Attempt) -> Call:
        """Score the tokens of ``attempt.request``, a :class:`ScoreRequest`: what a teacher server does."""
        raise NotImplementedError(f"{self.title} scores no given tokens")

    def parse_scores(self, attempt: Attempt, response: Any) -> Scored:
        """Raises BadResponse, LookupError or TypeError for a response of another form."""
        raise NotImplementedError(f"{self.title} scores no given tokens")

    @abstractmethod
    def abort(self, attempt_id: str) -> Call: ...

    def load_adapter(self, name: str, settings: Mapping[str, Any], weights: str, tp: int) -> Call:
        """With ``capabilities.lora_targets``: load an adapter. ``settings`` as in `adapter_config.json`; serialized ``weights``."""
        raise NotImplementedError(f"{self.title} loads no adapters")

    def has_adapter(self, refusal: ServerError) -> bool:
        """With ``capabilities.lora``: whether the server refused to load an adapter because it has loaded it already."""
        return False

    def unload_adapter(self, name: str) -> Call:
        """With ``capabilities.lora_targets``: unload an adapter once no request uses it."""
        raise NotImplementedError(f"{self.title} unloads no adapters")

    @abstractmethod
    def receiver(self, server: Server) -> WeightReceiver:
        """The server's end of a weight update."""

    def serialize_adapter(self, weights: dict[str, torch.Tensor]) -> str:
        """With ``capabilities.lora_targets``: an adapter's weights as the server takes them, in base64."""
        raise NotImplementedError(f"{self.title} loads no adapters")

    def parse_loaded_weights(self, response: Any) -> str | None:
        """The folder that the server loaded its weights from, or None if an update has replaced them since."""
        return None

    def parse_checksums(self, response: Any) -> list[Mapping[str, str]]:
        """For each rank of the server, the checksum of each tensor by name."""
        raise NotImplementedError(f"{self.title} has no checksums")


SERVER_BACKENDS = {
    "sglang": "vlmrl.engine.sglang.backend:SGLangBackend",
    "vllm": "vlmrl.engine.vllm.backend:VLLMBackend",
}
"""The server programs by the value of ``config.engine``, each as "module:Class", which is imported when it is used."""


def new_backend(config: Config) -> ServerBackend:
    """The server program that ``config.engine`` names: a name in SERVER_BACKENDS, ``module:Class`` or ``file.py:Class``.

    Raises:
        ValueError: there is none, it is no ServerBackend, or it cannot use ``config.server``.
    """
    return _backend(config.engine, config.server)


def teacher_backend(teacher: Teacher) -> ServerBackend:
    """The program of the running servers that ``teacher.model`` names."""
    program, urls = teacher.servers
    names = " or ".join(SERVER_BACKENDS)
    if program not in SERVER_BACKENDS:
        raise ValueError(
            f"teacher.model must begin with {names} before the addresses of servers, but it is {teacher.model!r}."
        )
    return _backend(program, ServerSettings(urls=urls))


def _backend(engine: str, settings: ServerSettings) -> ServerBackend:
    if engine not in SERVER_BACKENDS and ":" not in engine:
        names = ", ".join(["embedded", *SERVER_BACKENDS])
        raise ValueError(f"engine must be one of {names}, or file.py:Class, but it is {engine!r}.")
    found = load_code("engine", SERVER_BACKENDS.get(engine, engine))
    if not (isinstance(found, type) and issubclass(found, ServerBackend)):
        raise ValueError(f"engine must name a subclass of ServerBackend, but {engine} is {found!r}.")
    return found(settings)
