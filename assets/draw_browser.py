"""Draws assets/browser.png: a scripted episode of MiniWoB++'s login-user, as the page of trajectories shows it.

PYTHONPATH=.:tests python assets/draw_browser.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright
from testing.browsers import call, click
from testing.episodes import a_task, play_audited
from testing.run_folders import write_episodes

from vlmrl.env.base import resolve_env
from vlmrl.env.browser.chromium_process import find_chromium
from vlmrl.report.viewer.followed_run import FollowedRun
from vlmrl.report.viewer.page import write_snapshot

RESPONSES = [
    f"The user name first. {click(444, 421)} {call('type', text='keneth')}",
    f"Then the password. {click(381, 669)} {call('type', text='91YP')}",
    f"{click(284, 864)}",
]
WIDTH = 1100


def main() -> None:
    env = resolve_env("vlmrl:MiniWobEnv", options={"tasks": "login-user", "scale": 2.0, "tools_in_prompt": False})
    task = a_task("Use the mouse and the keyboard.", seed=3)
    trajectory = play_audited(env, RESPONSES, task, max_tokens=8000, max_response_tokens=500)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        run = write_episodes(Path(folder) / "run", [trajectory])
        write_snapshot([FollowedRun(run)], page, "Trajectories")
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=find_chromium(None))
            tab = browser.new_page(viewport={"width": WIDTH, "height": 1500})
            tab.goto(page.as_uri())
            tab.wait_for_function("document.querySelectorAll('.point').length > 0")
            tab.screenshot(path=f"{folder}/page.png")
            browser.close()
        shown = Image.open(f"{folder}/page.png").convert("RGB")
    shown.quantize(255, Image.Quantize.FASTOCTREE).save(Path(__file__).parent / "browser.png", optimize=True)


if __name__ == "__main__":
    main()
