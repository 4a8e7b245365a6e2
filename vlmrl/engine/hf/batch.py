"""The running batch: prefill, decode, and the prefix cache between turns. The thread of :mod:`vlmrl.engine.hf.engine` runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TypeVar

import torch

from vlmrl.engine.hf.budget import Budget
from vlmrl.engine.hf.cpu_threads import CpuThreads
from vlmrl.engine.hf.features import ImageFeatureCache
from vlmrl.engine.hf.kv_cache import BatchCache
from vlmrl.engine.hf.rows import BatchState, KeptRow, KeptRows, RequestRow, complete
from vlmrl.engine.hf.sampling import Sampling
from vlmrl.families.base import ImageFeatures
from vlmrl.model.expert_routing import ExpertRouters, routing_from_indices
from vlmrl.model.policy import Policy, layer_kinds
from vlmrl.multimodal.renderer import Renderer
from vlmrl.types import ExpertRouting

T = TypeVar("T")


@dataclass
class Resources:
    """What all batches of an engine share.

    ``prefill_tokens`` limits one prefill forward; ``routing`` records experts; ``threads`` is None on a GPU.
    """

    policy: Policy
    renderer: Renderer
    features: ImageFeatureCache
    prefixes: KeptRows
    routing: ExpertRouters | None
    prefill_tokens: int
    budget: Budget
    threads: CpuThreads | None
    tokens_prefilled: int = 0


class RunningBatch(BatchState):
    """Prefills, decodes and finishes the rows in progress."""

    def __init__(self, resources: Resources) -> None:
        super().__init__()
        self.resources = resources
        self.policy = resources.policy
        self.version = resources.prefixes.policy_version
        self._drawn_for: list[RequestRow] = []
        self._sampling: Sampling

    def recompute(self) -> None:
        """After a weight update: prefill again what the rows have so far, and continue from there."""
        rows, self.rows, self.cache = self.rows, [], None
        self.version = self.resources.prefixes.policy_version
        self.admit([row for row in rows if not row.abandoned])

    def admit(self, new_rows: list[RequestRow]) -> None:
        """Prefill the rows' prompts and responses so far, sample their next tokens, and add them. Equal prompts are run once."""
        fresh: dict[tuple[object, ...], list[RequestRow]] = {}
        resumed: list[tuple[RequestRow, KeptRow]] = []
        for row in new_rows:
            prefix = self.resources.prefixes.take(row)
            if prefix is not None:
                resumed.append((row, prefix))
            else:
                key = (tuple(row.request.prompt_ids), *row.token_ids, tuple(item.id for item in row.request.media))
                fresh.setdefault(key, []).append(row)
        for part in self._chunks(list(fresh.values()), lambda rows: len(rows[0].ids)):
            self._prefill(part, [None] * len(part))
        for pairs in self._resumed_together(resumed):
            # Rows of one cache must be adjacent, in their order. Caches come in the order of their first rows: their addresses differ
            # from run to run, and a row's place in the batch changes its numbers by rounding.
            order = {id(prefix.cache): number for number, (_, prefix) in reversed(list(enumerate(pairs)))}
            pairs.sort(key=lambda pair: (order[id(pair[1].cache)], pair[1].index))
            self._prefill([[row] for row, _ in pairs], [prefix for _, prefix in pairs])

    def advance(self) -> None:
        """Decode one token for every row."""
        cache, rows = self.cache, self.rows
        assert cache is not None
        device = self.policy.device
        cache.expect(self._left(rows))
        tokens = torch.tensor([[row.token_ids[-1]] for row in rows], device=device)
        positions = torch.tensor([[row.next_position] for row in rows], device=device).expand(3, -1, -1)
        hidden, experts = self._run(tokens, positions, cache, torch.ones_like(tokens, dtype=torch.bool))
        for row, new in zip(rows, experts, strict=True):
            row.next_position += 1
            row.expert_routing += new
        self._draw(rows, hidden[:, -1])
        self._finish()

    def _chunks(self, items: list[T], length: Callable[[T], int]) -> list[list[T]]:
        """Items sorted by length and cut into parts whose padded tokens fit into one forward."""
        parts: list[list[T]] = []
        longest = 0
        for item in sorted(items, key=length):
            longest = max(longest, length(item))
            if not parts or (len(parts[-1]) + 1) * longest > self.resources.prefill_tokens:
                parts.append([])
                longest = length(item)
            parts[-1].append(item)
        return parts

    def _resumed_together(self, resumed: list[tuple[RequestRow, KeptRow]]) -> list[list[tuple[RequestRow, KeptRow]]]:
        """Rows that continue their prefixes in one forward. Padding would change a recurrent model's states: it has none there."""
        alike: dict[int, list[tuple[RequestRow, KeptRow]]] = {}
        for row, prefix in resumed:
            new = len(row.ids) - len(prefix.token_ids) if self.policy.family.recurrent else 0
            alike.setdefault(new, []).append((row, prefix))
        return [part for pairs in alike.values() for part in self._chunks(pairs, lambda pair: len(pair[0].prompt_ids))]

    def _prefill(self, prompts: list[list[RequestRow]], prefixes: Sequence[KeptRow | None]) -> None:
        """Run one forward over distinct prompts, each shared by the rows of its list, after their cached ``prefixes``."""
        device = self.policy.device
        first_rows = [rows[0] for rows in prompts]
        cached_tokens = [0 if prefix is None else len(prefix.token_ids) for prefix in prefixes]
        cached_images = [0 if prefix is None else len(prefix.media_ids) for prefix in prefixes]
        new_ids = [row.ids[n:] for row, n in zip(first_rows, cached_tokens, strict=True)]
        length = max(map(len, new_ids))
        tokens = torch.zeros(len(first_rows), length, dtype=torch.long)
        positions = torch.zeros(3, len(first_rows), length, dtype=torch.long)
        real = torch.zeros(len(first_rows), length, dtype=torch.bool)
        for index, (row, ids, prefix) in enumerate(zip(first_rows, new_ids, prefixes, strict=True)):
            start = 0 if prefix is None else prefix.next_position
            row_positions, end = self.policy.family.positions(ids, row.request.media[cached_images[index] :], start)
            tokens[index, length - len(ids) :] = torch.tensor(ids)
            positions[:, index, length - len(ids) :] = row_positions
            real[index, length - len(ids) :] = True
            for member in prompts[index]:
                member.next_position = end
                if prefix is not None:
                    member.expert_routing = list(prefix.expert_routing)
        tokens, positions, real = tokens.to(device), positions.to(device), real.to(device)
        past = [prefix for prefix in prefixes if prefix is not None]
        cache = _joined(past) if past else BatchCache.empty(layer_kinds(self.policy.config), len(first_rows), device)
        owner = [index for index, rows in enumerate(prompts) for _ in rows]
        members = [row for rows in prompts for row in rows]
        stays = bool(past) and self.cache is None  # else it is copied or shared after this forward
        cache.expect(length + (self._left(members) if stays else 0))
        new_media = [item for row, n in zip(first_rows, cached_images, strict=True) for item in row.request.media[n:]]
        features = self.resources.features.of(new_media)
        images = [features[item.id] for item in new_media]
        hidden, experts = self._run(tokens, positions, cache, real, images)
        for rows, n, ids, new in zip(prompts, cached_tokens, new_ids, experts, strict=True):
            for row in rows:  # tokens that were run before keep their first experts
                row.expert_routing += new[length - len(ids) :][len(row.expert_routing) - n :]
        self.resources.tokens_prefilled += sum(map(len, new_ids))
        self._draw(members, hidden[torch.tensor(owner, device=device), -1])
        joined = cache.taken(owner, consume=True) if past else cache.share(owner)
        running, self.cache = self.cache, None
        if running is not None:
            joined = BatchCache.join([running.taken(range(len(self.rows)), consume=True), joined])
        self.cache = joined
        self.rows += members
        self._finish()

    def _run(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        cache: BatchCache,
        real: torch.Tensor,
        images: Sequence[ImageFeatures] = (),
    ) -> tuple[torch.Tensor, list[list[ExpertRouting]]]:
        """Hidden states of new ``tokens``, and the experts of each row's tokens: empty lists if they are not recorded."""
        policy, routing = self.policy, self.resources.routing
        attention = cache.attention(real, policy.dtype)
        cache.extend(real)
        forward = partial(policy.hidden, tokens, positions, images, cache.hf, real=real, cached=attention)
        if self.resources.threads is not None:
            kind = "decode" if tokens.shape[1] == 1 else "prefill"
            forward = partial(self.resources.threads.run, kind, tokens.numel(), forward)
        if routing is None:
            return forward(), [[] for _ in tokens]
        with routing.recorded() as layers:
            hidden = forward()
        return hidden, [
            routing_from_indices(row) for row in torch.stack(layers, 1).unflatten(0, tokens.shape).cpu().numpy()
        ]

    def _draw(self, rows: list[RequestRow], hidden: torch.Tensor) -> None:
        if rows != self._drawn_for:  # once a turn, not once a token
            self._drawn_for, params = list(rows), [row.request.sampling for row in rows]
            self._sampling = Sampling(params, hidden.device)
        logits = self.policy.logits(hidden, self._sampling.temperatures)
        ids, logprobs = self._sampling.draw(logits, [row.draws[len(row.token_ids)] for row in rows])
        for row, token, logprob in zip(rows, ids, logprobs, strict=True):
            row.token_ids.append(token)
            row.logprobs.append(logprob)
            row.versions.append(self.version)
            row.stop_reason = self._stop_reason(row)

    def _stop_reason(self, row: RequestRow) -> str | None:
        if row.token_ids[-1] in self.resources.renderer.stop_ids:
            return "stop"
        stops = row.request.sampling.stop
        if stops:
            longest = max(len(stop.encode()) for stop in stops)  # a token has at least one byte
            tail = self.resources.renderer.decode(row.token_ids[-longest - 4 :])
            if any(stop in tail for stop in stops):
                return "stop"
        return "length" if len(row.token_ids) >= row.request.sampling.max_tokens else None

    @staticmethod
    def _left(rows: Sequence[RequestRow]) -> int:
        return max(row.left for row in rows)

    def _finish(self) -> None:
        """Complete the finished rows, keep their keys and values, and continue with the rest."""
        running = [i for i, row in enumerate(self.rows) if row.stop_reason is None and not row.abandoned]
        if len(running) == len(self.rows):
            return
        cache, rows = self.cache, self.rows
        assert cache is not None
        finished = sorted(set(range(len(rows))) - set(running))
        prefixes, budget = self.resources.prefixes, self.resources.budget
        stopped = [index for index in finished if rows[index].stop_reason == "stop"] if prefixes.enabled else []
        if stopped and (not running or budget.has_room_for_prefixes(self, [rows[index] for index in stopped])):
            # A copy, since a few rows would keep the memory of the whole batch.
            own = cache.copied(stopped, prefixes.prompts) if running else cache
            for place, index in enumerate(stopped):
                prefixes.put(rows[index], own, place if running else index, self.version)
        for index in finished:
            complete(rows[index])
        self.rows, self.cache, self._drawn_for = [rows[index] for index in running], None, []
        self.cache = cache.taken(running, consume=True) if running else None


def _joined(prefixes: Sequence[KeptRow]) -> BatchCache:
    """The prefixes' rows as one cache; those of one cache are adjacent in ``prefixes``, which no longer hold theirs."""
    parts = []
    for _, adjacent in groupby(prefixes, lambda prefix: id(prefix.cache)):
        part = list(adjacent)
        parts.append(part[0].cache.taken([prefix.index for prefix in part]))
        for prefix in part:
            prefix.cache = BatchCache([], prefix.cache.valid)
    return BatchCache.join(parts)
