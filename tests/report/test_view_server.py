"""The server of `vlmrl view`, and the command."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx
import pytest
from testing.episodes import wait_until
from testing.run_folders import write_run_folder
from testing.servers import served

from vlmrl.cli import main as cli
from vlmrl.report import run_data
from vlmrl.report.run_data import load_run
from vlmrl.report.viewer.followed_run import FollowedRun
from vlmrl.report.viewer.view_server import create_view_app
from vlmrl.utils import output_files

pytestmark = pytest.mark.slow  # it listens


@contextmanager
def client_of(folder: Path, token: str | None = None) -> Iterator[httpx.Client]:
    with (
        served(create_view_app([FollowedRun(folder)], folder.name, token)) as url,
        httpx.Client(base_url=url, timeout=600) as http,
    ):
        yield http


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_run_folder(tmp_path_factory.mktemp("runs") / "geo3k", steps=1, groups=2, group_size=2)


@pytest.fixture(scope="module")
def client(folder) -> Iterator[httpx.Client]:
    with client_of(folder) as http:
        yield http


def test_the_server_answers_with_what_the_page_requests(client, folder):
    assert "</html>" in client.get("/").text
    first = client.get("/api/runs/0").json()
    assert len(first["trajectories"]) == 9
    query = {"generation": first["generation"], "metrics": 1, "trajectories": 9}
    later = client.get("/api/runs/0", params=query).json()
    assert later["metrics"] == first["metrics"][1:] and later["trajectories"] == []
    record = client.get("/api/runs/0/trajectories/3").json()
    assert record["id"] == first["trajectories"][3]["id"]
    assert client.get("/api/runs/0/search", params={"text": "timeouterror"}).json() == [4]
    image = client.get(f"/api/runs/0/images/{record['turns'][0]['images'][0]}")
    assert image.headers["content-type"] == "image/png" and image.content.startswith(b"\x89PNG")


def test_the_log_of_an_agents_command_is_shown_and_no_other_file(tmp_path):
    folder = write_run_folder(tmp_path / "run", steps=1, groups=1, group_size=1)
    lines = (folder / "trajectories.jsonl").read_text().splitlines()
    outside = json.loads(lines[1]) | {"id": "../secret"}
    (folder / "trajectories.jsonl").write_text("\n".join([lines[0], json.dumps(outside), ""]))
    (folder / "secret.log").write_text("secret")
    log = folder / f"agents/{json.loads(lines[0])['id']}.log"
    log.parent.mkdir(parents=True)
    log.write_text("zooming\n")
    with client_of(folder) as client:
        assert len(client.get("/api/runs/0").json()["trajectories"]) == 2
        assert [client.get(f"/api/runs/0/trajectories/{n}").json()["has_log"] for n in (0, 1)] == [True, False]
        response = client.get("/api/runs/0/trajectories/0/log")
        assert (response.text, response.headers["content-type"]) == ("zooming\n", "text/plain; charset=utf-8")
        assert client.get("/api/runs/0/trajectories/1/log").status_code == 404


def test_links_in_a_runs_folder_are_not_followed(tmp_path):
    folder = write_run_folder(tmp_path / "run", steps=1, groups=1, group_size=1)
    (tmp_path / "secret").write_text("secret")
    (folder / "images").mkdir(exist_ok=True)
    (folder / "images/link.png").symlink_to(tmp_path / "secret")
    (folder / "images/folder.png").mkdir()
    os.mkfifo(folder / "images/fifo.png")
    (folder / "elsewhere").symlink_to(tmp_path)
    record = json.loads((folder / "trajectories.jsonl").read_text().splitlines()[0])
    log = folder / f"agents/{record['id']}.log"
    log.parent.mkdir(parents=True)
    log.symlink_to(tmp_path / "secret")
    with client_of(folder) as client:
        for name in ("link", "folder", "fifo"):
            assert client.get(f"/api/runs/0/images/{name}").status_code == 404
        assert client.get("/api/runs/0/trajectories/0/log").status_code == 404
    (folder / "images").rename(folder / "moved")
    (folder / "images").symlink_to(tmp_path)
    (tmp_path / "outside.png").write_text("secret")
    assert load_run(folder).image_path("outside") is None


def test_a_file_that_becomes_a_pipe_holds_up_no_request(tmp_path):
    folder = write_run_folder(tmp_path / "run", steps=1, groups=1, group_size=1)
    with client_of(folder) as client:
        assert client.get("/api/runs/0").status_code == 200
        (folder / "trajectories.jsonl").unlink()
        os.mkfifo(folder / "trajectories.jsonl")
        for path in ("/trajectories/0", "", "/search?text=a"):
            assert client.get(f"/api/runs/0{path}").status_code == 400


@pytest.mark.parametrize("swapped", ["images/mine.png", "images", "config.json", "agents"])
def test_a_link_that_takes_the_place_of_a_file_after_the_look_at_it_is_not_followed(tmp_path, monkeypatch, swapped):
    """The owner of a run's folder reads no file of the user who serves it, such as a key: 1 in 100 images was one."""
    folder = write_run_folder(tmp_path / "run", steps=1, groups=1, group_size=1)
    log = f"agents/{json.loads((folder / 'trajectories.jsonl').read_text().splitlines()[0])['id']}.log"
    (tmp_path / "out").mkdir()
    for each in (folder, tmp_path / "out"):
        for name in ("images/mine.png", log, "mine.png", log.removeprefix("agents/")):
            (each / name).parent.mkdir(parents=True, exist_ok=True)
            (each / name).write_text("mine" if each == folder else "secret")
    (tmp_path / "out/config.json").write_text('{"secret": 1}')
    looks = []

    def looked(*args):
        found = output_files.regular_file(*args)
        if (args[1] if swapped == "config.json" else "/".join(args[1:])).startswith(swapped):
            looks.append(found)
            (folder / swapped).rename(folder / f"moved{len(looks)}")
            (folder / swapped).symlink_to(tmp_path / "out" / ("" if swapped == "agents" else swapped))
        return found

    with client_of(folder) as client:
        client.get("/api/runs/0")
        monkeypatch.setattr(run_data, "regular_file", looked)
        for path in ("images/mine", "trajectories/0/log", ""):
            response = client.get(f"/api/runs/0/{path}".rstrip("/"))
            assert "secret" not in response.text
        assert looks
        if swapped.startswith("images"):
            with pytest.raises(ValueError, match="must be a regular file"):
                output_files.open_regular(folder / "images/mine.png", folder)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("runs/1", 404),
        ("runs/-1", 404),
        ("runs/0?metrics=-3", 200),
        ("runs/0?metrics=many", 400),
        ("runs/0/trajectories/9", 404),
        ("runs/0/search", 400),
        (f"runs/0/trajectories/{'9' * 5000}", 404),
        (f"runs/{'9' * 5000}", 404),
        ("runs/0/images/missing", 404),
        (f"runs/0/images/{'a' * 300}", 404),
        ("runs/0/images/..%2f..%2fconfig", 404),
        ("runs/0/images/%2e%2e", 404),
    ],
)
def test_what_does_not_exist_is_an_error_and_nothing_else_is_read(client, path, status):
    assert client.get("/api/" + path).status_code == status


def test_names_of_other_machines_are_refused(client):
    for path in ("/", "/api/runs/0"):
        assert client.get(path, headers={"host": "evil.example"}).status_code == 403
        assert client.get(path, headers={"host": "localhost"}).status_code == 200


def test_a_link_of_another_site_leads_to_the_page_and_to_no_search(client):
    """A page elsewhere may have a hundred frames with searches, each of which reads all trajectories."""
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert client.get("/", headers=link).status_code == 200
    assert client.get("/api/runs/0/search?text=a", headers=link).status_code == 403
    assert client.get("/api/runs/0/search?text=a", headers={"Sec-Fetch-Site": "same-origin"}).status_code == 200


def test_searches_leave_threads_to_other_requests_and_end_with_their_clients(folder, monkeypatch):
    """Each letter of a search over all steps took a thread for all trajectories: of 470 MB, a click then waited for a minute."""
    ended = list[bool]()

    def endless(run, text, step=None, ends=lambda: False):
        wait_until(ends)
        ended.append(True)
        return []

    monkeypatch.setattr(FollowedRun, "search", endless)
    with client_of(folder) as client:
        client.get("/api/runs/0")
        target = client.base_url
        request = f"GET /api/runs/0/search?text=a HTTP/1.1\r\nHost: {target.host}\r\n\r\n".encode()
        searches = [socket.create_connection((target.host, target.port)) for _ in range(40)]
        for search in searches:
            search.sendall(request)
        assert client.get("/api/runs/0/trajectories/3", timeout=20).status_code == 200
        for search in searches:
            search.close()
        wait_until(lambda: ended)
        monkeypatch.undo()
        assert client.get("/api/runs/0/search?text=timeouterror").json() == [4]


def test_with_a_token_data_needs_it_and_the_page_does_not_contain_it(folder):
    with client_of(folder, "s3cret") as client:
        page = client.get("/", headers={"host": "gpu-box:8321"})
        assert page.status_code == 200 and "s3cret" not in page.text
        assert client.get("/api/runs/0").status_code == 401
        assert client.get("/api/runs/0", headers={"Authorization": "Bearer s3cret"}).status_code == 200


def view(monkeypatch: pytest.MonkeyPatch, *words: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["vlmrl", "view", *map(str, words)])
    cli.main()


def refused(monkeypatch: pytest.MonkeyPatch, capsys: Any, *words: Any) -> str:
    with pytest.raises(SystemExit) as ended:
        view(monkeypatch, *words)
    printed = capsys.readouterr()
    assert ended.value.code == 1 and printed.out == "" and "Traceback" not in printed.err
    return " ".join(printed.err.split())


def test_the_command_writes_a_page(monkeypatch, capsys, folder, tmp_path):
    view(monkeypatch, folder, "--out", tmp_path / "sub/page.html")
    assert "vlmrl" in (tmp_path / "sub/page.html").read_text()
    assert f"{tmp_path / 'sub/page.html'}: " in capsys.readouterr().out
    view(monkeypatch, folder)
    assert (folder / "trajectories.html").exists()


def test_a_port_in_use_is_said_before_an_address_is_printed(monkeypatch, capsys, folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused(monkeypatch, capsys, folder, "--serve", "--port", port)
    assert f"--port {port} of --host 127.0.0.1 is in use: choose another one." in said


def test_the_world_needs_a_token(monkeypatch, capsys, folder):
    monkeypatch.delenv("VLMRL_VIEW_TOKEN", raising=False)
    said = refused(monkeypatch, capsys, folder, "--serve", "--host", "0.0.0.0")
    assert "a token is required: put one into the environment variable VLMRL_VIEW_TOKEN" in said


def test_mistakes_are_said_in_a_line(monkeypatch, capsys, folder, tmp_path):
    assert "no-run: there is no such folder" in refused(monkeypatch, capsys, tmp_path / "no-run")
    assert "--serve and --out" in refused(monkeypatch, capsys, folder, "--serve", "--out", tmp_path / "page.html")


def test_the_address_has_the_port_that_was_chosen_and_only_a_private_file_the_token(monkeypatch, capsys, folder):
    ports: list[Any] = []
    opened: list[str] = []

    def open_page(address: str) -> None:
        page = Path(unquote(urlsplit(address).path)) if address.startswith("file:") else None
        opened.append(page.read_text() if page else address)
        assert page is None or page.parent.stat().st_mode & 0o077 == 0

    monkeypatch.setattr("webbrowser.open", open_page)
    monkeypatch.setattr("vlmrl.utils.http_server.serve_on", lambda port, app: ports.append(port.getsockname()))
    view(monkeypatch, folder, "--serve", "--open")
    assert f"geo3k: http://127.0.0.1:{ports[0][1]}/" in capsys.readouterr().out
    assert opened == [f"http://127.0.0.1:{ports[0][1]}/"]
    monkeypatch.setenv("VLMRL_VIEW_TOKEN", "s3cret")
    view(monkeypatch, folder, "--serve", "--host", "0.0.0.0", "--open")
    assert f"url=http://0.0.0.0:{ports[1][1]}/#token=s3cret" in opened[1]
    printed = capsys.readouterr().out
    assert f"http://0.0.0.0:{ports[1][1]}/#token=TOKEN" in printed and "s3cret" not in printed


def test_ctrl_c_ends_the_server_without_a_traceback(folder):
    command = [sys.executable, "-m", "vlmrl", "view", str(folder), "--serve"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert server.stdout is not None
    address = re.search(r"http://\S+", server.stdout.readline())
    assert address is not None
    with urllib.request.urlopen(address[0] + "api/runs/0", timeout=600) as response:  # it has started
        assert json.load(response)["name"] == "geo3k"
    server.send_signal(signal.SIGINT)
    _, said = server.communicate(timeout=600)
    assert server.returncode == 0 and said == ""
