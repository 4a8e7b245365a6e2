"""Runs' folders that somebody else sent: links, pipes, broken and odd records, names with markup."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

from testing.hostile import harmless, text, value

from vlmrl.report.viewer.followed_run import FollowedRun
from vlmrl.report.viewer.page import write_snapshot

SECRET = "TOP-SECRET-OF-ANOTHER-FOLDER"
MARKUP = "<img src=x onerror=alert(1)>"
FILES = ("config.json", "summary.json", "metrics.jsonl", "trajectories.jsonl", "advisories.jsonl")
NAMES = (MARKUP.replace("/", ""), "__DATA__", "a b", "\u202erun", "-rf", "%2e%2e", "run")
TEXTS = (
    MARKUP,
    "</script><script>alert(1)</script>",
    "<!--",
    "__MORE_DATA__",
    "__SCRIPT__",
    "\ud800",
    "\0",
    "javascript:alert(1)",
)


def run(rng: random.Random, good: Path, folder: Path) -> str:
    """Spoil a copy of the run ``good`` in ``folder``, and read it in every way. Returns whether it was ``shown`` or ``refused``."""
    copy = folder / rng.choice(NAMES)
    shutil.copytree(good, copy, symlinks=True)
    done = [_spoil(rng, copy, folder) for _ in range(rng.randint(1, 3))]
    page = folder / "page.html"
    with harmless(done):
        try:
            followed = FollowedRun(copy)
            response = followed.updates()
            for row in response["trajectories"]:
                followed.record(row["n"])
                followed.log_path(row["n"])
            followed.search("timeout")
            write_snapshot([followed], page, followed.name)
        except ValueError as error:
            said = str(error)
    if not page.exists():
        assert SECRET not in said and len(said) < 2000, done
        return "refused"
    shown = page.read_text(encoding="utf-8", errors="replace")
    assert SECRET not in shown and "U0VDUkVU" not in shown, done
    assert not any(words in shown.replace("<!--", "") for words in (MARKUP, "<script>alert")), done
    return "shown"


def _spoil(rng: random.Random, run: Path, outside: Path) -> Any:
    secret = outside / "secret.png"
    secret.write_text(SECRET)
    kind = rng.choice(("link", "pipe", "folder", "bytes", "line", "field", "field", "field", "image", "log"))
    name = rng.choice(FILES)
    path = run / name
    if kind in ("image", "log"):
        (run / "agents").mkdir(exist_ok=True)
        path = (
            run
            / ("images" if kind == "image" else "agents")
            / f"{rng.choice(('a', '0' * 64, MARKUP.replace('/', '')))}.png"
        )
    if kind in ("link", "image", "log", "pipe", "folder"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        else:
            path.symlink_to(rng.choice((secret, outside, "/dev/zero", path)))
        return kind, path.name
    if not path.is_file() or path.is_symlink():
        return kind, "nothing"
    if kind == "bytes":
        content = rng.choice(
            (
                b"",
                b"\xff\xfe",
                b"[" * 50_000 + b"\n",
                b"{}\n",
                b"null\n",
                b"1e999\n",
                path.read_bytes()[: rng.randint(0, 999)],
            )
        )
        path.write_bytes(content)
        return kind, name, content[:40]
    return (kind, name, _spoil_line(rng, path, name, everything=kind == "line"))


def _spoil_line(rng: random.Random, path: Path, name: str, everything: bool) -> Any:
    """Put an odd value into one line, or in place of it."""
    lines = path.read_text(errors="replace").splitlines() or ["{}"]
    number = rng.randrange(len(lines))
    odd = rng.choice((value(rng), rng.choice(TEXTS), text(rng)[:999]))
    if everything:
        lines[number] = json.dumps(odd)
    else:
        try:
            record = json.loads(lines[number])
            where = record
            while isinstance(where, dict | list) and where:
                key = rng.choice(list(where) if isinstance(where, dict) else range(len(where)))
                inner = where[key]
                if not isinstance(inner, dict | list) or rng.random() < 0.4:
                    where[key] = odd
                    break
                where = inner
            lines[number] = json.dumps(record)
        except (ValueError, RecursionError):
            pass
    path.write_text("\n".join([*lines, ""]), errors="replace")
    return repr(odd)[:200]
