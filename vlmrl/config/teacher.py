"""Settings of a teacher: on-policy distillation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vlmrl.config.fields import Named, Settings, positive
from vlmrl.utils.require import require

OWN = ("self", "average")
"""Teachers that are made from the policy itself."""


@dataclass(frozen=True)
class Teacher(Settings):
    """A teacher whose distribution the policy learns to match on the tokens that the policy sampled."""

    section = "teacher"
    model: str | None = None
    """Who teaches. `self`: the policy with its current weights. `average`: an exponential average of the policy's weights.
    Otherwise a frozen model of the policy's architecture and with its tokenizer: a name on the Hugging Face Hub or a folder.
    Unset: no teacher."""
    sees: Named | None = None
    """What the teacher sees: `function(task, trajectory, turn)` returns the messages before that turn's response, or None.
    None: the teacher says nothing about this turn. Unset: it sees what the policy saw; `self` would then agree with itself."""
    loss: Literal["reverse_kl", "forward_kl", "jensen_shannon", "sampled"] = "reverse_kl"
    """`reverse_kl`, `forward_kl` and `jensen_shannon` compare the distributions of each sampled token, over the whole vocabulary.
    `sampled` adds the teacher's logprob minus the policy's to the token's advantage, for `algo.loss`: cheaper, and noisier."""
    js_weight: float = 0.5
    """The teacher's weight in the mixture of `jensen_shannon`. Towards 1 it acts like `reverse_kl`, towards 0 like `forward_kl`."""
    top_k: int | None = None
    """Compare only the teacher's most likely tokens, with all others as one class. Set it to repeat a paper that does.
    Unset: the whole vocabulary, which costs the same here."""
    coef: float = 1.0
    """Weight of the teacher beside the rewards. With `algo.advantage none` the teacher alone trains."""
    clip: float | None = None
    """Limit of a token's divergence, in nats, or of the absolute value that `sampled` adds. A token above it has no gradient of it.
    Set it where few tokens, such as the first ones of a changed format, have most of the loss. Unset: no limit."""
    decay: float = 0.95
    """With `average`: the weight of the old average at each optimizer step. Raise it if teacher and policy drift off together."""

    def __post_init__(self) -> None:
        positive("teacher", self, "coef", "top_k", "clip")
        require(0 < self.js_weight < 1, "teacher.js_weight", "between 0 and 1, both excluded", self.js_weight)
        require(0 <= self.decay < 1, "teacher.decay", "in [0, 1)", self.decay)
        require(self.sees is None or self.model is not None, "teacher.sees", "unset without teacher.model", self.sees)
        if self.model == "self":
            rule = "set with teacher.model self, which would agree with itself on what the policy saw"
            require(self.sees is not None, "teacher.sees", rule, self.sees)
        if self.loss == "sampled":
            require(self.top_k is None, "teacher.top_k", "unset with teacher.loss sampled", self.top_k)
        rule = "self, average, a folder or a name on the Hub: scoring by a server is not supported"
        require("://" not in (self.model or ""), "teacher.model", rule, self.model)
