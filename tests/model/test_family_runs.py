"""A short run of the whole loop with every family there is: the engine samples what the trainer scores."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from PIL import Image
from rich.console import Console

from vlmrl import Env, obs
from vlmrl.config import Config, Data, Model, Optim, Rollout, Train
from vlmrl.families import FAMILIES
from vlmrl.report.progress import RunProgress
from vlmrl.report.run_log import RunLog
from vlmrl.run import loop
from vlmrl.run.build import build_run
from vlmrl.run.program import summary_of

pytestmark = pytest.mark.slow


def noise(seed: int, width: int) -> Image.Image:
    return Image.effect_noise((width, 64), 40 + seed).convert("RGB")


def images(index, seed):
    return {"prompt": "<image>What?", "images": [noise(index, 96)]}


def questions(index, seed):
    return {"prompt": f"What is {index}?"}


REWARDS = itertools.count()


class Closer(Env):
    """Answers the first response, with another image where the task had one; no two rewards are equal, so each group trains."""

    def __init__(self, task):
        self.task = task

    def step(self, response_text):
        images = [noise(self.turn, 64)] if self.task.images else None
        return obs("Closer:", images=images), self.turn == 1, {"reward": float(next(REWARDS))}


def config_of(family: str, folder) -> Config:
    return Config(
        name=family,
        output_dir=str(folder),
        model=Model(path=f"tiny:{family}", device="cpu"),
        data=Data(generator=images if FAMILIES[family].vision else questions, size=8),
        env=Closer,
        rollout=Rollout(
            group_size=4,
            max_turns=2,
            max_tokens=256,
            max_response_tokens=24,
            stop=tuple("aeiourst"),
            samples="step_wise",
            truncated_reward=0.0,
        ),
        optim=Optim(lr=1e-3),
        train=Train(steps=2, groups_per_batch=2, image_check=False),
        save_model=False,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_short_run_samples_from_what_it_trains(family, tmp_path):
    run = build_run(config_of(family, tmp_path))
    log = RunLog(run.folder)
    asyncio.run(loop.train(run, log, RunProgress(Console(quiet=True))))
    log.close()
    run.engine.close()
    rows = log.rows()
    assert [row["step"] for row in rows] == [1, 2]
    assert max(row["logprob_mismatch/max"] for row in rows) < 2e-5
    assert min(row["grad_norm"] for row in rows) > 0
    assert all((row["images/mean"] > 1) == FAMILIES[family].vision and row["turns/mean"] > 1 for row in rows)
    assert [row.get("routing/free_tokens") for row in rows] == ([0, 0] if "moe" in family else [None, None])
    assert "prefixes  not shared" not in summary_of(run)
