"""A loss and an advantage written in a user's own recipe file, as the README shows them."""

import subprocess
import sys

import pytest

from vlmrl.cli.train import TrainCommand

pytestmark = pytest.mark.slow

RECIPE = '''
import torch
import vlmrl
from vlmrl import Algo, Config, Data, Rollout, Train
from vlmrl.algos import LossOutputs, loss


@loss(has_ratio=False)
def half(inputs, scale=0.5):
    """Half of REINFORCE."""
    return LossOutputs(-scale * inputs.advantages * inputs.logprobs)


def sign(rewards, group_ids):
    """+1 for what was paid, -1 for what was not."""
    return torch.where(rewards > 0, 1.0, -1.0)


def make_task(index, seed):
    return {"prompt": "Say a.", "answer": "a"}


def config():
    return Config(
        name="own",
        data=Data(generator="own.py:make_task", size=8),
        reward=lambda text, task: float("a" in text),
        rollout=Rollout(group_size=2, max_tokens=64, max_response_tokens=8),
        algo=Algo(loss=half, options={"half.scale": 0.25}, advantage="own.py:sign"),
        train=Train(steps=1, groups_per_batch=2),
        save_model=False,
    )


if __name__ == "__main__":
    vlmrl.main(config)
'''


def test_a_recipe_with_its_own_loss_and_advantage_trains(tmp_path):
    (tmp_path / "own.py").write_text(RECIPE)
    done = subprocess.run([sys.executable, "own.py"], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "sign + half" in done.stdout and (tmp_path / "runs/own/metrics.jsonl").exists()


def test_options_that_do_not_fit_are_refused_before_anything_is_played(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(RECIPE.replace('half.scale": 0.25', 'half.scala": 2'))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"(?s)algo\.options do not fit half.*half\(inputs, scale=0\.5\)"):
        TrainCommand("own.py").run([])
    assert not (tmp_path / "runs/own").exists()
