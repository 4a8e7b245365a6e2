"""Settings of the datasets, and of the env or reward function that belongs to each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Annotated, Literal

from tyro.constructors import PrimitiveConstructorSpec

from vlmrl.config.fields import Code, Codes, Options, Settings, positive
from vlmrl.utils.require import require


def _pairs(words: Sequence[str]) -> dict[str, str]:
    if len(words) % 2:
        raise ValueError(f"data.columns must be pairs FIELD COLUMN, but it is {' '.join(words)!r}.")
    return dict(zip(words[::2], words[1::2], strict=True))


Columns = Annotated[
    dict[str, str],
    PrimitiveConstructorSpec(
        nargs="*",
        metavar="[FIELD COLUMN ...]",
        instance_from_str=_pairs,
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda value: list(chain.from_iterable(value.items())),
    ),
]
"""Columns by field. On the command line, pairs: ``prompt problem answer solution``."""


@dataclass(frozen=True)
class RowSettings(Settings):
    """Where tasks come from: rows of a dataset, or the output of a generator function."""

    path: str | None = None
    """Dataset: a name on the Hugging Face Hub, a .parquet, .json, .jsonl or .csv file, or a folder of such files or of images.
    One of several configurations is named behind a colon: `openai/gsm8k:main`."""
    split: str = "train"
    """Split of the dataset, optionally a slice such as `train[:100]`."""
    generator: Code = None
    """Function that makes tasks, instead of `path`: `function(index, seed, **options)` returns a Task or a dict with a prompt.
    It runs in a thread of its own."""
    size: int | None = None
    """Number of tasks. Required with `generator`. Of a dataset: maximum number of rows, taken from the start; unset: all rows."""
    options: Options = field(default_factory=dict)
    """Keyword arguments of the generator, as pairs `NAME VALUE`."""
    seed: int | None = 0
    """Seed of the shuffling, of the generator and of each task's env. `eval.data` with the same generator needs another seed.
    `None`: the order of the rows in each epoch, for a curriculum; then the seed of the others is 0."""

    def __post_init__(self) -> None:
        name = self.section
        if self.path is not None and self.generator is not None:
            raise ValueError(
                f"{name}.path and {name}.generator exclude each other, but are {self.path!r} and {self.generator!r}."
            )
        if self.generator is not None:
            require(self.size is not None, f"{name}.size", f"set when {name}.generator is", self.size)
        positive(name, self, "size")

    @property
    def is_set(self) -> bool:
        return self.path is not None or self.generator is not None


@dataclass(frozen=True)
class EvalData(RowSettings):
    """Held-out tasks. Their columns, prompts and maximum length are those of the training data."""

    section = "eval.data"


@dataclass(frozen=True)
class Data(RowSettings):
    """Tasks: rows of a dataset, or the output of a generator function."""

    section = "data"
    columns: Columns = field(default_factory=dict)
    """Columns of the dataset as pairs `FIELD COLUMN`, for example `prompt problem`. Those of the recipe stay for other fields.
    Fields: `prompt`, `images` and `answer`, which default to columns of the same names, and `id` and `source`, without a default."""
    prompt: str | None = None
    """Prompt of every row, for a dataset without a column of prompts, such as a folder of images: `<image>What is this?`."""
    system_prompt: str | None = None
    """System message for prompts that have none. Unset: no message is added."""
    max_prompt_tokens: int | None = None
    """Maximum prompt length in tokens, including images and tool schemas. Longer rows are skipped. Unset: no limit.
    Set it if a few rows are too long for `rollout.max_tokens`."""
    held_out: int | float = 0
    """Rows held out for evaluation: a count, or a fraction if below 1. Set it if there is no dataset for `eval.data`.
    A hash of the row's id selects them, or of the row's index without an id."""

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self.section, self, "max_prompt_tokens")
        rule = "unset with data.generator, which makes the prompts"
        require(self.prompt is None or self.generator is None, "data.prompt", rule, self.prompt)
        _check_rows(self, {"prompt", "images", "answer", "id", "source"})

    def with_rows(self, rows: EvalData) -> Data:
        """The data of ``rows``, read as this data is."""
        prompt = None if rows.generator is not None else self.prompt
        return replace(self, **vars(rows), prompt=prompt, held_out=0)


@dataclass(frozen=True)
class Conversations(Settings):
    """Recorded conversations to imitate: the folder of `vlmrl collect`, or a dataset in one of the usual forms."""

    section = "sft.data.NAME"
    path: str = ""
    """Folder that `vlmrl collect` wrote, a name on the Hugging Face Hub, a .parquet, .json or .jsonl file, or a folder of them."""
    split: str = "train"
    """Split of the dataset, optionally a slice such as `train[:100]`."""
    columns: Columns = field(default_factory=dict)
    """Columns of the dataset as pairs `FIELD COLUMN`. Unset, the usual names are looked for:
    `messages` or `conversations`, `prompt` and `completion`, `images` or `image`, `tools`, `system` or `system_prompt`.
    Texts of a question and an answer: `prompt question completion answer`."""
    epochs: float = 1.0
    """Times that each row is trained on. Raise it for a small dataset.
    Several datasets are mixed by rows times epochs."""
    turns: Literal["all", "last"] = "all"
    """Responses with a loss. Set `last` if only the last one is worth imitating.
    With columns `prompt` and `completion`, those of the prompt have none. A message's own `weight` of 0 leaves it out."""
    held_out: int | float = 0
    """Rows held out to measure the loss on: a count, or a fraction if below 1. Set it to see when more epochs stop helping."""

    def __post_init__(self) -> None:
        require(bool(self.path), f"{self.section}.path", "a dataset", self.path)
        positive(self.section, self, "epochs")
        _check_rows(self, {"messages", "prompt", "completion", "images", "tools", "system"})


@dataclass(frozen=True)
class Part(Settings):
    """One dataset of a mixture, with its env or reward function."""

    section = "mixture.NAME"
    data: Data = field(default_factory=Data)
    eval_data: EvalData = field(default_factory=EvalData)
    """Held-out tasks of this part. Unset: the rows that its `data.held_out` selects, if any."""
    env: Code = None
    """Env of this part. Without `env` and `reward`, the part uses the run's."""
    env_options: Options = field(default_factory=dict)
    """Keyword arguments of the env, as pairs `NAME VALUE`. Those of the run's `env_options` stay for other names of the run's env."""
    reward: Codes = None
    """Reward function for single-turn tasks, instead of an env: `function(text, task) -> float`. Several as in `reward`."""
    weight: float = 1.0
    """Sampling weight, relative to the weights of the other parts."""

    def __post_init__(self) -> None:
        require(self.data.is_set, "mixture.NAME.data", "given a path or a generator", self.data)
        positive("mixture.NAME", self, "weight")
        check_env_or_reward("mixture.NAME.", self.env, self.reward)
        check_held_out("mixture.NAME.data", self.data, "mixture.NAME.eval_data", self.eval_data)


def _check_rows(data: Data | Conversations, known: set[str]) -> None:
    """``held_out`` is a number of rows, and ``columns`` has ``known`` fields."""
    whole = data.held_out < 1 or data.held_out == int(data.held_out)
    ok = data.held_out >= 0 and whole
    require(ok, f"{data.section}.held_out", "a fraction or a count of rows", data.held_out)
    require(set(data.columns) <= known, f"{data.section}.columns", f"a mapping from {sorted(known)}", data.columns)


def check_env_or_reward(prefix: str, env: Code, reward: Codes) -> None:
    if env is not None and reward is not None:
        raise ValueError(
            f"{prefix}env and {prefix}reward cannot both be set: a reward function replaces a whole single-turn env."
        )


def check_held_out(name: str, data: Data, other: str, eval_data: EvalData) -> None:
    if data.held_out and eval_data.is_set:
        raise ValueError(f"{name}.held_out and {other} exclude each other: both select the tasks for evaluation.")
