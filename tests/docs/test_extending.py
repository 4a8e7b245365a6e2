"""The blocks of docs/extending.md, run as they stand."""

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from vlmrl.algos import LossInputs, choose, choose_all
from vlmrl.algos.advantages import grpo
from vlmrl.families import FAMILIES
from vlmrl.weight_sync import SENDERS
from vlmrl.weight_sync.base import SenderState, WeightUpdate

PAGE = (Path(__file__).parents[2] / "docs/extending.md").read_text()


def section(title: str) -> dict[str, Any]:
    """What the Python block under a heading defines."""
    block = re.search(rf"## {title}\n.*?```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {"__name__": "page"}
    exec(block[1], names)
    return names


def test_the_loss_the_advantage_and_the_correction():
    algo = section("A loss, an advantage, a correction")["algo"]
    loss, advantage, (correction,) = choose(algo, "loss"), choose(algo, "advantage"), choose_all(algo, "corrections")
    logprobs, ones = torch.tensor([[-1.0, -2.0]]), torch.ones(1, 2)
    inputs = LossInputs(logprobs, logprobs, logprobs, torch.tensor([[8.0, -1.0]]), ones)
    assert loss(inputs).per_token.tolist() == [[3.0, -2.0]]
    assert advantage(torch.tensor([1.0, 0.0]), ["a", "a"]).tolist() == [0.5, -0.5]
    factors, metrics = correction(logprobs, torch.tensor([[-1.5, -4.0]]), ones)
    assert factors.tolist() == [[1.0, 0.5]] and metrics["far"].tolist() == [[0.0, 1.0]]


def test_the_credit():
    page = section("Credit")
    rewards, states = [[1.0, 0.0], [0.0, 1.0], [0.0]], [["a", "b"], ["a", "b"], ["a"]]
    found = page["own_reward"](rewards, states, ["g"] * 3, partial(grpo, scale_by_std=False))
    assert [[round(value, 3) for value in row] for row in found] == [[0.667, -0.5], [-0.333, 0.5], [-0.333]]


def test_the_filter_and_the_history_policy():
    page = section("A filter, a history policy")
    assert page["has_a_right_one"]([SimpleNamespace(reward=0.0), SimpleNamespace(reward=1.0)])
    assert not page["has_a_right_one"]([SimpleNamespace(reward=0.5)])
    messages = [{"role": "user", "content": str(number)} for number in range(5)]
    assert [message["content"] for message in page["first_and_last"](messages)] == ["0", "3", "4"]


def test_the_family_is_registered(monkeypatch):
    monkeypatch.setattr("vlmrl.families.FAMILIES", dict(FAMILIES))
    page = section("A model family")
    assert page["FAMILIES"]["my_vl"] is page["MyVL"] and "my_vl" not in FAMILIES
    assert page["AutoConfig"].for_model("my_vl").model_type == "my_vl"


def test_the_sender_is_registered_and_iterates_over_all_weights(monkeypatch):
    monkeypatch.setattr("vlmrl.weight_sync.SENDERS", dict(SENDERS))
    page = section("A way to send weights")
    assert page["SENDERS"]["mine"] is page["MySender"] and "mine" not in SENDERS
    weights = iter([("a", torch.zeros(2)), ("b", torch.zeros(1))])
    state = SenderState()
    assert WeightUpdate((), page["MySender"], "v1", bucket_bytes=8).send(weights, state).bytes == 12
    assert next(weights, None) is None
    again = WeightUpdate((), page["MySender"], "v1", bucket_bytes=8, resend=True)
    assert again.send((), state).bytes == 12  # for a server that restarted


def test_the_tracker_prints_the_reward(capsys):
    tracker = section("A tracker")["PrintTracker"](Path("runs/x"), {})
    tracker.log(3, {"reward/mean": 0.25})
    tracker.close("finished")
    assert capsys.readouterr().out == "3 0.25\n"
