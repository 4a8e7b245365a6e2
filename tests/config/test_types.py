"""Unknown names and wrong types are refused in Python as on the command line, with the closest name."""

from __future__ import annotations

import re
from dataclasses import is_dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from vlmrl import Config, Data, Optim, Rollout, Train
from vlmrl.config import Algo, Lora, ServerSettings
from vlmrl.config.code import check_options
from vlmrl.config.fields import Settings


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Data(generater=print), "data has no setting 'generater'. Perhaps you meant 'generator'."),
        (lambda: Config(trian=Train()), "the config has no setting 'trian'. Perhaps you meant 'train'."),
        (lambda: Lora(rnak=8), "model.lora has no setting 'rnak'. Perhaps you meant 'rank'."),
        (lambda: ServerSettings(url=("a",)), "server has no setting 'url'. Perhaps you meant 'urls'."),
        (lambda: ServerSettings(zzz=1), "server has no setting 'zzz'."),
        (lambda: replace(Train(), stps=1), "train has no setting 'stps'. Perhaps you meant 'steps'."),
        (lambda: Train(steps="five"), "train.steps must be of the type int, but it is 'five'."),
        (lambda: Optim(betas=(0.9,)), "optim.betas must be of the type tuple[float, float], but it is (0.9,)."),
        (lambda: Rollout(stop="</a>"), "rollout.stop must be of the type tuple[str, ...], but it is '</a>'."),
        (lambda: Algo(kl="k4"), "algo.kl must be one of k1, k2, k3, abs, but it is 'k4'."),
        (lambda: Config(train=5), "train must be of the type Train, but it is 5."),
        (lambda: Config(env=5), "env must be a function, a class or 'file.py:name', but it is 5."),
        (lambda: Data("rows.json", "test", columns={"prompt": 5}), "data.columns must be of the type dict[str, str]"),
        (lambda: Train(*range(99)), "Train has 12 settings, but 99 values were given."),
    ],
)
def test_a_name_or_a_type_that_is_wrong(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_an_int_is_a_float_and_positions_are_names():
    assert Optim(lr=1).lr == 1
    assert Data("rows.json", "test").split == "test"


def test_a_value_with_an_obvious_meaning_is_taken():
    assert Rollout(stop=["</a>"]).stop == ("</a>",)
    assert Optim(betas=[np.float32(0.5), 0.75]).betas == (0.5, 0.75)
    steps, lr = Train(steps=np.int64(5)).steps, Optim(lr=np.float32(0.5)).lr
    assert (type(steps), type(lr)) == (int, float)
    assert Config(output_dir=Path("runs")).output_dir == "runs"
    options = {"words": ["a", "b"], "table": {"a": 1}}
    assert Config(env=Ask, env_options=options).env_options == options
    assert replace(Config(env=Ask, env_options=options), seed=1).env_options == options


class Ask:
    def __init__(self, task, patience: int = 3, scale: float | None = None, free=None):
        pass


def build(task, level: Unknown = 1):  # noqa: F821
    return Ask(task)


def test_an_option_has_the_type_of_its_annotation():
    check_options("env_options", Ask, 1, {"patience": 4, "scale": 2, "free": "any"})
    check_options("env_options", build, 1, {"level": "any"})
    with pytest.raises(ValueError, match=r"env_options\.patience must be of the type int, but it is 'many'\."):
        check_options("env_options", Ask, 1, {"patience": "many"})


def test_every_section_checks_names_and_types():
    sections = {name: value for name, value in vars(Config()).items() if is_dataclass(value)}
    assert len(sections) > 10
    assert {
        name for name, value in sections.items() if not isinstance(value, Settings) or value.section != name
    } == set()
