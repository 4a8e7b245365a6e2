"""Settings are checked when they are made, and complaints name field, rule and value."""

import ast
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tyro

from vlmrl import Algo, Config, Data, Eval, Model, Optim, Rollout, Train, WarmStart
from vlmrl.cli import main as cli
from vlmrl.config import Part

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Optim(lr=0.0), "optim.lr must be greater than 0, but it is 0.0."),
        (lambda: Config(seed=-1), "seed must be from 0 to 2**64 - 1, as torch and NumPy need, but it is -1."),
        (lambda: Config(seed=2**64), "seed must be from 0 to 2**64 - 1"),
        (lambda: Optim(weight_decay=-0.1), "optim.weight_decay must be 0 or more, but it is -0.1."),
        (lambda: Optim(betas=(0.9, 1.0)), "optim.betas must be in [0, 1), but it is (0.9, 1.0)."),
        (lambda: Algo(entropy_coef=float("inf")), "algo.entropy_coef must be a finite number, but it is inf."),
        (lambda: Algo(corrections=("veto", "veto")), "algo.corrections must be functions of different names"),
        (lambda: Rollout(top_p=0.0), "rollout.top_p must be in (0, 1], but it is 0.0."),
        (lambda: Rollout(temperature=-1.0), "rollout.temperature must be 0 (greedy) or more, but it is -1.0."),
        (lambda: Rollout(max_failed_fraction=2.0), "rollout.max_failed_fraction must be in [0, 1], but it is 2.0."),
        (lambda: Data(path="a", generator="b:c"), "data.path and data.generator exclude each other"),
        (lambda: Data(generator="b:c"), "data.size must be set when data.generator is, but it is None."),
        (lambda: Data(path="a", columns={"question": "q"}), "data.columns must be a mapping from"),
        (lambda: Model(path=""), "model.path must be a hub name"),
        (lambda: Eval(samples_per_task=0), "eval.samples_per_task must be greater than 0, but it is 0."),
        (lambda: Eval(solved=float("nan")), "eval.solved must be a finite number, but it is nan."),
        (
            lambda: Rollout(truncated_reward=float("nan")),
            "rollout.truncated_reward must be a finite number, but it is nan",
        ),
        (lambda: Rollout(temperature=float("inf")), "rollout.temperature must be a finite number, but it is inf."),
        (lambda: WarmStart(steps=3), "warm_start.demonstrate must be set when warm_start.steps is"),
        (lambda: Config(name="a/b"), "name must be a plain folder name, but it is 'a/b'."),
        (lambda: Config(env="a:b", reward="c:d"), "env and reward cannot both be set"),
        (
            lambda: Config(reward="c:d", env_options={"a": 1}),
            "env_options must be unset without an env: reward functions",
        ),
        (
            lambda: Config(agent="c:d", env_options={"a": 1}, rollout=Rollout(samples="merged")),
            "env_options must be unset without an env: reward functions",
        ),
        (
            lambda: Config(env="a:b", mixture={"p": Part(data=Data("a"), reward="c:d", env_options={"a": 1})}),
            "mixture.p.env_options must be unset without an env",
        ),
        (
            lambda: Config(reward="c:d", rollout=Rollout(max_turns=2)),
            "rollout.max_turns must be 1 with a reward function",
        ),
        (
            lambda: Train(groups_per_batch=16, groups_per_step=5),
            "train.groups_per_step must be a divisor of train.groups_per_batch (16), but it is 5.",
        ),
        (
            lambda: Config(rollout=Rollout(max_tokens=100, max_response_tokens=100)),
            "rollout.max_response_tokens must be less than rollout.max_tokens (100), but it is 100.",
        ),
    ],
)
def test_a_wrong_value_is_refused_by_name(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


@pytest.mark.slow
def test_a_recipes_help_reads_like_documentation(tmp_path):
    """From another folder, as paths in a recipe are resolved from its own."""
    command = [sys.executable, ROOT / "recipes/geo3k.py", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0
    assert "Geometry3K over several turns" in done.stdout
    assert "--optim.lr FLOAT" in done.stdout and "--rollout.max-turns INT" in done.stdout
    assert "Trajectories per task. Advantages are computed within such a group." in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--env", "nowhere.py:Env"], "'nowhere.py' does not exist"),
        (["--env", "../envs/zoom.py:Zoom"], "has no 'Zoom'"),
        (["--env-options.course", "32"], "--env-options.course"),
        (["--algo.advantage", "gpro"], "algo.advantage must be one of"),
        (["--data.generator", "../datasets/shapes.py:nothing"], "has no 'nothing'"),
        (["--model.path", "./no_such_model"], "no_such_model"),
        (["--optim.lr", "-1"], "optim.lr must be greater than 0"),
        (["--optim.learning-rate", "1"], "--optim.learning-rate"),
    ],
)
def test_a_mistake_gives_one_clear_line_before_anything_is_trained(tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["vlmrl", "train", str(ROOT / "recipes/quickstart.py"), *options])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    output = "".join(capsys.readouterr())
    assert exit_.value.code not in (0, None) and message in output
    assert "Traceback" not in output
    assert not (tmp_path / "runs/quickstart").exists()


def test_options_on_the_command_line_are_numbers_where_they_look_like_them():
    words = ["clip", "0.2", "count", "3", "on", "True", "off", "false", "name", "abc", "nothing", "None"]
    config = tyro.cli(Config, args=["--env", "a:b", "--env-options", *words])
    expected = {"clip": 0.2, "count": 3, "on": True, "off": False, "name": "abc", "nothing": None}
    assert config.env_options == expected


def settings_and_help():
    """The name of each setting in vlmrl/config, with its help text or ``None``. Nested sections have none of their own."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "vlmrl/config").glob("*.py")]
    for cls in (node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)):
        for node, after in itertools.pairwise(cls.body):
            if isinstance(node, ast.AnnAssign) and "field(default_factory=" not in ast.unparse(node):
                help_text = after.value.value if isinstance(after, ast.Expr) else None
                yield f"{cls.name}.{ast.unparse(node.target)}", help_text


def test_every_option_has_a_help_text():
    settings = dict(settings_and_help())
    assert len(settings) > 80
    assert not [name for name, help_text in settings.items() if not help_text]


def test_help_texts_are_sentences_and_break_only_between_them():
    """`--help` keeps the line breaks of a help text, so that each line must begin a sentence or a value."""
    for name, help_text in settings_and_help():
        for line in help_text.splitlines():
            assert line.rstrip().endswith((".", ":")), (name, line)
