"""Runs as one self-contained page: their metrics, and a limited number of trajectories with images."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vlmrl.report.viewer.followed_run import FollowedRun
from vlmrl.report.viewer.page import write_file

PAGE = "trajectories.html"  # of a run's folder
MOST_TRAJECTORIES = 500  # of each run
MOST_IMAGE_BYTES = 200 * 2**20  # of all images together, as files


def write_snapshot(runs: Sequence[FollowedRun], path: Path, title: str) -> None:
    """Write what the runs have so far. Of a long run, the page has the trajectories of steps that are evenly apart."""
    pages, records, wanted = [], {}, dict[str, Path]()
    for index, run in enumerate(runs):
        everything = _everything(run)
        numbers = choose_trajectories(everything["trajectories"], MOST_TRAJECTORIES)
        rows = [{**everything["trajectories"][number], "n": place} for place, number in enumerate(numbers)]
        pages.append({**everything, "trajectories": rows})
        for place, number in enumerate(numbers):
            record = run.record(number)
            records[index, place] = record
            ids = [image for turn in record["turns"] for image in turn["images"]]
            wanted |= {key: file for key in ids if (file := run.image_path(key)) is not None}
    write_file(path, title, pages, records, _data_uris(wanted))


def choose_trajectories(rows: Sequence[dict[str, Any]], most: int) -> list[int]:
    """The numbers of at most ``most`` trajectories: all of some steps, which are evenly apart and end with the last one.

    Of a last step that has more, its first ones.
    """
    by_step: dict[int, list[int]] = {}
    for row in rows:
        by_step.setdefault(row["step"], []).append(row["n"])
    steps = sorted(by_step)
    for stride in range(1, len(steps) + 1):
        chosen = [number for step in steps[::-1][::stride] for number in by_step[step]]
        if len(chosen) <= most:
            return sorted(chosen)
    return by_step[steps[-1]][:most] if steps else []


def _everything(run: FollowedRun) -> dict[str, Any]:
    response = run.updates()
    lists = {name: list(value) for name, value in response.items() if isinstance(value, list)}
    while response["more"]:
        response = run.updates(response["generation"], {name: len(rows) for name, rows in lists.items()}) | {
            name: response[name] for name in ("config", "folder")
        }
        for name, rows in lists.items():
            rows += response[name]
    return {**response, **lists}


def _data_uris(files: dict[str, Path]) -> Iterator[tuple[str, str]]:
    """Images as data URIs, until they are :data:`MOST_IMAGE_BYTES`."""
    size = 0
    for image_id, path in files.items():
        content = path.read_bytes()
        size += len(content)
        if size > MOST_IMAGE_BYTES:
            return
        yield image_id, "data:image/png;base64," + base64.b64encode(content).decode()
