"""Suggestions for an unknown option or setting: our name for one of TRL or verl, or close names."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Iterator

ELSEWHERE = {
    "algo.advantage": "adv_estimator",
    "algo.kl_coef": "beta kl_loss_coef kl_coef",
    "algo.loss": "loss_type loss_mode",
    "algo.options": "epsilon epsilon_high clip_ratio_low clip_ratio_high scale_rewards",
    "algo.reduction": "loss_agg_mode",
    "checkpoint.every": "save_steps save_freq",
    "cluster.gpus": "n_gpus_per_node",
    "data.columns": "prompt_key image_key",
    "data.max_prompt_tokens": "max_prompt_length",
    "data.path": "train_dataset dataset_name train_files",
    "engine": "use_vllm",
    "env": "environment_factory tools",
    "eval.data.path": "eval_dataset val_files",
    "eval.every": "eval_steps test_freq",
    "model.lora.rank": "peft_config lora_rank lora_r",
    "model.path": "model model_name_or_path",
    "name": "run_name experiment_name",
    "optim.grad_clip": "max_grad_norm",
    "optim.lr": "learning_rate",
    "optim.schedule": "lr_scheduler_type",
    "report.to": "report_to logger",
    "reward": "reward_funcs custom_reward_function",
    "rollout.group_size": "num_generations n",
    "rollout.max_response_tokens": "max_completion_length",
    "rollout.max_tokens": "max_response_length",
    "rollout.max_turns": "max_tool_calling_iterations max_assistant_turns",
    "train.groups_per_batch": "per_device_train_batch_size generation_batch_size train_batch_size",
    "train.groups_per_step": "ppo_mini_batch_size steps_per_generation",
    "train.steps": "max_steps num_train_epochs total_training_steps",
    "train.tokens_per_micro_batch": "gradient_accumulation_steps ppo_max_token_len_per_gpu",
}
"""By our setting: the last parts of its names in TRL and verl. docs/porting.md says where the meaning differs."""
OF_DATASETS = {
    "mixture": "the recipe must set mixture to a dict, whose entries then are options",
    "sft.data": "name a dataset first, such as by --sft.data.mine.path runs/x-episodes",
}
"""Settings that are dicts, of whose entries the settings are options, and what to do where a recipe has none."""


def option_names(options: object, prefix: str = "") -> Iterator[str]:
    """The full names of all options: ``optim.lr``. ``options`` is a dataclass whose field ``config`` holds the settings."""
    for each in dataclasses.fields(options):  # type: ignore[arg-type]
        value, name = getattr(options, each.name), f"{prefix}.{each.name}".lstrip(".")
        if dataclasses.is_dataclass(value):
            yield from option_names(value, "" if name == "config" else name)
        elif isinstance(value, dict) and any(map(dataclasses.is_dataclass, value.values())):
            for key, entry in value.items():
                yield from option_names(entry, f"{name}.{key}")
        else:
            yield name


def named_elsewhere(name: str, form: Callable[[str], str] = str) -> str:
    """``"optim.lr is what TRL or verl call learning_rate"``, our setting in this ``form``, or ``""`` for a name of neither."""
    ours = [setting for setting, theirs in ELSEWHERE.items() if name in theirs.split()]
    return f"{form(ours[0])} is what TRL or verl call {name}" if ours else ""


def describe_unknown(word: str, names: Iterable[str]) -> str:
    """``"there is no option --optim.learning-rate; --optim.lr is what TRL and verl call learning_rate"``."""
    given = word.lstrip("-").partition("=")[0].replace("-", "_")
    last, known = given.rpartition(".")[2], list(names)
    if ours := named_elsewhere(last, _option):
        return f"there is no option {word}; {ours}"
    for setting, remedy in OF_DATASETS.items():
        if f"{given}.".startswith(f"{setting}.") and not any(name.startswith(f"{setting}.") for name in known):
            return f"there is no option {word}: {remedy}"
    close = [name for name in known if name.rpartition(".")[2] == last]
    close.sort(key=lambda name: -difflib.SequenceMatcher(None, name, given).ratio())
    close += [name for name in difflib.get_close_matches(given, known, n=3) if name not in close]
    lasts = {name.rpartition(".")[2]: name for name in known}
    close += [lasts[name] for name in difflib.get_close_matches(last, lasts, n=2) if lasts[name] not in close]
    return f"there is no option {word}" + (f"; close: {', '.join(map(_option, close[:5]))}" if close else "")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
