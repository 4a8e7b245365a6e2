"""The quickstart's task for an agent that is a program: `zoom_script.py`, started once for each episode.

The program finds the model at OPENAI_BASE_URL and its task in the file VLMRL_TASK. Its output is the trajectory's log, an exit
status other than 0 a failure; the reward is computed here, from the last response.

    pip install 'vlmrl[agents]'
    python recipes/agents/zoom_command.py
"""

import shlex
import sys

import vlmrl
from vlmrl import Config, Data, Eval, EvalData, Model, Optim, Rollout, Train, Trajectory, WarmStart, read_tags


def judge(trajectory: Trajectory) -> float:
    """1 if the last response answers with the right color."""
    answers = read_tags(trajectory.turns[-1].text, "answer")
    return float(bool(answers) and answers[-1].strip() == trajectory.task.answer)


def config() -> Config:
    shapes = "../../datasets/shapes.py:make_task"
    return Config(
        name="zoom-command",
        model=Model(path="tiny:qwen3_vl"),
        data=Data(generator=shapes, size=4096),
        agent=f"{shlex.quote(sys.executable)} zoom_script.py",
        reward=judge,
        rollout=Rollout(group_size=8, max_turns=2, max_tokens=256, max_response_tokens=48, samples="merged"),
        warm_start=WarmStart(demonstrate="../quickstart.py:demonstrate", steps=100, trajectories_per_step=32, lr=1e-3),
        optim=Optim(lr=1e-4, betas=(0.9, 0.999), warmup_steps=10),
        train=Train(steps=200, groups_per_batch=16),
        eval=Eval(data=EvalData(generator=shapes, size=256, seed=1), every=50, blank_images=True, chance=0.25),
    )


if __name__ == "__main__":
    vlmrl.main(config)
