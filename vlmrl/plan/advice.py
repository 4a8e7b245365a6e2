"""Which settings to change when a run does not fit its GPU. Every suggestion is planned again before it is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from vlmrl.config import Cluster, Config
from vlmrl.plan.gpus import GIB, Gpu
from vlmrl.plan.memory_plan import MemoryPlan, Sizes

MOST_SUGGESTIONS = 4
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
SizesOf = Callable[[Config], Sizes]


@dataclass(frozen=True)
class Change:
    """Settings to change, as on the command line and by their full names."""

    option: str
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, name: str, value: Any) -> Change:
        return cls(f"--{name.replace('_', '-')} {value}", {name: value})


def suggestions(config: Config, gpu: Gpu, sizes_of: SizesOf) -> list[str]:
    """Lines for a run that does not fit: single changes after which it does; or else several together, all of them needed.

    None if no setting that was tried makes it fit.
    """
    sizes_of = _once(sizes_of)
    shape = sizes_of(config).shape
    changes = list(changes_of(config, experts=shape is not None and shape.experts_per_token > 0))
    planned = ((change.option, _plan_with(config, change.settings, gpu, sizes_of)) for change in changes)
    fitting = [f"{option}: {_peak(plan)}" for option, plan in planned if plan is not None and plan.fits]
    if fitting:
        return fitting[:MOST_SUGGESTIONS]
    chosen: list[Change] = []
    for change in changes:
        together = [each for each in chosen if each.settings.keys().isdisjoint(change.settings)] + [change]
        plan = _plan_with(config, _settings(together), gpu, sizes_of)
        if plan is None:
            continue
        chosen = together
        if plan.fits:
            chosen, plan = _necessary(config, chosen, plan, gpu, sizes_of)
            return [f"{' '.join(each.option for each in chosen)}, together: {_peak(plan)}"]
    return []


def _necessary(
    config: Config, changes: list[Change], plan: MemoryPlan, gpu: Gpu, sizes_of: SizesOf
) -> tuple[list[Change], MemoryPlan]:
    """The changes without which the run does not fit, and the plan with them. The ones that change the run most go first."""
    for change in reversed(changes):
        others = [each for each in changes if each is not change]
        without = _plan_with(config, _settings(others), gpu, sizes_of)
        if without is not None and without.fits:
            changes, plan = others, without
    return changes, plan


def _settings(changes: list[Change]) -> dict[str, Any]:
    return {name: value for change in changes for name, value in change.settings.items()}


def changes_of(config: Config, *, experts: bool) -> Iterator[Change]:
    """What reduces memory, from the cheapest change to the one that changes the run most."""
    if config.engine == "embedded" and config.rollout.kv_cache_gib is not None:
        yield Change.of("rollout.kv_cache_gib", None)
    if config.train.gradient_checkpointing is False:
        yield Change.of("train.gradient_checkpointing", True)
    if not config.optim.offload:
        yield Change("--optim.offload", {"optim.offload": True})
    cluster = config.resolved_cluster
    if config.has_servers and cluster.on:
        for tp in (2, 4, 8):
            if config.server.tp < tp <= cluster.num_ranks // cluster.nodes:
                yield Change.of("server.tp", tp)
    budget = config.train.tokens_per_micro_batch // 2
    while budget >= config.rollout.max_tokens:
        yield Change.of("train.tokens_per_micro_batch", budget)
        budget //= 2
    if not config.model.lora.rank:
        yield Change("--model.freeze vision_tower", {"model.freeze": ("vision_tower",)})
        targets = ATTENTION if experts else ()  # fused experts cannot have adapters
        option = " ".join(["--model.lora.rank 32", *(["--model.lora.targets"] if targets else []), *targets])
        yield Change(option, {"model.lora.rank": 32, "model.lora.targets": targets, "model.freeze": ()})
    known = cluster.gpus if cluster.on else 1
    for gpus in (2, 4, 8, 16, 32):
        if gpus > known:
            yield _more_gpus(config, on_gpus(config, gpus).cluster)


def with_settings(section: Any, settings: Mapping[str, Any]) -> Any:
    """A config or a section of it with settings changed at once: ``{"optim.lr": 1e-6, "model.lora.rank": 8}``.

    Raises:
        ValueError: they contradict other settings.
    """
    changed: dict[str, Any] = {name: value for name, value in settings.items() if "." not in name}
    for first in {name.partition(".")[0] for name in settings if "." in name}:
        inner = {name.partition(".")[2]: value for name, value in settings.items() if name.startswith(f"{first}.")}
        changed[first] = with_settings(getattr(section, first), inner)
    return replace(section, **changed)


def on_gpus(config: Config, gpus: int) -> Config:
    """The run on a Ray cluster of ``gpus``, eight to a machine unless the recipe says otherwise."""
    nodes = config.cluster.nodes if config.cluster.nodes > 1 else -(-gpus // 8)
    cluster = replace(config.cluster, gpus=gpus, nodes=nodes, ranks=None, engines=None)
    return replace(config, cluster=cluster)


def _more_gpus(config: Config, cluster: Cluster) -> Change:
    """The fields of ``cluster`` that differ from the config's."""
    fields = {name: getattr(cluster, name) for name in ("gpus", "nodes", "ranks", "engines")}
    changed = {name: value for name, value in fields.items() if value != getattr(config.cluster, name)}
    option = " ".join(f"--cluster.{name} {value}" for name, value in changed.items())
    return Change(option, {f"cluster.{name}": value for name, value in changed.items()})


def _once(sizes_of: SizesOf) -> SizesOf:
    """As ``sizes_of``, which builds a model of a billion parameters without values, once for all configs with the same model."""
    found: dict[str, Sizes] = {}

    def known(config: Config) -> Sizes:
        key = repr(config.model)
        if key not in found:
            found[key] = sizes_of(config)
        return found[key]

    return known


def _plan_with(config: Config, settings: Mapping[str, Any], gpu: Gpu, sizes_of: SizesOf) -> MemoryPlan | None:
    """The plan with changed settings. ``None``: they contradict another setting, or do not suit this model."""
    try:
        changed = with_settings(config, settings)
        return MemoryPlan.of(changed, sizes_of(changed), 1, gpu)
    except ValueError:
        return None


def _peak(plan: MemoryPlan) -> str:
    cache = f", {plan.cache / GIB:.1f} GiB of KV cache in the rollout" if plan.cache else ""
    return f"{plan.training_peak / GIB:.1f} GiB in training{cache}"
