"""Runs code that is for GPUs only, on simulated ones, and prints the lines of it that were executed: `python cuda_paths.py FOLDER`.

The parts that need a model or a server of their own have their own tests; what they execute is in docs/gpu.md, too.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from docs.test_gpu import ROOT, marked_lines

from vlmrl.config import Config, Data, Model, Optim, ServerSettings
from vlmrl.engine.hf.kv_cache import BatchCache, GrowingLayer
from vlmrl.engine.server_backend import ServedModel, new_backend
from vlmrl.engine.sglang.receiver import SGLangReceiver, serialized
from vlmrl.families.base import ImageFeatures
from vlmrl.model import tree_attention
from vlmrl.model.cached_attention import attend_cached
from vlmrl.model.head import score_tokens
from vlmrl.model.loading import LoadedModel, load_model, pick_checkpointing, pick_device, pick_dtype
from vlmrl.plan.memory_plan import MemoryPlan, Sizes
from vlmrl.run.program import run_training
from vlmrl.run.serving import LocalServerHost
from vlmrl.train.checkpoint import load_random, random_state, save_random
from vlmrl.train.controller import RunTrainer, join_process_group
from vlmrl.train.fsdp import backend_of, forget_unused
from vlmrl.train.master_weights import make_optimizer
from vlmrl.train.packing import layout_of
from vlmrl.train.rank import Rank
from vlmrl.types import to_device
from vlmrl.utils.current_gpu import current_gpu
from vlmrl.weight_sync import SENDERS, nccl
from vlmrl.weight_sync.base import Bucket, SenderState, WeightUpdate

FOLDER = Path(sys.argv[1])
CUDA = torch.device("cuda", 1)
MARKED = {str(path): marked_lines(path.read_text()) for path in (ROOT / "vlmrl").rglob("*.py")}
executed: set[tuple[str, int]] = set()


def trace(frame, event, argument):
    """Records the marked lines of the package that are executed."""
    if frame.f_code.co_filename not in MARKED:
        return None
    if event == "line" and frame.f_lineno in MARKED[frame.f_code.co_filename]:
        executed.add((frame.f_code.co_filename, frame.f_lineno))
    return trace


@dataclass
class NoServer:
    """A receiver on a GPU that refuses to join a process group."""

    url: str = "http://127.0.0.1:1"
    ranks: int = 1
    device: str = "cuda"
    dtype: torch.dtype | None = None
    timeout: float = 1.0

    def begin(self): ...
    def receive(self, bucket, version): ...
    def receive_broadcast(self, bucket, version, group): ...
    def end(self): ...
    def abort(self): ...

    def join_group(self, group):
        assert group.backend == "nccl"
        raise ConnectionRefusedError


def model_code() -> LoadedModel:
    torch.cuda.set_device(CUDA)
    loaded = load_model(Model(path="tiny:qwen3_vl"), FOLDER, seed=0)  # device and dtype auto
    assert loaded.policy.device == CUDA and loaded.policy.dtype == torch.bfloat16 == pick_dtype("auto", CUDA)
    assert pick_checkpointing(None, CUDA)
    with pytest.raises(ValueError, match="cuda:NUMBER"):
        pick_device("gpu")
    with current_gpu(torch.device("cuda", 0)):
        assert torch.cuda.current_device() == 0
    assert layout_of(loaded.policy, share_prefixes=False) == "packed"
    tree = tree_attention.plan(torch.tensor([4, 4, 3, 4], device=CUDA))
    query = torch.ones(1, 2, 4, 32, device=CUDA)
    with torch.compiler.set_stance("force_eager"):  # its kernels are compiled in a test of their own
        out, _ = tree_attention.attend(torch.nn.Identity(), query, query, query, None, scaling=1.0, tree=tree)
    assert out.shape == (1, 4, 2, 32)
    prompts = torch.ones(2, 5, dtype=torch.bool, device=CUDA)
    keys = torch.ones(2, 2, 5, 32, device=CUDA)
    cache = BatchCache([GrowingLayer(keys, keys)], prompts)
    cached = cache.share([0, 1, 1]).attention(torch.ones(3, 4, dtype=torch.bool, device=CUDA), query.dtype)
    assert cached is not None
    rows_of_three = query.expand(3, -1, -1, -1)
    assert attend_cached(0, rows_of_three, rows_of_three, rows_of_three, cached, 1.0).shape == (3, 4, 2, 32)
    hidden, head = (torch.ones(rows, 8, device=CUDA, dtype=torch.bfloat16) for rows in (3, 16))
    logprobs, _ = score_tokens(hidden, head, None, to_device(torch.tensor([1, 2, 3]), CUDA), 1.0, [0])
    assert logprobs.device == CUDA
    embeds = torch.ones(4, loaded.policy.config.get_text_config().hidden_size, device=CUDA)
    with loaded.policy.family.insert_features(loaded.policy.model, [ImageFeatures(embeds, (embeds,))]) as inputs:
        assert inputs["pixel_values"] is embeds
    return loaded


def trainer_code() -> None:
    state = torch.cuda.get_rng_state()
    save_random(FOLDER, 0, random_state())
    load_random(FOLDER, 0)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert make_optimizer([torch.nn.Parameter(torch.ones(1, device=CUDA))], Optim(), CUDA).defaults["fused"]
    forget_unused()
    assert backend_of(CUDA) == "cpu:gloo,cuda:nccl"
    launched = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "1"}
    os.environ |= launched
    assert join_process_group(backend_of(CUDA)).size == 1 and torch.cuda.current_device() == 1
    for name in launched:
        del os.environ[name]


def server_code(loaded: LoadedModel) -> None:
    settings = ServerSettings(first_gpu=1)
    trainer = RunTrainer(Rank(Config(output_dir=str(FOLDER)), loaded=loaded))
    host = LocalServerHost(settings, FOLDER, trainer.rank.device, 1)
    assert host.colocated and trainer.gpu_bytes
    backend = new_backend(Config(engine="sglang", server=settings, data=Data(generator=rows, size=2), reward=reward))
    [server] = host.servers(backend, ServedModel(path=loaded.path, dtype="bfloat16"))
    assert server.process is not None
    with pytest.raises(ValueError, match="first_gpu"):
        replace(host, settings=ServerSettings(first_gpu=2)).servers(
            backend, ServedModel(path=loaded.path, dtype="bfloat16")
        )
    receiver = SGLangReceiver("http://127.0.0.1:1", device="cuda")
    bucket = Bucket(["weight"], [torch.Size([3])], torch.ones(3))
    sender = SENDERS["tensor"](WeightUpdate((receiver,), SENDERS["tensor"], "run.1", 2**20), SenderState())
    assert sender.prepare(bucket).flat.is_cuda  # on the current GPU, if no weights were sent from another
    [on_gpu] = sender._buckets([("weight", torch.ones(3, device=CUDA))])
    assert on_gpu.flat.is_cuda and serialized(on_gpu.tensors())
    assert nccl.NcclSender(sender.update, SenderState()).prepare(bucket).flat.is_cuda
    with suppress(ConnectionError):  # there is no server
        receiver.receive(on_gpu, None)
    update = WeightUpdate((NoServer(),), SENDERS["group"], "run.1", 2**20)
    assert nccl.NcclSender(update, SenderState())._join([NoServer()])


def rows(index, seed):
    return {"prompt": "Hello"}


def reward(text, task):
    return 0.0


def main() -> None:
    threading.settrace(trace)
    sys.settrace(trace)
    loaded = model_code()
    trainer_code()
    server_code(loaded)
    config = Config(name="plan", output_dir=str(FOLDER), data=Data(generator=rows, size=2), reward=reward)
    run_training(config, dry_run=True)
    assert MemoryPlan.of(config, Sizes.of(loaded.policy.model), 1).dtype == torch.bfloat16
    sys.settrace(None)
    found = sorted((str(Path(file).relative_to(ROOT / "vlmrl")), line) for file, line in executed)
    print("\nEXECUTED", json.dumps(found))


main()
