"""The curve follows a run, and costs little of it; the page is written at the end."""

import asyncio
from types import SimpleNamespace

import pytest

from vlmrl.config import Config
from vlmrl.report.run_log import RunLog
from vlmrl.run import pages
from vlmrl.run.pages import Pages


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets; drawing takes ``clock.cost`` seconds of CPU."""
    clock = SimpleNamespace(now=0.0, cpu=0.0, cost=0.1, drawn=[])

    def draw(rows, path, **settings):
        clock.cpu += clock.cost
        clock.drawn.append(len(rows))

    monkeypatch.setattr(pages, "draw_curve", draw)
    monkeypatch.setattr(pages, "time", SimpleNamespace(monotonic=lambda: clock.now, thread_time=lambda: clock.cpu))
    return clock


def followed(folder, clock, times):
    """A run that logs a row at each of ``times`` and offers to draw its curve; then it ends. Returns the rows of each drawing."""

    async def run():
        with RunLog(folder) as log:
            made = Pages(SimpleNamespace(config=Config(name=folder.name, output_dir=folder.parent)), log)
            for step, now in enumerate(times, start=1):
                clock.now = now
                log.log(step, {"reward/mean": 0.5})
                made.update_if_due()
                await asyncio.sleep(0.05)  # the thread draws
            assert not (folder / "trajectories.html").exists()
            await made.finish()

    asyncio.run(run())
    return clock.drawn


def test_the_curve_is_drawn_every_thirty_seconds_and_the_page_at_the_end(tmp_path, clock):
    assert followed(tmp_path, clock, [1, 29, 31, 40, 62]) == [3, 5, 5]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "trajectories.html"]


def test_what_takes_long_to_draw_is_drawn_less_often(tmp_path, clock):
    clock.cost = 2.0  # 1% of 200 s
    assert followed(tmp_path, clock, [31, 62, 230, 232]) == [1, 4, 4]


def test_a_run_without_a_step_has_none(tmp_path, clock):
    assert followed(tmp_path, clock, []) == []
