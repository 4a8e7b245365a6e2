"""The geo3k env: calls, boxed answers, grading, endings. Loaded by path, since envs/ is no package."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from testing.episodes import a_task, play

from vlmrl import BoundedFunction, Task
from vlmrl.config.code import load_object

FILE = f"{Path(__file__).parents[2]}/envs/geo3k.py"
Geo3kEnv = load_object(f"{FILE}:Geo3kEnv")
is_right = load_object(f"{FILE}:is_right")
last_boxed = load_object(f"{FILE}:last_boxed")

RIGHT = "Score: 1. The answer is right: give it as the final answer in \\boxed{}."
WRONG = "Score: 0. The answer is wrong: look at the diagram again and check each step."
LAST = " This was the last check: reply now with the final answer in \\boxed{}, without a tool call."


def env(answer: str = "15", turn: int = 0, max_turns: int = 4, **options: Any) -> Any:
    data = {"choices": options.pop("choices", [])}
    made = Geo3kEnv(Task("t", [], answer=answer, data=data), **options)
    made.turn, made.max_turns = turn, max_turns
    return made


def step(made: Any, response: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
    return asyncio.run(made.step(response))


def call(answer: Any, name: str = "calc_score") -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'answer': answer}})}\n</tool_call>"


def raw(text: str) -> str:
    return f"<tool_call>{text}</tool_call>"


# Calls


@pytest.mark.parametrize(
    ("answer", "text"), [("15", RIGHT), ("14", WRONG), (15, RIGHT), (15.0, RIGHT), ("\\boxed{15}", RIGHT)]
)
def test_a_call_gets_the_score_and_the_episode_goes_on(answer, text):
    assert step(env(), "I think so. " + call(answer)) == ({"obs_str": text}, False, {"bad_calls": 0.0})


def test_the_last_call_of_a_response_counts():
    assert step(env(), call("14") + " no, " + call("15"))[0]["obs_str"] == RIGHT
    assert step(env(), call("15") + call("14") + " \\boxed{15}")[0]["obs_str"] == WRONG


def test_arguments_may_be_a_json_string():
    assert step(env(), raw('{"name": "calc_score", "arguments": "{\\"answer\\": \\"15\\"}"}'))[0]["obs_str"] == RIGHT


@pytest.mark.parametrize(
    ("response", "says"),
    [
        (call("15", name="calculator"), "the only one is calc_score"),
        (raw("[]"), "the only one is calc_score"),
        (raw('"calc_score"'), "the only one is calc_score"),
        (raw("{'name': 'calc_score'}"), "not valid JSON (Expecting property name enclosed in double quotes"),
        (raw(""), "not valid JSON"),
        (raw('{"name": "calc_score", "arguments": {"answer": "15"},}'), "not valid JSON"),
        (raw('{"name": "calc_score", "arguments": {"answer": NaN}}'), "not valid JSON (NaN is not JSON)"),
        (raw('{"name": "calc_score", "arguments": "answer=15"}'), "not valid JSON"),
        (raw("[" * 100_000), "not valid JSON"),
        (raw('{"name": "calc_score", "arguments": {"answer": ' + "1" * 5000 + "}}"), "not valid JSON"),
        (call(""), "has no answer"),
        (call("  \n"), "has no answer"),
        (call(None), "has no answer"),
        (call(True), "has no answer"),
        (call(["15"]), "has no answer"),
        (raw('{"name": "calc_score"}'), "has no answer"),
        (raw('{"name": "calc_score", "arguments": {"value": "15"}}'), "has no answer"),
        (raw('{"name": "calc_score", "arguments": "[15]"}'), "has no answer"),
    ],
)
def test_a_wrong_call_is_explained_and_the_episode_goes_on(response, says):
    observation, done, info = step(env(), response)
    assert says in observation["obs_str"]
    assert len(observation["obs_str"]) < 250
    assert (done, info) == (False, {"bad_calls": 1.0})


def test_the_last_chance_is_said():
    assert step(env(turn=1, max_turns=4), call("14"))[0]["obs_str"] == WRONG
    assert step(env(turn=2, max_turns=4), call("14"))[0]["obs_str"] == WRONG + LAST
    assert step(env(turn=2, max_turns=4), raw("x"))[0]["obs_str"].endswith(LAST)
    assert step(env(turn=3, max_turns=4), call("14"))[0]["obs_str"] == WRONG


def test_the_score_can_be_kept_back():
    blind = env(score_in_observation=False)
    assert [step(blind, call(a))[0]["obs_str"] for a in ("15", "14")] == ["The answer was received."] * 2
    assert "not valid JSON" in step(blind, raw("x"))[0]["obs_str"]


def test_the_tool_has_a_schema():
    (tool,) = Geo3kEnv.tools
    assert tool["type"] == "function"
    assert tool["function"]["name"] == "calc_score"
    assert tool["function"]["parameters"]["required"] == ["answer"]


# Endings


def test_a_response_without_a_call_is_judged():
    assert step(env(), "so \\boxed{15}") == ({"obs_str": ""}, True, {"reward": 1.0, "format": 1.0, "tool_calls": 0})
    assert step(env(), "so \\boxed{14}")[2] == {"reward": 0.0, "format": 1.0, "tool_calls": 0}
    assert step(env(), "it is 15")[2] == {"reward": 0.0, "format": 0.0, "tool_calls": 0}
    assert step(env(), "\\boxed{ }")[2] == {"reward": 0.0, "format": 0.0, "tool_calls": 0}


def test_half_a_call_is_no_call():
    for response in ("<tool_call>{", "</tool_call>", "</tool_call><tool_call>"):
        assert step(env(), response + "\\boxed{15}")[1:] == (True, {"reward": 1.0, "format": 1.0, "tool_calls": 0})


def test_every_ending_has_one_reward():
    judged = env()
    step(judged, call("15"))
    assert step(judged, "\\boxed{15}")[2] == {"reward": 1.0, "format": 1.0, "tool_calls": 1}
    assert judged.finish("env_done") is None
    for ending in ("max_turns", "max_tokens", "length"):
        cut = env()
        assert "reward" not in step(cut, call("15"))[2]
        assert cut.finish(ending) == 0.0
        assert env().finish(ending) == 0.0


# The boxed answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("", ""),
        ("\\boxed{}", ""),
        ("\\boxed{5}", "5"),
        ("\\boxed{5} or \\boxed{6}.", "6"),
        ("\\boxed {5}", "5"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{5\\sqrt{\\frac{1}{2}}} {x}", "5\\sqrt{\\frac{1}{2}}"),
        ("\\boxed{\\boxed{5}}", "5"),
        ("\\boxed{\\{5\\}}", "\\{5\\}"),
        ("\\boxed{5} then \\boxed{6", "5"),
        ("\\boxed{5 ", ""),
        ("} \\boxed{5}", "5"),
        ("{ \\boxed{5}", "5"),
        ("boxed{5}", ""),
    ],
)
def test_last_boxed(text, answer):
    assert last_boxed(text) == answer


def test_a_response_that_repeats_itself_is_read_in_time():
    began = time.thread_time()
    last_boxed("\\boxed{" * 20_000)
    last_boxed("\\boxed" + " " * 200_000)
    step(env(), "<tool_call>" * 20_000)
    assert time.thread_time() - began < 5


# Grading


@pytest.mark.slow  # mathematics runs in a process of its own
@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("15", "15"),
        (" $15$. ", "15"),
        ("15.0", "15"),
        ("+15", "15"),
        ("15 cm", "15"),
        ("15\\text{ cm}", "15"),
        ("15 \\mathrm{~m}", "15"),
        ("12\\text{ units}^2", "12"),
        ("12 square units", "12"),
        ("30^\\circ", "30"),
        ("30\\degree", "30"),
        ("\\boldsymbol{30}", "30"),
        ("\\(30\\)", "30"),
        ("\\approx 30", "30"),
        ("8.66", "\\approx 8.66"),
        ("8.7", "≈ 8.7"),
        ("x ≈ 8.66", "5 \\sqrt { 3 }"),
        ("\\mathbf{30}", "30"),
        ("30^{\\circ}", "30"),
        ("30°", "30"),
        ("30 degrees", "30"),
        ("x = 15", "15"),
        ("m\\angle A = 30^\\circ", "30"),
        ("1,000", "1000"),
        ("-8", "- 8"),
        ("3/7", "\\frac { 3 } { 7 }"),
        ("\\dfrac{6}{14}", "\\frac { 3 } { 7 }"),
        ("3\\frac{1}{2}", "3.5"),
        ("\\sqrt{12}", "2 \\sqrt { 3 }"),
        ("8√13", "8 \\sqrt { 13 }"),
        ("√(13)", "\\sqrt{13}"),
        ("12π", "12 \\pi"),
        ("12\\pi cm", "12 \\pi"),
        ("5/9", "5:9"),
        ("10y(2y-1)", "20 y^2 - 10 y"),
        ("60 > x", "x < 60"),
        ("b + a = 90", "a + b = 90"),
        ("Not enough information", "not enough information"),
        ("\\angle 1\\cong\\angle 4", "\\angle 1 \\cong \\angle 4"),
        # rounded: 5 sqrt 3 = 8.660, 3/7 = 0.4286, 12 pi = 37.699, sqrt 285 = 16.882
        ("8.66", "5 \\sqrt { 3 }"),
        ("5 \\sqrt{3}", "8.66"),
        ("0.43", "\\frac { 3 } { 7 }"),
        ("37.7", "12 \\pi"),
        ("16.9", "\\sqrt { 285 }"),
    ],
)
def test_right(answer, gold):
    assert is_right(answer, gold)


@pytest.mark.slow  # mathematics runs in a process of its own
@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("", "15"),
        ("$", "15"),
        ("=", "15"),
        ("14", "15"),
        ("-15", "15"),
        ("8", "- 8"),
        ("15x", "15"),
        ("5, 15", "15"),
        ("5 or 15", "15"),
        ("109", "108"),  # within 1%, but whole
        ("109.0", "108"),
        ("17", "\\sqrt { 285 }"),
        ("17", "16.9"),
        ("\\sqrt{89}", "2 \\sqrt { 22 }"),  # 9.434 and 9.381, both exact
        ("8.5", "5 \\sqrt { 3 }"),  # 1.8% off
        ("8√3", "8"),
        ("4", "\\angle 1 \\cong \\angle 4"),
        ("the answer is 15", "15"),
        ("C", "15"),
        ("1/0", "15"),
        ("\\frac{1}{0}", "15"),
        ("x < 61", "x < 60"),
        ("20y^2+10y", "20 y^2 - 10 y"),
    ],
)
def test_wrong(answer, gold):
    assert not is_right(answer, gold)


@pytest.mark.slow
def test_letters_count_where_there_are_choices():
    choices = ("5", "14", "15", "35")
    for right in (
        "C",
        "(C)",
        "C.",
        "C)",
        "\\text{C}",
        "15",
        "C. 15",
        "(C) 15^\\circ",
        "C: 15",
        "\\textbf{(C) }15",
        "\\text{C. }15",
    ):
        assert is_right(right, "15", choices)
    for wrong in ("A", "(B)", "D", "E", "Z", "14", "A. 15", "C. 14", "B. 14", "A. 5, C. 15"):
        assert not is_right(wrong, "15", choices)
    assert step(env(choices=list(choices)), "\\boxed{C}")[2]["reward"] == 1.0
    assert step(env(), "\\boxed{C}")[2]["reward"] == 0.0
    assert step(env(choices=None), "\\boxed{15}")[2]["reward"] == 1.0


@pytest.mark.slow
def test_the_letter_may_be_the_rows_answer():
    """As in Geometry3K's own file. Each answer was wrong."""
    choices = ("5", "14", "15", "35")
    for right in ("C", "(C)", "C. 15", "15", "x = 15"):
        assert is_right(right, "C", choices)
    for wrong in ("A", "A. 5", "14", "D"):
        assert not is_right(wrong, "C", choices)
    assert all(is_right("C", gold, choices) and not is_right("B", gold, choices) for gold in ("(C)", "C."))
    assert is_right("B", "C", ("A", "C", "B")) and not is_right("C", "C", ("A", "C", "B"))  # the names of points


def test_a_number_nearer_to_another_choice_is_wrong():
    choices = ("16.1", "16.2", "17", "18")
    assert is_right("16.19", "16.2", choices)
    assert is_right("16.2", "16.2", choices)
    assert not is_right("16.1", "16.2", choices)
    assert not is_right("16.11", "16.2", choices)
    assert is_right("16.11", "16.2")  # without choices within 1%


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [("15", "15.0", True), ("- 8", "-8", True), ("0.5", "0.50", True), ("14.9", "15", True), ("14", "15", False)],
)
def test_plain_numbers_need_no_process(answer, gold, right):
    assert is_right(answer, gold) is right  # a fast test may not start one


HOSTILE = [
    "9^{9^{9^9}}",
    "9**9**9",
    "9^{99999999}",
    "99999999!",
    "1E9999999",
    "1 E 9999999",
    "\\binom{10000000}{5000000}",
    "\\sum_{i=1}^{100000000} i",
    "(x+1)^{200}(y+2)^{200}",
    "((((((9^9)^9)^9)^9)^9)^9)",
    "{" * 40 + "5" + "}" * 40,
    "(" * 39 + "5" + ")" * 39,
    "9" * 100_000,
    "\\frac" * 5_000,
    " " * 50_000 + "x",
    "\\text" * 100_000 + "{x",
    "^" * 500_000,
    "√(" * 200_000,
    "(a+b+c+d+f+g+h+i+j)^9",
    "(a+b+c+d+f+g+h+i+j)^9=1",
    "\\sqrt{(a+b+c+d+f+g+h)^9+(j+k+l+m+n+p+q)^9}",
    "(a+b+c+d+f)^9(g+h+i+j+k)^9",
]


@pytest.fixture(scope="module")
def compare_briefly():
    """Half a second of CPU for a comparison, which has 2: what would take for ever meets either."""
    compare = BoundedFunction(f"{Path(FILE).with_name('geo3k_maths.py')}:compare", cpu_seconds=0.5)
    yield compare
    compare.close()


@pytest.fixture
def short_limit(monkeypatch, compare_briefly):
    monkeypatch.setitem(is_right.__wrapped__.__globals__, "compare", compare_briefly)
    assert is_right.__wrapped__("a+1", "1 + a")  # a usual one meets neither


@pytest.mark.slow
@pytest.mark.parametrize("gold", ["15", "a + b = 90", "20 y^2 - 10 y"])
@pytest.mark.parametrize("answer", HOSTILE, ids=[answer[:20] for answer in HOSTILE])
def test_what_would_take_for_ever_is_wrong(answer, gold, short_limit):
    began = time.thread_time()
    seen: list[bool] = []
    thread = threading.Thread(target=lambda: seen.append(is_right(answer, gold)), daemon=True)
    thread.start()
    thread.join(900)
    assert seen == [False]
    assert time.thread_time() - began < 2


@pytest.mark.slow
def test_a_hostile_answer_is_graded_while_other_threads_run():
    """The grading holds no interpreter lock: this thread counts on while another waits for a verdict."""
    seen: list[bool] = []
    thread = threading.Thread(target=lambda: seen.append(is_right("(a+b+c+d+f+g+h+i+k)^9", "16")), daemon=True)
    thread.start()
    rounds = 0
    while thread.is_alive():
        rounds += 1
        time.sleep(0)
    assert seen == [False] and rounds > 100


@pytest.mark.slow
def test_an_episode_with_hostile_mathematics_ends_with_reward_0(short_limit):
    response = "so \\boxed{(a+b+c+d+f+g+h+i+j)^9}"
    trajectory = play(Geo3kEnv, [call("(a+b+c+d+f+g+h+i+l)^9"), response], a_task(answer="15"), max_response_tokens=500)
    assert (trajectory.ending, trajectory.reward, trajectory.metrics.get("env_errors")) == ("env_done", 0.0, None)


@pytest.mark.slow
def test_it_works_outside_the_main_thread():
    seen = []
    thread = threading.Thread(target=lambda: seen.append(is_right("\\frac{6}{14}", "\\frac{3}{7}")), daemon=True)
    thread.start()
    thread.join(600)
    assert seen == [True]
    symbolic = threading.Thread(target=lambda: seen.append(is_right("b+a=91", "a + b = 91")), daemon=True)
    symbolic.start()
    symbolic.join(600)
    assert seen == [True, True]


def test_the_episode_in_the_readme_is_what_the_env_plays():
    section = (Path(FILE).parent / "README.md").read_text().split("## geo3k")[1].split("\n## ")[0]
    episode = section.split("```\n")[-2]
    assert "Use parallelogram M N P R" in episode
    said = re.split(r"^(?:user|assistant|reward)> ", episode, flags=re.MULTILINE)[2:]  # after the prompt
    responses, answers = said[0::2], said[1::2]
    played = env("6.45", max_turns=4, choices=["6.45", "12.9", "17.9", "35.8"])
    for played.turn, (response, answer) in enumerate(zip(responses, answers, strict=True)):
        observation, done, info = step(played, response)
        assert (str(info["reward"]) if done else observation["obs_str"]) == answer.strip()
    assert done
