"""Admits waiting requests to the running batch, so that the KV cache stays within a number of bytes.

A batch has two padded tensors for each layer: one for prompts and one for the rows' own tokens, each as wide as its longest entry. A
row is therefore counted with its whole response before it starts. Requests wait in order until the batch has room. Before a request
waits, keys and values that trajectories keep between two turns are evicted, the least recently used first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vlmrl.engine.hf.rows import BatchState, KeptRows, RequestRow, fail
from vlmrl.model.policy import Policy, cached_elements, layer_kinds

GIB = 2**30
RESERVE_BYTES = 1.0 * GIB  # of a GPU whose free memory is the budget: allocator fragments, image encoding
ACTIVATIONS = 24  # elements for each token and hidden dimension of a prefill forward
LOGITS_BYTES = 32  # for each row and id of the vocabulary, while a token is drawn
PREFILL_TOKENS = 16384  # of one prefill forward


@dataclass(frozen=True)
class RowSize:
    """What rows take in a model's KV cache."""

    layers: int
    token_bytes: int
    """One column of one row, in all attention layers."""
    state_bytes: int
    """One row's states in all recurrent layers."""

    @classmethod
    def of(cls, policy: Policy) -> RowSize:
        text, size = policy.config.get_text_config(), policy.dtype.itemsize
        kinds = layer_kinds(policy.config)
        return cls(
            len(kinds),
            size * cached_elements(policy.config),
            kinds.count("linear_attention") * _state_elements(text) * 4,
        )


class Budget:
    """``limit`` bytes for keys and values. None: on a GPU what is free at the time, less a reserve; on the CPU no limit.

    ``most_rows`` limits the rows of a batch after an out-of-memory error.
    """

    def __init__(self, policy: Policy, prefixes: KeptRows, prefill_tokens: int, limit: float | None = None) -> None:
        self.most_rows: int | None = None
        self.size = RowSize.of(policy)
        self._policy = policy
        self._prefixes = prefixes
        self._prefill_tokens = prefill_tokens
        self._limit = limit

    def admit(self, waiting: deque[RequestRow], running: BatchState) -> list[RequestRow]:
        """Remove and return the first ``waiting`` rows that fit beside the ``running`` ones. One that can never fit fails."""
        chosen: list[RequestRow] = []
        while len(chosen) < len(waiting):
            row = waiting[len(chosen)]  # it stays until the end: an error here must lose no row
            self._prefixes.drop_stale(row)
            if row.abandoned or self._fits(running, [*chosen, row]):
                chosen.append(row)
            elif running.rows or chosen:
                break
            elif row.request.trajectory_id in self._prefixes:
                self._prefixes.release(row.request.trajectory_id)  # its prompt alone takes less than beside the prefix
            else:
                fail([waiting.popleft()], self._never_fits(running, row))
        for _ in chosen:
            waiting.popleft()
        return chosen

    def has_room_for_prefixes(self, running: BatchState, rows: Sequence[RequestRow]) -> bool:
        """Whether a copy of these ``rows`` of the batch may be kept beside it. Drops older prefixes for it."""
        copied = len(rows) * (self.size.token_bytes * max(row.length for row in rows) + self.size.state_bytes)
        return self._make_room(running, self.needed(running, []) + copied, spared=())

    def needed(self, running: BatchState, new: Sequence[RequestRow]) -> float:
        """The most bytes that the batch takes with the ``new`` rows until all of its rows have ended, without prefixes."""
        rows = [*running.rows, *new]
        if not rows:
            return 0.0
        size, cache = self.size, running.cache
        prompts, own = self._columns(new)
        shared, held = (0, 0) if cache is None else (cache.prefix_columns, cache.columns)
        full = len(rows) * (max(prompts, shared) + max(own, held) + max(row.left for row in rows))
        longest = max((row.length for row in new), default=0)
        forward = min(len(new) * (prompts + own), 2 * max(self._prefill_tokens, longest))
        # A layer is copied when it grows or when rows join or leave, and freed when it is copied.
        return size.token_bytes * (full * (1 + 2 / size.layers) + forward) + 2 * size.state_bytes * len(rows)

    def _columns(self, new: Sequence[RequestRow]) -> tuple[int, int]:
        """Columns of the longest prompt of ``new`` rows, and what they have of their own after their prefill.

        Kept columns are padded to the longest, and so are the new tokens after them.
        """
        prompts, kept, added = 0, 0, 0
        for row in new:
            prefix = self._prefixes.of(row)
            if prefix is None:
                prompts = max(prompts, row.length)
            else:
                prompts = max(prompts, prefix.cache.prefix_columns)
                kept = max(kept, prefix.cache.columns)
                added = max(added, row.length - len(prefix.token_ids))
        return prompts, kept + added

    def _fits(self, running: BatchState, new: Sequence[RequestRow]) -> bool:
        if self.most_rows is not None and len(running.rows) + len(new) > self.most_rows:
            return False
        return self._make_room(running, self.needed(running, new), [row.request.trajectory_id for row in new])

    def _make_room(self, running: BatchState, needed: float, spared: Sequence[str]) -> bool:
        """Whether ``needed`` bytes fit. Drops prefixes for them if that helps, those that are ``spared`` last."""
        total = self._total(running)
        if total is None:
            return True
        if needed > total:
            return False
        while needed + self._prefixes.nbytes > total:
            if not self._prefixes.evict(spared) and not self._prefixes.evict():
                break
        return True

    def _total(self, running: BatchState) -> float | None:
        """Bytes for the batch and all prefixes together."""
        device = self._policy.device
        if self._limit is not None or device.type != "cuda":
            return self._limit
        held = self._prefixes.nbytes + (running.cache.nbytes if running.cache is not None else 0)
        text, size = self._policy.config.get_text_config(), self._policy.dtype.itemsize
        rows = len(running.rows) + 1
        return (
            held
            + free_bytes(device)
            - reserved_bytes(text.hidden_size, text.vocab_size, size, rows, self._prefill_tokens)
        )

    def _never_fits(self, running: BatchState, row: RequestRow) -> str:
        needed, total = self.needed(running, [row]) / GIB, (self._total(running) or 0.0) / GIB
        tokens = f"a prompt of {len(row.prompt_ids)} tokens and a response of up to {row.left}"
        what = f"at least {needed:.3g} for {tokens}, but it is {total:.3g}"
        if self._limit is None:
            what = f"set, or the GPU must have {needed:.3g} GiB free for {tokens}; it has {total:.3g}"
        return (
            f"trajectory {row.request.trajectory_id}: rollout.kv_cache_gib must be {what}. Lower rollout.max_tokens or "
            f"rollout.max_response_tokens, or give the engine more memory."
        )


def reserved_bytes(hidden: int, vocabulary: int, itemsize: int, rows: float, prefill_tokens: int) -> float:
    """Memory of a GPU that the engine leaves free beside keys and values, to compute prompts and to draw tokens for ``rows``."""
    return RESERVE_BYTES + prefill_tokens * hidden * ACTIVATIONS * itemsize + rows * vocabulary * LOGITS_BYTES


def free_bytes(device: torch.device) -> float:
    """Memory of a GPU that this process can still allocate."""
    free, _ = torch.cuda.mem_get_info(device)
    return float(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def _state_elements(text: Any) -> int:
    """Elements of one row's state in a recurrent layer: the convolution's last inputs, and the matrix of each head."""
    heads = getattr(text, "linear_num_value_heads", 0)
    key, value = getattr(text, "linear_key_head_dim", 0), getattr(text, "linear_value_head_dim", 0)
    convolved = 2 * getattr(text, "linear_num_key_heads", 0) * key + heads * value
    return heads * key * value + convolved * getattr(text, "linear_conv_kernel_dim", 0)
