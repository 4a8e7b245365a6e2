"""Where Ray starts servers, and whom they answer, without starting Ray."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("ray", reason="needs Ray: pip install 'vlmrl[ray]'")

from vlmrl.cluster import server_host, workers
from vlmrl.cluster.server_host import RayServerHost
from vlmrl.cluster.workers import ServerWorker
from vlmrl.config import Cluster, Config, SGLang
from vlmrl.engine.server_backend import TOKEN_VARIABLE, Capabilities, ServedModel
from vlmrl.engine.sglang.backend import SGLangBackend


class Method:
    """A method of an actor that is called at once."""

    def __init__(self, function):
        self.remote = function


class LocalActor:
    """A worker in this process, as Ray's handle of an actor."""

    def __init__(self, worker, address):
        self.worker = worker
        self.__ray_call__ = Method(lambda function: address)

    def __getattr__(self, name):
        return Method(getattr(self.worker, name))


@pytest.fixture
def host_of(monkeypatch):
    """Makes the host of a run's servers on nodes with these addresses, and the list of its actors."""
    monkeypatch.setattr(server_host, "results", lambda calls, seconds, what: list(calls))
    monkeypatch.setattr(workers, "free_ports", lambda count, host: [30000])

    def make(config, *addresses):
        actors = []

        def start_actor(worker, *arguments, index, of, gpus):
            return LocalActor(worker(*arguments), addresses[index])

        cluster = SimpleNamespace(start_actor=start_actor, engines=actors, ranks=None)
        return RayServerHost(config, cluster), actors

    return make


def launch_of(actor):
    assert isinstance(actor.worker, ServerWorker)
    return actor.worker._planned_process.launch


def test_servers_on_several_nodes_want_a_token_each(host_of):
    config = Config(engine="sglang", cluster=Cluster(ranks=2, engines=2, nodes=2))
    host, actors = host_of(config, "10.0.0.5", "10.0.0.6")
    servers = host.servers(SGLangBackend(config.sglang), ServedModel("/model", "float32"))
    assert [server.url for server in servers] == ["http://10.0.0.5:30000", "http://10.0.0.6:30000"]
    tokens = [server.token for server in servers]
    assert [launch_of(actor).env[TOKEN_VARIABLE] for actor in actors] == tokens
    assert len(set(tokens)) == 2 and None not in tokens


def test_servers_on_the_only_node_want_none(host_of):
    config = Config(engine="sglang", cluster=Cluster(ranks=2))
    host, actors = host_of(config, "10.0.0.5")
    [server] = host.servers(SGLangBackend(config.sglang), ServedModel("/model", "float32"))
    assert (server.url, server.token) == ("http://127.0.0.1:30000", None)
    assert TOKEN_VARIABLE not in launch_of(actors[0]).env


def test_running_servers_get_the_token_of_the_environment(host_of, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "abc")
    config = Config(engine="sglang", cluster=Cluster(ranks=2), sglang=SGLang(urls=("http://node7:30000",)))
    host, _ = host_of(config)
    [server] = host.servers(SGLangBackend(config.sglang), ServedModel("/model", "float32"))
    assert server.token == "abc"


def test_a_server_program_that_checks_no_token_is_not_started_on_several_nodes(host_of, monkeypatch):
    monkeypatch.setattr(SGLangBackend, "capabilities", Capabilities())
    config = Config(engine="sglang", cluster=Cluster(ranks=2, engines=2, nodes=2))
    host, actors = host_of(config, "10.0.0.5", "10.0.0.6")
    with pytest.raises(ValueError, match="it checks no token, and would answer everybody"):
        host.servers(SGLangBackend(config.sglang), ServedModel("/model", "float32"))
    assert [actor.worker._process for actor in actors] == [None, None]
