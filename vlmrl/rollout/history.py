"""History modes: how the prompt of the next response is made.

The turn loop creates one history per trajectory with :func:`new_history`. It renders the prompt and, after each response, the
continuation. ``append`` adds the observation as the chat template writes it; ``inline`` adds it inside the assistant message, which
continues; ``rerender`` renders the whole conversation again, after a policy such as :func:`keep_last_images` has rewritten it. For a
policy that asks the model, such as :func:`compact`, see `rollout/asking_loop.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vlmrl.config import Rollout
from vlmrl.config.code import find_function, resolve_function
from vlmrl.multimodal.messages import copied, is_long, same_messages, tools_as_user
from vlmrl.multimodal.renderer import Rendered, Renderer
from vlmrl.rollout.history_policies import HISTORY_POLICIES, Conversation, Messages
from vlmrl.types import Message, Turn
from vlmrl.utils.require import require

HistoryPolicy = Callable[..., Any]
"""``(messages) -> messages``, or ``async (messages, asker) -> messages``, with its options bound."""


@dataclass(frozen=True)
class Continuation:
    """The tokens between a response and the next one."""

    rendered: Rendered
    dropped: int = 0  # tokens to remove from the response's end first
    is_whole_prompt: bool = False  # rendered is the whole next prompt, not only its new part


class Append:
    """Responses stay as sampled, and each observation is appended as a delta. Base class of the other modes."""

    opens_responses = True  # every response follows a generation prompt, not only the first
    shown: Messages | None = None  # all messages of the last prompt, if they were rendered again

    def __init__(self, renderer: Renderer, tools: Sequence[dict[str, Any]], limit: int | None = None) -> None:
        self.renderer = renderer
        self.tools = tools
        self.limit = limit  # in tokens; a text that certainly has more is not encoded, but raises TooLongError

    def prompt(self, messages: Sequence[Message]) -> Rendered:
        shown = self.renderer.adapt_tool_messages(messages)
        return self.renderer.prompt(shown, self.tools, limit=self.limit)

    def continuation(self, turn: Turn, messages: Sequence[Message]) -> Continuation:
        shown = self.renderer.adapt_tool_messages(messages)
        return Continuation(self.renderer.delta(shown, self.tools, response=turn.response_ids, limit=self.limit))

    def is_long(self, messages: Sequence[Message]) -> bool:
        """Whether a call with ``messages`` renders so much that it would stop the event loop."""
        return is_long((messages, self.tools))

    def tail(self, turn: Turn) -> list[int]:
        """Untrained tokens after the last response."""
        return []


class Inline(Append):
    """The whole episode is one assistant message. An end-of-turn token inside it is dropped; one closes the last response."""

    opens_responses = False

    def continuation(self, turn: Turn, messages: Sequence[Message]) -> Continuation:
        sampled_end = turn.response_ids[-1] in self.renderer.stop_ids
        return Continuation(self.renderer.inline(tools_as_user(messages), limit=self.limit), dropped=int(sampled_end))

    def tail(self, turn: Turn) -> list[int]:
        return [] if turn.response_ids[-1] in self.renderer.stop_ids else [self.renderer.end_of_turn_id]


class Rerender(Append):
    """Before each response, ``policy`` rewrites the conversation so far, and the chat template renders it again."""

    def __init__(
        self,
        renderer: Renderer,
        tools: Sequence[dict[str, Any]],
        policy: HistoryPolicy = list,
        limit: int | None = None,
    ) -> None:
        super().__init__(renderer, tools, limit)
        self.messages = Conversation()
        if asks(policy):
            raise ValueError("a history policy that asks the model is played by AskingLoop, not by TurnLoop.")
        self._policy = policy

    def prompt(self, messages: Sequence[Message]) -> Rendered:
        self.messages = Conversation(messages)
        self.messages.task = len(messages)
        self.shown = self.rewritten()
        self.examples = _assistants(self.shown)  # which nobody sampled
        return super().prompt(self.shown)

    def continuation(self, turn: Turn, messages: Sequence[Message]) -> Continuation:
        self.messages += [response_message(turn), *messages]
        self.examples += _assistants(messages)
        self.shown = self.rewritten()
        return Continuation(super().prompt(self.shown), is_whole_prompt=True)

    def is_long(self, messages: Sequence[Message]) -> bool:
        return is_long((self.messages, messages, self.tools))

    def rewritten(self) -> Messages:
        """The conversation as the policy rewrites it. All prompts share the messages that it leaves as they are."""
        copies = self.messages.copied()  # which the policy may change
        own = {id(copy): message for copy, message in zip(copies, self.messages, strict=True)}
        given = Conversation(copies)
        given.task = copies.task
        result = list(self._policy(given))
        pairs = [(own.get(id(each)), each) for each in result]  # a message of its own is copied: the policy may keep it
        return [old if old is not None and same_messages([old], [each]) else copied(each) for old, each in pairs]


def are_examples(messages: Sequence[Message], examples: Sequence[Message]) -> list[bool]:
    """For each message of the role ``assistant``, whether it is one of the ``examples`` of task and env, which are in this order."""
    found, left = [], list(examples)
    for message in _assistants(messages):
        place = next((place for place, each in enumerate(left) if same_messages([each], [message])), None)
        found.append(place is not None)
        left = left if place is None else left[place + 1 :]
    return found


def _assistants(messages: Sequence[Message]) -> Messages:
    return [each for each in messages if each.get("role") == "assistant"]


def response_message(turn: Turn) -> Message:
    """A response as a message of the role ``assistant``."""
    return turn.message or {"role": "assistant", "content": turn.text}


def new_history(
    config: Rollout, renderer: Renderer, tools: Sequence[dict[str, Any]], policy: HistoryPolicy | None = None
) -> Append:
    """The history that ``config.history`` names; ``policy`` rewrites the messages that are rendered again."""
    if config.rerenders:
        return Rerender(renderer, tools, policy or list, config.max_tokens)
    return (Inline if config.history == "inline" else Append)(renderer, tools, config.max_tokens)


def resolve_policy(config: Rollout) -> HistoryPolicy | None:
    """The history policy of ``config``, one of :data:`HISTORY_POLICIES` or a user's own, with its options bound.

    Raises:
        ValueError: there is none of this name, its options do not fit, or it asks the model and ``rollout.samples`` is ``concat``.
    """
    if config.history_policy is None:
        return None
    options = config.history_options
    parameters = ["messages"]
    if asks(find_function("rollout.history", config.history_policy, parameters, HISTORY_POLICIES)):
        parameters.append("asker")
        require(
            config.samples != "concat",
            "rollout.samples",
            "merged or step_wise with a history policy that asks the model, since its episodes do not fit one row",
            config.samples,
        )
    function = resolve_function(
        "rollout.history",
        config.history_policy,
        parameters,
        options,
        options_field="rollout.history_options",
        registry=HISTORY_POLICIES,
    )
    return partial(function, **options)


def asks(policy: HistoryPolicy | None) -> bool:
    """Whether the policy is a coroutine function, which gets an :class:`~vlmrl.rollout.history_policies.Asker`."""
    return inspect.iscoroutinefunction(policy.func if isinstance(policy, partial) else policy)
