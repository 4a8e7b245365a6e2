"""Ray on this machine starts the ranks of a recipe: what they train, and how a run ends when a rank, a server or a node is lost."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from testing.ray_runs import MEMORY_MONITOR, rank_processes, running, training, until_restarted, until_trained
from testing.runs import RECIPES

from vlmrl.config import Cluster, Config
from vlmrl.run.program import run_training

pytestmark = pytest.mark.slow

pytest.importorskip("ray", reason="needs Ray: pip install 'vlmrl[ray]'")
Nodes = pytest.importorskip("ray.cluster_utils").Cluster

RECIPE = f"""
import itertools

import vlmrl
from dataclasses import replace
from vlmrl import Algo, Train
from vlmrl.algos import LossOutputs
from vlmrl.config.code import load_object

RECIPES = {str(RECIPES)!r}

losses = itertools.count(1)

def half(inputs, last=0):
    import helper

    if next(losses) == last:
        raise ZeroDivisionError("wrong on purpose")
    return LossOutputs(-helper.SCALE * inputs.advantages * inputs.logprobs)

def config():
    config = load_object(RECIPES + "/quickstart.py:config")()
    data = replace(config.data, generator=RECIPES + "/../datasets/shapes.py:make_task")
    return replace(
        config,
        name="own",
        env=RECIPES + "/../envs/zoom.py:ZoomEnv",
        data=data,
        eval=replace(config.eval, data=replace(config.eval.data, generator=data.generator, size=2), blank_images=False),
        warm_start=replace(config.warm_start, steps=2, trajectories_per_step=4),
        rollout=replace(config.rollout, group_size=4),
        algo=Algo(loss=half, advantage="rloo"),
        train=Train(steps=2, groups_per_batch=2),
    )

if __name__ == "__main__":
    vlmrl.main(config)
"""
SERVED = """
import vlmrl
from vlmrl.config import Algo, Config, Data, Model, Optim, Rollout, ServerSettings, Train

def task(index, seed):
    return {"prompt": f"Say {index}."}

def reward(text, task):
    return float(len(text) % 2)

def config():
    return Config(
        name="own",
        model=Model(path="tiny:qwen3_vl", dtype="float32"),
        data=Data(generator=task, size=4),
        reward=reward,
        rollout=Rollout(group_size=2, max_tokens=64, max_response_tokens=8),
        engine="testing.policy_backend:PolicyBackend",
        server=ServerSettings(check=False, sync="tensor"),
        algo=Algo(entropy_coef=0.1),  # equal responses with opposite advantages have no other gradient
        optim=Optim(lr=3e-3),
        train=Train(steps=4, groups_per_batch=2),
    )

if __name__ == "__main__":
    vlmrl.main(config)
"""


@pytest.fixture(scope="module")
def two_nodes():
    """A Ray of two nodes on this machine."""
    os.environ[MEMORY_MONITOR] = "0"
    made = Nodes(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    made.add_node(num_cpus=2)
    yield made
    made.shutdown()
    del os.environ[MEMORY_MONITOR]


@pytest.fixture
def nodes(two_nodes, monkeypatch):
    """Runs use the two nodes."""
    monkeypatch.setenv("RAY_ADDRESS", two_nodes.address)
    return two_nodes


TWO_NODES = ["--cluster.ranks", "2", "--cluster.nodes", "2"]
FAILS_AT = ["--algo.options", "half.last"]


def test_a_recipe_trains_on_two_nodes_with_its_own_loss_until_that_fails(nodes, tmp_path):
    """In the third step, on both ranks."""
    with training(tmp_path, "trained", *TWO_NODES, "--train.steps", "3", *FAILS_AT, "3", text=RECIPE) as run:
        output, _ = run.communicate(timeout=600)
    assert run.returncode == 1
    assert "ZeroDivisionError: wrong on purpose" in output and "own.py, line" in output, output
    assert "2 trainer ranks (FSDP2) on the CPUs of 2 nodes, the engine beside rank 0" in output, output
    rows = [json.loads(line) for line in (tmp_path / "runs/own/metrics.jsonl").read_text().splitlines()]
    differences = [row["logprob_mismatch/max"] for row in rows if "logprob_mismatch/max" in row]
    assert len(differences) == 2 and max(differences) < 1e-4, output
    assert (tmp_path / "runs/own/model/model.safetensors").exists()
    command = (tmp_path / "runs/own/command.txt").read_text()
    assert "torchrun" not in command and "--cluster.ranks 2" in command


def test_a_rank_that_is_killed_is_named_with_its_node_and_ends_the_run(tmp_path):
    options = ["--cluster.ranks", "2", "--train.steps", "100000", "--warm-start.steps", "0"]
    with training(tmp_path, "killed", *options, text=RECIPE) as run:
        begun = until_trained(run)
        os.kill(rank_processes("killed")["1"], signal.SIGKILL)
        output, _ = run.communicate(timeout=600)
    assert run.returncode == 1
    assert re.search(r"vlmrl: rank 1 on node [\d.]+ was killed by SIGKILL", output), [*begun, output]
    assert (tmp_path / "runs/own/model/model.safetensors").exists(), output  # rank 0 has saved the engine's copy


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_driver_saves_the_last_step_on_all_ranks(tmp_path, monkeypatch, number):
    """The end of a terminal sends SIGHUP to the driver's process group, in which Ray's own programs are."""
    temporary = Path(tempfile.mkdtemp(prefix="ray"))  # with a short name, as it gets Ray's sockets, too
    monkeypatch.setenv("TMPDIR", str(temporary))
    steps = ["--train.steps", "100000", "--warm-start.steps", "0", "--checkpoint.every", "100000"]
    send = os.killpg if number == signal.SIGHUP else os.kill
    earlier = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, also by what is started
    with training(tmp_path, f"stopped by {number}", "--cluster.ranks", "2", *steps, text=RECIPE) as run:
        signal.signal(signal.SIGHUP, earlier)
        begun = until_trained(run)
        send(run.pid, number)
        output, _ = run.communicate(timeout=600)
    assert run.returncode == 128 + number and f"stopped by {number.name} after" in output, [*begun, output]
    assert (tmp_path / "runs/own/model/model.safetensors").exists(), output
    [checkpoint] = (tmp_path / "runs/own/checkpoints").iterdir()
    assert "--resume" in output and (checkpoint / "run.json").exists()
    assert list(temporary.glob("ray")) and not list(temporary.glob("vlmrl-rank-*"))  # no rank's log is left
    shutil.rmtree(temporary)


def test_a_server_that_is_killed_is_started_again_by_its_launcher_and_gets_the_weights(tmp_path):
    with training(tmp_path, "served", "--cluster.ranks", "2", "--train.steps", "100000", text=SERVED) as run:
        begun = until_trained(run)
        [server] = running("served", "policy_program.py")
        os.kill(server, signal.SIGKILL)
        rows = until_restarted(run, tmp_path / "runs/own/metrics.jsonl")
        run.send_signal(signal.SIGTERM)
        output, _ = run.communicate(timeout=600)
    assert run.returncode == 143, [*begun, output]
    assert [row["failed"] for row in rows] == [0] * len(rows) and rows[-1]["engine/restarts"] == 1
    assert max(row["logprob_mismatch/max"] for row in rows) < 1e-3 and all(row["weight_sync/bytes"] > 0 for row in rows)
    assert "1 Policy server, placed by Ray; weights by tensor" in "".join(begun)


def test_a_node_that_is_lost_ends_the_run_and_its_rank_is_named(nodes, tmp_path):
    """The last test of these nodes."""
    options = [*TWO_NODES, "--train.steps", "100000", "--warm-start.steps", "0"]
    with training(tmp_path, "lost", *options, text=RECIPE) as run:
        begun = until_trained(run)
        nodes.remove_node(next(iter(nodes.worker_nodes)))
        output, _ = run.communicate(timeout=600)
    assert run.returncode == 1
    assert re.search(r"rank \d on node [\d.]+ (is gone with its node|was killed)", output), [*begun, output]


def test_there_must_be_room_and_a_program_that_every_rank_can_run(tmp_path):
    with pytest.raises(ValueError, match="cluster needs a program that every rank can run"):
        run_training(Config(output_dir=str(tmp_path), cluster=Cluster(ranks=2)))
    with training(tmp_path, "room", "--cluster.gpus", "64", text=RECIPE) as run:
        output, _ = run.communicate(timeout=600)
    assert run.returncode == 1 and "vlmrl: no room on 1 nodes with" in output, output
