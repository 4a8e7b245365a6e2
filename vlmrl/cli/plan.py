"""`vlmrl plan`: whether a recipe fits a GPU, without the GPU, the model or the dataset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vlmrl.cli.recipe import Recipe, RecipeOptions, RecipePath
from vlmrl.config import Cluster, Config

if TYPE_CHECKING:
    from vlmrl.plan.gpus import Gpu
    from vlmrl.plan.memory_plan import MemoryPlan, Sizes


@dataclass(frozen=True)
class PlanCommand:
    """Plan the memory of a recipe on a GPU."""

    recipe: RecipePath
    """Python file with a function `config() -> Config`. For its options, see `vlmrl plan RECIPE --help`."""

    def run(self, options: Sequence[str]) -> None:
        recipe = Recipe.load(self.recipe)
        chosen = recipe.options(PlanOptions(recipe.config()), options, f"vlmrl plan {self.recipe}", self.__doc__)
        print("\n".join(plan_lines(chosen.config, chosen.gpu, chosen.gpus)))


@dataclass(frozen=True)
class PlanOptions(RecipeOptions):
    gpu: str | None = None
    """GPU to plan for, such as `h100-80gb`. An unknown name prints the known ones. Unset: the GPU of this machine, or the CPU."""
    gpus: int | None = None
    """Number of GPUs. Unset: as in the recipe.
    Above 1 the run is planned on Ray, as with `--cluster.gpus`, with eight GPUs to a machine."""


def plan_lines(config: Config, gpu_name: str | None, gpus: int | None) -> list[str]:
    """The plan, and advice if it does not fit.

    Raises:
        ValueError: an unknown GPU, or settings that contradict each other.
    """
    from vlmrl.plan.advice import on_gpus, suggestions
    from vlmrl.plan.gpus import gpu_named
    from vlmrl.plan.memory_plan import MemoryPlan, gpu_of
    from vlmrl.utils.require import require

    if gpus is not None:
        require(gpus > 0, "--gpus", "1 or more", gpus)
        config = on_gpus(config, gpus) if gpus > 1 or config.cluster.on else replace(config, cluster=Cluster())
    gpu = gpu_of(config) if gpu_name is None else gpu_named(gpu_name)
    sizes = sizes_of(config)
    plan = MemoryPlan.of(config, sizes, 1, gpu)
    lines = str(plan).splitlines()
    if gpu is None:
        return [*lines, "          --gpu h100-80gb, or another name, plans for a GPU that is not at hand"]
    lines += _mode(config, gpus)
    lines += _assumed(config, sizes) + _required(config, plan, gpu)
    if plan.is_tight:
        spare = (gpu.memory - plan.training_peak) / 2**30
        assumed = "contexts, NCCL, CUDA graphs and fragmentation are assumed"
        lines.append(
            f"verdict   tight on {gpu.name}: it fits with {spare:.1f} GiB to spare, but {assumed}, not measured"
        )
    elif plan.fits:
        lines.append(f"verdict   fits {gpu.name}. Computed, not measured")
    else:
        fitting = suggestions(config, gpu, sizes_of)
        none = (
            "No setting that was tried makes it fit: use a smaller model, shorter trajectories, or more or larger GPUs"
        )
        lines.append(f"verdict   does not fit {gpu.name}. {'It would with' if fitting else none}")
        lines += [f"          {line}" for line in fitting]
    return lines


def sizes_of(config: Config) -> Sizes:
    """The sizes of the config's model: from its folder or the hub, or the shape of a published one.

    Raises:
        ValueError: the model's config is neither stored locally nor built in.
    """
    from vlmrl.plan.memory_plan import sizes_of_model
    from vlmrl.plan.published_models import PUBLISHED, shape_folder

    name = config.model.source
    with shape_folder(name) as folder:
        try:
            return sizes_of_model(replace(config.model, path=folder), config.models_dir)
        except OSError as error:
            raise ValueError(
                f"model.path must be a folder with the model's config.json (SmolVLM: and preprocessor_config.json), a model of the "
                f"hub that can be reached, or one of {', '.join(PUBLISHED)}, but it is {name!r}: {str(error).splitlines()[0]}"
            ) from error


def _mode(config: Config, gpus: int | None) -> list[str]:
    """How the GPUs are used, if the recipe does not say it."""
    if gpus is None or gpus == 1:
        return []
    cluster = config.resolved_cluster
    how = "colocated" if cluster.colocate else "trainer and engines apart"
    return [
        f"mode      planned on Ray, as with --cluster.gpus {cluster.gpus} --cluster.nodes {cluster.nodes}, {how}; not for torchrun"
    ]


def _required(config: Config, plan: MemoryPlan, gpu: Gpu) -> list[str]:
    """The setting that a run requires: the memory of a server that samples while the trainer uses its GPU."""
    from vlmrl.engine.server_backend import new_backend
    from vlmrl.plan.memory_plan import placement_of
    from vlmrl.plan.phases import ROLLOUT

    placement = placement_of(config, plan.ranks, copies=True)
    if not (placement.concurrent and placement.served):
        return []
    backend, parts = new_backend(config), plan.phases[ROLLOUT]
    if backend.sets_memory or not backend.memory_args:
        return []
    share = (parts["server's weights"] + parts["server's KV cache"]) / gpu.memory
    option = f"--server.args {backend.memory_args[0]} {int(100 * share) / 100}"
    return [f"set       {option}, or a GPU of its own for the server: the trainer works while it samples"]


def _assumed(config: Config, sizes: Sizes) -> list[str]:
    """What the plan assumes for missing data."""
    path = config.data.path
    lines = [
        f"assumed   trajectories of {config.rollout.max_tokens} tokens in micro-batches of {config.train.tokens_per_micro_batch}"
    ]
    if sizes.shape is not None and sizes.shape.image is not None:
        width, height = sizes.shape.image.size
        lines[0] += f"; an image of {width} x {height} pixels in each prompt and after each turn but the last"
    if path is not None and not Path(path).exists():
        lines.append(f"          {path} is not here; a plan does not need it")
    return lines
