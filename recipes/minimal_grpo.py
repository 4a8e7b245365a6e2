"""The whole algorithm on one page: GRPO with a vision-language agent over two turns, from the library's own parts.

    python recipes/minimal_grpo.py --steps 100

No loop object hides anything: this file plays groups, turns them into samples, audits them, computes advantages and the
loss, and takes the optimizer step itself. `vlmrl/run/loop.py` does the same with evaluation, logging and settings.
"""

import asyncio
import itertools
import random
from pathlib import Path

import torch
import tyro

from vlmrl import Data, Model, Rollout, Sample, Trajectory
from vlmrl.algos import ADVANTAGES, LOSSES, REDUCTIONS, LossInputs
from vlmrl.parts import (
    HFEngine,
    MicroBatchPlan,
    Policy,
    Runner,
    ScriptedEngine,
    TurnLoop,
    audit,
    concat,
    load_model,
    load_tasks,
    pack,
    per_token,
    resolve_env,
)

ROOT = Path(__file__).resolve().parent.parent
COLORS = ["red", "green", "blue", "yellow"]
QUARTERS = ["top left", "top right", "bottom left", "bottom right"]
BOXES = ["[0, 0, 500, 500]", "[500, 0, 1000, 500]", "[0, 500, 500, 1000]", "[500, 500, 1000, 1000]"]


def demonstrate(task, turn: int) -> str:
    """A scripted response for the warm start: the right zoom, then a color that is right 42 times in a hundred."""
    if turn == 0:
        box = BOXES[QUARTERS.index(task.data["quarter"])]
        return f'<tool_call>{{"name": "zoom", "arguments": {{"bbox": {box}}}}}</tool_call>'
    luck = random.Random(task.seed)
    wrong = [color for color in COLORS if color != task.answer]
    return f"<answer>{task.answer if luck.random() < 0.42 else luck.choice(wrong)}</answer>"


def emit(trajectories: list[Trajectory], policy: Policy) -> list[Sample]:
    """Trajectories to samples; the audit checks that they hold exactly what was sampled."""
    samples = [sample for trajectory in trajectories for sample in concat(trajectory)]
    audit(samples, trajectories, image_token_id=policy.image_token_id, banned_ids=policy.banned_ids)
    return samples


def update(
    policy: Policy, optimizer: torch.optim.Optimizer, samples: list[Sample], advantages: list[float], loss: str
) -> float:
    """One optimizer step on all samples, in micro-batches of 64 rows; token weights are computed over the whole batch."""
    mask = per_token(samples, lambda sample: sample.loss_mask)
    weights = REDUCTIONS["token_mean"](mask, [sample.group_id for sample in samples])
    total = 0.0
    for first in range(0, len(samples), 64):
        part = samples[first : first + 64]
        packed = pack(part, MicroBatchPlan(list(range(len(part))), "padded"), policy.family)
        logprobs = packed.by_sample(policy(packed.batch)).logprobs
        length = logprobs.shape[1]
        inputs = LossInputs(
            logprobs=logprobs,
            old_logprobs=logprobs.detach(),  # one step a batch: the old policy is the current one
            rollout_logprobs=per_token(part, lambda sample: sample.rollout_logprobs),
            advantages=torch.tensor(advantages[first : first + 64])[:, None].expand(-1, length),
            loss_mask=mask[first : first + 64, :length],
        )
        per_token_loss = LOSSES[loss](inputs).per_token
        part_loss = (per_token_loss * weights[first : first + 64, :length]).sum()
        part_loss.backward()
        total += part_loss.item()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return total


def main(steps: int = 100, warm_steps: int = 400, groups: int = 16, group_size: int = 8, seed: int = 0) -> float:
    """Train, print the reward of each step, and return the mean reward of the last ten steps."""
    tasks = load_tasks(Data(generator=f"{ROOT}/datasets/shapes.py:make_task", size=4096))
    options = {"coarse": 32, "crop": 32, "tools_in_prompt": False}
    env = resolve_env(f"{ROOT}/envs/zoom.py:ZoomEnv", options=options)
    model = load_model(Model(path="tiny:qwen3_vl", device="cpu"), Path("runs/.models"), seed)
    policy, renderer, store = model.policy, model.renderer, model.new_store()
    rollout = Rollout(group_size=group_size, max_turns=2, max_tokens=256, max_response_tokens=48)
    order = itertools.cycle(tasks.order(0))

    # Warm start: imitate scripted episodes, played through the same turn loop.
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(warm_steps):
        batch = [tasks[next(order)] for _ in range(32)]
        playing = {f"warm/{index:05d}/00": task for index, task in enumerate(batch)}
        script = ScriptedEngine(
            lambda request, turn, playing=playing: demonstrate(playing[request.trajectory_id], turn), renderer
        )
        runner = Runner(TurnLoop(env, script, renderer, store, rollout, seed), group_size=1)
        rollouts = asyncio.run(runner.play(iter(batch), len(batch), "warm"))
        loss = update(policy, optimizer, emit(rollouts.trajectories, policy), [0.0] * len(batch), "sft")
        if step % 50 == 0:
            print(f"warm start {step:4d}  loss {loss:.3f}")

    # GRPO: groups of episodes, rewards against their group's mean, one step; the engine shares the policy's weights.
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0)
    engine = HFEngine(policy, renderer)
    runner = Runner(TurnLoop(env, engine, renderer, store, rollout, seed))
    rewards: list[float] = []
    for step in range(1, steps + 1):
        engine.weights_changed(step)
        rollouts = asyncio.run(runner.play((tasks[index] for index in order), groups, f"step{step:04d}"))
        trajectories = rollouts.trajectories
        reward = torch.tensor([trajectory.reward for trajectory in trajectories])
        advantages = ADVANTAGES["grpo"](reward, [trajectory.group_id for trajectory in trajectories])
        loss = update(policy, optimizer, emit(trajectories, policy), advantages.tolist(), "ppo")
        rewards.append(reward.mean().item())
        print(f"step {step:4d}  reward {rewards[-1]:.3f}  loss {loss:+.4f}")
    last = rewards[-10:]
    print(f"mean reward of the last {len(last)} steps: {sum(last) / len(last):.3f}")
    engine.close()
    return sum(last) / len(last)


if __name__ == "__main__":
    tyro.cli(main)
