"""Settings of the episodes and of the engines that sample the responses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from vlmrl.config.fields import Code, Named, Options, Settings, positive
from vlmrl.utils.require import require

HISTORIES = (
    "append",
    "inline",
    "rerender",
    "compact",
    "keep_images",
    "keep_last_images",
    "drop_thinking",
    "last_turns",
)
"""Names that ``rollout.history`` may have. The functions are in ``vlmrl.rollout.history_policies``."""


@dataclass(frozen=True)
class Rollout(Settings):
    """How episodes are played: groups, sampling, limits, retries, history and samples."""

    section = "rollout"
    group_size: int = 8
    """Trajectories per task. Advantages are computed within such a group."""
    max_turns: int = 1
    """Maximum turns (model responses) per trajectory. The env may end the episode earlier."""
    max_tokens: int = 4096
    """Maximum tokens of a trajectory: prompt, images, responses and observations together."""
    max_response_tokens: int = 1024
    """Maximum tokens of one response."""
    temperature: float = 1.0
    """Sampling temperature. 0 is greedy decoding."""
    top_p: float = 1.0
    """Nucleus sampling: probability mass of the tokens that are sampled from. 1 disables it."""
    top_k: int = 0
    """Sample from the k most likely tokens only. 0 disables it."""
    stop: tuple[str, ...] = ()
    """Stop strings. The response ends after the first match and includes it."""
    max_concurrent: int = 256
    """Maximum trajectories in progress at the same time."""
    kv_cache_gib: float | None = None
    """Memory of the embedded engine's KV cache in GiB, of each engine if there are several. Requests that do not fit wait.
    Unset: on a GPU, what is free when a request arrives, less a reserve; on a CPU, no limit."""
    over_sampling: float = 1.0
    """Over-sampling factor: start this many times the groups of a batch, keep the first to finish, abort the rest. 1 disables it."""
    max_env_retries_per_turn: int = 1
    """Retries per turn after an env error. Each retry builds a new env and replays the earlier turns in it."""
    env_timeout: float = 60.0
    """Timeout of one env call, of reading or generating one task, and of loading one image, in seconds, without time in queues."""
    engine_timeout: float = 600.0
    """Timeout of one response from the engine, in seconds, in the startup checks too."""
    max_refills: int = 2
    """Times a failed trajectory is played again before its group is dropped."""
    max_failed_fraction: float = 0.25
    """Maximum fraction of a step's trajectories that may fail, those of bad rows included. Above it, the run stops with an error."""
    generate: Code = None
    """Agent loop of your own, instead of `env`: `async function(client, renderer, task)` returns a trajectory."""
    history: Named = "append"
    """How the next prompt is built.
    `append`: earlier tokens stay as sampled; observations are appended, formatted by the chat template.
    `inline`: the episode is one assistant message; observations are inserted as plain text.
    `rerender`: the chat template renders the whole conversation again before each response.
    `keep_images`, `keep_last_images`, `drop_thinking`, `last_turns`: as `rerender`, of messages that this function has rewritten.
    `compact`: as `append`, until the context is almost full; then the model writes a summary, which replaces the conversation.
    `file.py:function`: your own `function(messages, **options) -> messages`; a coroutine function may also ask the model."""
    history_options: Options = field(default_factory=dict)
    """Keyword arguments of the function that `history` names, as pairs `NAME VALUE`, for example `k 2`."""
    samples: Literal["concat", "step_wise", "merged"] = "concat"
    """Training samples per trajectory.
    `concat`: one for the whole trajectory.
    `step_wise`: one per turn, with the exact prompt of that turn.
    `merged`: step-wise samples, joined where a prompt continues the previous one."""
    truncated_reward: float | None = None
    """Reward of a truncated trajectory that received none from its env. Unset: such a trajectory is an error."""

    def __post_init__(self) -> None:
        sizes = ("group_size", "max_turns", "max_tokens", "max_response_tokens", "max_concurrent")
        positive("rollout", self, *sizes, "env_timeout", "engine_timeout", "kv_cache_gib")
        require(self.temperature >= 0, "rollout.temperature", "0 (greedy) or more", self.temperature)
        require(self.over_sampling >= 1, "rollout.over_sampling", "1 (off) or more", self.over_sampling)
        require(0 < self.top_p <= 1, "rollout.top_p", "in (0, 1]", self.top_p)
        require(self.top_k >= 0, "rollout.top_k", "0 (off) or more", self.top_k)
        failed = self.max_failed_fraction
        require(0 <= failed <= 1, "rollout.max_failed_fraction", "in [0, 1]", failed)
        known = not isinstance(self.history, str) or self.history in HISTORIES or ":" in self.history
        require(
            known, "rollout.history", f"one of {', '.join(HISTORIES)}, or code such as file.py:function", self.history
        )
        if self.history_options:
            require(self.history_policy is not None, "rollout.history", "a function with history_options", self.history)
        for name in ("max_env_retries_per_turn", "max_refills"):
            require(getattr(self, name) >= 0, f"rollout.{name}", "0 or more", getattr(self, name))

    @property
    def kv_cache_bytes(self) -> float | None:
        return None if self.kv_cache_gib is None else self.kv_cache_gib * 2**30

    @property
    def rerenders(self) -> bool:
        """Whether the chat template renders the whole conversation again before each response."""
        return self.history not in ("append", "inline")

    @property
    def history_policy(self) -> str | Callable[..., Any] | None:
        """The function that rewrites the messages before they are rendered again; ``None``: they stay."""
        return None if self.history in ("append", "inline", "rerender") else self.history

    @property
    def needs_rendered_rows(self) -> bool:
        """Whether a sample is the re-rendered conversation: its tokens are encoded again and have no rollout logprobs."""
        return self.rerenders and self.samples == "concat"
