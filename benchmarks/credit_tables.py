"""Which credit assignment learns a long episode fastest? FrozenLake without a model: the policy is a table.

    python benchmarks/credit_tables.py                  # prints the first three rows of docs/algorithms.md
    python benchmarks/credit_tables.py --seeds 10

The advantages are vlmrl's own functions. Eight lakes of 4x4 tiles have a group of eight episodes each in every step; an episode has
at most eight turns of two tokens, of which each is a move. The policy is a softmax over four moves for each lake, tile and first move
of the turn. Its table starts at 0, and learns with Adam from one gradient a step.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import gymnasium
import numpy as np
import torch
import tyro
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

from vlmrl import Algo
from vlmrl.algos import choose

LAKES, GROUP, TURNS = 8, 8, 8
TILES, FIRST, MOVES = 16, 5, 4  # the table's sides: the tile, no first move or one of four, the move
METHODS = {"grpo": Algo(), "turn": Algo(credit="turn"), "gigpo": Algo(credit="gigpo")}


@dataclass
class Episode:
    """Its tokens: a place in the table, and the move; the tile in which each turn began; its reward."""

    group: int
    places: list[int]
    moves: list[int]
    tiles: list[str]
    reward: float = 0.0


class Lakes:
    """Transitions ``[lakes, tiles, moves, 3 outcomes]`` of lakes that gymnasium makes: the next tile, its reward, and the end."""

    def __init__(self, seed: int, slippery: bool) -> None:
        shape = (LAKES, TILES, MOVES, 3)
        self.next, self.reward, self.done = np.zeros(shape, int), np.zeros(shape), np.zeros(shape, bool)
        for lake in range(LAKES):
            desc = generate_random_map(4, 0.8, 1000 * seed + lake)
            env = gymnasium.make("FrozenLake-v1", desc=desc, is_slippery=slippery)
            for tile, moves in env.unwrapped.P.items():
                for move, outcomes in moves.items():
                    for place in range(3):  # equally likely; without slipping all the same
                        _, following, reward, done = outcomes[place % len(outcomes)]
                        at = lake, tile, move, place
                        self.next[at], self.reward[at], self.done[at] = following, reward, done

    def play(self, policy: list[list[float]], luck: random.Random) -> list[Episode]:
        """A group of episodes on each lake, by a policy ``[lakes * tiles * 5, moves]`` of weights."""
        return [self._episode(lake, policy, luck) for lake in range(LAKES) for _ in range(GROUP)]

    def _episode(self, lake: int, policy: list[list[float]], luck: random.Random) -> Episode:
        episode, tile, done = Episode(lake, [], [], []), 0, False
        for _ in range(TURNS):
            episode.tiles.append(str(tile))
            first, chosen = 0, []
            for _ in range(2):
                place = (lake * TILES + tile) * FIRST + first
                [move] = luck.choices(range(MOVES), policy[place])
                episode.places.append(place)
                episode.moves.append(move)
                chosen, first = [*chosen, move], move + 1
            for move in chosen:
                at = lake, tile, move, luck.randrange(3)
                episode.reward += float(self.reward[at])
                tile, done = int(self.next[at]), bool(self.done[at])
                if done:
                    return episode
        return episode


class Learner:
    """The table, and one gradient step on a batch of episodes."""

    def __init__(self, algo: Algo, lr: float) -> None:
        self.algo = algo
        self.logits = torch.zeros(LAKES * TILES * FIRST, MOVES, requires_grad=True)
        self.optimizer = torch.optim.Adam([self.logits], lr=lr, betas=(0.9, 0.999))

    @property
    def policy(self) -> list[list[float]]:
        return self.logits.detach().softmax(1).tolist()

    def step(self, episodes: list[Episode]) -> None:
        places = torch.tensor([place for episode in episodes for place in episode.places])
        moves = torch.tensor([move for episode in episodes for move in episode.moves])
        chosen = self.logits.log_softmax(1)[places, moves]
        loss = -(self._advantages(episodes).float() * chosen).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def _advantages(self, episodes: list[Episode]) -> torch.Tensor:
        """Of all tokens."""
        groups, estimate = [str(episode.group) for episode in episodes], choose(self.algo, "advantage")
        totals = torch.tensor([episode.reward for episode in episodes], dtype=torch.float64)
        lengths = [len(episode.places) for episode in episodes]
        if self.algo.credit == "trajectory":
            found = [[value] * (length // 2) for value, length in zip(estimate(totals, groups), lengths, strict=True)]
        else:
            rewards = [[0.0] * (len(episode.tiles) - 1) + [episode.reward] for episode in episodes]
            found = choose(self.algo, "credit")(rewards, [episode.tiles for episode in episodes], groups, estimate)
        return torch.tensor([value for row in found for value in row for _ in range(2)])


def learn(algo: Algo, seed: int, slippery: bool, steps: int, lr: float) -> Iterator[float]:
    """The mean reward of each step's episodes."""
    lakes, learner, luck = Lakes(seed, slippery), Learner(algo, lr), random.Random(seed)
    for _ in range(steps):
        episodes = lakes.play(learner.policy, luck)
        yield statistics.fmean(episode.reward for episode in episodes)
        learner.step(episodes)


def main(seeds: int = 3, steps: int = 200, lr: float = 0.1) -> None:
    """``steps`` of 64 episodes for each method and seed. Prints the mean reward of each quarter, and the last quarter's by seed."""
    quarter = steps // 4
    for slippery in (False, True):
        print(f"\n{'slippery' if slippery else 'not slippery'}, {64 * steps} episodes, {seeds} seeds\n")
        print("| method | 1st quarter | 2nd | 3rd | last | last, by seed |\n| --- | --- | --- | --- | --- | --- |")
        for name, algo in METHODS.items():
            curves = [list(learn(algo, seed, slippery, steps, lr)) for seed in range(seeds)]
            parts = [[statistics.fmean(c[i * quarter : (i + 1) * quarter]) for i in range(4)] for c in curves]
            means = " | ".join(f"{statistics.fmean(column):.3f}" for column in zip(*parts, strict=True))
            print(f"| {name} | {means} | {', '.join(f'{part[-1]:.3f}' for part in parts)} |", flush=True)


if __name__ == "__main__":
    tyro.cli(main)
