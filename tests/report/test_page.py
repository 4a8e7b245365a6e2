import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

from PIL import Image
from testing.fakes import item_of
from testing.run_folders import write_episodes

from vlmrl.multimodal.images import data_uri
from vlmrl.report.records import message_parts
from vlmrl.report.viewer.followed_run import FollowedRun
from vlmrl.report.viewer.page import write_snapshot
from vlmrl.types import Task, Trajectory, Turn

RED = item_of("c0ffee", Image.new("RGB", (8, 4), "red"), 2)
BLUE = item_of("b1ue", Image.new("RGB", (4, 4), "blue"), 1)
NASTY = "</script><script>alert(1)</script><!-- &amp; \u2028 \ud800 __DATA__ __TITLE__"


class Page(HTMLParser):
    """What a browser would make of the file: its elements, its title, and the content of its data script."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = [("", {})]
        self.texts: dict[str, str] = {}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        tag, attributes = self.elements[-1]
        key = attributes.get("id") or tag
        self.texts[key] = self.texts.get(key, "") + data

    @property
    def rows(self):
        """The overview of each trajectory."""
        return json.loads(self.texts["data"])["runs"][0]["trajectories"]

    def record(self, number):
        return json.loads(self.texts[f"trajectory-0-{number}"])


def user_message(*parts):
    return [{"role": "user", "content": list(parts)}]


def image():
    return {"type": "image", "image": None}


def text(words):
    return {"type": "text", "text": words}


def turn(messages=(), media=(), words="ok", ids=(7, 8), logprobs=(-0.5, -1.5)):
    return Turn([1, 2], list(media), list(ids), list(logprobs), [3] * len(ids), "stop", words, list(messages), 1.0)


def trajectory(name, turns, **more):
    return Trajectory(name, name.split("#")[0], Task("t", user_message(text("Which?"))), turns, "env_done", **more)


def written(tmp_path, trajectories, title="Trajectories", decode=None) -> Page:
    folder = write_episodes(tmp_path / f"run{len(list(tmp_path.iterdir()))}", trajectories, 7, decode)
    write_snapshot([FollowedRun(folder)], tmp_path / "out/page.html", title)
    return Page(tmp_path / "out/page.html")


def test_the_page_is_one_file_that_loads_nothing(tmp_path):
    page = written(tmp_path, [trajectory("a#0", [turn(user_message(image()), [RED])])])
    places = [attributes[name] for _, attributes in page.elements for name in ("src", "href") if name in attributes]
    assert places == ["data:,"]  # the icon: none


def test_the_policy_allows_the_pages_own_script_and_style_only(tmp_path):
    page = written(tmp_path, [])
    (policy,) = [a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'" and "unsafe" not in policy
    for name in ("style", "script"):
        (inline,) = re.findall(f"<{name}>(.*?)</{name}>", (tmp_path / "out/page.html").read_text(), re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        assert rules[f"{name}-src"] == f"'sha256-{digest}'"


def test_texts_cannot_become_markup(tmp_path):
    nasty = trajectory("a#0", [turn(user_message(text(NASTY)), words=NASTY)], error=NASTY)
    page = written(tmp_path, [nasty], title=NASTY, decode=lambda ids: NASTY)
    fine = written(tmp_path, [trajectory("a#0", [turn(user_message(text("fine")))])])
    policies = {"http-equiv": "Content-Security-Policy"}
    assert [e for e in page.elements if policies.items() - e[1].items()] == [
        e for e in fine.elements if policies.items() - e[1].items()
    ]
    shown = page.record(0)
    assert shown["error"] == shown["turns"][0]["text"] == NASTY
    assert shown["turns"][0]["messages"] == [{"role": "user", "parts": [{"text": NASTY}]}]
    assert shown["turns"][0]["tokens"] == [NASTY, NASTY]
    assert page.rows[0]["question"] == NASTY
    assert page.texts["title"].strip() == NASTY.replace("\ud800", "?")


def test_each_distinct_image_is_in_the_file_once(tmp_path):
    turns = [turn(user_message(image()), [RED]), turn(user_message(image(), image()), [BLUE, RED])]
    page = written(tmp_path, [trajectory("a#0", turns), trajectory("a#1", turns)])
    assert (tmp_path / "out/page.html").read_text().count(data_uri(RED.image)) == 1
    assert page.texts["image-c0ffee"].strip() == data_uri(RED.image)
    assert page.texts["image-b1ue"].strip() == data_uri(BLUE.image)


def test_trajectories_have_the_step_of_their_run(tmp_path):
    page = written(tmp_path, [trajectory("a#0", [turn()])])
    assert page.rows[0]["step"] == page.record(0)["step"] == 7


def test_images_appear_where_the_messages_have_them():
    messages = [{"role": "system", "content": "Look."}, *user_message(image(), text("or"), image())]
    assert message_parts(turn(messages, [RED, BLUE])) == [
        {"role": "system", "parts": [{"text": "Look."}]},
        {"role": "user", "parts": [{"image": "c0ffee"}, {"text": "or"}, {"image": "b1ue"}]},
    ]


def test_missing_and_surplus_images_are_shown():
    assert message_parts(turn(user_message(image()), [])) == [{"role": "user", "parts": [{"image": None}]}]
    assert message_parts(turn([], [RED])) == [{"role": "images", "parts": [{"image": "c0ffee"}]}]


def test_a_tool_call_in_a_prompt_is_shown():
    (shown,) = message_parts(turn([{"role": "assistant", "content": None, "tool_calls": [{"name": "zoom"}]}]))
    assert [json.loads(part["text"]) for part in shown["parts"]] == [{"tool_calls": [{"name": "zoom"}]}]


def test_without_decode_there_are_no_tokens_and_bad_numbers_do_not_break_the_page(tmp_path):
    odd = turn(logprobs=[float("nan"), -1.0])
    assert "tokens" not in written(tmp_path, [trajectory("a#0", [odd])]).record(0)["turns"][0]
    shown = written(tmp_path, [trajectory("a#0", [odd])], decode=lambda ids: "x").record(0)["turns"][0]
    assert shown["tokens"] == ["x", "x"] and shown["logprobs"] == ["nan", -1.0]


def test_a_page_without_trajectories_can_be_written(tmp_path):
    assert written(tmp_path, []).rows == []
