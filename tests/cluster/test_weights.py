"""The sender of weights to engine actors, with actors that load nothing but a dictionary."""

from __future__ import annotations

import asyncio
import sys

import pytest
import torch

from vlmrl.utils.threads import DaemonPool

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'vlmrl[ray]'")
from vlmrl.cluster import weights as cluster_weights  # noqa: E402
from vlmrl.cluster.weights import RayEngineSender  # noqa: E402

PATIENCE = 60


class Engine:
    """Takes weights into a dictionary; where it ``hangs``, it never answers."""

    def __init__(self, hangs: bool) -> None:
        self.hangs, self.called, self.weights = hangs, asyncio.Event(), {}

    async def load_weights(self, bucket) -> None:
        self.called.set()
        if self.hangs:
            await asyncio.Event().wait()
        self.weights |= {name: weight.tolist() for name, weight in bucket.bucket().tensors()}

    async def until_called(self) -> None:
        await self.called.wait()

    async def loaded(self) -> dict:
        return self.weights


@pytest.fixture(scope="module")
def engines():
    ray.init(address="local", num_cpus=2, include_dashboard=False)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the actors cannot import tests
    actor = ray.remote(Engine).options(max_concurrency=4)
    yield [actor.remote(hangs) for hangs in (False, True)]
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    ray.shutdown()


def weights():
    """float32 and int64: two buckets, of which the second is sent while the engines load the first."""
    return iter([("a", torch.tensor([1.001, 2.0])), ("b", torch.tensor([[3]]))])


def test_weights_reach_an_engine_in_the_dtype_that_it_computes_in(engines):
    result = RayEngineSender((engines[0],), torch.bfloat16).send(weights())
    assert ray.get(engines[0].loaded.remote()) == {"a": [1.0, 2.0], "b": [[3]]}
    assert (result.bytes, result.failed) == (2 * 2 + 8, {})


def test_an_abort_gives_up_engines_that_never_answer(engines, monkeypatch):
    monkeypatch.setattr(cluster_weights, "WEIGHTS_SECONDS", float(PATIENCE))
    sender = RayEngineSender(tuple(engines), torch.float32)
    sending = DaemonPool("sending").submit(sender.send, weights())
    ray.get(engines[1].until_called.remote(), timeout=PATIENCE)
    sender.abort()
    assert sending.result(PATIENCE).failed == {"engines": "aborted"}
    assert not RayEngineSender((engines[0],), torch.float32).send(weights()).failed
