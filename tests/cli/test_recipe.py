"""The settings of a recipe and the command line together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vlmrl import SFT, Algo, Config, Conversations, Data, Eval, EvalData, Part
from vlmrl.cli.plan import PlanOptions
from vlmrl.cli.recipe import Recipe

OPTIONS = {"ppo.clip_low": 0.2, "ppo.clip_high": 0.3, "token_truncation.cap": 2.0}


def config() -> Config:
    return Config(
        data=Data(path="train.json", columns={"prompt": "problem", "answer": "label"}),
        algo=Algo(corrections=("token_truncation",), options=OPTIONS),
        eval=Eval(data=EvalData(path="test.json")),
    )


def chosen(*words):
    return Recipe.of(config).options(PlanOptions(config()), words, "vlmrl plan recipe.py").config


def test_columns_of_the_command_line_join_those_of_the_recipe():
    merged = chosen("--data.columns", "prompt", "question", "images", "photo")
    assert merged.data.columns == {"prompt": "question", "answer": "label", "images": "photo"}
    assert chosen("--data.split", "test").data.columns == config().data.columns


def test_columns_of_the_command_line_join_those_of_each_dataset_of_the_recipe():
    dataset = {"path": "train.json", "columns": {"images": "photo"}}
    recipe = replace(
        config(),
        data=Data(),
        eval=Eval(),
        mixture={name: Part(data=Data(**dataset), reward="a.py:reward") for name in "ab"},
        sft=SFT(data={"notes": Conversations(**dataset)}),
    )
    words = ("--mixture.b.data.columns", "answer", "label", "--sft.data.notes.columns", "messages", "chat")
    merged = Recipe.of(lambda: recipe).options(PlanOptions(recipe), words, "vlmrl plan recipe.py").config
    assert merged.mixture["a"].data.columns == {"images": "photo"}
    assert merged.mixture["b"].data.columns == {"images": "photo", "answer": "label"}
    assert merged.sft.data["notes"].columns == {"images": "photo", "messages": "chat"}


def test_options_of_the_command_line_join_those_of_the_recipe():
    assert chosen().algo.options == OPTIONS
    merged = chosen("--algo.options", "ppo.clip_low", "0.1", "grpo.scale_by_std", "False")
    assert merged.algo.options == OPTIONS | {"ppo.clip_low": 0.1, "grpo.scale_by_std": False}


def test_options_of_a_function_that_the_command_line_replaces_are_left_out():
    assert chosen("--algo.loss", "gspo").algo.options == {"token_truncation.cap": 2.0}
    other = chosen("--algo.loss", "gspo", "--algo.corrections", "--algo.options", "gspo.clip_low", "0.1")
    assert other.algo.options == {"gspo.clip_low": 0.1}


def test_options_of_a_function_that_nothing_names_are_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        chosen("--algo.options", "gspo.clip_low", "0.1")
    assert "but it is 'gspo.clip_low'" in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_columns_are_pairs(capsys):
    with pytest.raises(SystemExit, match="2"):
        chosen("--data.columns", "prompt")
    assert "pairs FIELD COLUMN" in capsys.readouterr().err
