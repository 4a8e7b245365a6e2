"""Which settings to change when a run does not fit its GPU. Every suggestion is planned again before it is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vlmrl.config import Cluster, Config, Lora, ServerSettings
from vlmrl.plan.gpus import GIB, Gpu
from vlmrl.plan.memory_plan import MemoryPlan, Sizes

MOST_SUGGESTIONS = 4
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
SizesOf = Callable[[Config], Sizes]


@dataclass(frozen=True)
class Change:
    """A setting and its new value, as on the command line."""

    option: str
    apply: Callable[[Config], Config]


def suggestions(config: Config, gpu: Gpu, sizes_of: SizesOf) -> list[str]:
    """Lines for a run that does not fit: single changes after which it does; or else several together."""
    plan = _planner(gpu, sizes_of)
    shape = sizes_of(config).shape
    changes = list(changes_of(config, experts=shape is not None and shape.experts_per_token > 0))
    fitting = [
        (change, found) for change in changes if (found := plan(change.apply(config))) is not None and found.fits
    ]
    if fitting:
        return [f"{change.option}: {_peak(found)}" for change, found in fitting[:MOST_SUGGESTIONS]]
    return _together(config, changes, plan)


def changes_of(config: Config, *, experts: bool) -> Iterator[Change]:
    """What reduces memory, from the cheapest change to the one that changes the run most."""
    if config.engine == "embedded" and config.rollout.kv_cache_gib is not None:
        yield Change(
            "--rollout.kv-cache-gib None",
            lambda c: replace(c, rollout=replace(c.rollout, kv_cache_gib=None)),
        )
    if config.train.gradient_checkpointing is False:
        yield Change(
            "--train.gradient-checkpointing True",
            lambda c: replace(c, train=replace(c.train, gradient_checkpointing=True)),
        )
    budget = config.train.tokens_per_micro_batch // 2
    while budget >= config.rollout.max_tokens:
        yield Change(f"--train.tokens-per-micro-batch {budget}", _with_budget(budget))
        budget //= 2
    if not config.optim.offload:
        yield Change("--optim.offload", lambda c: replace(c, optim=replace(c.optim, offload=True)))
    settings, cluster = config.server_settings, config.resolved_cluster
    if settings is not None and cluster.on:
        for tp in (2, 4, 8):
            if settings.tp < tp <= cluster.num_ranks // cluster.nodes:
                yield Change(f"--{settings.section}.tp {tp}", _with_tp(settings, tp))
    if not config.model.lora.rank:
        yield Change(
            "--model.freeze vision_tower", lambda c: replace(c, model=replace(c.model, freeze=("vision_tower",)))
        )
        targets = ATTENTION if experts else ()  # fused experts cannot have adapters
        named = f" --model.lora.targets {' '.join(targets)}" if targets else ""
        lora = Lora(rank=32, targets=targets)
        yield Change(f"--model.lora.rank 32{named}", lambda c: replace(c, model=replace(c.model, lora=lora, freeze=())))
    known = cluster.gpus if cluster.on else 1
    for gpus in (2, 4, 8, 16, 32):
        if gpus > known:
            option = _gpus_option(config, on_gpus(config, gpus).cluster)
            yield Change(option, lambda c, gpus=gpus: on_gpus(c, gpus))  # type: ignore[misc]


def _gpus_option(config: Config, cluster: Cluster) -> str:
    """The fields of ``cluster`` that differ from the config's, as options."""
    changed = [
        name
        for name in ("gpus", "nodes", "ranks", "engines")
        if getattr(cluster, name) != getattr(config.cluster, name)
    ]
    return " ".join(f"--cluster.{name} {getattr(cluster, name)}" for name in changed)


def on_gpus(config: Config, gpus: int) -> Config:
    """The run on a Ray cluster of ``gpus``, eight to a machine unless the recipe says otherwise."""
    nodes = config.cluster.nodes if config.cluster.nodes > 1 else -(-gpus // 8)
    cluster = replace(config.cluster, gpus=gpus, nodes=nodes, ranks=None, engines=None)
    return replace(config, cluster=cluster)


def on_one_gpu(config: Config) -> Config:
    return replace(config, cluster=Cluster())


def _planner(gpu: Gpu, sizes_of: SizesOf) -> Callable[[Config], MemoryPlan | None]:
    def plan(config: Config) -> MemoryPlan | None:
        try:
            return MemoryPlan.of(config, sizes_of(config), 1, gpu)
        except ValueError:  # the change contradicts another setting, or does not suit this model
            return None

    return plan


def _together(config: Config, changes: Sequence[Change], plan: Callable[[Config], MemoryPlan | None]) -> list[str]:
    """The first changes that fit together; of several values of one setting the last is taken."""
    options: dict[str, str] = {}
    for change in changes:
        try:
            changed = change.apply(config)
        except ValueError:
            continue
        found = plan(changed)
        if found is None:
            continue
        config = changed
        options[change.option.split()[0]] = change.option
        if "lora" in change.option:
            options.pop("--model.freeze", None)
        if found.fits:
            return [f"{' '.join(options.values())}, together: {_peak(found)}"]
    return ["no setting that was tried makes it fit: use a smaller model, shorter trajectories, or larger GPUs"]


def _with_budget(budget: int) -> Callable[[Config], Config]:
    return lambda config: replace(config, train=replace(config.train, tokens_per_micro_batch=budget))


def _with_tp(settings: ServerSettings, tp: int) -> Callable[[Config], Config]:
    changed: dict[str, Any] = {settings.section: replace(settings, tp=tp)}
    return lambda config: replace(config, **changed)


def _peak(plan: MemoryPlan) -> str:
    cache = f", {plan.cache / GIB:.1f} GiB of KV cache in the rollout" if plan.cache else ""
    return f"{plan.training_peak / GIB:.1f} GiB in training{cache}"
