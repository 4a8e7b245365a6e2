"""Options that do not exist, options that replace parts of a recipe, and names that are looked up before anything is loaded."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from vlmrl.cli import main as cli
from vlmrl.cli.recipe import Recipe
from vlmrl.cli.train import TrainOptions
from vlmrl.config import SFT, Config, Conversations, Data, Eval, EvalData, Model, Optim, Rollout
from vlmrl.config.option_names import ELSEWHERE, describe_unknown, option_names
from vlmrl.run.build import check_names

NAMES = list(option_names(TrainOptions()))


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--optim.learning-rate", "--optim.lr is what TRL or verl call learning_rate"),
        ("--num_generations=8", "--rollout.group-size is what TRL or verl call num_generations"),
        ("actor_rollout_ref.rollout.n=8", "--rollout.group-size is what TRL or verl call n"),
        ("--optim.lrr", "close: --optim.lr, "),
        ("--group-size", "close: --rollout.group-size"),
        ("--dryrun", "close: --dry-run"),
        (
            "--sft.data.mine.epochs",
            "no option --sft.data.mine.epochs: name a dataset first, such as by --sft.data.mine.path",
        ),
        ("--mixture", "no option --mixture: the recipe must set mixture to a dict"),
        ("--qqqqqqq", "there is no option --qqqqqqq"),
    ],
)
def test_an_unknown_option_names_ours(word, said):
    assert said in describe_unknown(word, NAMES)


def test_the_options_of_a_recipes_datasets_are_known():
    names = list(option_names(TrainOptions(Config(sft=SFT(data={"mine": Conversations("x")})))))
    assert describe_unknown("--sft.data.min.path", names).partition("close: ")[2].startswith("--sft.data.mine.path")


@pytest.mark.parametrize(
    ("section", "name", "ours"),
    [
        (Rollout, "num_generations", "rollout.group_size"),
        (Optim, "learning_rate", "optim.lr"),
        (Config, "beta", "algo.kl"),
    ],
)
def test_an_unknown_setting_in_a_recipe_names_ours(section, name, ours):
    with pytest.raises(ValueError, match=f"has no setting '{name}'. {ours}.* is what TRL or verl call {name}.$"):
        section(**{name: 1})


def test_the_table_of_names_is_true():
    porting = (Path(__file__).parents[2] / "docs/porting.md").read_text()
    for ours, theirs in ELSEWHERE.items():
        assert ours in NAMES
        assert all(re.search(rf"\b{name}\b", porting) for name in theirs.split()), theirs
    every = " ".join(ELSEWHERE.values()).split()
    assert len(every) == len(set(every))


def tasks(index, seed):
    return {"prompt": "Ask", "answer": "a"}


def reward(text, task):
    return 1.0


def config():
    return Config(data=Data(generator=tasks, size=8, held_out=2), reward=reward, rollout=Rollout(max_turns=1))


def with_rows():
    rows = {"columns": {"prompt": "problem"}}
    return Config(data=Data("rows.jsonl", **rows), eval=Eval(data=EvalData("more.jsonl")), reward=reward)


def chosen(function, *words):
    recipe = Recipe.of(function)
    return recipe.options(TrainOptions(recipe.config()), words, "vlmrl train r.py").config


def test_a_path_replaces_the_recipes_generator():
    data = chosen(config, "--data.path", "x.jsonl").data
    assert (data.path, data.generator, data.size, data.held_out) == ("x.jsonl", None, None, 2)
    assert chosen(config, "--data.path=x.jsonl", "--data.size", "3").data.size == 3
    assert chosen(config, "--data.generator", "None", "--data.path", "x.jsonl").data.path == "x.jsonl"


def test_a_generator_replaces_the_recipes_path():
    data = chosen(with_rows, "--data.generator", "a.py:tasks", "--data.size", "4").data
    assert (data.path, data.generator, data.columns) == (None, "a.py:tasks", {})
    words = ["--eval.data.generator", "a.py:tasks", "--eval.data.size", "4"]
    assert chosen(with_rows, *words).eval.data.path is None


def test_none_unsets_the_held_out_tasks_with_their_size_and_seed():
    def evaluated():
        data = EvalData(generator=tasks, size=8, seed=1)
        return Config(data=Data(generator=tasks, size=8), eval=Eval(data=data), reward=reward)

    config = chosen(evaluated, "--eval.data.generator", "None", "--data.held-out", "2")
    assert (config.eval.data, config.data.held_out) == (EvalData(), 2)
    assert chosen(evaluated, "--eval.data.generator=None").eval.data == EvalData()
    assert chosen(evaluated, "--eval.data.path", "x.jsonl").eval.data == EvalData("x.jsonl", seed=1)
    assert chosen(evaluated, "--eval.data.path", "None").eval.data.generator is tasks


def test_a_recipe_without_conversations_gets_those_of_the_command_line():
    words = ["--sft.data.first-round.path", "a.jsonl", "--sft.data.first-round.epochs", "2", "--sft.data.b.path=b"]
    assert chosen(config, *words).sft.data == {
        "first_round": Conversations("a.jsonl", epochs=2),
        "b": Conversations("b"),
    }

    def tuned():
        return replace(config(), sft=SFT(data={"mine": Conversations("x")}))

    assert chosen(tuned, "--sft.data.mine.path", "y").sft.data == {"mine": Conversations("y")}
    with pytest.raises(SystemExit, match="2"):  # a wrong name is not a second dataset
        chosen(tuned, "--sft.data.min.path", "y")


def test_none_unsets_and_several_functions_are_a_tuple():
    assert chosen(config, "--reward", "None", "--env", "a.py:Env").reward is None
    assert chosen(config, "--reward", "a.py:right", "a.py:short").reward == ("a.py:right", "a.py:short")


def test_an_unknown_option_is_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "r.py").write_text("from vlmrl import Config\ndef config(): return Config()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["vlmrl", "train", "r.py", "--learning-rate", "1", "--n", "8", "--optim.lr", "1"])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    first, second = capsys.readouterr().err.splitlines()
    assert first == "vlmrl: there is no option --learning-rate; --optim.lr is what TRL or verl call learning_rate."
    assert second.startswith("vlmrl: there is no option --n; --rollout.group-size is what TRL or verl call n. For full")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"algo": {"loss": "pp0"}}, "algo.loss must be one of cispo, .* but it is 'pp0'. Perhaps you meant 'ppo'."),
        ({"algo": {"loss": "dapo"}}, "'dapo' of TRL is algo.loss ppo with algo.reduction token_mean"),
        ({"algo": {"loss": "dr_grpo"}}, "algo.loss ppo with algo.reduction seq_mean_token_sum_norm"),
        ({"algo": {"advantage": "grpp"}}, "algo.advantage must be one of"),
        ({"algo": {"filters": ("zero_var",)}}, "algo.filters must be one of"),
        ({"model": {"chat_template": "nope"}}, "model.chat_template must be a file NAME.jinja or one of ours"),
        ({"engine": "sgl"}, "engine must be one of"),
    ],
)
def test_names_are_looked_up_before_a_model_is_known(wrong, message):
    sections = {"algo": Config().algo.__class__, "model": Model}
    parts = {name: sections[name](**value) if name in sections else value for name, value in wrong.items()}
    with pytest.raises(ValueError, match=message):
        check_names(Config(**parts))
