"""Settings of the algorithm as users may combine them, with groups of any rewards, turns and lengths."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
from testing.fakes import make_turn

from vlmrl.config import Algo, Config, Rollout, Train
from vlmrl.samples import concat, merge_prefixes, step_wise
from vlmrl.train.credit import assign_advantages
from vlmrl.types import Sample, Task, Trajectory

REWARDS = (0.0, 0.0, 1.0, 1.0, 0.5, -1.0, 10.1, 1e-30, 1e15, -1e308, 1e308)
FORMS = {"concat": concat, "step_wise": step_wise, "merged": lambda each: merge_prefixes(step_wise(each))}


def cases(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Endlessly: settings of the sections ``algo``, ``rollout`` and ``train``, and the ``groups`` as rewards by member and turn."""
    while True:
        limit = rng.choice([8, 64, 4096])
        algo = {
            "advantage": rng.choice(["grpo", "rloo", "maxrl", "reinforce_pp"]) if rng.random() < 0.97 else "gae",
            "credit": rng.choice(["trajectory", "trajectory", "turn", "gigpo"]),
            "loss": rng.choice(["ppo", "ppo", "reinforce", "sft"]),
            "kl": rng.choice(["k1", "k2", "k3", "abs"]),
            "kl_coef": rng.choice([0.0, 0.1, -1.0, 1e300]) if rng.random() < 0.4 else 0.0,
            "overlong_buffer": rng.choice([-1, 4, limit, limit + 1]) if rng.random() < 0.2 else 0,
            "old_policy": rng.choice(["trainer", "rollout"]) if rng.random() < 0.2 else None,
            "corrections": rng.choice([("token_truncation",), ("veto", "veto")]) if rng.random() < 0.2 else (),
            "reference": "other/model" if rng.random() < 0.1 else None,
        }
        rollout = {
            "group_size": rng.choice([2, 8, 8]) if rng.random() < 0.9 else 1,
            "max_tokens": limit,
            "max_response_tokens": limit // 2,
            "truncated_reward": rng.choice([0.0, -1.0]) if rng.random() < 0.2 else None,
            "history": "rerender" if rng.random() < 0.1 else "append",
            "samples": rng.choice([*FORMS]),
        }
        train = {
            "max_staleness": rng.choice([1, 4]) if rng.random() < 0.2 else 0,
            "shuffle_rewards": rng.random() < 0.1,
        }
        few = rng.sample(REWARDS, rng.randint(1, len(REWARDS)))
        given = rng.choice([0.0, 0.5])  # the share of turns with a reward
        groups = [
            [
                [rng.choice(few) if rng.random() < given else None for _ in range(rng.randint(1, 4))]
                for _ in range(members)
            ]
            for members in (rng.randint(1, 4) for _ in range(rng.randint(1, 3)))
        ]
        yield {
            "algo": algo,
            "rollout": rollout,
            "train": train,
            "groups": groups,
            "final": rng.choice([(0.0, 1.0), (11.0,)]),
            "seed": rng.randrange(10**9),
        }


def outcome(case: dict[str, Any]) -> str:
    """``assigned`` if every sample has finite advantages that hold what the docs say, ``refused`` after an error that names a setting.

    Anything else raises AssertionError.
    """
    rng = random.Random(case["seed"])
    refusal = None
    try:
        config = Config(algo=Algo(**case["algo"]), rollout=Rollout(**case["rollout"]), train=Train(**case["train"]))
        trajectories = [
            _trajectory(f"g{group}/{member}", turns, rng.choice(case["final"]), rng)
            for group, members in enumerate(case["groups"])
            for member, turns in enumerate(members)
        ]
        samples = [sample for each in trajectories for sample in FORMS[config.rollout.samples](each)]
        kl = [np.array([rng.gauss(0, 1) for _ in sample.response_ids], np.float32) for sample in samples]
        assign_advantages(samples, trajectories, config, kl if config.algo.kl_in_reward else None)
    except ValueError as error:
        refusal = str(error)
    if refusal is not None:
        assert any(name in refusal for name in ("algo.", "rollout.", "train.", "maxrl", "gae")), refusal
        return "refused"
    for sample in samples:
        assert all(math.isfinite(value) for value in _advantages(sample)), sample
        if isinstance(sample.advantage, list):
            pairs = zip(sample.advantage, sample.loss_mask, strict=True)
            assert not any(value for value, mask in pairs if not mask), "an advantage of a token that is not trained"
    compares_rewards = config.algo.credit != "gigpo"  # which also compares how far turns are from their rewards
    if compares_rewards and not config.algo.kl_in_reward and not config.algo.overlong_buffer:
        _check_equal_rewards(samples, trajectories)
    return "assigned"


def _check_equal_rewards(samples: list[Sample], trajectories: list[Trajectory]) -> None:
    """If all members of all groups have one and the same reward, and give it at the end, no token has an advantage."""
    rewards = {each.reward for each in trajectories}
    members = {each.group_id: sum(other.group_id == each.group_id for other in trajectories) for each in trajectories}
    if len(rewards) == 1 and min(members.values()) > 1 and not any(any(each.turn_rewards) for each in trajectories):
        assert not any(any(_advantages(sample)) for sample in samples), "an advantage among equal rewards"


def _advantages(sample: Sample) -> list[float]:
    assert sample.advantage is not None, "a sample without an advantage"
    return sample.advantage if isinstance(sample.advantage, list) else [sample.advantage]


def _trajectory(name: str, rewards: list[float | None], final: float, rng: random.Random) -> Trajectory:
    sizes = [rng.randint(1, 6) for _ in rewards]
    turns = [
        make_turn([1] * rng.randint(1, 3), [5] * size, [-0.1] * size, reward=reward)
        for reward, size in zip(rewards, sizes, strict=True)
    ]
    return Trajectory(name, name.partition("/")[0], Task("t", []), turns, "env_done", final_reward=final)
