"""Short whole runs: their files, how they fail, and that a deterministic run repeats."""

import asyncio
import json
import re
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from testing.runs import short_quickstart, train

from vlmrl.config import Algo, Checkpoint, Config, Data, Eval, Optim, Part, Rollout, Train, WarmStart
from vlmrl.env.base import Env, obs
from vlmrl.report.progress import RunProgress
from vlmrl.report.run_log import RunLog
from vlmrl.run import loop
from vlmrl.run.build import build_run
from vlmrl.run.program import report, run_training
from vlmrl.types import Task

pytestmark = pytest.mark.slow


def length_bonus(trajectories):
    """Of a reward that differs within each group, something is learned."""
    return [float(len(trajectory.turns[0].text)) for trajectory in trajectories]


def test_a_run_leaves_what_it_promises_and_moves_an_earlier_one_aside(tmp_path, capsys):
    folder = tmp_path / "runs/quickstart"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 1, "groups/trained": 4}\n')
    run_training(short_quickstart(tmp_path, group_reward=length_bonus))
    assert [path.name for path in (tmp_path / "runs/quickstart.1").iterdir()] == ["metrics.jsonl"]
    summary = json.loads((folder / "summary.json").read_text())
    assert {"reward_before", "reward_after", "reward_blanked"} <= summary.keys()
    for name in (
        "config.json",
        "metrics.jsonl",
        "trajectories.jsonl",
        "reward.png",
        "trajectories.html",
        "model/config.json",
    ):
        assert (folder / name).stat().st_size > 0, name
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2]
    assert all(row["grad_norm"] > 0 for row in steps)
    assert all(row["logprob_mismatch/max"] < 1e-4 for row in steps)  # the engine's distribution is the trainer's
    output = capsys.readouterr().out
    assert "reward.png" in output and "trajectories.html" in output and "held-out reward after" in output
    assert f"look at it    vlmrl view {folder} --serve\n" in output


def number_tasks(index, seed):
    return {"prompt": f"Say {index}.", "answer": index}


class Echo(Env):
    """Two turns; pays in the first. Plays no other tasks than its own."""

    def __init__(self, task: Task, part: str) -> None:
        super().__init__(task)
        assert task.part == part

    def step(self, response_text):
        return obs("Again."), self.turn == 1, {"reward": 1.0 if self.turn == 0 else 0.0}


def test_a_mixture_plays_each_part_with_its_own_env_and_has_metrics_of_each(tmp_path):
    config = Config(
        name="mixed",
        output_dir=str(tmp_path),
        mixture={
            "echo": Part(
                data=Data(generator=number_tasks, size=30, held_out=3),
                env=Echo,
                env_options={"part": "echo"},
                weight=2,
            ),
            "letters": Part(data=Data(generator=number_tasks, size=8), reward=lambda text, task: float(len(text) % 2)),
        },
        rollout=Rollout(group_size=2, max_turns=2, max_tokens=256, max_response_tokens=8, truncated_reward=0.0),
        optim=Optim(lr=1e-4),
        train=Train(steps=2, groups_per_batch=3),
        eval=Eval(samples_per_task=2),
        save_model=False,
    )
    run, rows, summary = train(config)
    steps = [row for row in rows if "loss" in row]
    for row in steps:
        assert (row["source/echo/trajectories"], row["source/letters/trajectories"]) == (4, 2)
        assert {"source/echo/reward/mean", "source/letters/reward/mean"} <= row.keys()
    assert steps[-1]["data/drawn"] == 6
    assert rows[0]["eval/source/echo/trajectories"] == 3 * config.eval.samples_per_task
    echo = [row["eval/source/echo/reward/mean"] for row in rows if "eval/source/echo/reward/mean" in row][-1]
    assert summary["reward_after/echo"] == echo
    solved = summary["reward_after_pass@2"]
    assert solved == [row["eval/pass@2"] for row in rows if "eval/pass@2" in row][-1]
    assert re.search(rf"held-out reward after: .* \(pass@2 {solved:.3f}, echo {echo:.3f}\)", report(run, summary, 1.0))
    assert run.spec is not None and run.spec.name.startswith("echo: Echo, letters: ")


def test_a_mixture_whose_part_nobody_plays_is_refused():
    config = Config(mixture={"a": Part(data=Data(generator=number_tasks, size=1))})
    with pytest.raises(ValueError, match=r"mixture\.a\.env must be set, or else env"):
        build_run(config)


def test_prompts_over_the_limit_are_not_played(tmp_path):
    config = short_quickstart(tmp_path, save_model=False)
    changes = {"data": replace(config.data, max_prompt_tokens=10), "eval": Eval(), "warm_start": WarmStart()}
    with pytest.raises(
        ValueError, match=r"data\.max_prompt_tokens \(10\) leaves nothing: 32 prompts in a row were longer"
    ):
        train(replace(config, **changes))


def test_rollouts_continue_while_the_trainer_trains(tmp_path):
    """Interrupted responses continue after a weight update, an evaluation blocks nothing, and a run resumes."""
    config = short_quickstart(tmp_path, checkpoint=Checkpoint(every=2), group_reward=length_bonus)
    config = replace(
        config,
        warm_start=replace(config.warm_start, steps=5),
        algo=Algo(corrections=("token_truncation",)),
        train=replace(config.train, steps=4, max_staleness=2),
        eval=replace(config.eval, blank_images=False),
    )
    run, rows, _ = train(config)
    assert run.trainer.rank.policy is not run.model.policy
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    oldest = [row["staleness/max"] for row in steps]
    assert oldest[:3] == [0, 1, 2] and oldest[3] <= 2  # the first three batches begin under the first weights
    assert all(row["length_bias/turns"] == 1.0 or row["queue/ready"] for row in steps)
    assert all({"idle/trainer", "idle/rollouts", "queue/playing", "time/transfer"} <= row.keys() for row in steps)
    assert [row["step"] for row in rows if "eval/reward/mean" in row] == [0, 1, 2, 3, 4]
    saved = json.loads((run.checkpoints.newest() / "run.json").read_text())
    assert saved["step"] == 4 and len(saved["batches"]["unfinished"]) == 12
    for name, weight in run.trainer.rank.policy.named_parameters():
        assert torch.equal(weight, dict(run.model.policy.named_parameters())[name])

    again = build_run(replace(config, train=replace(config.train, steps=5)))
    log = RunLog(again.folder, saved["log"])
    asyncio.run(loop.train(again, log, RunProgress(Console(quiet=True)), again.checkpoints.newest()))
    log.close()
    assert [row["step"] for row in log.rows() if "loss" in row] == [1, 2, 3, 4, 5]
    assert log.rows()[-2]["staleness/max"] == 0  # groups that were not trained are played again
