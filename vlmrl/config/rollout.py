"""How episodes are played, and what samples the replies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from vlmrl.config.fields import Code, Options, positive, require


@dataclass(frozen=True)
class Rollout:
    group_size: int = 8
    """Trajectories per task: the group of a GRPO baseline."""
    max_turns: int = 1
    """Replies in one episode; an env may end it sooner."""
    max_tokens: int = 4096
    """The budget of a whole trajectory: prompt, images, replies and observations."""
    max_reply_tokens: int = 1024
    """The most tokens one reply may take."""
    temperature: float = 1.0
    """Of sampling; 0: always the likeliest token."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that make up this share; 1: from all."""
    top_k: int = 0
    """0: off."""
    stop: tuple[str, ...] = ()
    """Stop strings; the matched one stays in the reply."""
    max_concurrent: int = 256
    """Trajectories in play at once."""
    over_sampling: float = 1.0
    """Start so many times the groups a batch needs, keep the first that finish, and stop the stragglers."""
    max_env_retries_per_turn: int = 1
    """Fresh envs tried after an env error, each replaying the turns so far."""
    env_timeout: float = 60.0
    """Seconds that one call of an env may take."""
    engine_timeout: float = 600.0
    """Seconds that one reply may take."""
    max_refills: int = 2
    """Failed members of a group are played anew, so many times; then the group is dropped and counted."""
    max_failed_fraction: float = 0.25
    """The run stops when more of a step's trajectories fail."""
    generate: Code = None
    """An async function of client, renderer and task that plays an episode in place of the turn loop; env is then unset."""
    history: Literal["append", "inline", "rerender"] = "append"
    """`append`: replies stay as sampled and observations follow, as the template writes them. `inline`: the episode is one
    assistant message, observations are bare text inside it. `rerender`: the messages are templated anew before each reply."""
    history_policy: Code = None
    """For `rerender`: `keep_last_images`, `drop_thinking`, `last_turns`, or a function from messages to messages."""
    history_options: Options = field(default_factory=dict)
    """Keyword options of the policy, such as `k 2`."""
    samples: Literal["concat", "step_wise", "merged"] = "concat"
    """What is trained: `concat`: one row per trajectory. `step_wise`: one row per turn, with exactly the prompt it had. `merged`:
    step-wise rows joined wherever one's prompt goes on from the one before."""
    truncated_reward: float | None = None
    """What a truncated trajectory counts that got no reward from its env; unset: that is an error."""

    def __post_init__(self) -> None:
        sizes = ("group_size", "max_turns", "max_tokens", "max_reply_tokens", "max_concurrent")
        positive("rollout", self, *sizes, "env_timeout", "engine_timeout")
        require(self.temperature >= 0, "rollout.temperature", "0 (greedy) or more", self.temperature)
        require(self.over_sampling >= 1, "rollout.over_sampling", "1 (off) or more", self.over_sampling)
        require(0 < self.top_p <= 1, "rollout.top_p", "in (0, 1]", self.top_p)
        require(self.top_k >= 0, "rollout.top_k", "0 (off) or more", self.top_k)
        require(
            0 <= self.max_failed_fraction <= 1, "rollout.max_failed_fraction", "in [0, 1]", self.max_failed_fraction
        )
        if self.history_policy is not None:
            require(self.history == "rerender", "rollout.history", "rerender with a history_policy", self.history)
        if self.history_options:
            require(self.history_policy is not None, "rollout.history_policy", "set when history_options are", None)
        for name in ("max_env_retries_per_turn", "max_refills"):
            require(getattr(self, name) >= 0, f"rollout.{name}", "0 or more", getattr(self, name))

    @property
    def needs_rendered_rows(self) -> bool:
        """One row of a history that is rendered anew: its tokens are encoded again, so it has no rollout logprobs."""
        return self.history == "rerender" and self.samples == "concat"
