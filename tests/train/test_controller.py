"""The trainer as the loop uses it: what it keeps of the ranks' results."""

from pathlib import Path

import numpy as np

from vlmrl.train.controller import LocalTrainer
from vlmrl.train.trainer import StepOutput


class FakeTrainer:
    """Counts optimizer steps: two for each batch; a checkpoint holds 7."""

    steps = 0

    def step(self, samples):
        self.steps += 2
        return StepOutput({"loss": 0.5}, [np.zeros(len(samples))], self.steps)

    def restore(self, checkpoint):
        self.steps = 7
        return self.steps


def test_it_knows_how_many_optimizer_steps_were_taken_also_after_a_resume():
    trainer = LocalTrainer(FakeTrainer())  # type: ignore[arg-type]
    assert trainer.steps_done == 0
    assert trainer.step([]).metrics == {"loss": 0.5} and trainer.steps_done == 2
    trainer.restore(Path("step000003"))
    assert trainer.steps_done == 7
    trainer.step([])
    assert trainer.steps_done == 9
