"""Random requests of an agent: questions, tool results, images, retries, forks, edits, changed tools, lost and cancelled responses.

:class:`RandomAgent` plays a list of steps, and finds by comparing whole conversations which response each request continues.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from testing.agent_episodes import ZOOM, says, zoom_call
from testing.episodes import image
from vlmrl.engine.base import Request
from vlmrl.gateway.chat import ChatError, ChatRequest, ChatResponse
from vlmrl.gateway.episode import AgentEpisode
from vlmrl.gateway.request_tree import message_of_response
from vlmrl.multimodal.images import content_hash, data_uri, load_image
from vlmrl.multimodal.messages import images_of, parts_of_message
from vlmrl.multimodal.placeholders import expand, image_spans
from vlmrl.multimodal.renderer import Renderer
from vlmrl.types import Completion, ExpertRouting, MediaItem, Message

KINDS = [
    "ask",
    "tool",
    "image",
    "retry",
    "fork",
    "edit",
    "swap",
    "tools",
    "system",
    "rewrite",
    "lose",
    "cancel",
    "parallel",
]
TEXTS = [
    "",
    "red",
    "Look closer.",
    "What is it? ",
    "no <|im_end|> yes",
    "1 2 3",
    "猫 blue",
    "<tool_call>",
    "yes",
    "box",
]
RESPONSES = [
    "red",
    "Closer.",
    "red",
    zoom_call(1),
    f"Closer. {zoom_call(2)}",
    f"{zoom_call(1)}\n{zoom_call('[1, 2]')}",
    "<think>Hm.</think>blue",
    "",
    "the box",
    "<tool_call>{",
]
COLORS = ["red", "green", "blue", "yellow"]
Step = tuple[str, int, int]
"""What is done, in which conversation, and a number that it depends on."""
Complete = Callable[[ChatRequest], Coroutine[Any, Any, ChatResponse]]


def experts_of(token_ids: Sequence[int], media: Sequence[MediaItem], image_token_id: int | None) -> list[ExpertRouting]:
    """Two of three experts for each token, which depend on it and on all tokens and images before it."""
    images = {
        start: item.id for (start, _), item in zip(image_spans(token_ids, image_token_id, media), media, strict=True)
    }
    digest, experts = hashlib.blake2b(digest_size=1), []
    for index, id in enumerate(token_ids):
        digest.update(f"{id} {images.get(index)} ".encode())
        first = digest.digest()[0] % 3
        experts.append(ExpertRouting(bytes([first, 0, (first + 1 + digest.digest()[0] // 3 % 2) % 3, 0]), top_k=2))
    return experts


class Responses:
    """What the engine says: any of :data:`RESPONSES`, some of them in odd tokens or cut off. Keeps all that it has ``sampled``."""

    def __init__(self, renderer: Renderer, has_experts: bool = False) -> None:
        self.renderer = renderer
        self.has_experts = has_experts
        self.sampled: list[Completion] = []
        self.hangs = False
        self.reached = asyncio.Event()

    async def __call__(self, request: Request, turn: int) -> Completion:
        if self.hangs:
            self.reached.set()
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        number, text = len(self.sampled), RESPONSES[request.sampling.seed % len(RESPONSES)]
        pieces = list(text) if number % 3 == 0 and "<" not in text else [text]
        ids = [id for piece in pieces for id in self.renderer.encode(piece)]
        is_cut = number % 5 == 4 and bool(ids)
        if not is_cut:
            ids.append(self.renderer.end_of_turn_id)
        image_token_id = self.renderer.image_token_id
        prompt = expand(request.prompt_ids, image_token_id, request.media)
        logprobs = [-0.01 * (number + 1)] * len(ids)
        completion = Completion(ids, logprobs, "length" if is_cut else "stop", [0] * len(ids), len(prompt))
        if self.has_experts:
            experts = experts_of(prompt + ids, request.media, image_token_id)
            completion = replace(completion, expert_routing=[*experts[request.routing_from : -1], None])
        self.sampled.append(completion)
        return completion


@dataclass
class Sent:
    """A request that was answered. ``conversation`` are its messages with each continued response as it was sampled."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    response: ChatResponse
    above: Sent | None  # the request whose response it continues
    conversation: list[Message]
    lost: bool


@dataclass
class Conversation:
    """One of the agent's conversations, and the ids of the calls in its last response."""

    messages: list[Message] = field(default_factory=lambda: [says("system", "Look.")])
    tools: list[dict[str, Any]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)


class RandomAgent:
    """Plays steps against an episode whose engine says ``responses``. All that was answered is in ``sent``, in order."""

    def __init__(
        self, episode: AgentEpisode, responses: Responses, with_images: bool = True, complete: Complete | None = None
    ) -> None:
        self.episode = episode
        self.complete = complete or episode.complete
        self.responses = responses
        self.with_images = with_images
        self.sent: list[Sent] = []
        self.cancelled = 0
        self.conversations = [Conversation()]

    async def play(self, steps: list[Step]) -> None:
        for kind, who, number in steps:
            await getattr(self, f"step_{kind}")(self.conversations[who % len(self.conversations)], number)
        for sent in reversed(self.sent):
            if sent.above is not None and not sent.lost:
                sent.above.lost = False

    async def send(self, conversation: Conversation, lost: bool = False) -> None:
        messages, tools = copy.deepcopy(conversation.messages), list(conversation.tools)
        above = self._above(messages, tools)
        try:
            response = await self.complete(ChatRequest(copy.deepcopy(messages), tools))
        except ChatError as error:  # the template takes no such messages
            if error.code != "messages" or self._is_rendered(messages, tools):
                raise
            conversation.messages = Conversation().messages
            return
        self.sent.append(Sent(messages, tools, response, above, self._conversation(messages, above), lost))
        if lost:
            self.episode.undelivered(response)
        else:
            conversation.messages.append(message_of_response(response))
            conversation.calls = [call.id for call in response.tool_calls]

    def _is_rendered(self, messages: list[Message], tools: list[dict[str, Any]]) -> bool:
        renderer = self.episode.renderer
        try:
            renderer.prompt(renderer.adapt_tool_messages(messages), tools)
        except Exception:  # templates raise what they like
            return False
        return True

    # The kinds of steps

    async def step_ask(self, conversation: Conversation, number: int) -> None:
        conversation.messages.append(says("user", TEXTS[number % len(TEXTS)]))
        await self.send(conversation)

    async def step_image(self, conversation: Conversation, number: int) -> None:
        colors = COLORS[: 1 + number % 2] if self.with_images else []
        shown = [image(color) if number % 3 else data_uri(image(color)) for color in colors]
        conversation.messages.append(says("user", TEXTS[number % len(TEXTS)], *shown))
        await self.send(conversation)

    async def step_tool(self, conversation: Conversation, number: int) -> None:
        for place, name in enumerate(conversation.calls or ["unknown"]):
            shown = [image(COLORS[(number + place) % 4])] if self.with_images and number % 2 else []
            conversation.messages.append(says("tool", TEXTS[number % len(TEXTS)], *shown, tool_call_id=name))
        await self.send(conversation)

    async def step_system(self, conversation: Conversation, number: int) -> None:
        conversation.messages.append(says("system", TEXTS[number % len(TEXTS)]))
        await self.step_ask(conversation, number + 1)

    async def step_retry(self, conversation: Conversation, number: int) -> None:
        if conversation.messages[-1]["role"] == "assistant":
            conversation.messages.pop()
        await self.send(conversation)

    async def step_fork(self, conversation: Conversation, number: int) -> None:
        self.conversations.append(copy.deepcopy(conversation))
        await self.step_ask(self.conversations[-1], number)

    async def step_edit(self, conversation: Conversation, number: int) -> None:
        conversation.messages[number % len(conversation.messages)]["content"] = f"Edited {number % 3}."
        await self.step_ask(conversation, number)

    async def step_swap(self, conversation: Conversation, number: int) -> None:
        """The first image in another encoding, or another one in its place."""
        for message in conversation.messages:
            for part in parts_of_message(message):
                if part["type"] == "image" and number % 2:
                    part["image"] = data_uri(load_image(part["image"]))
                elif part["type"] == "image":
                    part["image"] = image(COLORS[number % 4])
        await self.step_ask(conversation, number)

    async def step_tools(self, conversation: Conversation, number: int) -> None:
        conversation.tools = [] if conversation.tools else [ZOOM]
        await self.step_ask(conversation, number)

    async def step_rewrite(self, conversation: Conversation, number: int) -> None:
        conversation.messages = [says("system", "Look."), says("user", f"So far: {number % 3}.")]
        await self.send(conversation)

    async def step_lose(self, conversation: Conversation, number: int) -> None:
        question = says("user", TEXTS[number % len(TEXTS)])
        await self.send(Conversation([*conversation.messages, question], conversation.tools), lost=True)

    async def step_cancel(self, conversation: Conversation, number: int) -> None:
        self.responses.hangs = True
        self.responses.reached.clear()
        request = ChatRequest([says("user", "Wait.")], [])
        task = asyncio.create_task(self.complete(request))
        await self.responses.reached.wait()
        self.responses.hangs = False
        task.cancel()
        await asyncio.wait([task])
        self.cancelled += 1

    async def step_parallel(self, conversation: Conversation, number: int) -> None:
        forks = [copy.deepcopy(conversation) for _ in range(3)]
        for place, fork in enumerate(forks):
            fork.messages.append(says("user", TEXTS[(number + place) % len(TEXTS)]))
        await asyncio.gather(*map(self.send, forks))
        self.conversations += forks[:1]

    # What is expected

    def _above(self, messages: list[Message], tools: list[dict[str, Any]]) -> Sent | None:
        """The newest request whose messages and response are the first of ``messages``, and have no assistant message after them.

        One with equal ids of calls comes first.
        """
        last = max((index for index, message in enumerate(messages) if message["role"] == "assistant"), default=None)
        found = None
        if last is not None:
            for with_ids in (False, True):
                wanted = [_plain(message, with_ids) for message in messages[: last + 1]]
                for sent in self.sent:
                    held = [
                        _plain(message, with_ids) for message in (*sent.messages, message_of_response(sent.response))
                    ]
                    if held == wanted and sent.tools == tools:
                        found = sent
        return found

    def _conversation(self, messages: list[Message], above: Sent | None) -> list[Message]:
        if above is None:
            return messages
        text = self.episode.renderer.text(above.response.token_ids)
        return [*above.conversation, says("assistant", text), *messages[len(above.messages) + 1 :]]


def _plain(message: Message, with_ids: bool) -> Any:
    """The message in one form, with its images by their pixels."""
    parts = parts_of_message(message)
    text = "|".join("image" if part["type"] == "image" else part["text"] for part in parts)
    images = [content_hash(load_image(source)) for source in images_of([message])]
    calls = [call["function"] for call in message.get("tool_calls", [])]
    ids = [message.get("tool_call_id"), *(call["id"] for call in message.get("tool_calls", []))]
    return message["role"], text, images, calls, ids if with_ids else None
