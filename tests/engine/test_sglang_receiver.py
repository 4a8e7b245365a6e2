"""SGLang's HTTP API for weights: paths and bodies as a server gets them."""

from __future__ import annotations

import base64
import pickle
import socket
from pathlib import Path

import pytest
import torch
from testing.fake_sglang import FakeSGLang

from vlmrl.engine.sglang.receiver import SGLangReceiver
from vlmrl.utils.threads import DaemonPool
from vlmrl.weight_sync.base import Bucket, WeightsRefused
from vlmrl.weight_sync.nccl import GroupAddress

pytestmark = pytest.mark.slow

PATIENCE = 600  # seconds, for what takes milliseconds
BUCKET = Bucket(["a", "b"], [torch.Size([2]), torch.Size([1, 1])], torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16))


@pytest.fixture
def server():
    fake = FakeSGLang()
    yield fake
    fake.close()


def test_each_rank_gets_a_serialization_of_its_own_and_the_last_bucket_flushes_the_caches(server):
    receiver = SGLangReceiver(server.url, ranks=2)
    receiver.begin()
    receiver.receive(BUCKET, None)
    receiver.receive(BUCKET, "v1")
    receiver.end()
    (begin, _), (_, first), (path, last), end = server.calls
    assert (begin, path, end) == ("/begin_weight_update", "/update_weights_from_tensor", ("/end_weight_update", {}))
    parts = [pickle.loads(base64.b64decode(part)) for part in first.pop("serialized_named_tensors")]
    assert [[(name, tensor.tolist()) for name, tensor in part] for part in parts] == [[("a", [1, 2]), ("b", [[3]])]] * 2
    assert first == {"flush_cache": False}
    del last["serialized_named_tensors"]
    assert last == {"flush_cache": True, "weight_version": "v1"}


def test_groups_and_folders_are_announced_with_what_the_server_has_to_know(server):
    """The fake refuses these paths: it has no process groups and reads no files."""
    receiver = SGLangReceiver(server.url, ranks=2)
    with pytest.raises(WeightsRefused, match=r"/init_weights_update_group: HTTP 404: .*there is no"):
        receiver.join_group(GroupAddress("vlmrl-1", "10.0.0.1", 29500, 4, 6, "nccl", "vlmrl-0"))
    with pytest.raises(WeightsRefused):
        receiver.receive_broadcast(BUCKET, "v1", "vlmrl-1")
    with pytest.raises(WeightsRefused):
        receiver.load_folder(Path("/weights/v1"), "v1")
    group = {"master_address": "10.0.0.1", "master_port": 29500, "rank_offset": 4, "world_size": 6}
    tensors = {"names": ["a", "b"], "dtypes": ["bfloat16", "bfloat16"], "shapes": [[2], [1, 1]]}
    assert server.calls == [
        ("/destroy_weights_update_group", {"group_name": "vlmrl-0"}),
        ("/init_weights_update_group", group | {"group_name": "vlmrl-1", "backend": "nccl"}),
        (
            "/update_weights_from_distributed",
            tensors
            | {"group_name": "vlmrl-1", "load_format": "flattened_bucket"}
            | {"flush_cache": True, "weight_version": "v1"},
        ),
        ("/update_weights_from_disk", {"model_path": "/weights/v1", "load_format": "auto", "weight_version": "v1"}),
    ]


def test_an_update_that_an_earlier_sender_left_open_is_closed_first(server, monkeypatch):
    """After a while: its sender may be another run that is still sending."""
    monkeypatch.setattr("vlmrl.engine.server_sync.OPEN_SECONDS", 0.0)
    server.begun = True
    SGLangReceiver(server.url).begin()
    paths = [path for path, _ in server.calls]
    assert paths == ["/begin_weight_update", "/end_weight_update", "/begin_weight_update"] and server.begun


def test_an_abort_closes_the_socket_of_a_server_that_never_answers():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        receiver = SGLangReceiver(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=PATIENCE)
        beginning = DaemonPool("beginning").submit(receiver.begin)
        connection, _ = listener.accept()
        with connection:
            request = b""
            while not request.endswith(b"{}"):
                request += connection.recv(2**16)
            receiver.abort()
            assert isinstance(beginning.exception(PATIENCE), OSError)
            assert connection.recv(1) == b""  # our end is closed
        with pytest.raises(ConnectionAbortedError):
            receiver.end()
