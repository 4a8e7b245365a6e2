"""Where Ray starts servers, and whom they answer, without starting Ray."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="needs Ray: pip install 'vlmrl[ray]'")


from vlmrl.cluster import server_host
from vlmrl.cluster.launcher import Node
from vlmrl.cluster.server_host import RayServerHost
from vlmrl.config import Cluster, Config, ServerSettings
from vlmrl.engine.server_backend import TOKEN_VARIABLE, Capabilities, ServedModel
from vlmrl.engine.sglang.backend import SGLangBackend

MODEL = ServedModel("/model", "float32")


class Method:
    """A method of an actor that is called at once."""

    def __init__(self, function):
        self.remote = function


class Actor:
    """A launcher on a node, as Ray's handle of it."""

    def __init__(self, address, gpus=()):
        self.node = Method(lambda: Node(address, address, gpus))
        self.free_port = Method(lambda host: 30000)


@pytest.fixture
def place(monkeypatch):
    """Gives the launchers of a run by their names."""

    def launchers(**actors):
        named = {name.replace("_", "-"): actor for name, actor in actors.items()}
        monkeypatch.setattr(server_host, "_connect", lambda: "run")
        monkeypatch.setattr(server_host, "results", lambda calls, seconds, what: list(calls))
        monkeypatch.setattr(server_host.ray, "get_actor", lambda name, namespace: named[name])

    return launchers


def placed(config):
    return RayServerHost(config).servers(SGLangBackend(config.server), MODEL)


ONE, OTHER = Actor("10.0.0.5"), Actor("10.0.0.6")
TWO_NODES = {"server_0": ONE, "server_1": OTHER, "rank_0": ONE, "rank_1": OTHER}


def test_servers_on_several_nodes_want_a_token_each(place):
    place(**TWO_NODES)
    servers = placed(Config(engine="sglang", cluster=Cluster(ranks=2, engines=2, nodes=2)))
    assert [server.url for server in servers] == ["http://10.0.0.5:30000", "http://10.0.0.6:30000"]
    tokens = [server.token for server in servers]
    assert [server.process.launch.env[TOKEN_VARIABLE] for server in servers] == tokens
    assert len(set(tokens)) == 2 and None not in tokens


def test_a_server_on_the_only_node_listens_on_the_loopback_address(place):
    place(server_0=ONE, rank_0=ONE, rank_1=ONE)
    [server] = placed(Config(engine="sglang", cluster=Cluster(ranks=2)))
    assert (server.url, server.beside) == ("http://127.0.0.1:30000", ())
    assert server.process.launch.env[TOKEN_VARIABLE] == server.token


def test_colocated_servers_use_the_gpus_of_the_ranks_beside_them(place):
    ranks = {f"rank_{number}": Actor("10.0.0.5", (str(7 - number),)) for number in range(4)}
    place(server_0=ONE, server_1=ONE, **ranks)
    servers = placed(Config(engine="sglang", cluster=Cluster(gpus=4), server=ServerSettings(tp=2)))
    assert [server.process.launch.env["CUDA_VISIBLE_DEVICES"] for server in servers] == ["7,6", "5,4"]
    assert [server.beside for server in servers] == [(0, 1), (2, 3)]  # whose GPU memory each of their ranks can map


def test_servers_apart_use_their_own_gpus_and_map_no_ranks_memory(place):
    place(server_0=Actor("10.0.0.5", ("2", "3")), rank_0=ONE, rank_1=ONE)
    cluster = Cluster(gpus=4, colocate=False, ranks=2)
    [server] = placed(Config(engine="sglang", cluster=cluster, server=ServerSettings(tp=2)))
    assert server.process.launch.env["CUDA_VISIBLE_DEVICES"] == "2,3" and server.beside == ()


def test_running_servers_get_the_token_of_the_environment(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "abc")
    [server] = placed(
        Config(engine="sglang", cluster=Cluster(ranks=2), server=ServerSettings(urls=("http://node7:30000",)))
    )
    assert (server.token, server.beside) == ("abc", ())


def test_a_server_program_that_checks_no_token_is_not_started_on_several_nodes(place, monkeypatch):
    monkeypatch.setattr(SGLangBackend, "capabilities", Capabilities())
    place(**TWO_NODES)
    with pytest.raises(ValueError, match="it checks no token: it would answer everybody"):
        placed(Config(engine="sglang", cluster=Cluster(ranks=2, engines=2, nodes=2)))


def test_an_embedded_engine_is_beside_rank_0_alone():
    for setting in ({"engines": 2}, {"colocate": True}, {"colocate": False}):
        with pytest.raises(
            ValueError, match=r"cluster\.\w+ must be unset with engine embedded, which samples in the process"
        ):
            Config(cluster=Cluster(gpus=2, **setting))
    config = Config(cluster=Cluster(gpus=8))
    assert (config.resolved_cluster.num_ranks, config.resolved_cluster.num_engines, config.colocated) == (8, 1, False)
