"""Recorded conversations as tasks whose prompt is the whole conversation, from datasets in the usual forms.

- OpenAI's: a column ``messages``, with image parts as data URIs, paths, bytes, ``{"bytes", "path"}`` or PIL images. The folder that
  `vlmrl collect` writes has this form.
- TRL's: the same with ``{"type": "image"}`` parts or ``<image>`` marks, whose images are in a column ``images``; or ``prompt`` and
  ``completion``, each a list of messages or the text of one.
- ShareGPT's and LLaVA's: a column ``conversations`` of ``{"from", "value"}``, ``<image>`` marks and a column ``image`` or ``images``;
  the system message may be in a column ``system`` or ``system_prompt``.

Tool calls are those of OpenAI's API, with arguments as JSON or as an object, ``function_call`` messages, or plain text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmrl.config import Config, Conversations
from vlmrl.config.code import local_data
from vlmrl.data.mixture import TaskMixture
from vlmrl.data.row_images import OWN_SOURCE, RowImages, image_parts, json_as_written, without_nulls
from vlmrl.data.row_problems import MARK, call_problem, content_problem, unread_mark
from vlmrl.data.source import MESSAGES_AS_TEXT, TEMPLATED, Row, TaskSource, task_seed, train_and_held_out
from vlmrl.multimodal.masks import REASONING, RowError
from vlmrl.multimodal.messages import parts_of_message
from vlmrl.types import Message, Task

if TYPE_CHECKING:
    from vlmrl.data.dataset_rows import Rows

EPISODES = "episodes.jsonl"
"""The file of conversations in the folder that `vlmrl collect` writes."""
COLUMNS = {
    "messages": ("messages", "conversations", "conversation"),
    "prompt": ("prompt",),
    "completion": ("completion",),
    "images": ("images", "image"),
    "tools": ("tools",),
    "system": ("system", "system_prompt"),
}
"""The columns that a field is looked for in, without `sft.data.NAME.columns`."""
FIELDS = {"role", "content", "name", "weight", "loss", "tool_calls", "tool_call_id", "function_call", "from", "value"}
"""The fields of a message that are read, beside those of :data:`~vlmrl.multimodal.masks.REASONING`."""
SCHEMA = {"parameters", "input_schema"}
"""What a tool's schema has, and a call has not."""
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "function": "tool",
    "developer": "system",
}
"""Roles by their names in other forms."""


def load_conversations(config: Config) -> tuple[TaskMixture, TaskMixture | None]:
    """The conversations of `sft.data` to train on, and those held out to measure the loss on, if there are any.

    Raises:
        ValueError: a dataset does not exist, or has no column of messages.
    """
    loaded = {name: _load(name, data, config.seed) for name, data in config.sft.data.items()}
    weights = {name: len(loaded[name][0]) * data.epochs for name, data in config.sft.data.items()}
    kept = {name: rest for name, (_, rest) in loaded.items() if rest is not None}
    mixed = TaskMixture({name: rows for name, (rows, _) in loaded.items()}, weights)
    return mixed, TaskMixture(kept, dict.fromkeys(kept, 1.0)) if kept else None


def _load(name: str, data: Conversations, seed: int) -> tuple[TaskSource, TaskSource | None]:
    local = local_data(data.path, field=f"sft.data.{name}.path")
    if local is not None and (local / EPISODES).is_file():
        local = local / EPISODES
    from vlmrl.data.files import load_rows  # here: it imports datasets, which a generator does not need

    try:
        rows = load_rows(str(local or data.path), data.split)
    except ValueError as error:
        raise ValueError(str(error).replace("data.path", f"sft.data.{name}.path", 1)) from error
    columns = _found_columns(name, data, rows.columns)
    unread = "" if local is not None and local.name == EPISODES else _unread(rows, columns)
    notes = [f"not read: {unread}"] if unread else []
    roots = [Path.cwd()] if local is None else [local if local.is_dir() else local.parent, Path.cwd()]

    def label(index: int) -> str:
        return f"row {index} of {data.path!r} ({data.split})"

    def make(index: int) -> Task:
        where = label(index)
        try:
            task = Task(f"{name}/{index}", [], source=name, seed=task_seed(seed, index), part=name)
            return _conversation(task, rows[index], columns, data.turns, RowImages(where, roots))
        except RowError as error:
            raise RowError(error.reason, f"{where}: {error}") from error
        except Exception as error:
            raise RowError("unreadable", f"{where}: {type(error).__name__}: {error}") from error

    sides = train_and_held_out(range(len(rows)), data.held_out)
    if not sides[0]:
        raise ValueError(f"sft.data.{name}.held_out {data.held_out} leaves none of {len(rows)} rows to train on.")
    train, rest = (
        TaskSource(make, side, seed, label=label, warnings=notes, sample_hash=rows.sample_hash) for side in sides
    )
    return train, rest if sides[1] else None


def _found_columns(name: str, data: Conversations, present: Sequence[str]) -> dict[str, list[str]]:
    """The columns of each field that the dataset has. Rows of different datasets in one file have different ones."""
    usual = {field: [each for each in names if each in present] for field, names in COLUMNS.items()}
    if not {"prompt", "completion"}.isdisjoint(data.columns):
        if "messages" in data.columns:
            raise ValueError(f"sft.data.{name}.columns must have messages, or prompt and completion, but it has both.")
        usual["messages"] = []
    found = usual | {field: [column] for field, column in data.columns.items()}
    if found["messages"]:
        found |= {"prompt": [], "completion": []}
    problem = next(
        (f"there is no column {name!r}" for names in found.values() for name in names if name not in present), None
    )
    if not found["messages"] and not (found["prompt"] and found["completion"]) and problem is None:
        problem = (
            f"there is no column of messages, under a name of {', '.join(COLUMNS['messages'])}: set `messages COLUMN`, or both of "
            "`prompt COLUMN completion COLUMN`"
        )
    if problem:
        raise ValueError(f"sft.data.{name}.columns: {problem}. The columns of {data.path!r} are: {', '.join(present)}.")
    return found


def _unread(rows: Rows, columns: Mapping[str, list[str]]) -> str:
    """``columns id, context; fields of messages lang``: what of the columns and of the first row's messages is not read."""
    sources = columns["messages"] or [*columns["prompt"], *columns["completion"]]
    try:
        cells = [cell for name in sources if (cell := rows.first(name))]
        is_list = bool(columns["messages"])  # else a text is a message
        messages = [message for cell in cells if is_list or not isinstance(cell, str) for message in _parsed(cell)]
    except (RowError, ValueError, RecursionError):  # a bad row, which is named when it is read
        messages = []
    used = {"functions", "responses", "last_response_cut"}.union(sources, *columns.values())
    found = {
        "columns": [name for name in rows.columns if name not in used],
        "fields of messages": list(
            dict.fromkeys(key for message in messages for key in message if key not in FIELDS.union(REASONING))
        ),
    }
    return "; ".join(f"{what} {', '.join(names):.300}" for what, names in found.items() if names)


def _conversation(task: Task, row: Row, columns: Mapping[str, list[str]], turns: str, row_images: RowImages) -> Task:
    """The task of a row: its messages in OpenAI's form with their images, its tools, and which responses are trained."""

    def given(field: str) -> Any:
        return next((row[name] for name in columns.get(field, ()) if row[name]), None)

    if columns["messages"]:
        asked, rest = [], _parsed(given("messages"))
    else:
        asked, rest = (
            _messages(given(field) or [], role) for field, role in (("prompt", "user"), ("completion", "assistant"))
        )
    messages = [_message(each) for each in [*asked, *rest]]
    added = int(bool(given("system")) and not any(each["role"] == "system" for each in messages))
    if added:
        messages.insert(0, {"role": "system", "content": given("system")})
    first = added + len(asked)  # a prompt's responses have no loss, as in TRL
    _check_roles(messages)
    weights = [message.pop("weight", None) for message in messages]
    responses = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    for place in responses:
        if weights[place] not in (None, 0, 1):
            raise RowError(
                "unreadable", f"message {place}: its weight must be 0 or 1, but it is {weights[place]!r:.50}."
            )
    is_cut = row.get("last_response_cut") is True and not row.get("responses")
    last = messages[responses[-1]]
    if is_cut and not any(str(last.get(key) or "").strip() for key in ("content", "tool_calls", *REASONING)):
        weights[responses[-1]] = 0
    first = responses[-1] if turns == "last" else first
    trained = [weights[place] != 0 and place >= first for place in responses]
    if not any(trained):
        raise RowError(
            "untrained",
            "no response has a loss: the weights of all are 0, all are in the prompt, or the only one was cut before its text.",
        )
    try:
        row_images.set_column(given("images"))
        prompt = row_images.messages(_marks_as_parts(messages, len(row_images.sources)))
    except RowError:
        raise
    except ValueError as error:
        raise RowError("images", str(error).removeprefix(f"{row_images.where}: ")) from error
    if problem := unread_mark(prompt, row):
        raise RowError("marks", f"{problem}.")
    number_of = {place - added: number for number, place in enumerate(responses)}
    sampled = {number_of[each["message"]]: each["token_ids"] for each in row.get("responses") or []}
    has_calls = any(message.get("tool_calls") for message in messages)
    tools = _parsed(given("tools") or (row.get("functions") if has_calls else None) or [])
    if has_calls and not tools and (other := _unread_tools(messages, row)):
        found = f"the row has calls, but no tools: those of its column {other!r} are not read"
        raise RowError("unreadable", f"{found}. Set sft.data.NAME.columns tools {other}.")
    images = [part["image"] for message in prompt for part in image_parts(message)]
    data = {"tools": without_nulls(tools), "trained": trained, "sampled": sampled, "is_cut": is_cut}
    return Task(task.id, prompt, images, data=data, source=task.source, seed=task.seed, part=task.part)


def _unread_tools(messages: Sequence[Message], row: Row) -> str:
    """The column of another name that has tools which no text of the messages names; ``""`` if there is none."""
    texts = "\n".join(str(part.get("text")) for message in messages for part in parts_of_message(message))
    for name, value in row.items():
        if "tool" not in name.lower() and "function" not in name.lower():
            continue
        try:
            schemas = [tool.get("function") or tool for tool in _parsed(value)]
        except (ValueError, RecursionError):  # no tools
            continue
        described = [each for each in schemas if isinstance(each, dict) and not SCHEMA.isdisjoint(each)]
        if any(str(each.get("name")) not in texts for each in described if each.get("name")):
            return name
    return ""


def _parsed(value: Any) -> list[dict[str, Any]]:
    """A list of objects that may be written as JSON."""
    found = json_as_written(value) if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise RowError("unreadable", f"messages and tools must be lists of objects, not {value!r:.100}.")
    return found


def _messages(cell: Any, role: str) -> list[dict[str, Any]]:
    """The messages of a prompt or a completion: a list of them, or the text of one of this ``role``."""
    if not isinstance(cell, str):
        return _parsed(cell)
    # An answer may be JSON with one of these keys.
    has_both = all(re.search(rf"""["']({keys})["']\s*:""", cell) for keys in ("role|from", "content|value"))
    if (has_both and MESSAGES_AS_TEXT.match(cell)) or (role == "user" and TEMPLATED.match(cell)):
        problem = "has messages written as a text, or in a chat template: write a list of them, or the text alone"
        raise RowError("unreadable", f"the text of the {role} {problem}.")
    return [{"role": role, "content": cell}]


def _message(given: dict[str, Any]) -> Message:
    """A message in OpenAI's form, with the arguments of tool calls as objects."""
    role = given.get("role") or given.get("from")
    message = {key: value for key, value in given.items() if value is not None and key not in ("from", "value", "role")}
    message = {"role": ROLES.get(str(role), role), "content": given.get("value")} | message
    if message.get("loss") in (0, 1):  # ms-swift's; another number may be a loss that was measured
        message.setdefault("weight", int(message.pop("loss")))
    calls: Any = message.pop("tool_calls", None) or (
        [message.pop("function_call")] if message.get("function_call") else []
    )
    if role == "function_call":
        kept = {key: message[key] for key in ("weight", *REASONING) if key in message}
        message = {"role": "assistant", "content": "", **kept}
        calls = json_as_written(given["value"]) if "value" in given else [given]
    calls = json_as_written(calls) if isinstance(calls, str) else calls
    if calls:
        message["tool_calls"] = [_call(call) for call in (calls if isinstance(calls, list) else [calls])]
    return message


def _call(call: dict[str, Any]) -> dict[str, Any]:
    if problem := call_problem(call):
        raise RowError("unreadable", f"{problem}.")
    function = dict(call.get("function") or {key: call.get(key) for key in ("name", "arguments")})
    arguments = function.get("arguments")
    if isinstance(arguments, str):  # as in the API; templates write an object
        try:
            function["arguments"] = json_as_written(arguments or "{}")
        except ValueError as error:
            raise RowError(
                "unreadable", f"the arguments of a tool call are not JSON ({error}): {arguments!r:.100}."
            ) from error
    return {"type": "function", "function": function}


def _check_roles(messages: Sequence[Message]) -> None:
    """A system message or none, then the user; responses follow the user or tools, and tools follow responses. All have content."""
    before: dict[Any, set[Any]] = {
        "system": {None},
        "user": {None, "system", "user", "assistant", "tool"},
        "assistant": {"user", "tool"},
        "tool": {"assistant", "tool"},
    }
    last = None
    for place, message in enumerate(messages):
        if problem := content_problem(message):
            raise RowError("unreadable", f"message {place}: {problem}.")
        role = message["role"]
        if role not in before:
            raise RowError("roles", f"message {place} has the role {role!r}, not one of {', '.join(before)}.")
        if last not in before[role]:
            raise RowError("roles", f"message {place}, of the role {role}, follows {last or 'nothing'}.")
        last = role
    if not any(message["role"] == "assistant" for message in messages):
        raise RowError("roles", "there is no response to train on.")


def _marks_as_parts(messages: list[Message], images: int) -> list[Message]:
    """The messages with each ``<image>`` mark as a part without a source; as they are, if their images have sources already."""
    contents = [message["content"] for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    shown = [part for part in parts if part.get("type") in ("image", "image_url")]
    bare = [part for part in shown if not any(part.get(key) is not None for key in OWN_SOURCE)]

    def is_marked(message: Message) -> bool:
        content = message["content"]
        return message["role"] in ("user", "tool") and isinstance(content, str) and MARK in content

    marks = sum(message["content"].count(MARK) for message in messages if is_marked(message))
    if len(shown) > len(bare):
        return messages
    if marks + len(bare) > images:
        raise RowError("marks", f"there are {marks + len(bare)} marks or parts of images, but {images} images.")
    return [each | {"content": _split_at_marks(each["content"])} if is_marked(each) else each for each in messages]


def _split_at_marks(text: str) -> list[dict[str, Any]]:
    """``"a<image>b"`` as a text, an image without a source and a text."""
    first, *others = text.split(MARK)
    parts = [{"type": "text", "text": first}]
    for piece in others:
        parts += [{"type": "image"}, {"type": "text", "text": piece}]
    return [part for part in parts if part.get("text") != ""]
