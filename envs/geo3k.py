r"""geo3k: a geometry problem with a diagram. A tool scores answers before the agent gives its final one.

A response with ``<tool_call>{"name": "calc_score", "arguments": {"answer": "15"}}</tool_call>`` gets the answer's score as
an observation. A response without a call ends the episode: the answer in its last ``\boxed{}`` earns 1 or 0.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from vlmrl import BoundedFunction, LimitError, Task, ToolCall, ToolEnv, ToolResult, obs, read_tool_calls

TOLERANCE = 0.01  # relative, for decimal numbers: 8.66 equals 5 sqrt 3; 17 equals neither sqrt 285 nor 17.1
SPELLINGS = {"π": r"\pi ", "²": "^2", "×": r"\times ", "·": r"\cdot ", "−": "-", "≈": "=", r"\approx": "="}
SPELLINGS |= dict.fromkeys(("\\$", "$", "\\%", "%"), "")
LENGTHS = r"[kcm]?m|in|ft|yd|inch(?:es)?|feet|meters?|miles?|units?"
UNITS = re.compile(rf"(?<=[\d}})i]) ?(?:deg(?:rees?)?|(?:square |sq\.? )?(?:{LENGTHS})(?: ?\^ ?\{{?[23]\}}?)?)$")
NUMBER = re.compile(r"-? ?\d{1,12}(?:\.\d{1,12})?")  # needs no mathematics
MAX_LENGTH = 80  # characters of an answer that `compare` reads; the longest right one has 36
compare = BoundedFunction(f"{Path(__file__).resolve().with_name('geo3k_maths.py')}:compare")


class Geo3kEnv(ToolEnv):
    """One problem. Without ``score_in_observation`` the tool accepts an answer and does not say whether it is right."""

    unfinished_reward = 0.0  # an episode that a budget ended before the final answer

    def __init__(self, task: Task, score_in_observation: bool = True) -> None:
        super().__init__(task)
        self.score_in_observation = score_in_observation
        self.calls = 0

    def calc_score(self, answer: str) -> str:
        r"""Score an answer to the problem before giving it as the final one.

        Args:
            answer: The answer, for example 12 or 5\sqrt{3}.
        """
        return self.verdict(last_boxed(answer) or answer)

    functions = (calc_score,)

    def judge(self, response: str) -> dict[str, Any]:
        boxed = last_boxed(response)
        return {"reward": self.score(boxed), "format": float(bool(boxed)), "tool_calls": self.calls}

    def read_calls(self, response: str) -> list[ToolCall]:
        """The last whole call, its arguments checked."""
        whole, end, _ = response.rpartition("</tool_call>")
        return [checked(call) for call in read_tool_calls(whole + end, self.tools, self.tool_format)[-1:]]

    def show_results(self, results: list[ToolResult]) -> tuple[dict[str, Any], dict[str, Any]]:
        (result,) = results
        self.calls += 1
        text = result.problem or result.value
        if self.turn == self.max_turns - 2:
            text += " This was the last check: reply now with the final answer in \\boxed{}, without a tool call."
        return obs(text), {"bad_calls": float(bool(result.problem))}

    def verdict(self, answer: str) -> str:
        if not self.score_in_observation:
            return "The answer was received."
        if self.score(answer):
            return "Score: 1. The answer is right: give it as the final answer in \\boxed{}."
        return "Score: 0. The answer is wrong: look at the diagram again and check each step."

    def score(self, answer: str) -> float:
        return float(is_right(answer, str(self.task.answer), tuple(self.task.data.get("choices") or ())))


def checked(call: ToolCall) -> ToolCall:
    """The call with its answer as text, or with the ``problem`` that the model reads. Numbers are answers too."""
    answer = call.arguments.get("answer")
    _, not_json, reason = call.problem.partition("not valid JSON: ")
    if not_json:
        return ToolCall(problem=f"The tool call is not valid JSON ({reason.removesuffix('.')[:100]}).")
    if call.name != "calc_score":
        problem = 'The tool call names no tool there is: the only one is calc_score, {"name": "calc_score", ...}.'
        return ToolCall(problem=problem)
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)) or not str(answer).strip():
        problem = 'The tool call has no answer: calc_score takes {"answer": "..."} with a text that is not empty.'
        return ToolCall(problem=problem)
    return ToolCall(call.name, {"answer": str(answer)})


def last_boxed(text: str) -> str:
    r"""The content of the last closed ``\boxed{...}``, with braces inside it; ``""`` if there is none."""
    opened: list[re.Match[str]] = []
    start = end = 0
    for token in re.finditer(r"\\boxed\s*\{|(?<!\\)[{}]", text):
        if token.group() != "}":
            opened.append(token)
        elif opened and (opening := opened.pop()).group() != "{" and opening.end() > start:
            start, end = opening.end(), token.start()
    return text[start:end].strip()


@lru_cache(maxsize=4096)  # the members of a group give the same answers
def is_right(answer: str, gold: str, choices: tuple[str, ...] = ()) -> bool:
    """Whether ``answer`` equals ``gold``: the right letter, the same text, the same mathematics, or a number close to it."""
    if len(answer) > 10 * max(MAX_LENGTH, len(gold)):
        return False
    answer, gold, *options = map(plain, (answer, gold, *choices))
    lettered = dict(zip(ascii_uppercase, options, strict=False))
    if gold not in options:
        gold = lettered.get(gold.strip("()."), gold)  # rows that give the letter as the answer
    if options and (letter := re.fullmatch(r"\(?([A-Z])[).]?", answer)):
        return gold == lettered.get(letter[1])
    listed = re.fullmatch(r"\(?([A-Z])(?:[).:,]+ ?| )(.+)", answer)  # as the prompt lists a choice: "C. 15"
    if listed and listed[2] == lettered.get(listed[1]):
        answer = listed[2]
    if not answer or answer.replace(" ", "").casefold() == gold.replace(" ", "").casefold():
        return bool(answer)
    gold = gold.removeprefix("=").strip()  # of "≈ 8.7"
    if not re.search("[=<>]", gold):
        answer = answer.rsplit("=", 1)[-1].strip()
    texts = [answer, gold, *(option for option in options if option != gold)]
    if not answer or len(answer) > MAX_LENGTH:
        return False
    try:
        is_simple = all(map(NUMBER.fullmatch, texts))
        numbers, is_same = ([float(text.replace(" ", "")) for text in texts], False) if is_simple else compare(*texts)
    except LimitError:
        return False
    mine, right, *others = numbers
    if mine is None or right is None:
        return is_same
    decimal = mine % 1 != 0 and "." in answer + gold
    near = abs(mine - right) <= (TOLERANCE if decimal else 1e-9) * abs(right)
    return near and all(abs(mine - right) <= abs(mine - other) for other in others if other is not None)


def plain(text: str) -> str:
    """A normal form: no marks of inline mathematics, units, degrees or text commands."""
    text = re.sub(r"√ ?(\d+)", r"\\sqrt{\1}", re.sub(r"√ ?\(([^()]*)\)", r"\\sqrt{\1}", text))
    for old, new in SPELLINGS.items():
        text = text.replace(old, new)
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf|boldsymbol)\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\^\s*\\circ|\^\s*\{\s*\\circ\s*\}|\\degree(?![a-zA-Z])|\\[,;! ()]|[°~]", " ", text)
    return UNITS.sub("", " ".join(text.split()).rstrip("."))
