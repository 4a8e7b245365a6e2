"""Collected episodes: their records, the choice of the kept ones, and the rows of ``episodes.jsonl``.

A row is a conversation with what it earned. `datasets.load_dataset("json", data_files="episodes.jsonl")` loads the file::

    {"id": "collect/00007/01", "task": 7, "messages": [{"role": "user", "content": [{"type": "image", "image": "images/3fa9.png"},
     {"type": "text", "text": "Which?"}]}, {"role": "assistant", "content": "A"}], "tools": null, "reward": 1.0, "metrics": {},
     "ending": "env_done", "model": "runs/zoom", "last_response_cut": false,
     "responses": [{"message": 1, "token_ids": [32, 7], "logprobs": [-0.1, -0.0]}]}

``responses`` are those that were sampled with token ids: not by an API. A length limit may have cut the last response.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from vlmrl.algos.filters import FILTERS, best_of
from vlmrl.config.code import find_function
from vlmrl.config.collection import Keep
from vlmrl.data.conversations import EPISODES
from vlmrl.multimodal.messages import map_images
from vlmrl.report.json_lines import JsonLinesTail
from vlmrl.report.records import plain
from vlmrl.rollout.history import response_message
from vlmrl.types import Message, Task, Trajectory
from vlmrl.utils.output_files import whole_file
from vlmrl.utils.require import require

EPISODE_ID = re.compile(r"collect/([0-9]{5,9})/([0-9]{2,9})(?:\.[0-9]{1,9})?")
BRANCHES = "its turns are not one conversation"


def episode_id(task: int, member: int | None = None) -> str:
    """The id of a task's group, or of one of its episodes: ``collect/00007/01``."""
    return f"collect/{task:05d}" + ("" if member is None else f"/{member:02d}")


def place_of(id: str) -> tuple[int, int]:
    """The task and the member of an episode's id, which may be that of a further try: ``collect/00007/01.2`` is ``(7, 1)``."""
    found = EPISODE_ID.fullmatch(id)
    if found is None:
        raise ValueError(f"id must be collect/TASK/MEMBER, such as collect/00007/01, but it is {id[:100]!r}.")
    return int(found[1]), int(found[2])


def collected_fields(trajectory: Trajectory, model: str) -> dict[str, Any]:
    """The fields of an episode's record beside those of :func:`~vlmrl.report.records.trajectory_record`: ``tokens`` and ``episode``.

    ``tokens`` is the length of its longest context, as the API counts it if an API sampled it. ``episode`` is its row; ``None`` if it
    failed or is no conversation.
    """
    counts = [
        turn.metrics.get("api_prompt_tokens", 0.0) + turn.metrics.get("api_response_tokens", 0.0)
        for turn in trajectory.turns
    ]
    tokens = int(max([trajectory.num_tokens, *counts]))
    has_row = not trajectory.failed and is_conversation(trajectory)
    return {"tokens": tokens, "episode": episode_row(trajectory, model) if has_row else None}


def is_conversation(trajectory: Trajectory) -> bool:
    """Whether each turn follows the one before. Requests of an agent may be branches, and a policy that asks starts a new one."""
    if any(turn.asked or (number and turn.rewritten is turn.messages) for number, turn in enumerate(trajectory.turns)):
        return False
    received = [turn.received for turn in trajectory.turns]
    return all(
        each is None or each.continues == (number - 1 if number else None) for number, each in enumerate(received)
    )


def episode_row(trajectory: Trajectory, model: str) -> dict[str, Any]:
    """The row of an episode that is a conversation; see this module."""
    messages: list[Message] = []
    responses: list[dict[str, Any]] = []
    metrics = Counter[str]()
    for turn in trajectory.turns:
        shown = map_images(turn.messages, lambda item: f"images/{item.id}.png")
        messages += [each | {"weight": 0} if each.get("role") == "assistant" else each for each in shown]  # an example
        if turn.response_ids:
            sampled = {"token_ids": turn.response_ids, "logprobs": [float(each) for each in turn.logprobs]}
            responses.append({"message": len(messages), **sampled})
        messages.append(response_message(turn))
        metrics.update(turn.metrics)
    row = {
        "id": episode_id(*place_of(trajectory.id)),
        "task": place_of(trajectory.id)[0],
        "messages": plain(messages),
        "tools": plain(trajectory.tools) or None,
        "reward": trajectory.reward,
        "metrics": plain({**trajectory.metrics, **metrics}),
        "ending": trajectory.ending,
        "model": model,
        "last_response_cut": trajectory.turns[-1].stop_reason == "length",
    }
    return row | ({"responses": responses} if responses else {})


class Ended(NamedTuple):
    """An episode's record without its texts, and where the record is."""

    trajectory: Trajectory
    """For filters: its reward, ending and metrics, without turns."""
    tokens: int
    failure: str | None
    has_row: bool
    start: int
    size: int


@dataclass
class Recorded:
    """The episodes that ended, by task and member: the last record of each. ``size`` is that of the file's whole lines, in bytes."""

    episodes: dict[tuple[int, int], Ended] = field(default_factory=dict)
    size: int = 0

    def done(self, retry_failed: bool) -> set[tuple[int, int]]:
        """Those that are not to be played again."""
        return {place for place, each in self.episodes.items() if each.failure is None or not retry_failed}


def read_recorded(folder: Path) -> Recorded:
    """What the folder's ``trajectories.jsonl`` has. A last line that was cut does not count.

    Raises ValueError if it is that of a run, or has a line that no command writes.
    """
    recorded = Recorded()
    for start, size, record in JsonLinesTail(folder / "trajectories.jsonl").lines():
        if "episode" not in record:
            raise ValueError(f"{folder} holds a run, not collected episodes: name another folder with --out.")
        recorded.size = start + size
        if record.get("retried"):
            continue
        try:
            recorded.episodes[place_of(record["id"])] = _ended(record, start, size)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ValueError(
                f"{folder / 'trajectories.jsonl'}: the line at byte {start} is not a record of an episode: {error!r:.200}."
            ) from error
    return recorded


def _ended(record: dict[str, Any], start: int, size: int) -> Ended:
    trajectory = Trajectory(record["id"], record["group_id"], Task(record["task_id"], []), ending=record["ending"])
    trajectory.final_reward, trajectory.metrics = record["reward"], record["metrics"]
    require(math.isfinite(trajectory.reward or 0.0), "reward", "a finite number", trajectory.reward)
    row, reason = record["episode"], record.get("reason")
    require(row is None or isinstance(row, dict), "episode", "an object or null", type(row).__name__)
    require(reason is None or isinstance(reason, str), "reason", "a text or null", type(reason).__name__)
    return Ended(trajectory, int(record["tokens"]), reason, row is not None, start, size)


def kept(group: Sequence[Ended], keep: Keep) -> list[Ended]:
    """Those of a task's episodes that are written."""
    functions = [find_function("--keep.filters", name, ("trajectories",), FILTERS) for name in keep.filters]
    if not all(passes([each.trajectory for each in group]) for passes in functions):
        return []
    fit = [
        (each.trajectory.reward or 0.0, each)
        for each in group
        if (keep.min_reward is None or (each.trajectory.reward or 0.0) >= keep.min_reward)
        and (keep.max_tokens is None or each.tokens <= keep.max_tokens)
    ]
    places = range(len(fit)) if keep.best is None else best_of([reward for reward, _ in fit], keep.best)
    return [fit[place][1] for place in places]


def write_episodes(folder: Path, keep: Keep) -> dict[str, Any]:
    """Write ``episodes.jsonl`` from the records, in the order of tasks. Returns what became of all episodes that ended.

    ``reasons`` counts those that are not written, by reason.
    """
    recorded = read_recorded(folder)
    groups: dict[int, list[Ended]] = defaultdict(list)
    reasons = Counter[str]()
    for (task, _), each in sorted(recorded.episodes.items()):
        if each.failure is None and each.has_row:
            groups[task].append(each)
        else:
            reasons[each.failure or BRANCHES] += 1
    chosen = [each for group in groups.values() for each in kept(group, keep)]
    tail = JsonLinesTail(folder / "trajectories.jsonl")
    # half a surrogate pair, which an env may write, becomes "?": UTF-8 has none
    with whole_file(folder / EPISODES) as part, part.open("w", encoding="utf-8", errors="replace") as file:
        for each in chosen:
            row = tail.reread(each.start, each.size)["episode"]
            file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
    failed = sum(each.failure is not None for each in recorded.episodes.values())
    if filtered := sum(map(len, groups.values())) - len(chosen):
        reasons["--keep leaves them out"] = filtered
    counts = {"played": len(recorded.episodes) - failed, "failed": failed, "written": len(chosen)}
    return counts | {"reasons": dict(reasons.most_common())}
