"""`vlmrl plan` for the shipped recipes: without GPU, weights, datasets or a network."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from vlmrl.cli import main as cli

RECIPES = Path(__file__).parents[2] / "recipes"


def planned(monkeypatch, capsys, recipe: str, *options: str) -> str:
    monkeypatch.setattr(sys, "argv", ["vlmrl", "plan", str(RECIPES / f"{recipe}.py"), *options])
    cli.main()
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize("recipe", ["geo3k", "zoom", "frozenlake", "search", "miniwob"])
def test_every_gpu_recipe_fits_one_h100(monkeypatch, capsys, recipe):
    printed = planned(monkeypatch, capsys, recipe, "--gpu", "h100-80gb")
    assert "verdict   fits h100-80gb" in printed
    assert "forward and backward: " in printed and "optimizer step: " in printed


def test_a_mixture_of_experts_on_sixteen_gpus(monkeypatch, capsys):
    options = ["--gpus", "16", "--model.path", "Qwen/Qwen3-VL-30B-A3B-Instruct", "--engine", "sglang"]
    printed = planned(monkeypatch, capsys, "geo3k", "--gpu", "h100-80gb", *options)
    assert "31.07 B parameters" in printed and "16 GPUs of 2 nodes" in printed
    assert "verdict   does not fit h100-80gb. It would with\n          --optim.offload: " in printed
    printed = planned(monkeypatch, capsys, "geo3k", "--gpu", "h100-80gb", *options, "--server.tp", "4")
    assert "verdict   fits h100-80gb" in printed


def test_a_run_that_nothing_makes_fit(monkeypatch, capsys):
    options = ["--gpus", "8", "--model.path", "Qwen/Qwen2.5-VL-7B-Instruct"]
    printed = planned(monkeypatch, capsys, "geo3k", "--gpu", "4090-24gb", *options)
    assert printed.endswith(
        "verdict   does not fit 4090-24gb. No setting that was tried makes it fit: use a smaller model, shorter trajectories, or more "
        "or larger GPUs\n"
    )


def test_options_of_the_recipe_are_planned(monkeypatch, capsys):
    usual = planned(monkeypatch, capsys, "geo3k", "--gpu", "4090-24gb")
    assert "does not fit" in usual
    printed = planned(monkeypatch, capsys, "geo3k", "--gpu", "4090-24gb", "--model.lora.rank", "32")
    assert "verdict   fits 4090-24gb" in printed


def test_an_unknown_gpu_is_one_line(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        planned(monkeypatch, capsys, "geo3k", "--gpu", "gtx")
    assert capsys.readouterr().err.startswith("vlmrl: --gpu must be one of ")
