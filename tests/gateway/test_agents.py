"""How agents are run: in threads, in one loop, in processes; their deadlines and failures."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from vlmrl.config import Config, Gateway, Rollout
from vlmrl.gateway import agent_command, command_log
from vlmrl.gateway.agent_client import AgentClient
from vlmrl.gateway.agents import AgentError, Agents, AgentSpec, resolve_agent
from vlmrl.types import Task
from vlmrl.utils import user_loop

RED = Image.new("RGB", (8, 4), "red")
PROMPT = [{"role": "user", "content": [{"type": "image", "image": RED}, {"type": "text", "text": "Which color?"}]}]
TASK = Task("t/1", PROMPT, [RED], answer="red", data={"size": 8})
CLIENT = AgentClient("http://127.0.0.1:9/t/x", "sk-x")


@pytest.fixture
def run(tmp_path):
    """Runs an agent, and ends all agents after the test."""
    made = []

    def run(agent, task=TASK, **settings):
        spec = AgentSpec("a", command=tuple(agent)) if isinstance(agent, list) else AgentSpec("a", agent)
        made.append(Agents(spec, Gateway(**settings), tmp_path / "agents"))
        return asyncio.run(made[-1].run(task, CLIENT, "step1/0/00"))

    yield run
    for each in made:
        each.close()


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def wait_until_ended(pid: int) -> None:
    while is_running(pid):
        time.sleep(0.01)


def read_when_there(path: Path) -> str:
    while not path.exists() or not (text := path.read_text()):
        time.sleep(0.01)
    return text


async def answer(task, client, *, bonus=0.0):
    return {"reward": float(task.answer == "red") + bonus, "thread": threading.get_ident()}


def plain_answer(task, client):
    with pytest.raises(RuntimeError, match="no running event loop"):
        asyncio.get_running_loop()
    return {"reward": 1.0, "thread": threading.get_ident()}


@pytest.mark.parametrize("agent", [answer, plain_answer])
def test_a_function_runs_outside_of_the_runs_thread(run, agent):
    result = run(agent)
    assert result["reward"] == 1.0
    assert result["thread"] != threading.get_ident()


def test_a_timeout_of_the_agents_own_is_not_the_deadline(run):
    async def times_out(task, client):
        raise TimeoutError("the shop does not answer")

    with pytest.raises(AgentError, match="TimeoutError: the shop does not answer"):
        run(times_out)


def test_an_agent_beyond_its_deadline_fails_and_is_cancelled(run, monkeypatch):
    monkeypatch.setattr(user_loop, "ANSWER_SECONDS", 600.0)
    begun, ended = threading.Event(), threading.Event()

    async def sleeps(task, client):
        begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    while not begun.is_set():  # the deadline of a slow machine may come before
        with pytest.raises(AgentError, match=r"^no end within gateway.agent_timeout \(0.05 s\).$"):
            run(sleeps, agent_timeout=0.05)
    assert ended.wait(600)


async def cancels_itself(task, client):
    asyncio.current_task().cancel()
    await asyncio.sleep(3600)


async def interrupts(task, client):
    raise KeyboardInterrupt


async def groups(task, client):
    async with asyncio.TaskGroup() as group:
        group.create_task(raises(task, client))


async def raises(task, client):
    json.loads("{")


class Unprintable(Exception):
    def __str__(self):
        raise KeyError


def raises_unprintable(task, client):
    raise Unprintable


def exits(task, client):
    sys.exit(3)


async def exits_async(task, client):
    sys.exit(3)


def raises_much(task, client):
    raise ValueError("x" * 100_000)


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (cancels_itself, r"^it cancelled itself\.$"),
        (interrupts, r"^RuntimeError: KeyboardInterrupt:  \(.*test_agents.py, line \d+, in interrupts\)$"),
        (groups, r"^JSONDecodeError: .* \(.*test_agents.py, line \d+, in raises\)$"),
        (raises_unprintable, r"^Unprintable: its text cannot be had \(KeyError\) \(.*, in raises_unprintable\)$"),
        (
            partial(int, "x"),
            r"^TypeError: .* \(.*, line \d+, in ",
        ),  # no code of the user's: the last line that is known
        (exits, r"^RuntimeError: SystemExit: 3 \(.*test_agents.py, line \d+, in exits\)$"),
        (exits_async, r"^RuntimeError: SystemExit: 3 \(.*test_agents.py, line \d+, in exits_async\)$"),
        (raises_much, r"^ValueError: x{2000} \("),
    ],
)
def test_a_failed_agent_harms_no_other_and_its_own_code_is_named(tmp_path, agent, message):
    async def both():
        with pytest.raises(AgentError, match=message):
            await agents.run(TASK, CLIENT, "a")
        agents.spec = AgentSpec("b", answer)
        return await agents.run(TASK, CLIENT, "b")

    agents = Agents(AgentSpec("a", agent), Gateway(agent_timeout=60), tmp_path)
    try:
        assert asyncio.run(both()) is not None
    finally:
        agents.close()


def test_a_function_that_returns_a_coroutine_is_an_async_agent(run):
    assert run(lambda task, client: answer(task, client))["reward"] == 1.0


def test_a_plain_function_beyond_its_deadline_is_abandoned(run):
    release, ended = threading.Event(), threading.Event()

    def waits(task, client):
        release.wait()
        ended.set()

    with pytest.raises(AgentError, match=r"no end within gateway\.agent_timeout"):
        run(waits, agent_timeout=0.05)
    assert not ended.is_set()
    release.set()
    assert ended.wait(600)


def test_an_async_agent_that_blocks_is_named_and_the_next_one_gets_another_loop(tmp_path):
    begun, release = threading.Event(), threading.Event()

    async def blocks(task, client):
        if task.id == "blocks":
            begun.set()
            release.wait()
        return threading.get_ident()

    async def three():
        blocking = asyncio.create_task(made.run(Task("blocks", []), CLIENT, "a"))
        await asyncio.to_thread(begun.wait)
        made._settings = Gateway(agent_timeout=0.05)
        with pytest.raises(AgentError, match="blocks the event loop of all async agents"):
            await made.run(TASK, CLIENT, "b")
        made._settings = Gateway()
        last = await made.run(TASK, CLIENT, "c")
        release.set()
        return await blocking, last

    made = Agents(AgentSpec("a", blocks), Gateway(), tmp_path)
    try:
        assert len({threading.get_ident(), *asyncio.run(three())}) == 3
    finally:
        release.set()
        made.close()


@pytest.mark.slow
def test_a_command_gets_the_endpoint_and_the_task_and_leaves_a_log(run, tmp_path):
    code = """
import json, os
task = json.load(open(os.environ["VLMRL_TASK"]))
file = task["messages"][0]["content"][0]["image_url"]["url"]
print(json.dumps([os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], task["answer"], task["data"], file, os.getcwd()]))
from PIL import Image
print(Image.open(task["images"][0]).size)
"""
    assert run(python(code)) is None
    first, size = (tmp_path / "agents/step1/0/00.log").read_text().splitlines()
    url, key, told, data, file, folder = json.loads(first)
    assert (url, key, told, data, size) == ("http://127.0.0.1:9/t/x/v1", "sk-x", "red", {"size": 8}, "(8, 4)")
    assert file == f"file://{folder}/image-0.png"
    assert not Path(folder).exists()


@pytest.mark.slow
def test_orphans_of_a_command_do_not_stay_as_zombies_while_it_runs(run):
    """Each keeps a process id of the machine until then."""
    code = """
import os, time
reader, writer = os.pipe()
if not (parent := os.fork()):
    if not (orphan := os.fork()):
        os._exit(0)
    os.write(writer, b"%d" % orphan)
    os._exit(0)
os.waitpid(parent, 0)
orphan = os.read(reader, 20).decode()
while os.path.exists(f"/proc/{orphan}"):
    time.sleep(0.01)
"""
    assert run(python(code), agent_timeout=120.0) is None


@pytest.mark.slow
def test_a_folder_nested_too_deep_for_python_to_delete_fails_no_command(run, tmp_path):
    code = "import os\nprint(os.getcwd())\nfor _ in range(2000):\n    os.mkdir('a')\n    os.chdir('a')"
    assert run(python(code)) is None
    assert not Path((tmp_path / "agents/step1/0/00.log").read_text().strip()).exists()


@pytest.mark.slow
def test_a_failed_command_is_reported_with_the_end_of_its_output(run):
    with pytest.raises(AgentError, match=r"(?s)^exit status 3; the end of its output:\n1\n.*19\nbad$"):
        run(python("import sys\nprint(*range(20), sep='\\n')\nsys.exit(print('bad') or 3)"))
    with pytest.raises(AgentError, match=r"^ended by signal 9, without any output$"):
        run(python("import os\nos.kill(os.getpid(), 9)"))


LEAVES_ORPHANS = """
import os, sys, time
folder = sys.argv[1]
for name in ("in_group", "in_session"):
    if os.fork():
        continue
    if name == "in_session":
        os.setsid()
        if os.fork():
            os._exit(0)
    with open(f"{folder}/{name}.part", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{folder}/{name}.part", f"{folder}/{name}")
    time.sleep(3600)
while len(os.listdir(folder)) < 2: time.sleep(0.01)
sys.exit(4)
"""


@pytest.mark.slow
def test_what_a_command_leaves_is_killed_also_in_a_session_of_its_own(run, tmp_path):
    (tmp_path / "pids").mkdir()
    with pytest.raises(AgentError, match="exit status 4"):
        run([*python(LEAVES_ORPHANS), str(tmp_path / "pids")])
    assert not any(is_running(int((tmp_path / "pids" / name).read_text())) for name in ("in_group", "in_session"))


@pytest.mark.slow
def test_what_a_command_leaves_is_killed_also_if_it_kills_its_guard(run, tmp_path):
    with pytest.raises(AgentError, match="ended by signal 9"):
        run(["sh", "-c", f"setsid sleep 3600 & echo $! > {tmp_path / 'pid'}; kill -9 $PPID; sleep 3600"])
    wait_until_ended(int((tmp_path / "pid").read_text()))


@pytest.mark.slow
def test_a_command_beyond_its_deadline_is_ended(run, tmp_path):
    pid = tmp_path / "pid"
    while not pid.exists():  # the deadline of a slow machine may come before
        with pytest.raises(AgentError, match=r"no end within gateway\.agent_timeout"):
            run(["sh", "-c", f"echo $$ > {pid}; sleep 3600"], agent_timeout=0.5)
    assert not is_running(int(pid.read_text() or -1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at_sigterm", "seconds", "output"),
    [("lambda *_: sys.exit(print('SIGTERM'))", 3600.0, "SIGTERM\n"), ("signal.SIG_IGN", 0.1, "")],
)
def test_a_cancelled_command_gets_sigterm_and_then_sigkill(tmp_path, monkeypatch, at_sigterm, seconds, output):
    monkeypatch.setattr(agent_command, "KILL_SECONDS", seconds)
    code = f"""
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, {at_sigterm})
pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(os.getpid()))
while True: time.sleep(0.01)
"""

    async def cancelled():
        playing = asyncio.create_task(made.run(TASK, CLIENT, "step1/0/00"))
        pid = int(await asyncio.to_thread(read_when_there, tmp_path / "pid"))
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        return pid

    made = Agents(AgentSpec("a", command=tuple(python(code))), Gateway(), tmp_path / "agents")
    try:
        assert not is_running(asyncio.run(cancelled()))
    finally:
        made.close()
    assert (tmp_path / "agents/step1/0/00.log").read_text() == output


RUN_OF_ITS_OWN = """
import asyncio, pathlib, sys, threading
from vlmrl.config import Gateway
from vlmrl.gateway.agent_client import AgentClient
from vlmrl.gateway.agents import Agents, AgentSpec
from vlmrl.types import Task
folder = pathlib.Path(sys.argv[1])
command = ("sh", "-c", f"pwd > {folder}/cwd; echo $$ > {folder}/pid; setsid sleep 3600 & echo $! > {folder}/child; wait")
agents = Agents(AgentSpec("a", command=command), Gateway(), folder)
asyncio.run(agents.run(Task("t", []), AgentClient("http://127.0.0.1:9/t/x", "k"), "a"))
"""


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_no_command_and_no_folder(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", RUN_OF_ITS_OWN, str(tmp_path)])
    try:
        pids = [int(read_when_there(tmp_path / name)) for name in ("pid", "child")]
        folder = Path((tmp_path / "cwd").read_text().strip())
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    for pid in pids:
        wait_until_ended(pid)
    while folder.parent.exists():
        time.sleep(0.01)


def test_a_log_keeps_the_beginning_and_the_end_of_a_long_output(tmp_path, monkeypatch):
    monkeypatch.setattr(command_log, "HALF", 4)
    logs = command_log.CommandLogs(tmp_path)
    log = logs.open("step1/0/00")
    for output in (b"012", b"345678", b"9abcdef"):
        log.write(output)
    assert log.close() == "0123\n[8 bytes are left out]\ncdef"
    assert (tmp_path / "step1/0/00.log").read_text() == "0123\n[8 bytes are left out]\ncdef"
    monkeypatch.setattr(command_log, "KEPT", 2)
    for name in ("step2/0/00", "step2/0/01"):
        logs.open(name).close()
    assert sorted(path.name for path in tmp_path.rglob("*.log")) == ["00.log", "01.log"]
    assert not (tmp_path / "step1/0").exists()


def test_an_agent_is_checked_before_the_run():
    rollout = Rollout(samples="merged")
    spec = resolve_agent(Config(agent=answer, rollout=rollout))
    assert (spec.name, spec.command, spec.is_async) == ("answer", (), True)
    with pytest.raises(ValueError, match="reward must be callable as plain_answer"):
        resolve_agent(Config(agent=answer, reward=plain_answer, rollout=rollout))
    with pytest.raises(ValueError, match=r"agent must begin with a program that can be run, but it is 'no-such-agent'"):
        resolve_agent(Config(agent="no-such-agent --fast", rollout=rollout))
    with pytest.raises(ValueError, match=r"Make it executable: chmod \+x .*test_agents.py$"):
        resolve_agent(Config(agent=__file__, rollout=rollout))
    assert len(resolve_agent(Config(agent=f"sh -c '{'true; ' * 99}'", rollout=rollout)).name) == 80


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout": Rollout()}, "rollout.samples must be merged or step_wise with agent"),
        ({"rollout": Rollout(samples="merged", history="inline")}, "rollout.history must be append with agent"),
        ({"env": "a:B"}, "env and agent exclude each other"),
        ({"agent": " "}, "agent must be a function or a command line, but it is ' '"),
        ({"rollout": Rollout(samples="merged", generate="a:b")}, "rollout.generate and agent exclude each other"),
    ],
)
def test_what_an_agent_excludes(settings, message):
    with pytest.raises(ValueError, match=message):
        Config(**{"agent": answer, "rollout": Rollout(samples="merged")} | settings)


@pytest.mark.parametrize("kind", ["openai", "async_openai", "anthropic", "async_anthropic"])
def test_a_ready_made_client_uses_no_proxy(monkeypatch, kind):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for url in ("http://127.0.0.1:8000/t/x", "http://[::1]:8000/t/x", "https://gateway.example/t/x"):
        http = getattr(AgentClient(url, "k"), kind)()._client
        assert http._transport_for_url(type(http.base_url)(url)) is http._transport


@pytest.mark.parametrize("kind", ["plain", "async", "returns a coroutine", "fails"])
def test_the_clients_of_an_agent_are_closed_at_its_end_except_those_on_a_connection_of_its_own(run, kind):
    httpx, made = pytest.importorskip("httpx"), []
    pytest.importorskip("openai")
    shared = httpx.Client()

    def plain(task, client):
        made.extend([client.openai(), client.openai(http_client=shared)])
        if kind == "fails":
            raise ValueError("bad")

    async def asynchronous(task, client):
        made.extend([client.async_openai(), client.openai(http_client=shared)])

    if kind == "fails":
        with pytest.raises(AgentError, match="bad"):
            run(plain)
    else:
        coroutine = (lambda task, client: asynchronous(task, client)) if "returns" in kind else asynchronous
        run(plain if kind == "plain" else coroutine)
    assert [each.is_closed() for each in made] == [True, False]
    shared.close()
