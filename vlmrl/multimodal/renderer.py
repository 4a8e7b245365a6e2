"""Messages to token ids, and a response's ids to text.

The turn loop renders the prompt once and each observation as a delta, so that no sampled id is ever re-encoded. A delta is what
the chat template writes after a fixed base conversation, cut after the base's last end-of-turn id: the newline that ChatML
templates put after ``<|im_end|>`` is its first token. `rollout/history.py` decides where each is used.

Text from datasets, users, tools and retrievers is data: an added token of the tokenizer that is written in it, such as ``<|im_end|>``
or ``<tool_call>``, is encoded as plain text. What the template writes is encoded as tokens, and so are ``<tool_call>``, ``<think>``
and ``<|box_start|>`` in the assistant's own messages.

Rendered ids hold one placeholder per image, as engines expect them; `placeholders.py` converts them to the form that models are
trained on.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import chain, groupby, pairwise
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from vlmrl.multimodal.added_tokens import ESCAPE, AddedTokens, cuts_cleanly
from vlmrl.multimodal.messages import characters_of, kind_of_part, map_texts, parts_of_message, tools_as_user
from vlmrl.multimodal.placeholders import numbers_images
from vlmrl.multimodal.tokenizer_backends import backends_of, ids_of_text, least_tokens, most_characters
from vlmrl.types import ImageSource, Message
from vlmrl.utils.kept import Kept

BASE: list[Message] = [{"role": "system", "content": "."}, {"role": "user", "content": "."}]
OUR_TEMPLATES = "`chatml`, `smolvlm` for SmolVLM, `glm` for GLM-V"  # for errors
KEPT_BYTES = 32 * 2**20  # of the texts, and of the token ids, of sets of tools: agents choose their tools themselves
LONG_HEAD = 1000  # characters; encoding them takes longer than finding their ids
# transformers keeps the marks of a rendering in the compiled template, which all threads share: renderings with marks have their own.
_MARKING = threading.Lock()
MARKED = "{# marked #}\n"  # renders as nothing


class TooLongError(ValueError):
    """A text has more tokens than allowed, which is known before it is encoded. ``least`` is a lower bound of their number."""

    def __init__(self, least: int) -> None:
        super().__init__(f"the text has at least {least} tokens.")
        self.least = least


@dataclass(frozen=True)
class Rendered:
    """Token ids with one placeholder per image, and the images' sources in order."""

    token_ids: list[int]
    images: list[ImageSource]


class Renderer:
    """Renders with one tokenizer and one chat template.

    ``image_token`` is the text of the model's image placeholder, ``None`` for a text model. ``end_of_turn`` is the text of the
    token that closes a turn, by default the tokenizer's end-of-sequence token. ``stop_ids`` are further ids that end a response.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        image_token: str | None = None,
        chat_template: str | None = None,
        end_of_turn: str | None = None,
        stop_ids: Iterable[int] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template or tokenizer.chat_template
        if not self.chat_template:
            raise ValueError(
                f"the tokenizer has no chat template; name one with model.chat_template (ours: {OUR_TEMPLATES})."
            )
        self.image_token = image_token
        self.image_token_id = None if image_token is None else tokenizer.convert_tokens_to_ids(image_token)
        self.end_of_turn = end_of_turn or tokenizer.eos_token
        self.end_of_turn_id: int = tokenizer.convert_tokens_to_ids(self.end_of_turn)
        self.stop_ids = frozenset({self.end_of_turn_id, *stop_ids})
        self._tokens = AddedTokens(tokenizer)
        self._backend, self._plain_backend = backends_of(tokenizer)
        self._most_characters = most_characters(self._backend)
        self._bases: Kept[str] = Kept(KEPT_BYTES, sys.getsizeof)
        self._heads: Kept[array[int]] = Kept(KEPT_BYTES, lambda ids: ids.itemsize * len(ids))
        self._keeps_heads = self._most_characters is not None and cuts_cleanly(tokenizer, self.end_of_turn_id)
        self._texts: dict[int, str] = {}
        self._shown_roles: dict[tuple[str, bool], bool] = {}
        self._template = _with_times(self.chat_template)
        self._takes_strings = True
        self._takes_strings = self.write(BASE, None) != self.write([m | {"content": ","} for m in BASE], None)
        self._numbers_images = numbers_images(self.write, BASE)
        self.opening = self._find_opening()

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), *, limit: int | None = None
    ) -> Rendered:
        """The whole conversation with the generation prompt at its end.

        Raises TooLongError instead of encoding a text that certainly has more than ``limit`` tokens.
        """
        self._check_roles(messages, begins=True)
        clean, images = self.clean(messages)
        text = self.write(clean, self.check_tools(tools))
        return self._finish(text, images, messages, limit, keeps_head=bool(tools))

    def check_length(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], limit: int) -> None:
        """Raise TooLongError for contents and tools whose texts certainly have more than ``limit`` tokens, without rendering them."""
        shown = [message.get("content") for message in messages]
        self._check_characters(characters_of((shown, list(tools))), limit)

    def check_text(self, text: str, limit: float | None) -> None:
        """Raise TooLongError for a text of :meth:`write` whose length or beginning shows that it has more than ``limit`` tokens."""
        self._check_characters(len(text), limit)
        if limit is not None and (least := least_tokens(self.encode_written, text, limit)):
            raise TooLongError(least)

    def _check_characters(self, characters: int, limit: float | None) -> None:
        if limit is not None and self._most_characters and characters > limit * self._most_characters:
            raise TooLongError(-(-characters // self._most_characters))

    def check_tools(self, tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
        """:meth:`clean_tools`. Raises ValueError if the chat template does not render the tools."""
        schemas = self.clean_tools(tools)
        if schemas and self._base(schemas) == self._base(None):
            raise ValueError(
                f"the env has {len(schemas)} tools, but the chat template does not show them; set model.chat_template (ours do: "
                f"{OUR_TEMPLATES}), or leave Env.tools empty and describe the tools in the prompt."
            )
        return schemas

    @property
    def tool_format(self) -> str:
        """The format of tool calls that the chat template asks the model for: a name in `env/tool_calls.py`."""
        marks = {"glm": "<arg_key>", "xml": "<function="}
        return next((name for name, mark in marks.items() if mark in self.chat_template), "json")

    @cached_property
    def has_tool_role(self) -> bool:
        """Whether the chat template shows messages of the role ``tool``, and their images if the model reads any."""
        content: Any = "result"
        if self.image_token is not None:
            content = [{"type": "image"}, {"type": "text", "text": content}]
        try:
            shown = self.write([*BASE, {"role": "tool", "content": content}], None)
        except Exception:  # a template may raise for any role, and no type of error is agreed on
            return False
        return "result" in shown and (self.image_token is None or self.image_token in shown)

    def _check_roles(self, messages: Sequence[Message], begins: bool) -> None:
        """Raise ValueError for a message that the chat template leaves out, as Qwen3-VL's does a second system message.

        ``begins``: the first of ``messages`` is the conversation's.
        """
        for role, first in dict.fromkeys((str(each.get("role")), begins and not n) for n, each in enumerate(messages)):
            if (role, first) not in self._shown_roles:
                self._shown_roles[role, first] = self._shows(role, first)
            if not self._shown_roles[role, first]:
                place = "in first place" if first else "after the first message"
                raise ValueError(
                    f"the chat template leaves out messages of the role {role!r:.50} {place}: give it another role, such as user, "
                    "or set model.chat_template."
                )

    def _shows(self, role: str, first: bool) -> bool:
        """Whether the text depends on the content of such a message."""

        def written(content: str) -> str:
            message = {"role": self._tokens.escape_name(role), "content": content}
            return self.write([message, BASE[1]] if first else [*BASE, message], None)

        try:
            return written("1") != written("2")
        except Exception:  # then it raises for such messages, too
            return True

    def adapt_tool_messages(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as the chat template can show them.

        A template that refuses tool messages, or loses their images, gets those that follow each other as one user message, each
        between ``<tool_response>`` tags, as Qwen's templates write them.
        """
        return list(messages) if self.has_tool_role else tools_as_user(messages)

    def delta(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        *,
        response: Sequence[int] | None = None,
        limit: int | None = None,
    ) -> Rendered:
        """The ids that an observation adds after ``response``, by default one that ends with an end-of-turn id.

        Another is closed by that id first. Where the template has none, the first id, which opens the next turn, is left out if the
        response ends with it. Raises TooLongError instead of encoding a text that certainly has more than ``limit`` tokens.
        """
        self._check_roles(messages, begins=False)
        clean, images = self.clean(messages)
        self._check_appended(images)
        schemas = self.clean_tools(tools)
        base = self._base(schemas)
        full = self.write([*BASE, *clean], schemas)
        if not full.startswith(base):
            raise ValueError(
                "the chat template rewrites earlier messages when an observation follows, so observations cannot be "
                f"appended; it rendered {full[: len(base)]!r} where the conversation had {base!r}."
            )
        is_closed = (
            response is None or list(response[-1:]) == [self.end_of_turn_id] or not base.endswith(self.end_of_turn)
        )
        rendered = self._finish(("" if is_closed else self.end_of_turn) + full[len(base) :], images, messages, limit)
        opens_next = response and not base.endswith(self.end_of_turn) and rendered.token_ids[:1] == list(response[-1:])
        return Rendered(rendered.token_ids[1:], images) if opens_next else rendered

    def inline(self, messages: Sequence[Message], *, limit: int | None = None) -> Rendered:
        """The ids that an observation adds in the middle of a response: its bare text, and images as the template writes them.

        Raises TooLongError instead of encoding a text that certainly has more than ``limit`` tokens.
        """
        parts = [part for message in messages for part in parts_of_message(message)]  # texts of two messages may join
        (clean,), images = self.clean([{"role": "user", "content": parts}])
        self._check_appended(images)
        content = clean["content"]
        shown = [{"type": "text", "text": content}] if isinstance(content, str) else content
        text = "".join(part["text"] if part["type"] == "text" else self._image_text for part in shown)
        return self._finish(text, images, messages, limit)

    def conversation(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), examples: Sequence[bool] = ()
    ) -> tuple[Rendered, list[int]]:
        """A finished conversation, and a mask that is 1 on the ids between the template's generation markers.

        The text is encoded in pieces cut at the markers, as it would have been sampled. ``examples``: for each message of the role
        ``assistant`` whether it has mask 0.
        """
        if not self.marks_responses:
            raise ValueError(
                "the chat template has no {% generation %} markers, which mark the tokens of the responses; set "
                f"model.chat_template (ours have them: {OUR_TEMPLATES}), or rollout.samples to step_wise."
            )
        self._check_roles(messages, begins=True)
        clean, images = self.clean(messages)
        with _MARKING:
            marked: Any = render_jinja_template(
                [self._as_taken(clean)],
                tools=self.clean_tools(tools),
                chat_template=MARKED + self._template,
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
        texts, spans = marked
        if any(examples) and len(examples) != len(spans[0]):
            raise ValueError(
                "the task has examples of responses, and the chat template has other than one {% generation %} block for each "
                "response, so that they cannot be distinguished: set rollout.samples to step_wise."
            )
        edges = [0, *chain.from_iterable(spans[0]), len(texts[0])]
        pieces = [self.encode_written(texts[0][start:end]) for start, end in pairwise(edges)]
        ids = list(chain.from_iterable(pieces))
        self._check_images(ids, images, messages)
        untrained = examples if any(examples) else [False] * len(spans[0])
        marks = [0, *chain.from_iterable((int(not each), 0) for each in untrained)]
        return Rendered(ids, images), [mark for mark, piece in zip(marks, pieces, strict=True) for _ in piece]

    @property
    def marks_responses(self) -> bool:
        """Whether the template has generation markers around the assistant's tokens."""
        return bool(re.search(r"\{%-?\s*generation\s*-?%\}", self.chat_template))

    def text(self, token_ids: Sequence[int], opened: bool = True) -> str:
        """A response as an env reads it: without its end-of-turn id, and if ``opened`` after the opening of the generation prompt."""
        ids = list(token_ids[:-1]) if token_ids and token_ids[-1] in self.stop_ids else list(token_ids)
        return (self.opening if opened else "") + self.decode(ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token by itself. Each id is decoded once, however often it is sampled."""
        for index in set(token_ids).difference(self._texts):
            self._texts[index] = self.decode([index])
        return [self._texts[index] for index in token_ids]

    def encode(self, text: str) -> list[int]:
        """A text as the model could have written it: special tokens in it stay text, others (``<tool_call>``) are tokens."""
        return self.encode_written(self._tokens.escape(text, self._tokens.special))

    def _finish(
        self,
        text: str,
        images: list[ImageSource],
        messages: Sequence[Message],
        limit: int | None = None,
        *,
        keeps_head: bool = False,
    ) -> Rendered:
        self.check_text(text, limit)
        ids = self._encode_prompt(text) if keeps_head else self.encode_written(text)
        self._check_images(ids, images, messages)
        return Rendered(ids, images)

    def _encode_prompt(self, text: str) -> list[int]:
        """The ids of a prompt with tools. Its first message, where templates show them, is encoded once for all such prompts."""
        end = text.find(self.end_of_turn) + len(self.end_of_turn)
        if not self._keeps_heads or end < LONG_HEAD:
            return self.encode_written(text)
        head = text[:end]
        kept = self._heads.of_text(head, lambda: array("i", self.encode_written(head)))
        return kept.tolist() + self.encode_written(text[end:])

    def _check_images(self, ids: Sequence[int], images: Sequence[ImageSource], messages: Sequence[Message]) -> None:
        shown = 0 if self.image_token_id is None else ids.count(self.image_token_id)
        if shown != len(images):
            roles = ", ".join(sorted({message["role"] for message in messages}))
            raise ValueError(
                f"messages hold {len(images)} images, but the chat template shows {shown} (roles: {roles}). "
                "Some templates lose those of tool messages: let format_observation return a user message."
            )

    def encode_written(self, text: str) -> list[int]:
        """The ids of a text that :meth:`write` gave, or of a part of it."""
        if ESCAPE not in text:
            return ids_of_text(self._backend, text)
        ids: list[int] = []
        for piece in self._tokens.split(text):
            if isinstance(piece, int):
                ids.append(piece)
            elif piece:
                ids.extend(ids_of_text(self._plain_backend, self._tokens.restored(piece)))
        return ids

    def write(self, messages: list[Message], tools: list[dict[str, Any]] | None, generate: bool = True) -> str:
        """What the template writes for messages and tools that are clean; with ``generate``, the generation prompt follows."""
        return self.tokenizer.apply_chat_template(
            self._as_taken(messages),
            tools=tools,
            chat_template=self._template,
            tokenize=False,
            add_generation_prompt=generate,
        )

    def _as_taken(self, messages: list[Message]) -> list[Message]:
        """With contents as lists of parts for a template that drops strings silently, as SmolVLM's does."""
        if self._takes_strings:
            return messages
        return [
            message | {"content": parts_of_message(message) or [{"type": "text", "text": ""}]} for message in messages
        ]

    def _base(self, tools: list[dict[str, Any]] | None) -> str:
        """What the template writes for the base conversation, up to the end of its last turn."""
        return self._bases.of_text(json.dumps(tools), lambda: self._make_base(tools))

    def _make_base(self, tools: list[dict[str, Any]] | None) -> str:
        text = self.write(BASE, tools, generate=False)
        end = text.rfind(self.end_of_turn)
        if end < 0 and not self._opens_turns_by_a_stop_token(text, tools):
            raise ValueError(
                f"the chat template never writes the end-of-turn token {self.end_of_turn!r}, nor does it begin turns with another "
                f"token that ends a response; set model.chat_template to one for this model (ours: {OUR_TEMPLATES})."
            )
        return text if end < 0 else text[: end + len(self.end_of_turn)]

    def _opens_turns_by_a_stop_token(self, text: str, tools: list[dict[str, Any]] | None) -> bool:
        """Whether what follows ``text`` begins with one, as GLM's turns do: a response ends with the ``<|user|>`` of the next turn."""
        longer = self.write([*BASE, BASE[1]], tools, generate=False)
        return longer.startswith(text) and not self.stop_ids.isdisjoint(self.encode_written(longer[len(text) :])[:1])

    @cached_property
    def image_opening_id(self) -> int | None:
        """The id of the token that the template writes before each image, such as ``<|vision_start|>``. None: it writes none."""
        if self.image_token is None:
            return None
        return next(reversed(self.encode_written(self._image_text.partition(self.image_token)[0])), None)

    @cached_property
    def _image_text(self) -> str:
        """An image as the template writes it, such as ``<|vision_start|><|image_pad|><|vision_end|>``."""
        parts = [{"type": "text", "text": "("}, {"type": "image"}, {"type": "text", "text": ")"}]
        before = self.write([*BASE, {"role": "user", "content": [parts[0], parts[2]]}], None)
        after = self.write([*BASE, {"role": "user", "content": parts}], None)
        start = before.rindex("()") + 1
        return after[start : len(after) - (len(before) - start)]

    def _check_appended(self, images: list[ImageSource]) -> None:
        """Raise ValueError for an observation's images, rendered without earlier ones, if the template numbers images."""
        if images and self._numbers_images:
            remedy = "set rollout.history to rerender, or another model.chat_template."
            raise ValueError(f"the chat template numbers images, so no image can be appended: {remedy}")

    def _find_opening(self) -> str:
        """The start of a response that the generation prompt writes after its role line, such as ``<think>``."""
        prompt = self.write(BASE, None)[len(self._base(None)) :]
        _, *opening = re.split(r"assistant(?:\|>)?\n", prompt, maxsplit=1)
        return opening[0] if opening else ""

    def clean(self, messages: Sequence[Message]) -> tuple[list[Message], list[ImageSource]]:
        """The messages with added tokens escaped and images replaced by ``{"type": "image"}``, and the images."""
        images: list[ImageSource] = []
        clean = []
        for message in messages:
            content = {"content": self._clean_content(message, images)}
            clean.append(map_texts(message | {"content": None}, self._tokens.escape_name) | content)
        if images and self.image_token is None:
            raise ValueError(f"messages hold {len(images)} images, but the model reads text only.")
        return clean, images

    def clean_tools(self, tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
        """The tools with added tokens escaped, for :meth:`write`."""
        return self._tokens.escape_tools(tools)

    def _clean_content(self, message: Message, images: list[ImageSource]) -> str | list[dict[str, Any]]:
        # The model may write <think>, <tool_call> and <|box_start|>, but a template's special tokens are never text that it meant.
        tokens = self._tokens.special if message.get("role") == "assistant" else None
        parts: list[dict[str, Any]] = []
        for (kind, is_ours), run in groupby(parts_of_message(message), kind_of_part):
            if kind == "text":  # joined before escaping, or a token cut over two parts would get through
                text = "".join(part["text"] for part in run)
                parts.append({"type": "text", "text": text if is_ours else self._tokens.escape(text, tokens)})
            elif kind == "image":
                shown = [part["image"] for part in run]
                images.extend(shown)
                parts.extend({"type": "image"} for _ in shown)
            else:
                raise ValueError(f"a message part must have the type text or image, but it has {kind!r}.")
        if all(part["type"] == "text" for part in parts):
            # Some text templates silently drop lists, see also `_as_taken`.
            return "".join(part["text"] for part in parts)
        return parts


def _with_times(template: str) -> str:
    """The template with today's date in place of each request for it: midnight in a run must not rewrite earlier messages."""
    now = datetime.now()
    return re.sub(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""", lambda found: repr(now.strftime(found[2])), template)
