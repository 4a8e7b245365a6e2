"""The tool ``computer_use``: mouse and keyboard actions, and the parser of their calls.

Names and meanings are those of Qwen's own tool, so that Qwen2.5-VL and Qwen3-VL can act at once: class ``ComputerUse`` of
``cookbooks/utils/agent_function_call.py`` in github.com/QwenLM/Qwen3-VL. Its coordinates are thousandths of the screen for Qwen3-VL
(a screen of 1000 x 1000), and pixels of the image that the model sees for Qwen2.5-VL. ``start_coordinate`` is our addition.

    read_action({"action": "left_click", "coordinate": [500, 250]}, (1000, 1000)) == Action("left_click", ((0.5, 0.25),))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vlmrl.env.tool_calls import Schema

CLICKS = {"left_click": ("left", 1), "right_click": ("right", 1), "middle_click": ("middle", 1)}
CLICKS |= {"double_click": ("left", 2), "triple_click": ("left", 3)}
KINDS = ("key", "type", "mouse_move", *CLICKS, "left_click_drag", "scroll", "hscroll", "wait", "terminate", "answer")
MAX_TEXT, MAX_PIXELS, MAX_SECONDS, MAX_KEYS = 2000, 10_000.0, 60.0, 8
NAMED_KEYS = {
    **{name: name.capitalize() for name in ("alt", "backspace", "control", "delete", "end", "enter", "escape")},
    **{name: name.capitalize() for name in ("home", "insert", "meta", "shift", "space", "tab")},
    **{f"arrow{name}": f"Arrow{name.capitalize()}" for name in ("up", "down", "left", "right")},
    **{name: f"Arrow{name.capitalize()}" for name in ("up", "down", "left", "right")},
    **{f"f{number}": f"F{number}" for number in range(1, 13)},
    "ctrl": "Control",
    "option": "Alt",
    "cmd": "Meta",
    "command": "Meta",
    "super": "Meta",
    "win": "Meta",
    "return": "Enter",
    "esc": "Escape",
    "del": "Delete",
    "pageup": "PageUp",
    "page_up": "PageUp",
    "pagedown": "PageDown",
    "page_down": "PageDown",
}
"""Names of keys, in small letters, and what Playwright calls them."""

Point = tuple[float, float]
"""Fractions of the screen's width and height, from the left and the top."""


@dataclass(frozen=True)
class Action:
    """One thing done with mouse or keyboard: ``Action("type", text="hi")``, ``Action("left_click", ((0.5, 0.25),))``."""

    kind: str
    points: tuple[Point, ...] = ()  # where; for a drag from a given point, from where to where
    text: str = ""  # of type and answer; for a click or scroll, the modifier keys: "ctrl+shift"
    keys: tuple[str, ...] = ()  # Playwright's names
    pixels: float = 0.0  # of a scroll; up is positive
    seconds: float = 0.0  # of wait
    mark: int | None = None  # the number of the marked element, in place of a point
    status: str = ""  # of terminate


def computer_use_schema(frame: tuple[int, int], marks: bool = False) -> Schema:
    """The tool's JSON schema for a screen of ``frame`` (width, height). With ``marks`` an element may be named by its number."""
    width, height = frame
    properties: dict[str, Any] = {
        "action": {"type": "string", "enum": list(KINDS), "description": ACTIONS_HELP},
        "keys": {"type": "array", "items": {"type": "string"}, "description": "The keys of action=key."},
        "text": {
            "type": "string",
            "description": "The text of action=type and action=answer. For clicks and scrolls: modifier keys that are held, such as "
            "ctrl or ctrl+shift.",
        },
        "coordinate": {
            "type": "array",
            "items": {"type": "number"},
            "description": f"(x, y): from the left edge, 0 to {width}, and from the top edge, 0 to {height}.",
        },
        "start_coordinate": {
            "type": "array",
            "items": {"type": "number"},
            "description": "Where action=left_click_drag starts, if not at the cursor's place.",
        },
        "pixels": {
            "type": "number",
            "description": "How far action=scroll scrolls: positive values scroll up, negative values scroll down.",
        },
        "time": {"type": "number", "description": "The seconds of action=wait."},
        "status": {
            "type": "string",
            "enum": ["success", "failure"],
            "description": "The outcome, for action=terminate.",
        },
    }
    if marks:
        properties["mark"] = {
            "type": "integer",
            "description": "The number drawn on an element of the screenshot, in place of coordinate.",
        }
    description = (
        "Use a mouse and keyboard to interact with a computer, and take screenshots.\n"
        f"* The screen's resolution is {width}x{height}.\n"
        "* Each action is followed by a new screenshot. Find the coordinates of an element in the last one.\n"
        "* Click in the center of buttons, links and icons, not on their edges."
    )
    parameters = {"type": "object", "required": ["action"], "properties": properties}
    return {"type": "function", "function": {"name": NAME, "description": description, "parameters": parameters}}


NAME = "computer_use"
ACTIONS_HELP = """The action to perform:
* `key`: Press the keys in order, then release them in reverse order.
* `type`: Type a text on the keyboard.
* `mouse_move`: Move the cursor to a coordinate.
* `left_click`, `right_click`, `middle_click`, `double_click`, `triple_click`: Click at a coordinate.
* `left_click_drag`: Drag from the cursor's place to a coordinate with the left button held.
* `scroll`, `hscroll`: Turn the mouse wheel, vertically or horizontally.
* `wait`: Wait some seconds for a change.
* `terminate`: End the task and report its status.
* `answer`: Answer a question, which ends the task."""


def read_action(arguments: dict[str, Any], frame: tuple[int, int], marks: bool = False) -> Action:
    """The action of a call's arguments. ``frame`` is the width and height that coordinates refer to.

    Raises ValueError, whose text explains to the model what is wrong.
    """
    kind = arguments.get("action")
    if kind not in KINDS:
        raise ValueError(f"action must be one of {', '.join(KINDS)}, but it is {_short(kind)}.")
    mark = arguments.get("mark") if marks else None
    if mark is not None and (not isinstance(mark, int) or isinstance(mark, bool)):
        raise ValueError(f"mark must be the number of an element, but it is {_short(mark)}.")
    points = _points(kind, arguments, frame, optional=mark is not None)
    text = _text(kind, arguments)
    keys = _keys(arguments.get("keys", arguments.get("text"))) if kind == "key" else ()
    if kind in CLICKS or kind in ("scroll", "hscroll"):
        keys = _keys(text) if text else ()
    pixels = _number("pixels", arguments, MAX_PIXELS, signed=True) if kind in ("scroll", "hscroll") else 0.0
    seconds = _number("time", arguments, MAX_SECONDS) if kind == "wait" else 0.0
    status = str(arguments.get("status", "success")) if kind == "terminate" else ""
    return Action(kind, points, text, keys, pixels, seconds, mark, status)


def _points(kind: str, arguments: dict[str, Any], frame: tuple[int, int], optional: bool) -> tuple[Point, ...]:
    needed = kind == "mouse_move" or kind in CLICKS or kind == "left_click_drag"
    names = [name for name in ("start_coordinate", "coordinate") if arguments.get(name) is not None]
    if needed and "coordinate" not in names and not optional:
        raise ValueError(f"{kind} needs coordinate, [x, y].")
    if not needed and kind not in ("scroll", "hscroll"):
        return ()
    if kind != "left_click_drag":
        names = [name for name in names if name == "coordinate"]
    return tuple(_point(name, arguments[name], frame) for name in names)


def _point(name: str, value: Any, frame: tuple[int, int]) -> Point:
    is_pair = isinstance(value, list | tuple) and len(value) == 2 and all(_is_number(each) for each in value)
    if not is_pair or not all(0 <= each <= limit for each, limit in zip(value, frame, strict=True)):
        width, height = frame
        raise ValueError(
            f"{name} must be [x, y] with x from 0 to {width} and y from 0 to {height}, but it is {_short(value)}."
        )
    return value[0] / frame[0], value[1] / frame[1]


def _text(kind: str, arguments: dict[str, Any]) -> str:
    text = arguments.get("text", "")
    if kind in ("type", "answer") and not isinstance(arguments.get("text"), str):
        raise ValueError(f"{kind} needs text, a string.")
    if not isinstance(text, str):
        raise ValueError(f"text must be a string, but it is {_short(text)}.")
    if len(text) > MAX_TEXT:
        raise ValueError(f"text must have at most {MAX_TEXT} characters, but it has {len(text)}.")
    return text


def _keys(value: Any) -> tuple[str, ...]:
    """``["ctrl", "A"]`` or ``"ctrl+a"`` as Playwright's names: ``("Control", "a")``."""
    names: Sequence[Any] = value if isinstance(value, list) else value.split("+") if isinstance(value, str) else []
    if not 0 < len(names) <= MAX_KEYS or not all(isinstance(name, str) for name in names):
        raise ValueError(f'keys must be 1 to {MAX_KEYS} names, such as ["ctrl", "a"], but they are {_short(value)}.')
    return tuple(map(_key, names))


def _key(name: str) -> str:
    if len(name) == 1 and name.isprintable():
        return name
    known = NAMED_KEYS.get(name.strip().lower())
    if known is None:
        raise ValueError(
            f"there is no key {_short(name)}; keys are characters, enter, tab, esc, ctrl, up, f1 and so on."
        )
    return known


def _number(name: str, arguments: dict[str, Any], limit: float, signed: bool = False) -> float:
    value: Any = arguments.get(name)
    low = -limit if signed else 0.0
    if not _is_number(value) or not low <= value <= limit:
        raise ValueError(f"{name} must be a number from {low:g} to {limit:g}, but it is {_short(value)}.")
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: Any) -> str:
    return repr(value)[:80]
