"""Where tasks come from, and who plays them."""

from __future__ import annotations

from dataclasses import dataclass, field

from vlmrl.config.fields import Code, Options, positive, require


@dataclass(frozen=True)
class Data:
    path: str | None = None
    """A hub name, a parquet, json or jsonl file, or a folder of them."""
    split: str = "train"
    """Which split; it may be a slice such as `train[:100]`."""
    columns: dict[str, str] = field(default_factory=dict)
    """Where prompt, images and answer are found, if not under these names: `prompt problem`. `source` and `id` can be named, too."""
    generator: Code = None
    """`file.py:function` or `module:function`, called as `function(index, seed, **options)` to make each task."""
    size: int | None = None
    """How many tasks the generator makes."""
    limit: int | None = None
    """Take only the first so many rows."""
    held_out: int | float = 0
    """Rows kept for the evaluation: a number of them, or below 1 a share. Chosen by id alone, or by place where rows have none."""
    max_prompt_tokens: int | None = None
    """Pass over rows whose prompt is longer, its images and the env's tools included."""
    shuffle: bool = True
    """Play each epoch in an order of its own; otherwise as the rows stand."""
    system_prompt: str | None = None
    """Put before every prompt that has no system message of its own."""
    seed: int = 0
    """Of the order, and of the tasks: a generator's images, an env's chances."""
    options: Options = field(default_factory=dict)
    """Keyword options of the generator."""

    def __post_init__(self) -> None:
        if self.path is not None and self.generator is not None:
            raise ValueError(
                f"data.path and data.generator exclude each other, but are {self.path!r} and {self.generator!r}."
            )
        if self.generator is not None:
            require(self.size is not None, "data.size", "set when data.generator is", self.size)
        positive("data", self, "size", "limit", "max_prompt_tokens")
        whole = self.held_out < 1 or self.held_out == int(self.held_out)
        require(self.held_out >= 0 and whole, "data.held_out", "a share or a count of rows", self.held_out)
        known = {"prompt", "images", "answer", "id", "source"}
        require(set(self.columns) <= known, "data.columns", f"a mapping from {sorted(known)}", self.columns)

    @property
    def is_set(self) -> bool:
        return self.path is not None or self.generator is not None


@dataclass(frozen=True)
class Part:
    """One of the datasets that a run mixes, and who plays it."""

    data: Data = field(default_factory=Data)
    eval_data: Data = field(default_factory=Data)
    """Its held-out tasks; unset: those that `data.held_out` keeps back, if any."""
    env: Code = None
    """Its env; with neither env nor reward the run's own plays it."""
    env_options: Options = field(default_factory=dict)
    """Keyword options of its env."""
    reward: Code = None
    """For a single turn, instead of an env: `function(text, task) -> float`."""
    weight: float = 1.0
    """Its share of the draws, beside the other parts' weights."""

    def __post_init__(self) -> None:
        require(self.data.is_set, "mixture.NAME.data", "given a path or a generator", self.data)
        positive("mixture.NAME", self, "weight")
        check_player("mixture.NAME.", self.env, self.reward)
        check_held_out("mixture.NAME.data", self.data, "mixture.NAME.eval_data", self.eval_data)


def check_player(prefix: str, env: Code, reward: Code) -> None:
    if env is not None and reward is not None:
        raise ValueError(
            f"{prefix}env and {prefix}reward cannot both be set: a reward function stands for a whole single-turn env."
        )


def check_held_out(name: str, data: Data, other: str, eval_data: Data) -> None:
    if data.held_out and eval_data.is_set:
        raise ValueError(f"{name}.held_out and {other} exclude each other: both say what the run is evaluated on.")
