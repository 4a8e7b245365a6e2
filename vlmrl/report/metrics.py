"""What a run leaves behind for a human: numbers a line, trajectories a line, the config, the reward curve.

    runs/geo3k/config.json           the resolved config
    runs/geo3k/metrics.jsonl         {"step": 3, "time": 1767225600.125, "reward/mean": 0.25, ...}
    runs/geo3k/trajectories.jsonl    {"step": 3, "id": "train/3#0", "reward": 1.0, "turns": [...], ...}

The page that also shows the images is :func:`vlmrl.report.viewer.write_page`'s.
"""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self, get_args

from vlmrl.config.code import code_path
from vlmrl.types import TRUNCATED, Ending, Message, Trajectory, Turn

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Number = float | int | str | None
"""What a metric may be. ``None`` means not known."""

INK, MUTED, GRID = "#1f2328", "#6e7781", "#e4e7eb"
TRAIN, HELD_OUT = "#0f7b8a", "#d9622b"


class RunLog:
    """The folder of one run and the files in it: ``RunLog(Path("runs/geo3k")).log(3, {"reward/mean": 0.25})``.

    ``place`` is where an interrupted run goes on: what :meth:`place` said when its checkpoint was made. Later lines, which
    the resumed run writes anew, are cut off; ``{}`` starts over. Without it, a folder that already holds a run is refused.
    """

    FILES = ("metrics.jsonl", "trajectories.jsonl")

    def __init__(self, folder: Path | str, place: Mapping[str, int] | None = None) -> None:
        self.folder = Path(folder)
        if place is None and any(self._size(name) for name in self.FILES):
            raise ValueError(f"run folder {self.folder}: holds a run already; resume it or choose another folder")
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in self.FILES:
            self._cut(name, (place or {}).get(name, 0))
        self._open: dict[str, IO[str]] = {}

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Append one row to ``metrics.jsonl``. A value that is no finite number, string or ``None`` is an error."""
        row: dict[str, Number] = {"step": step, "time": round(time.time(), 3)}
        for key, value in values.items():
            if key in row:
                raise ValueError(f"metric {key!r}: the name is taken by the row's own {key}; rename it")
            row[key] = checked(key, value)
        self._append("metrics.jsonl", [row])

    def log_trajectories(self, step: int, trajectories: Iterable[Trajectory]) -> None:
        """Append one :func:`trajectory_record` a line to ``trajectories.jsonl``."""
        self._append("trajectories.jsonl", [{"step": step, **trajectory_record(t)} for t in trajectories])

    def write_config(self, config: Any) -> None:
        """Write the resolved config, a dataclass or a dict, as ``config.json``."""
        (self.folder / "config.json").write_text(json.dumps(plain(config), indent=2) + "\n", encoding="utf-8")

    def rows(self) -> list[dict[str, Any]]:
        """All rows of ``metrics.jsonl``, those from before a resume included."""
        return read_rows(self.folder / "metrics.jsonl")

    def place(self) -> dict[str, int]:
        """How many bytes each file has now: ``{"metrics.jsonl": 5120, "trajectories.jsonl": 0}``, for a checkpoint."""
        return {name: self._size(name) for name in self.FILES}

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _size(self, name: str) -> int:
        path = self.folder / name
        return path.stat().st_size if path.exists() else 0

    def _cut(self, name: str, size: int) -> None:
        if (present := self._size(name)) < size:
            raise ValueError(
                f"{self.folder / name}: it has {present} bytes and the checkpoint was made at byte {size}; "
                "restore the file, or resume in the folder the checkpoint belongs to"
            )
        if present > size:
            with (self.folder / name).open("r+b") as file:
                file.truncate(size)

    def _append(self, name: str, records: Iterable[Mapping[str, Any]]) -> None:
        if name not in self._open:
            self._open[name] = (self.folder / name).open("a", encoding="utf-8")
        file = self._open[name]
        file.write("".join(json.dumps(record, allow_nan=False) + "\n" for record in records))
        file.flush()


def read_rows(path: Path | str) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file; a last line that was cut short, as by a killed process, is left out."""
    path = Path(path)
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def checked(key: str, value: Any) -> Number:
    """``value`` as a plain number, string or ``None``; anything else is an error that names ``key``."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return float(value)
    raise ValueError(
        f"metric {key!r}: must be one finite number, a string or None, is {value!r:.80}; "
        "log the parts of a dict or list under names of their own, and None for what is not known"
    )


def plain(value: Any) -> Any:
    """``value`` in JSON's own types: ``plain(Path("a"))`` is ``"a"``, a class ``"module:Name"``, infinity ``"inf"``."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in (value if isinstance(value, list | tuple) else sorted(value, key=str))]
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else str(float(value))
    if callable(value) and hasattr(value, "__qualname__"):
        return code_path(value)
    return str(value)


def trajectory_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Summarise a batch of trajectories, for one row of ``metrics.jsonl``.

    Over those that did not fail: ``reward/mean|std|min|max``, ``group_reward/mean|std``, ``turns/mean|max``,
    ``sampled_tokens/mean|max``, ``images/mean`` (a trajectory), ``turn/<what>/mean|max`` (a turn's tokens, seconds and
    :func:`repetition`), and ``env/<name>`` (the mean over the turns that carry it). Over all: ``trajectories``, ``failed``,
    ``ending/<reason>`` and ``truncated`` (fractions), ``retries/<kind>`` (counts) and ``trajectory/<name>`` (the mean over the
    trajectories that carry it). What nothing is known about is left out: two trajectories with rewards 0 and 1 give
    ``reward/std`` 0.5, none give no ``reward/`` at all.

    Several sources, and the parts of a mixture, are also told apart: ``source/<name>/reward/mean``, ``turns/mean``, ``trajectories``.
    """
    played = [t for t in trajectories if not t.failed]
    turns = [turn for t in played for turn in t.turns]
    rewards = [t.reward for t in played if t.reward is not None]
    result = {"trajectories": float(len(trajectories)), "failed": float(len(trajectories) - len(played))}
    result |= _ending_fractions(trajectories)
    result |= _summary("reward", rewards, "mean", "std", "min", "max")
    result |= _summary("group_reward", [t.group_reward for t in played if t.group_reward is not None], "mean", "std")
    result |= _summary("turns", [len(t.turns) for t in played], "mean", "max")
    result |= _summary("sampled_tokens", [t.num_sampled for t in played], "mean", "max")
    result |= _summary("images", [sum(len(turn.media) for turn in t.turns) for t in played], "mean")
    result |= _summary("turn/sampled_tokens", [len(turn.response_ids) for turn in turns], "mean", "max")
    result |= _summary("turn/new_prompt_tokens", [len(turn.prompt_ids) for turn in turns], "mean", "max")
    result |= _summary("turn/engine_seconds", [turn.engine_seconds for turn in turns], "mean", "max")
    result |= _summary("turn/env_seconds", [turn.env_seconds for turn in turns], "mean", "max")
    result |= _summary("turn/repetition", [repetition(turn.response_ids) for turn in turns], "mean", "max")
    result |= _retries(trajectories)
    result |= _means("env", [turn.metrics for turn in turns])
    result |= _means("trajectory", [t.metrics for t in trajectories])
    result |= _by_source(played)
    return result


def _by_source(played: Sequence[Trajectory]) -> dict[str, float]:
    groups: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in played:
        groups[trajectory.task.source].append(trajectory)
    if len(groups) < 2 and not any(t.task.part for t in played):
        return {}
    result: dict[str, float] = {}
    for source, group in sorted(groups.items()):
        name = f"source/{source}"
        result[f"{name}/trajectories"] = float(len(group))
        result |= _summary(f"{name}/reward", [t.reward for t in group if t.reward is not None], "mean")
        result |= _summary(f"{name}/turns", [len(t.turns) for t in group], "mean")
    return result


def repetition(token_ids: Sequence[int], length: int = 4) -> float:
    """The share of the runs of ``length`` tokens that occurred before: 0 in ``1 2 3 4 5``, 3/4 in ``1 1 1 1 1 1 1``."""
    runs = list(zip(*(token_ids[start:] for start in range(length)), strict=False))
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def _retries(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    counts = {f"retries/{kind}": 0.0 for kind in ("env_errors", "env_timeouts", "turns_resampled")}
    for trajectory in trajectories:
        for metrics in (trajectory.metrics, *(turn.metrics for turn in trajectory.turns)):
            for name in counts:
                counts[name] += metrics.get(name.removeprefix("retries/"), 0.0)
    return counts


def _ending_fractions(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    counts = Counter(t.ending for t in trajectories)
    fractions = {f"ending/{reason}": counts[reason] / len(trajectories) for reason in get_args(Ending) if trajectories}
    return fractions | (
        {"truncated": sum(fractions[f"ending/{reason}"] for reason in TRUNCATED)} if trajectories else {}
    )


def _summary(name: str, values: Sequence[float], *kinds: str) -> dict[str, float]:
    how: dict[str, Callable[[Sequence[float]], float]]
    how = {"mean": statistics.fmean, "std": statistics.pstdev, "min": min, "max": max}
    return {f"{name}/{kind}": float(how[kind](values)) for kind in kinds if values}


def _means(prefix: str, carriers: Iterable[Mapping[str, float]]) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for metrics in carriers:
        for name, value in metrics.items():
            values[name].append(value)
    return {f"{prefix}/{name}": statistics.fmean(given) for name, given in sorted(values.items())}


def trajectory_record(trajectory: Trajectory) -> dict[str, Any]:
    """One trajectory in JSON's own types, images by their ids: a line of ``trajectories.jsonl``.

    ``prompt`` is the text the model first read (an env's ``reset`` may have replaced the task's); ``observation`` what it
    read before a later reply. An image stands as ``[image]`` in both.
    """
    task, turns = trajectory.task, trajectory.turns
    return {
        "id": trajectory.id,
        "group_id": trajectory.group_id,
        "task_id": task.id,
        "source": task.source,
        "prompt": messages_text(turns[0].messages if turns and turns[0].messages else task.prompt),
        "answer": plain(task.answer),
        "reward": plain(trajectory.reward),
        "final_reward": plain(trajectory.final_reward),
        "group_reward": plain(trajectory.group_reward),
        "ending": trajectory.ending,
        "error": trajectory.error,
        "metrics": plain(trajectory.metrics),
        "turns": [_turn_record(turn, first=index == 0) for index, turn in enumerate(turns)],
    }


def _turn_record(turn: Turn, first: bool) -> dict[str, Any]:
    return {
        "observation": None if first else messages_text(turn.messages),
        "images": [item.id for item in turn.media],
        "text": turn.text,
        "reward": plain(turn.reward),
        "metrics": plain(turn.metrics),
        "stop_reason": turn.stop_reason,
        "prompt_tokens": len(turn.prompt_ids),
        "sampled_tokens": len(turn.response_ids),
        "mean_logprob": plain(statistics.fmean(turn.logprobs)) if turn.logprobs else None,
        "policy_versions": sorted(set(turn.policy_versions)),
        "repetition": repetition(turn.response_ids),
        "engine_seconds": plain(turn.engine_seconds),
        "env_seconds": plain(turn.env_seconds),
        "logprob_mismatch": plain(turn.logprob_mismatch),
    }


def messages_text(messages: Sequence[Message]) -> str:
    """The text of chat messages for a human: one image and "Which?" give ``"[image]\\nWhich?"``."""
    return "\n\n".join(_content_text(message.get("content")) for message in messages)


def _content_text(content: Any) -> str:
    if not isinstance(content, list):
        return str(content or "")
    return "\n".join(part["text"] if "text" in part else f"[{part.get('type', 'part')}]" for part in content)


def draw_curve(
    rows: Sequence[Mapping[str, Any]],
    path: Path | str,
    *,
    title: str = "",
    reward: str = "reward/mean",
    held_out: str = "eval/reward/mean",
    levels: Mapping[str, float] | None = None,
    ylabel: str = "reward",
) -> None:
    """Draw the reward curve of a run's ``rows`` as a PNG.

    ``reward`` and ``held_out`` name the columns of the training reward (a thin line and a smoothed one) and of the
    evaluations (markers); rows without them are passed over. ``levels`` are dashed lines to compare with, by label:
    ``{"images blanked": 0.11, "chance": 0.25}``.
    """
    from matplotlib.figure import Figure

    train, evaluations = _points(rows, reward), _points(rows, held_out)
    if not train[0] and not evaluations[0]:
        raise ValueError(f"rows: none of the {len(rows)} has a {reward!r} or a {held_out!r} to draw")
    figure = Figure(figsize=(8, 4.5), dpi=160, layout="tight", facecolor="white")
    axes = figure.add_subplot()
    _draw_train(axes, *train)
    if evaluations[0]:
        style: dict[str, Any] = {"marker": "o", "markersize": 6.5, "markeredgecolor": "white", "markeredgewidth": 1.2}
        axes.plot(*evaluations, color=HELD_OUT, linewidth=1.4, label="held out", zorder=4, **style)
    for label, value in (levels or {}).items():
        axes.axhline(value, color=MUTED, linewidth=1.1, linestyle=(0, (5, 4)), zorder=2)
        place: dict[str, Any] = {"xy": (1, value), "xytext": (-4, 3), "xycoords": axes.get_yaxis_transform()}
        axes.annotate(label, textcoords="offset points", ha="right", va="bottom", color=MUTED, fontsize=9.5, **place)
    _style(axes, title, ylabel)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def _points(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    known = sorted((row["step"], row[key]) for row in rows if row.get(key) is not None)
    return [step for step, _ in known], [value for _, value in known]


def _draw_train(axes: Axes, steps: list[int], values: list[float]) -> None:
    if len(steps) < 8:
        axes.plot(steps, values, color=TRAIN, linewidth=2.2, marker=".", label="training", zorder=3)
        return
    axes.plot(steps, values, color=TRAIN, linewidth=0.9, alpha=0.35, label="training, each step", zorder=2)
    axes.plot(steps, smooth(values), color=TRAIN, linewidth=2.4, label="training, smoothed", zorder=3)


def smooth(values: Sequence[float], width: float | None = None) -> list[float]:
    """A centred Gaussian mean, ``width`` rows its standard deviation (by default a 40th of the rows, at least 1.5).

    The weights are renormalised at both ends, so that a constant stays that constant.
    """
    import numpy as np

    width = width or max(1.5, len(values) / 40)
    reach = min(math.ceil(3 * width), len(values) - 1)
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)
    inside = slice(reach, reach + len(values))
    weighted = np.convolve(np.asarray(values, dtype=float), kernel)[inside]
    return list(weighted / np.convolve(np.ones(len(values)), kernel)[inside])


def _style(axes: Axes, title: str, ylabel: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_axisbelow(True)
    axes.grid(color=GRID, linewidth=0.8)
    axes.margins(x=0.02, y=0.08)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=9))
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#c5cbd3")
    axes.tick_params(colors=MUTED, labelsize=10, length=0, pad=6)
    axes.set_xlabel("step", color=INK, fontsize=11, labelpad=6)
    axes.set_ylabel(ylabel, color=INK, fontsize=11, labelpad=8)
    axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=3, frameon=False, fontsize=10, labelcolor=INK)
    if title:
        axes.set_title(title, loc="left", color=INK, fontsize=13, fontweight="bold", pad=34)
