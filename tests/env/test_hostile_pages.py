"""Pages that give or ask for more than they should: only their own episode fails, and quickly."""

from __future__ import annotations

import pytest
from testing.browser import need_chromium
from testing.browsers import click, opened, page_env

from vlmrl.env.browser.browser_pool import BrowserFailure

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def chromium():
    need_chromium()


def on_click(script: str) -> str:
    return f"<div style='height:100px' onclick='{script}'></div>"


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("Array(3e6).fill(0)", "a list of 3000000 values"),  # it took 10 s, in which other episodes failed
        ('"x".repeat(2 ** 29 - 30)', '"' + "x" * 100 + '"'),  # it ended the driver of all episodes
        ("10n ** 5000n", "a value of the type bigint"),
    ],
)
async def test_a_reward_that_is_no_number_stays_in_its_page(tmp_path, value, what):
    async with opened(page_env(tmp_path, on_click(f"window.reward = {value}"))) as env:
        with pytest.raises(ValueError, match=r"reward_script of .* must give a number") as raised:
            await env.step(click(500, 500))
        assert str(raised.value).endswith(f"but it gave {what}.")


async def test_a_page_that_asks_until_it_is_refused_goes_on(tmp_path):
    asking = on_click("let n = 0; while (confirm(`Again ${n}?`)) n++; document.title = n")
    async with opened(page_env(tmp_path, asking)) as env:
        observation, _, _ = await env.step(click(500, 500))
        assert observation["obs_str"].splitlines()[-1].endswith("confirm: Again 9?")
        assert await env.evaluate("document.title") == "10"


async def test_a_page_with_endless_dialogs_fails_alone(tmp_path):
    """Chromium was so busy with them that it was taken for one that hangs, and ended with all its episodes."""
    (tmp_path / "calm").mkdir()
    calm = page_env(tmp_path / "calm", on_click("window.reward = 1"))
    busy = page_env(tmp_path, on_click("for (;;) alert(1)"))
    async with opened(calm, timeout=5.0) as other, opened(busy, timeout=5.0) as env:
        with pytest.raises(BrowserFailure, match="took longer than 5 s"):
            await env.step(click(500, 500))
        await env.close()
        _, done, info = await other.step(click(500, 500))
        assert done and info["reward"] == 1
        assert other._pool.counts["hung"] == 0
