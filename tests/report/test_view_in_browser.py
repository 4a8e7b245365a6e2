"""The page of `vlmrl view` and of `trajectories.html` in a headless Chromium."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from testing.browser import Browser
from testing.episodes import wait_until
from testing.fakes import item_of
from testing.run_folders import write_episodes, write_run_folder
from testing.servers import served

from vlmrl.report.records import trajectory_record
from vlmrl.report.viewer.followed_run import FollowedRun
from vlmrl.report.viewer.page import write_snapshot
from vlmrl.report.viewer.view_server import create_view_app
from vlmrl.types import PointSet, Task, Trajectory, Turn

pytestmark = pytest.mark.slow

SELECTED = "document.querySelector('#main h2').textContent"
IMAGES = "[...document.querySelectorAll('#main figure.image img')]"
HOSTILE = '<img src=x onerror="window.broken = 1"></script><script>window.broken = 1</script><b>bold</b>'


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    browser = Browser()
    yield browser
    browser.quit()


@pytest.fixture
def browser(chromium) -> Iterator[Browser]:
    """The browser at its usual size; a page that writes anything to the console fails the test."""
    chromium.size(1280, 860)
    chromium.prefer("light")
    chromium.errors()
    yield chromium
    assert chromium.errors() == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_run_folder(tmp_path_factory.mktemp("runs") / "geo3k", steps=3, groups=3, group_size=4)


@pytest.fixture(scope="module")
def page(folder, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("page") / "page.html"
    write_snapshot([FollowedRun(folder)], path, "geo3k")
    return path


def rows(browser: Browser) -> int:
    """How many trajectories pass the filters."""
    browser.wait("document.querySelector('#counts').textContent")
    return int(browser.texts("#counts")[0].split(" ")[0])


def test_images_of_a_trajectory_are_shown_and_can_be_enlarged(browser, page):
    browser.open(page, "view=trajectories")
    browser.wait(f"{IMAGES}.length > 1 && {IMAGES}.every((image) => image.naturalWidth > 0)")
    assert browser.run(f"{IMAGES}[0].naturalWidth") == 160
    browser.click("#main figure.image img")
    assert browser.run("byId('zoom').open") and browser.run("byId('zoom').querySelector('img').width") > 160


def test_clicks_and_drags_are_drawn_where_they_were(browser, tmp_path):
    """The second turn shows no image, so that its drag is drawn on the first turn's, which both responses saw."""
    shown = item_of("c0ffee", Image.new("RGB", (200, 100), "white"), 2)
    (tmp_path / "run/images").mkdir(parents=True)
    shown.image.save(tmp_path / "run/images/c0ffee.png")
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Click."}]}
    turns = [
        Turn([1], [shown], [7], [-0.5], [0], "stop", "a", [message], points=[PointSet("left_click", ((0.5, 0.25),))]),
        Turn([1], [], [7], [-0.5], [0], "stop", "b", points=[PointSet("left_click_drag", ((0.0, 0.0), (1.0, 0.5)))]),
    ]
    turns[1].messages = [{"role": "user", "content": "Wrong."}]
    record = trajectory_record(Trajectory("t/0", "t", Task("t", "?"), turns, "env_done"), 1, "train")
    append(tmp_path / "run/trajectories.jsonl", record)
    append(tmp_path / "run/config.json", {"name": "run"})
    write_snapshot([FollowedRun(tmp_path / "run")], tmp_path / "page.html", "run")
    browser.open(tmp_path / "page.html", "view=trajectories")
    browser.wait(f"{IMAGES}.length === 1 && {IMAGES}[0].naturalWidth === 200")
    middle = """[...document.querySelectorAll('SCOPE .point')].map((point) => {
      const [dot, box] = [point, point.closest('.canvas').querySelector('img')].map((e) => e.getBoundingClientRect());
      return [(dot.x + dot.width / 2 - box.x) / box.width, (dot.y + dot.height / 2 - box.y) / box.height, point.title];
    })"""
    expected = [[0.5, 0.25, "left_click"], [1.0, 0.5, "left_click_drag"]]
    for scope in ("#main", "#zoom"):
        seen = browser.run(middle.replace("SCOPE", scope))
        assert [label for *_, label in seen] == [label for *_, label in expected]
        for (x, y, _), (right_x, right_y, _) in zip(seen, expected, strict=True):
            assert (x, y) == pytest.approx((right_x, right_y), abs=0.02)
        assert browser.run(f"document.querySelectorAll('{scope} .points line').length") == 1
        if scope == "#main":
            browser.click("#main figure.image img")  # opens the enlarged image


def test_ticks_of_a_small_range_have_different_labels(browser, page):
    browser.open(page, "view=curves")
    assert browser.run("labels(ticks(6.2078, 6.2084))") == ["6.2078", "6.208", "6.2082", "6.2084"]
    assert browser.run("labels(ticks(0, 1))") == ["0", "0.5", "1"]


def test_ticks_of_numbers_without_a_next_one_have_an_end(browser, page):
    browser.open(page)
    assert browser.run("[ticks(0, 0.93), ticks(1, 5), ticks(1e22, 1e22 + 4e6).length < 6, ticks(1e999, 1e999)]") == [
        [0, 0.5],
        [1, 2, 3, 4, 5],
        True,
        [float("inf")],
    ]


def test_curves_leave_out_the_steps_of_a_warm_start(browser, page):
    browser.open(page, "view=curves")
    warm = "{name: 'warm', metrics: [{step: 400, 'sft/loss': 1}, {step: 0, 'reward/mean': 0}, {step: 20, 'reward/mean': 1}]}"
    assert browser.run(f"stepRange([{warm}])") == [0, 20]
    assert browser.run(f"stepRange([{warm}], ['sft/loss'])") == [0, 400]
    assert browser.run("stepRange([{metrics: [{step: 3, 'sft/loss': 1}]}])") == [3, 3]


def test_the_header_says_how_far_a_run_is(browser, page):
    browser.open(page, "view=curves")
    reward = json.loads(
        browser.run("JSON.stringify(pointsOf(run(), 'eval/reward/mean').map((point) => format(point[1])))")
    )
    assert browser.texts("#progress") == [f"step 3 of 3 · held-out reward {reward[0]}"]
    evaluated = "{step: 0, 'eval/reward/mean': 0.25}, {step: 1, 'eval/reward/mean': 0.5}"
    rows = f"[{evaluated}, {{step: 1, trajectories: 8}}, {{step: 2, trajectories: 8}}]"
    assert browser.run(f"progressOf({{metrics: {rows}, config: {{train: {{steps: 9}}}}}})") == (
        "step 2 of 9 · held-out reward 0.25 → 0.5"
    )
    assert browser.run("progressOf({metrics: [], config: {}})") == ""


def test_the_reward_of_guessing_is_a_level_of_the_rewards(browser, page):
    browser.open(page, "view=curves")
    assert [legend for legend in browser.texts(".chart") if "chance" in legend] == browser.texts(".chart")[:1]


def test_tokens_have_colours_and_numbers(browser, page):
    browser.open(page, "view=trajectories")
    browser.wait("document.querySelectorAll('#main .token').length > 10")
    browser.hover("#main .token")
    assert "rollout logprob" in browser.texts("#tip")[0] and "advantage" in browser.texts("#tip")[0]
    assert browser.texts("#main select option") == ["logprob", "mismatch", "advantage", "loss mask", "no colours"]
    seen = []
    for _ in range(5):
        seen.append(browser.run("document.querySelector('#main select').value"))
        browser.press("c")
        browser.wait(f"document.querySelector('#main select').value !== {seen[-1]!r}")
    assert seen == ["logprob", "mismatch", "advantage", "mask", "none"]
    browser.wait("document.querySelectorAll('#main .token.high, #main .token.low').length > 5")  # logprob again, drawn


def test_filters_leave_what_they_name(browser, page):
    browser.open(page, "view=trajectories")
    assert rows(browser) == 13  # of the last step: 12 and a failed one
    browser.type("input[aria-label='reward from']", "1")
    right = rows(browser)
    assert 0 < right < 13 and set(browser.texts("#rows .score")) == {"1"}
    browser.type("input[aria-label='reward from']", "2")
    browser.wait("document.querySelector('#main').textContent.includes('No trajectory matches the filters.')")
    browser.open(page, "view=trajectories")
    browser.click("#filters .chips button", "error")
    browser.wait("document.querySelector('#main .error')")
    assert rows(browser) == 1 and "TimeoutError: step()" in browser.texts("#main .error")[0]
    browser.open(page, "view=trajectories")
    browser.run("(document.querySelector('select[aria-label=\"all kinds\"]').value = 'blanked', 1)")
    browser.run(
        "document.querySelector('select[aria-label=\"all kinds\"]').dispatchEvent(new Event('change', {bubbles: true}))"
    )
    browser.wait(f"{SELECTED}.startsWith('blanked')")
    assert rows(browser) == 4


def test_a_search_finds_texts_of_one_step_or_of_all(browser, page):
    browser.open(page, "view=trajectories")
    browser.press("/")
    browser.press("timeouterror")
    browser.wait("document.querySelector('#counts').textContent.startsWith('1 of 13')")
    browser.click("#filters button", "all steps")
    browser.wait("document.querySelector('#counts').textContent.startsWith('3 of 39')")


def test_keys_move_through_trajectories_groups_and_steps(browser, page):
    browser.open(page, "view=trajectories")
    browser.wait(f"document.querySelector('#main h2') && {SELECTED} === 'step000003/00000/00'")
    for key, name in {"j": "0/01", "k": "0/00", "J": "1/00", "K": "0/00", "[": "2/00000/00", "]": "3/00000/00"}.items():
        browser.press(key)
        browser.wait(f"{SELECTED}.endsWith({name!r})")
    browser.press("g")
    browser.wait("document.querySelectorAll('#main .column').length === 5")
    browser.press("?")
    browser.wait("byId('help').open && byId('help').textContent.includes('next trajectory')")


def test_a_click_on_a_curve_shows_the_steps_trajectories(browser, page):
    browser.open(page)
    assert "Reward" in browser.texts(".chart figcaption b") and "Seconds of a step" in browser.texts("figcaption b")
    browser.hover(".chart .plot")
    browser.wait("byId('tip').textContent.startsWith('step 2')")
    browser.click(".chart .plot")
    browser.wait(f"document.querySelector('#main h2') && {SELECTED}.startsWith('step000002')")


def test_advisories_failures_and_settings_are_shown(browser, page):
    browser.open(page)
    assert [text for text in browser.texts(".advisory") if "every response was cut." in text]
    browser.press("3")
    assert browser.texts(".reason summary") == ["3\u00d7 TimeoutError: step() of <ZoomEnv object at N> took N s"]
    browser.press("4")
    cells = "[...document.querySelectorAll('.config tr')].map((row) => [...row.cells].map((c) => c.textContent))"
    changed = {name: values for name, *values in browser.run(cells) if len(values) == 2}
    assert changed["setting"] == ["geo3k", "default"] and changed["optim.lr"] == ["0.0001", "0.000001"]
    assert all(value != default for value, default in changed.values())
    browser.click("#view button", "differences only")
    everything = {name: values for name, *values in browser.run(cells) if len(values) == 2}
    assert changed.items() < everything.items()


def test_a_views_key_is_the_same_without_failures(browser, folder, tmp_path):
    healthy = Path(shutil.copytree(folder, tmp_path / "healthy"))
    lines = (healthy / "trajectories.jsonl").read_text().splitlines(keepends=True)
    (healthy / "trajectories.jsonl").write_text("".join(line for line in lines if '"reason"' not in line))
    write_snapshot([FollowedRun(healthy)], tmp_path / "page.html", "healthy")
    browser.open(tmp_path / "page.html")
    titles = browser.run("[...document.querySelectorAll('#tabs button')].map((tab) => tab.title)")
    assert titles == ["Curves (1)", "Trajectories (2)", "Config (4)"]
    for key, view in {"2": "trajectories", "3": "trajectories", "4": "config", "1": "curves"}.items():
        browser.press(key)
        assert browser.run("state.view") == view


def test_several_runs_are_compared(browser, folder, tmp_path):
    other = write_run_folder(tmp_path / "other", steps=2, groups=1, group_size=2, seed=5)
    write_snapshot([FollowedRun(folder), FollowedRun(other)], tmp_path / "page.html", "two runs")
    browser.open(tmp_path / "page.html")
    together = browser.run("document.querySelectorAll('.chart').length")
    key = "document.querySelector('.chart .legend svg path').getAttribute('stroke-dasharray')"
    assert browser.run(key) == "5 4"  # the legend has a line's own dashes
    browser.click(".controls button", "side by side")
    assert browser.run("document.querySelectorAll('.chart').length") > together
    browser.press("4")
    assert browser.texts("table.config td:first-child") == ["name", "train.steps"]
    browser.press("2")
    browser.click("#runs button", "other")
    browser.wait("document.querySelector('#counts').textContent.startsWith('3 trajectories')")


def test_texts_never_become_markup(browser, tmp_path):
    message = {"role": "user", "content": HOSTILE}
    turn = Turn([1], [], [7, 8], [-0.5, -1.0], [0, 0], "stop", HOSTILE, [message], 1.0, {HOSTILE: 1.0})
    task = Task(HOSTILE, HOSTILE, answer=HOSTILE, source=HOSTILE)
    bad = Trajectory(HOSTILE, HOSTILE, task, [turn], "env_done", error=HOSTILE)
    folder = write_episodes(tmp_path / "run", [bad], decode=lambda ids: HOSTILE)
    write_snapshot([FollowedRun(folder)], tmp_path / "page.html", HOSTILE)
    browser.open(tmp_path / "page.html", "view=trajectories")
    browser.wait("document.querySelectorAll('#main .token').length === 2")
    assert browser.run("document.querySelector('#main h2').textContent") == HOSTILE
    assert browser.run("window.broken ?? null") is None
    assert (
        browser.run(
            "document.querySelectorAll('#main .text b, img, body > script:not([type]):not(:last-of-type)').length"
        )
        == 0
    )


def test_a_page_of_texts_has_no_thumbnails_and_no_curves(browser, tmp_path):
    message = {"role": "user", "content": "How many?"}
    turns = [Turn([1], [], [7], [-0.5], [0], "stop", "two", [message], 1.0)]
    folder = write_episodes(tmp_path / "run", [Trajectory("a/0", "a", Task("t", "How many?"), turns, "env_done")], 7)
    write_snapshot([FollowedRun(folder)], tmp_path / "page.html", "texts")
    browser.open(tmp_path / "page.html")
    browser.wait("document.querySelector('#rows .question')")
    assert browser.texts("#rows .question") == ["How many?"]
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert browser.texts("#tabs button") == ["Trajectories"]
    assert browser.texts("#strip b") == ["step 7"]


def test_of_500_trajectories_only_those_in_sight_are_in_the_page(browser, tmp_path):
    def played(number: int) -> Trajectory:
        item = item_of(f"image{number}", Image.new("RGB", (320, 240), (number % 256, 90, 90)), 4)
        message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": f"Question {number}?"}]}
        turns = [Turn([1], [item], [7] * 200, [-0.5] * 200, [0] * 200, "stop", "ok", [message], number % 2)]
        return Trajectory(f"{number // 5}/{number}", f"group {number // 5}", Task("t", "?"), turns, "env_done")

    folder = write_episodes(tmp_path / "run", [played(number) for number in range(500)], decode=lambda ids: "word ")
    write_snapshot([FollowedRun(folder)], tmp_path / "page.html", "500")
    browser.open(tmp_path / "page.html")
    browser.wait(f"{IMAGES}.length === 1 && {IMAGES}[0].naturalWidth === 320")
    assert rows(browser) == 500
    assert 10 < browser.run("document.querySelectorAll('#rows .row').length") < 60
    assert browser.run("document.querySelectorAll('#view *').length") < 900
    assert browser.run("run().records.size") == 1  # the others are not parsed
    browser.run("(byId('list').scrollTop = 1e6, 1)")
    browser.wait("[...document.querySelectorAll('#rows .question')].at(-1)?.textContent === 'Question 495?'")
    assert browser.run("document.querySelectorAll('#rows .row').length") < 60


def test_light_and_dark_follow_the_system_and_the_switch(browser, page):
    background = "getComputedStyle(document.body).backgroundColor"
    browser.open(page)
    light = browser.run(background)
    browser.prefer("dark")
    dark = browser.run(background)
    assert light != dark
    for theme, colour in {"light": light, "dark": dark, "auto": dark}.items():
        browser.click("#theme")
        assert browser.run("document.documentElement.dataset.theme") == theme
        assert browser.run(background) == colour


@pytest.mark.parametrize("view", ["curves", "trajectories", "failures", "config"])
def test_a_narrow_page_does_not_scroll_sideways(browser, page, view):
    browser.size(400, 800)
    browser.open(page, f"view={view}")
    assert browser.run("Math.max(document.scrollingElement.scrollWidth, byId('view').scrollWidth)") <= 400


def append(path: Path, record: object) -> None:
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def test_a_letter_of_a_search_ends_the_search_before_it(browser, tmp_path, monkeypatch):
    folder = write_run_folder(tmp_path / "live", steps=2, groups=2, group_size=2)
    search, begun, ended = FollowedRun.search, list[str](), list[str]()

    def endless(run, text, step=None, ends=lambda: False):
        begun.append(text)
        if text != "timeouterror":
            wait_until(ends)
            ended.append(text)
        return search(run, text, step, ends)

    monkeypatch.setattr(FollowedRun, "search", endless)
    with served(create_view_app([FollowedRun(folder)], "live")) as address:
        browser.open(address, "view=trajectories")
        browser.press("/")
        browser.press("t")
        wait_until(lambda: begun == ["t"])
        browser.press("imeouterror")
        browser.wait("document.querySelector('#counts').textContent.startsWith('1 of 5')")
        assert "t" in ended


def test_the_served_page_follows_the_run(browser, tmp_path):
    folder = write_run_folder(tmp_path / "live", steps=2, groups=2, group_size=2)
    with served(create_view_app([FollowedRun(folder)], "live")) as address:
        browser.open(address, "view=trajectories")
        browser.wait(f"{IMAGES}.length > 0 && {IMAGES}.every((image) => image.naturalWidth > 0)")
        assert rows(browser) == 5
        browser.type("#search", "timeouterror")
        browser.wait("document.querySelector('#counts').textContent.startsWith('1 of 5')")
        browser.open(address, "view=curves")
        append(folder / "metrics.jsonl", {"step": 3, "time": 1.8e9, "reward/mean": 0.75, "fresh": 1.0})
        browser.wait("run().metrics.some((row) => row.fresh)")
        browser.wait("[...document.querySelectorAll('.xtick')].some((tick) => tick.textContent === '3')")
        browser.press("2")
        browser.wait("document.querySelector('#counts').textContent.startsWith('5 trajectories')")
        append(folder / "trajectories.jsonl", trajectory_record(new_trajectory(), 3, "train"))
        browser.wait(f"{SELECTED} === 'new/3'")  # the latest step, until a trajectory is chosen
        browser.wait("document.querySelector('#main').textContent.includes('new response')")
        browser.click("#rows .member")
        append(folder / "trajectories.jsonl", trajectory_record(new_trajectory(), 4, "train"))
        browser.wait("document.querySelector('.stepper').textContent.includes('latest')")
        browser.wait("run().trajectories.at(-1).step === 4")
        assert browser.run("currentStep()") == 3
        browser.press("]")
        browser.wait("currentStep() === 4")
        browser.close()


def test_an_episode_with_summaries_is_drawn_as_a_tree(browser, tmp_path):
    """Responses 1 and 2, then the summary 3; 4 keeps the first 2 tokens of its context and none of its images; 5 goes on."""
    first = [item_of(name, Image.new("RGB", (20, 10), "red"), 2) for name in ("aa", "bb")]

    def turn(prompt, media=(), parent=None, kept=0, kept_media=0, **more):
        return Turn(
            [1] * prompt, list(media), [7] * 3, [-0.5] * 3, [0] * 3, "stop", "a", parent=parent, kept=kept, **more
        )

    turns = [
        turn(4),
        turn(5, first, 0, 7),
        turn(2, (), 1, 15, 2, asked=True),
        turn(6, first[1:], 2, 2),
        turn(1, (), 3, 11),
    ]
    turns[2].kept_media, turns[4].kept_media = 2, 1
    turns[0].messages = [{"role": "user", "content": "Begin."}]
    record = trajectory_record(Trajectory("t/0", "t", Task("t", "?"), turns, "env_done"), 1, "train")
    (tmp_path / "run").mkdir()
    append(tmp_path / "run/trajectories.jsonl", record)
    append(tmp_path / "run/config.json", {"name": "run"})
    write_snapshot([FollowedRun(tmp_path / "run")], tmp_path / "page.html", "run")
    browser.open(tmp_path / "page.html", "view=trajectories")
    browser.wait("document.querySelectorAll('#main .path').length === 2")
    assert browser.texts("#main .path button") == ["responses 1–3", "responses 4–5"]
    left_out = "leaves out 18 tokens and 1 image of the context of response 3"
    assert browser.texts("#main .path .muted") == ["20 tokens, 9 sampled", f"15 tokens, 6 sampled; {left_out}"]
    assert browser.texts("#main .branch") == [f"branch: {left_out}"]
    bars = "[...document.querySelectorAll('#main .track i')].map((bar) => [bar.style.left, bar.style.width])"
    assert browser.run(bars) == [["0%", "100%"], ["10%", "65%"]]
    levels = "[...document.querySelectorAll('#main .path button')].map((b) => b.style.marginLeft)"
    assert browser.run(levels) == ["0em", "1em"]


def test_turns_that_began_in_one_state_are_linked(browser, tmp_path):
    """Two members: the second turn of one and the third of the other begin in the state 5."""

    def member(number, *states):
        turns = [
            Turn([1], [], [7], [-0.5], [0], "stop", "a", [{"role": "user", "content": "Go."}], 0.0, next_state=state)
            for state in states
        ]
        return trajectory_record(Trajectory(f"t/{number}", "t", Task("t", "?"), turns, "env_done"), 1, "train")

    (tmp_path / "run").mkdir()
    append(tmp_path / "run/trajectories.jsonl", member(0, "5", "6", "9"))
    append(tmp_path / "run/trajectories.jsonl", member(1, "8", "5", "5", "9"))
    append(tmp_path / "run/config.json", {"name": "run"})
    write_snapshot([FollowedRun(tmp_path / "run")], tmp_path / "page.html", "run")
    browser.open(tmp_path / "page.html", "view=trajectories&group=1")
    browser.wait("document.querySelectorAll('#main section.response').length === 7")
    links = """[...document.querySelectorAll('#main section.response')].map(
        (response) => [...response.querySelectorAll('.same button')].map((link) => link.textContent))"""
    assert browser.run(links) == [[], ["2.3", "2.4"], [], [], [], ["1.2", "2.4"], ["1.2", "2.3"]]
    browser.open(tmp_path / "page.html", "view=trajectories")
    browser.wait("document.querySelectorAll('#main section.response').length === 3")
    assert browser.texts("#main .same") == []


def new_trajectory() -> Trajectory:
    message = {"role": "user", "content": "A new question"}
    turn = Turn([1], [], [7], [-0.5], [0], "stop", "new response", [message], 1.0)
    return Trajectory("new/3", "g", Task("t", "?"), [turn], "env_done")


def test_with_a_token_the_address_opens_the_data_and_without_it_the_page_says_so(browser, folder):
    with served(create_view_app([FollowedRun(folder)], "live", "s3cret")) as address:
        browser.open(address, "token=s3cret&view=trajectories")
        browser.wait(f"{IMAGES}.length > 0 && {IMAGES}.every((image) => image.naturalWidth > 0)")
        assert "token=s3cret" in browser.run("location.hash")
        browser.open(address)
        browser.wait("byId('live').textContent.startsWith('the token is missing')")
        browser.close()
        assert all("401" in message for message in browser.errors())


def test_an_agents_branches_and_its_log_are_shown(browser, tmp_path):
    folder = write_run_folder(tmp_path / "agents", steps=1, groups=1, group_size=1, turns=4)
    lines = [json.loads(line) for line in (folder / "trajectories.jsonl").read_text().splitlines()]
    turns = lines[0]["turns"]
    added = [turn["prompt_tokens"] + turn["sampled_tokens"] for turn in turns]
    for turn, parent in zip(turns, [None, 0, 0, None], strict=True):
        turn |= {"parent": parent, "kept_tokens": 0 if parent is None else added[0], "kept_images": 0}
    (folder / "trajectories.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    log = folder / f"agents/{lines[0]['id']}.log"
    log.parent.mkdir(parents=True)
    log.write_text("zoomed <b>in</b>")
    with served(create_view_app([FollowedRun(folder)], "run")) as url:
        browser.open(url, "view=trajectories&kind=train")
        browser.wait("document.querySelectorAll('#main .branch').length === 2")
        shown = browser.texts("#main .branch")
        for line, number, tokens in zip(shown, (2, 3), (added[1], added[0] + added[2]), strict=True):
            assert line.startswith(f"branch: leaves out {tokens} tokens")
            assert line.endswith(f"of the context of response {number}")
        browser.click("#main .log summary")
        browser.wait("document.querySelector('#main .log .text')")
        assert browser.texts("#main .log .text") == ["zoomed <b>in</b>"]
        browser.close()
