"""The page that shows runs and trajectories: one self-contained HTML file, or what the server of `vlmrl view` sends.

A file has the runs' metrics, and a limited number of trajectories with images.

All data is JSON, embedded or fetched, and the page's script turns it into text nodes, so that no text of a model, a tool or a dataset
becomes markup. The content security policy allows the page's own script and style only, by their hashes. Each distinct image is
embedded once, under its content hash.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from vlmrl.config import Config
from vlmrl.report.records import plain
from vlmrl.report.viewer.followed_run import FollowedRun
from vlmrl.utils.output_files import open_regular, whole_file

STYLES = ("page", "charts", "trajectories", "narrow")
SCRIPTS = ("dom", "source", "state", "charts", "curves", "turns", "branches", "trajectory", "list", "tables", "app")
PAGE = "trajectories.html"  # of a run's folder
MOST_TRAJECTORIES = 500  # of each run
MOST_IMAGE_BYTES = 200 * 2**20  # of all images together, as files


def write_snapshot(runs: Sequence[FollowedRun], path: Path, title: str) -> None:
    """Write what the runs have so far. Of a long run, the page has the trajectories of steps that are evenly apart."""
    pages, records, wanted = [], {}, dict[str, tuple[Path, Path]]()
    for index, run in enumerate(runs):
        everything = run.updates()
        numbers = choose_trajectories(everything["trajectories"], MOST_TRAJECTORIES)
        rows = [{**everything["trajectories"][number], "n": place} for place, number in enumerate(numbers)]
        pages.append({**everything, "trajectories": rows})
        for place, number in enumerate(numbers):
            record = run.record(number)
            records[index, place] = record
            ids = [image for turn in record["turns"] for image in turn["images"]]
            wanted |= {key: (file, run.folder) for key in ids if (file := run.image_path(key)) is not None}
    _write_file(path, title, pages, records, _data_uris(wanted))


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


def _data_uris(files: dict[str, tuple[Path, Path]]) -> Iterator[tuple[str, str]]:
    """Images as data URIs, until they are :data:`MOST_IMAGE_BYTES`; each is a file and the folder of its run."""
    size = 0
    for image_id, (path, folder) in files.items():
        with open_regular(path, folder) as file:
            content = file.read(MOST_IMAGE_BYTES)
        size += len(content)
        if size > MOST_IMAGE_BYTES:
            return
        yield image_id, "data:image/png;base64," + base64.b64encode(content).decode()


def _write_file(
    path: Path,
    title: str,
    runs: Sequence[Mapping[str, Any]],
    records: Mapping[tuple[int, int], Mapping[str, Any]],
    images: Iterable[tuple[str, str]],
) -> None:
    """Write one self-contained page.

    ``runs`` are as :meth:`FollowedRun.updates` returns them; ``records`` the trajectories by the number of their run and their own;
    ``images`` data URIs by image id. A trajectory is parsed when it is first shown, and so the page opens at once.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as part, part.open("w", encoding="utf-8", errors="replace") as file:
        start, end = page_halves(title, {"title": title, "live": False, "runs": list(runs)})
        file.write(start)
        for (run, number), record in records.items():
            file.write(_data_element(f"trajectory-{run}-{number}", script_json(record)))
        for image_id, uri in images:
            file.write(_data_element(f"image-{image_id}", uri))
        file.write(end)


def page_halves(title: str, data: Mapping[str, Any]) -> tuple[str, str]:
    """The page before and after the place for further data elements. ``data`` is what the page's script begins with."""
    folder = files("vlmrl.report.viewer")
    style = "".join(folder.joinpath(f"{name}.css").read_text(encoding="utf-8") for name in STYLES)
    script = "".join(folder.joinpath(f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    policy = (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; img-src data: blob:; connect-src 'self'; "
        f"style-src {_hash(style)}; script-src {_hash(script)}"
    )
    data_element = _data_element("data", script_json({**data, "defaults": plain(Config())}))
    values = {"TITLE": html.escape(title), "POLICY": policy, "STYLE": style, "SCRIPT": script, "DATA": data_element}
    template = folder.joinpath("page.html").read_text(encoding="utf-8")
    start, end = template.split("__MORE_DATA__")
    return _fill(start, values), _fill(end, values)


def _fill(template: str, values: Mapping[str, str]) -> str:
    return re.sub("__(TITLE|POLICY|STYLE|SCRIPT|DATA)__", lambda match: values[match[1]], template)


def _hash(text: str) -> str:
    """The source expression of a content security policy that allows this one inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _data_element(key: str, text: str) -> str:
    return f'<script type="application/json" id="{html.escape(key)}">{text}</script>\n'


def script_json(value: Any) -> str:
    """JSON that is safe inside a script element: ``"</script>"`` becomes ``"\\u003c/script\\u003e"``."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
