"""vLLM's HTTP API for weights: paths and bodies as a server gets them."""

from __future__ import annotations

import base64
import pickle
from pathlib import Path

import pytest
import torch
from aiohttp import web

from vlmrl.engine.vllm.receiver import VLLMReceiver
from vlmrl.utils.threads import LoopThread
from vlmrl.weight_sync import SENDERS
from vlmrl.weight_sync.base import Bucket, WeightsRefused, WeightUpdate
from vlmrl.weight_sync.nccl import GroupAddress

pytestmark = pytest.mark.slow

BUCKET = Bucket(["a", "b"], [torch.Size([2]), torch.Size([1, 1])], torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16))
HEAD = {"names": ["a", "b"], "shapes": [[2], [1, 1]], "dtype": "bfloat16"}
RESETS = ["/reset_prefix_cache?reset_running_requests=true", "/reset_encoder_cache"]


class FakeVLLM:
    """Notes all calls. An update must be started and finished; paths in ``failing`` fail; a dead one fails everywhere."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []
        self.open = False
        self.failing: set[str] = set()
        self.dead = False
        self.reset_succeeds = True
        self.thread = LoopThread("fake-vllm")
        self.url = self.thread.wait(self._start())

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    def close(self) -> None:
        self.thread.wait(self._runner.cleanup())
        self.thread.close()

    async def _start(self) -> str:
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _serve(self, request: web.Request) -> web.Response:
        if request.path == "/health":
            return web.Response(status=503 if self.dead else 200)
        self.calls.append((request.path_qs, await request.json()))
        wrong = {"/start_weight_update": self.open, "/finish_weight_update": not self.open}.get(request.path, False)
        if self.dead or wrong or request.path in self.failing:
            return web.json_response({"error": {"message": "it failed"}}, status=500)
        if request.path.endswith("_weight_update"):
            self.open = request.path == "/start_weight_update"
        return web.json_response({"success": self.reset_succeeds})


@pytest.fixture
def server():
    fake = FakeVLLM()
    yield fake
    fake.close()


def test_an_update_ends_with_the_new_name_and_the_caches_of_the_old_weights(server):
    receiver = VLLMReceiver(server.url, ranks=2)
    receiver.begin()
    receiver.receive(BUCKET, None)
    receiver.receive(BUCKET, "v1")
    receiver.end()
    values = base64.b64encode(BUCKET.flat.view(torch.uint8).numpy()).decode()
    update = ("/update_weights", {"update_info": HEAD | {"values": values}})
    finish = ("/finish_weight_update", {"weight_version": "v1"})
    assert server.calls == [("/start_weight_update", {}), update, update, finish, *((path, {}) for path in RESETS)]


def test_each_rank_gets_a_handle_of_its_own(server, monkeypatch):
    """The handle of a GPU tensor is in JSON, without code: bytes are in base64."""
    made = iter(range(2))
    rebuild = (torch.Tensor, (3,), (1,), 5, object, torch.bfloat16, 0, b"handle", 512, 256)
    reduced = lambda tensor: (None, (*rebuild, False, b"counter", next(made), b"event", True))  # noqa: E731
    monkeypatch.setattr("torch.multiprocessing.reductions.reduce_tensor", reduced)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: type("Properties", (), {"uuid": "GPU-7"}))

    class OnGpu(torch.Tensor):
        is_cuda = True

    bucket = Bucket(BUCKET.names, BUCKET.shapes, BUCKET.flat.as_subclass(OnGpu))
    VLLMReceiver(server.url, ranks=2).receive(bucket, None)
    [(_, body)] = server.calls
    memory = ["aGFuZGxl", 512, 256, False, "Y291bnRlcg=="]
    expected = [{"device": "GPU-7", "offset": 5, "memory": [*memory, rank, "ZXZlbnQ=", True]} for rank in range(2)]
    assert body == {"update_info": [HEAD | {"handle": each} for each in expected]}


def test_groups_and_folders_are_announced_with_what_the_server_has_to_know(server):
    receiver = VLLMReceiver(server.url, ranks=2, timeout=60.0)
    receiver.join_group(GroupAddress("vlmrl-1", "10.0.0.1", 29500, 4, 6, "nccl", "vlmrl-0"))
    receiver.receive_broadcast(BUCKET, None, "vlmrl-1")
    group = {"name": "vlmrl-1", "host": "10.0.0.1", "port": 29500, "first_rank": 4, "size": 6, "backend": "nccl"}
    joined = ("/init_weight_transfer_engine", {"init_info": group | {"timeout": 60.0}})
    assert server.calls == [joined, ("/update_weights", {"update_info": HEAD})]
    server.calls.clear()
    receiver.load_folder(Path("/weights/v1"), "v1")
    paths = ["/start_weight_update", "/update_weights", "/finish_weight_update", *RESETS]
    assert server.paths == paths and server.calls[1][1] == {"update_info": {"folder": "/weights/v1"}}


def test_a_failed_update_gives_the_weights_no_new_name(server):
    server.failing = {"/update_weights"}
    update = WeightUpdate((VLLMReceiver(server.url),), SENDERS["tensor"], "v1", 2**20, keep=False)
    result = update.send([("a", torch.ones(2))])
    assert result.refused == (server.url,) and "it failed" in result.failed[server.url]
    assert server.calls[-3] == ("/finish_weight_update", {"weight_version": None})


def test_a_server_whose_workers_died_has_refused_nothing(server):
    """So that it is restarted, and the run goes on."""
    server.dead = True
    update = WeightUpdate((VLLMReceiver(server.url),), SENDERS["tensor"], "v1", 2**20, keep=False)
    result = update.send([("a", torch.ones(2))])
    assert result.refused == () and "it failed" in result.failed[server.url]


def test_a_prefix_cache_that_was_not_reset_is_a_refusal(server):
    server.open, server.reset_succeeds = True, False
    with pytest.raises(WeightsRefused, match="prefix cache was not reset"):
        VLLMReceiver(server.url).end()


def test_receivers_pickle(server):
    assert pickle.loads(pickle.dumps(VLLMReceiver(server.url, token="t"))) == VLLMReceiver(server.url, token="t")
