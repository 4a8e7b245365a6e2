"""Writes trajectories to a run's folder: their records, the images of some, and those that failed."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vlmrl.multimodal.images import encode_png
from vlmrl.multimodal.messages import map_texts
from vlmrl.report.records import Kind, trajectory_record
from vlmrl.report.run_log import RunLog, json_lines
from vlmrl.report.token_columns import Decode, TokenTexts
from vlmrl.types import MediaItem, Trajectory
from vlmrl.utils.output_files import whole_file
from vlmrl.utils.work_pool import cpu_pool

MOST_LINE = 64 * 2**20  # bytes of a record with all its texts; a reader takes four times as many
LONG_TEXT = 10_000  # characters of a text that is cut in a longer record
KEPT_WHOLE = 32  # trajectories of a step or an evaluation whose tokens and images a run keeps


class TrajectoryLog:
    """Writes ``trajectories.jsonl`` and ``images/ID.png`` of a run.

    Of each call, ``keep`` trajectories, in whole groups, have their tokens and images, and so have all failed ones; of the others
    only the text is kept. ``extra`` gives further fields of a trajectory's record.
    """

    def __init__(
        self,
        log: RunLog,
        decode: Decode,
        keep: int,
        extra: Callable[[Trajectory], Mapping[str, Any]] = lambda trajectory: {},
    ) -> None:
        self._log = log
        self._texts = TokenTexts(decode)
        self._keep = keep
        self._extra = extra
        self._images = log.folder / "images"

    async def write(
        self, step: int, kind: Kind, trajectories: Sequence[Trajectory], failed: Sequence[Trajectory] = ()
    ) -> list[dict[str, Any]]:
        """Write the ``trajectories`` of a step or an evaluation and those that ``failed`` in it. Returns their records.

        An image is written before the line that names it. Records are made in a thread, as they take long; the files are written by
        the event loop, so that their sizes never count half a line.
        """
        whole = {id(each) for each in [*kept_whole(trajectories, self._keep), *failed]}
        everything = [*trajectories, *failed]
        await self._write_images(turn.media for each in everything if id(each) in whole for turn in each.turns)
        records, lines = await asyncio.to_thread(self._records, step, kind, everything, whole)
        self._log.append_lines("trajectories.jsonl", lines)
        self._log.trackers.log_trajectories(step, kind, trajectories)
        return records

    def _records(
        self, step: int, kind: Kind, trajectories: Sequence[Trajectory], whole: Container[int]
    ) -> tuple[list[dict[str, Any]], bytes]:
        records = [
            {**trajectory_record(each, step, kind, self._texts if id(each) in whole else None), **self._extra(each)}
            for each in trajectories
        ]
        return records, b"".join(map(_line, records))

    async def _write_images(self, media: Iterable[Sequence[MediaItem]]) -> None:
        """Write the images that have no file yet, in the process's threads for images."""
        items = {item.id: item for group in media for item in group}
        paths = {key: self._images / f"{key}.png" for key in items}
        missing = [key for key, path in paths.items() if not path.exists()]
        if missing:
            self._images.mkdir(exist_ok=True)
            pool = cpu_pool()
            # without a deadline: a shared file system may stand still for minutes, and a run waits for it with its other files, too
            await asyncio.gather(*(pool.run(math.inf, write_image, items[key], paths[key]) for key in missing))


def _line(record: dict[str, Any]) -> bytes:
    """The line of a record. Of one that no command could read any more, long texts are cut: an env may show what takes no tokens."""
    line = json_lines([record])
    return line if len(line) <= MOST_LINE else json_lines([map_texts(record, _cut)])


def _cut(text: str) -> str:
    left_out = len(text) - LONG_TEXT
    return text if left_out <= 0 else f"{text[:LONG_TEXT]} [{left_out} characters are left out]"


def kept_whole(trajectories: Sequence[Trajectory], count: int) -> list[Trajectory]:
    """The first whole groups of ``trajectories`` with at most ``count`` trajectories; the first group always, unless it is 0."""
    sizes = Counter(each.group_id for each in trajectories)
    kept: set[str] = set()
    left = count
    for group_id, size in sizes.items():
        if size > left and (kept or not count):
            break
        kept.add(group_id)
        left -= size
    return [each for each in trajectories if each.group_id in kept]


def write_image(item: MediaItem, path: Path) -> None:
    """Write an image at the model's size as a PNG that appears whole or not at all."""
    with whole_file(path) as part:
        part.write_bytes(encode_png(item.image))
