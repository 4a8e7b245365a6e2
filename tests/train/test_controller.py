"""All ranks as one trainer: what it keeps of their results, where their memory is, and what happens after an error."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from testing.runs import short_quickstart

from vlmrl.config import Algo, Model, Optim
from vlmrl.engine.sglang.receiver import SGLangReceiver
from vlmrl.model import tiny
from vlmrl.train.controller import RunTrainer, updates_by_rank
from vlmrl.train.rank import HOST, Rank
from vlmrl.train.ranks import Ranks
from vlmrl.train.trainer import StepOutput, TrainerSpec
from vlmrl.types import Sample
from vlmrl.utils.http_server import free_ports
from vlmrl.weight_sync.base import IpcSender, TransferResult, WeightUpdate
from vlmrl.weight_sync.disk import DiskSender

GPU = torch.device("cuda", 0)
ROW = Sample([1, 2], [3], [1], [-1.0], [0], "g", "t", True, "stop", [], advantage=1.0)

HANGS = """
import os
import signal
from datetime import timedelta

from vlmrl.train import controller

ranks = controller.join_process_group("gloo")
controller.COLLECTIVE = timedelta(seconds=1)
commands = controller.Commands()
if ranks.rank == 0:
    commands.send("offload")
    commands.gather(None)
    commands.send("offload")
commands.receive()
commands.gather(None)
os.kill(os.getpid(), signal.SIGSTOP)
"""


class FakeTrainer:
    """Counts optimizer steps: two for each batch; a checkpoint holds 7."""

    steps = 0

    def step(self, samples):
        self.steps += 2
        return StepOutput({"loss": 0.5}, [np.zeros(len(samples))], self.steps)

    def restore(self, checkpoint):
        self.steps = 7
        return self.steps

    def rows_by_rank(self, samples, in_steps):
        return [set(), set()]


class FakeRank:
    ranks = Ranks(0, 2)

    def __init__(self):
        self.trainer = FakeTrainer()

    def call(self, method, *arguments):
        return getattr(self.trainer, method)(*arguments)


class Sent:
    """Commands that nobody receives."""

    def __init__(self):
        self.methods = []

    def send(self, method, *arguments):
        self.methods.append((method, *arguments[:1]))

    def send_images(self, parts): ...


def test_it_knows_how_many_optimizer_steps_were_taken_also_after_a_resume():
    trainer = RunTrainer(FakeRank())
    assert trainer.steps_done == 0
    assert trainer.step([]).metrics == {"loss": 0.5} and trainer.steps_done == 2
    trainer.restore(Path("step000003"))
    assert trainer.steps_done == 7
    trainer.step([])
    assert trainer.steps_done == 9


def test_after_an_error_no_command_reaches_the_ranks_that_may_wait_in_another_collective():
    commands = Sent()
    trainer = RunTrainer(FakeRank(), commands)
    trainer.step([])
    with pytest.raises(AttributeError):
        trainer.close()  # this trainer has no such method
    for call in (lambda: trainer.step([]), lambda: list(trainer.named_weights()), lambda: trainer.save(Path("x"))):
        with pytest.raises(RuntimeError, match="one of the trainer's ranks has failed"):
            call()
    assert commands.methods == [("call", "step"), ("call", "close")]
    assert not trainer.offload()


@pytest.mark.slow
def test_a_rank_that_hangs_between_two_commands_is_noticed_as_soon_as_one_that_hangs_in_a_step():
    """Rank 0 waited for seven days until it had sent the next command."""
    variables = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0]), "WORLD_SIZE": "2"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", HANGS],
            env=variables | {"TORCHELASTIC_RUN_ID": "hangs", "RANK": str(number), "LOCAL_RANK": str(number)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        output = started[0].communicate(timeout=120)[1]
        assert started[0].returncode == 1 and "Timed out waiting 1000ms for send operation" in output
        assert "a rank did not receive `offload`: it hangs, or has ended" in output
        assert started[1].poll() is None
    finally:
        for each in started:
            each.kill()
            each.communicate()


@pytest.fixture
def rank(tmp_path):
    """A rank whose memory is said to be on a GPU; ``moves`` are the devices it was moved to."""
    config = short_quickstart(tmp_path)
    config = replace(config, model=Model(path=str(tiny.build(tmp_path / "model", "qwen3")), device="cpu"))
    made = Rank(config)
    made.device, made.moves = GPU, []
    made._move = made.moves.append
    return made


def test_each_call_moves_an_offloaded_rank_to_its_gpu_first(rank):
    trainer, spec = RunTrainer(rank), TrainerSpec(Algo(), Optim(), total_steps=1, tokens_per_micro_batch=100)
    for call in (
        lambda: trainer.logprobs([ROW], 1.0),  # before there is a trainer: the startup parity check
        lambda: trainer.send(WeightUpdate((), IpcSender, "v1", 2**20)),
        lambda: trainer.start(spec),
        lambda: trainer.end_schedule_at(1),
        lambda: trainer.step([ROW]),
        lambda: next(trainer.named_weights()),
    ):
        assert trainer.offload() and trainer.offload()
        call()
    assert rank.moves == [HOST, GPU] * 6
    trainer.offload()
    trainer.send(WeightUpdate((), IpcSender, "v1", 2**20, resend=True))  # of the copy in host memory
    assert rank.moves[-1] == HOST


@pytest.mark.parametrize("error", [None, OSError("no server")])
def test_all_weights_are_gathered_whatever_a_sender_of_ones_own_does(rank, monkeypatch, error):
    """The other ranks waited in a collective for one that had returned early, until its limit of 20 minutes."""

    class Early:
        def send(self, weights):
            next(iter(weights))
            if error is not None:
                raise error
            return TransferResult(0, 0.0)

        def abort(self): ...

    names, gathered = [name for name, _ in rank.named_weights()], []
    own = rank.named_weights

    def named_weights(dtype):
        for name, weight in own(dtype):
            gathered.append(name)
            yield name, weight

    monkeypatch.setattr(rank, "named_weights", named_weights)
    with pytest.raises(OSError, match="no server") if error else nullcontext():
        rank.send([WeightUpdate((), lambda update, state: Early(), "v1", 2**20)])
    assert gathered == names


def test_a_failed_move_to_the_gpu_is_tried_again(rank):
    rank.offload()
    move, rank._move = rank._move, lambda device: (_ for _ in ()).throw(torch.OutOfMemoryError("full"))
    with pytest.raises(torch.OutOfMemoryError):
        rank.onload()
    rank._move = move
    rank.onload()
    assert rank.moves == [HOST, GPU]


def test_a_trainer_is_released_before_the_next_one_is_made_and_parameters_stay_over_moves(rank):
    spec = TrainerSpec(Algo(), Optim(), total_steps=1, tokens_per_micro_batch=100)
    first = weakref.ref(rank.start(spec))
    parameters = list(map(id, rank.policy.parameters()))  # the optimizer holds them
    Rank._move(rank, HOST)
    assert list(map(id, rank.policy.parameters())) == parameters
    rank.start(spec)
    gc.collect()
    assert first() is None


def test_servers_get_handles_from_the_rank_on_their_gpu_and_values_from_rank_0_which_keeps_the_weights():
    receivers = tuple(SGLangReceiver(f"http://127.0.0.1:{port}") for port in (1, 2, 3))
    urls = [receiver.url for receiver in receivers]
    whole, beside = WeightUpdate(receivers, IpcSender, "run.1", 2**20), {urls[0]: (0,), urls[1]: (2,), urls[2]: (2,)}
    parts = updates_by_rank(whole, beside, ranks=4)
    assert [part and (part.receivers, part.keep, part.by_value) for part in parts] == [
        (receivers[:1], True, False),
        None,
        (receivers[1:], False, False),
        None,
    ]
    [first, other] = updates_by_rank(whole, dict.fromkeys(urls, ()), ranks=2)  # servers on GPUs of their own
    assert (first.receivers, first.by_value, other) == (receivers, True, None)
    [resent] = updates_by_rank(replace(whole, receivers=receivers[1:2], resend=True), beside, ranks=1)
    assert resent.by_value  # from rank 0's copy to the server on rank 2's GPU
    [files, other] = updates_by_rank(replace(whole, sender=DiskSender), beside, ranks=2)
    assert (files.receivers, other) == (receivers, None)
    whole.abort()
    assert parts[0].aborted.done()
