"""Ports for programs that open them a minute later: nobody gets them in the meantime."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from vlmrl.utils import http_server
from vlmrl.utils.http_server import FIRST_PORT, free_ports

pytestmark = pytest.mark.slow  # they open sockets


def test_ports_are_none_that_the_kernel_gives_to_connections():
    """An SGLang server ended at its start, since another program had got its port."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if first < FIRST_PORT + 1000:
        pytest.skip("this kernel keeps no ports apart")
    ports = free_ports(50)
    assert len(set(ports)) == 50
    assert not [port for port in ports if not FIRST_PORT <= port < first]


def test_a_port_in_use_is_not_chosen(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        only_it_and = {port, *free_ports(2)}
        monkeypatch.setattr(http_server, "_ports_to_try", lambda: iter(sorted(only_it_and)))
        assert set(free_ports(2)) == only_it_and - {port}


@pytest.mark.parametrize("content", [None, "1024 65535", "a range"])
def test_a_kernel_without_a_range_or_with_all_ports_in_it_chooses_itself(
    content: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    file = tmp_path / "ip_local_port_range"
    if content is not None:
        file.write_text(content)
    monkeypatch.setattr(http_server, "_KERNELS_PORTS", file)
    assert len(set(free_ports(20))) == 20
