"""The loop of docs/library.md, run as it stands in the page."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from vlmrl.samples import AuditError

PAGE = (Path(__file__).parents[2] / "docs/library.md").read_text()


def run_page(name: str, as_program: bool = False) -> dict[str, Any]:
    (block,) = re.findall(rf"```python\n(# {name}\.py\n.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {"__name__": "__main__" if as_program else name}
    exec(compile(block, "docs/library.md", "exec"), names)
    return names


@pytest.mark.slow
def test_the_twenty_lines_train(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    result = run_page("train_here", as_program=True)["result"]
    assert result.summary.keys() >= {"reward_before", "reward_after"}
    assert {"reward/mean", "env/right", "env/short"} <= {key.removesuffix("/episode") for key in result.metrics[1]}
    assert f"{result.folder}\n" in capsys.readouterr().out


def test_the_loop_of_the_page_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    history = asyncio.run(run_page("own_loop")["main"]())
    assert [row["policy_version"] for row in history] == list(range(1, 16))  # one weight update a step
    assert history[0]["reward"] < 0.05 and max(row["reward"] for row in history[-5:]) > 0.2
    assert all(0 <= row["logprob_mismatch/max"] < 1e-4 for row in history)  # also after the updates: none went missing


def test_the_audit_of_the_page_refuses_a_changed_sample(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = run_page("own_loop")
    honest = page["concat"]

    def changed(trajectory):
        (sample,) = honest(trajectory)
        sample.response_ids[0] += 1
        return [sample]

    page["main"].__globals__["concat"] = changed
    with pytest.raises(AuditError, match="turn 0"):
        asyncio.run(page["main"](steps=1))
