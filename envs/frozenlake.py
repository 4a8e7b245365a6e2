"""FrozenLake with Gymnasium's rendered frames: the agent walks over a frozen lake to the goal, around the holes.

A response names its steps between answer tags: ``<answer>right, down</answer>``. The next frame shows the new position. Every task's
lake is generated from its seed and has a path to the goal. The goal earns 1; a hole ends the episode with 0.
"""

from vlmrl import GymnasiumEnv, Task, read_tags

MOVES = ("left", "down", "right", "up")  # as Gymnasium numbers them
ASK = f"Name your steps between answer tags, such as <answer>right, down</answer>; a step is {', '.join(MOVES)}."


class FrozenLakeEnv(GymnasiumEnv):
    """A lake of ``size`` x ``size`` tiles, each frozen with probability ``frozen``; on ``slippery`` ice steps slide sideways."""

    def __init__(
        self, task: Task, size: int = 4, frozen: float = 0.8, slippery: bool = False, steps_per_turn: int = 5
    ) -> None:
        super().__init__(task)
        self.size, self.frozen, self.slippery, self.steps_per_turn = size, frozen, slippery, steps_per_turn

    def make(self):
        from gymnasium.envs.toy_text.frozen_lake import generate_random_map

        lake = generate_random_map(self.size, self.frozen, self.seed)
        return self.gymnasium.make("FrozenLake-v1", desc=lake, is_slippery=self.slippery, render_mode="rgb_array")

    def read_actions(self, response):
        answers = read_tags(response, "answer")
        steps = [step.strip().lower() for step in answers[-1].split(",")] if answers else []
        if not steps or not set(steps) <= set(MOVES):
            raise ValueError(ASK)
        if len(steps) > self.steps_per_turn:
            raise ValueError(f"At most {self.steps_per_turn} steps at once.")
        return [MOVES.index(step) for step in steps]

    def describe(self, info):
        return "You are here now. " + ASK
