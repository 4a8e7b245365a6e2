"""The requests that an agent sends while it plays one trajectory: each is rendered, sampled and recorded once.

A request that continues an earlier response keeps the tokens sampled there, and only its new messages are encoded. Any other
request is rendered as a whole.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from vlmrl.config import Rollout
from vlmrl.engine.base import Engine, EngineError
from vlmrl.env.session import EnvError
from vlmrl.gateway.chat import ChatError, ChatRequest, ChatResponse, IssuedCall
from vlmrl.gateway.engine_ids import EngineIds
from vlmrl.gateway.request_body import size_beside
from vlmrl.gateway.request_tree import Found, RequestTree
from vlmrl.gateway.responses import split_response
from vlmrl.multimodal.images import ImageUnavailableError
from vlmrl.multimodal.messages import images_of, is_long, same_messages
from vlmrl.multimodal.placeholders import expand
from vlmrl.multimodal.renderer import Rendered, Renderer, TooLongError
from vlmrl.multimodal.store import MediaStore
from vlmrl.rollout.message_images import load_answer_images, load_images
from vlmrl.rollout.record import Prompt, TurnRecorder
from vlmrl.rollout.sampler import AbortedError, EpisodeLimitError, Sampler, derive_seed
from vlmrl.types import Ending, MediaItem, Message, ReceivedRequest, Trajectory, Turn
from vlmrl.utils.require import MOST_NUMBER
from vlmrl.utils.work_pool import DeadlineError, cpu_pool

T = TypeVar("T")
MAX_KEYS = 10_000  # of posted rewards
MAX_BESIDE = 2**24  # characters of reasoning and calls in all turns of an episode, which are kept and logged with it


class AgentEpisode:
    """One trajectory while an agent plays it. It lives on the run's event loop; any number of requests may run at once.

    ::

        episode = AgentEpisode(trajectory, engine, renderer, store, config.rollout, seed)
        response = await episode.complete(ChatRequest([{"role": "user", "content": "2+2?"}]))
        episode.finish()
    """

    def __init__(
        self,
        trajectory: Trajectory,
        engine: Engine,
        renderer: Renderer,
        store: MediaStore | None,
        config: Rollout,
        seed: int,
    ) -> None:
        self.trajectory = trajectory
        self.engine = engine
        self.renderer = renderer
        self.store = store
        self.config = config
        self.recorder = TurnRecorder(trajectory, renderer.image_token_id)
        self.sampler = Sampler(self.recorder, engine, config, seed)
        self.failure: str | None = None  # why the trajectory must fail, even if the agent handles the error
        self.aborted = False  # it must fail because the engine was stopped from outside
        self._posted: float | None = None
        self._posted_keys: set[str] = set()
        self._tree = RequestTree()  # its requests are the places of their turns in the record
        self._places: dict[str, int] = {}  # of turns, by the ids of their responses
        self._images_not_shown: list[int] = []  # by turn: in all messages of its request
        self._engine_ids = EngineIds(trajectory.id, engine)
        self._in_flight: set[asyncio.Task[ChatResponse]] = set()
        self._counts = Counter[str]()
        self._beside = 0  # characters of reasoning and calls in the messages of all prompts
        self._finished = False
        self._one_long = asyncio.Semaphore()  # the threads are shared: one for each episode's long requests

    async def complete(self, request: ChatRequest) -> ChatResponse:
        """Sample the response to a request. A caller that is cancelled cancels the request.

        Raises:
            ChatError: the client's mistake (400), a budget (400, `max_turns` or `max_tokens`), an engine that failed (503), an error
                of ours (500), or an episode that has ended (410).
        """
        number = self._begin()
        task = asyncio.create_task(self._complete(number, request))
        self._in_flight.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self._finished and not _is_cancelled():
                raise ChatError(410, "finished", "the episode has ended.") from None
            if not task.cancelled() and task.exception() is None:  # it has just been sampled
                self.undelivered(task.result())
            else:
                self._counts["requests_cancelled"] += 1
            raise
        finally:
            self.sampler.end(number)
            self._in_flight.discard(task)

    async def count_tokens(self, request: ChatRequest) -> int:
        """The tokens of the prompt that :meth:`complete` would make of a request.

        Raises ChatError: what is new in it has more than ``rollout.max_tokens``, or it cannot be rendered (400).
        """
        try:
            messages, _ = await self._load(request.messages)
            _, prompt, _ = await self._prompt(messages, request.tools)
        except TooLongError as error:
            message = (
                f"the prompt has at least {error.least} tokens, and rollout.max_tokens is {self.config.max_tokens}."
            )
            raise ChatError(400, "max_tokens", message) from error
        except ChatError:
            raise
        except Exception as error:  # templates raise what they like
            raise ChatError(400, "messages", f"the messages cannot be rendered: {error}"[:500]) from error
        return prompt.length

    def undelivered(self, response: ChatResponse) -> None:
        """Leave out a response that was sampled but could not be sent. A request that continues it takes it back."""
        place = self._places.get(response.id)
        if place is not None:  # else the episode has ended
            self.recorder.left_out.add(place)

    @property
    def posted_reward(self) -> float | None:
        """The sum of the posted rewards; ``None`` if there are none."""
        return self._posted

    def post_reward(self, reward: float, key: str | None = None) -> None:
        """Add to ``posted_reward``, once for each ``key``, if there is one: a client that got no answer posts again.

        Raises ChatError: there are :data:`MAX_KEYS` keys, or the sum is out of range.
        """
        total = (self._posted or 0.0) + reward
        if key is not None:
            if key in self._posted_keys:
                return
            if len(self._posted_keys) >= MAX_KEYS:
                raise ChatError(400, "id", f"the trajectory has {MAX_KEYS} rewards with an id: post their sum.")
        if abs(total) > MOST_NUMBER:
            rule = (
                f"reward must not make the sum of the posted rewards exceed {MOST_NUMBER:g}, but it would be {total:g}."
            )
            raise ChatError(400, "reward", rule)
        if key is not None:
            self._posted_keys.add(key)
        self._posted = total

    @property
    def limit(self) -> Ending | None:
        """The budget that refused a request, or cut a response that was received, if one did."""
        recorder = self.recorder
        received = [turn for place, turn in enumerate(recorder.turns) if place not in recorder.left_out]
        return self.sampler.limit(received)

    def finish(self) -> None:
        """Cancel what is in flight, and write the trajectory's turns and metrics. A second call changes nothing."""
        if self._finished:
            return
        self._finished = True
        # Of a request whose caller was cancelled just now, the task may have ended already.
        self._counts["requests_cancelled"] += sum(task.cancel() or task.cancelled() for task in self._in_flight)
        self._engine_ids.release()
        sampled, order = len(self.recorder.turns), self.recorder.ordered()
        self.trajectory.turns = self.recorder.selected(order)
        shown = [turn.received.tools or [] for turn in self.trajectory.turns if turn.received is not None]
        self.trajectory.tools = shown[-1] if shown else []
        self.recorder.left_out.clear()
        self.trajectory.metrics |= self._metrics(sampled)
        self._places.clear()

    def _begin(self) -> int:
        """The number of a request. Raises ChatError if no further request is served."""
        if self._finished:
            raise ChatError(410, "finished", "the episode has ended.")
        if self.failure is not None:
            raise ChatError(503, "failed", f"the episode has failed: {self.failure}")
        try:
            return self.sampler.begin()
        except EpisodeLimitError as error:
            raise ChatError(400, error.ending, str(error)) from error

    def _fail(self, status: int, code: str, reason: str) -> ChatError:
        self.failure = self.failure or reason
        return ChatError(status, code, reason)

    async def _complete(self, number: int, request: ChatRequest) -> ChatResponse:
        where = f"trajectory {self.trajectory.id}, request {number}"
        try:
            return await self._sample(number, request)
        except (ChatError, asyncio.CancelledError):
            raise
        except (EpisodeLimitError, TooLongError) as error:
            limit = self.sampler.too_long(f"at least {error.least}") if isinstance(error, TooLongError) else error
            raise ChatError(400, limit.ending, str(limit)) from error
        except EngineError as error:
            self.aborted = self.aborted or isinstance(error, AbortedError)
            raise self._fail(503, "engine", str(error)) from error
        except Exception as error:
            raise self._fail(500, "internal", f"{where}: {type(error).__name__}: {error}") from error
        finally:
            self.sampler.end(number)

    async def _sample(self, number: int, request: ChatRequest) -> ChatResponse:
        messages, not_shown = await self._load(request.messages)
        found, prompt, continues = await self._prompt(messages, request.tools)
        request.on_rendered()
        self._count_beside(await self._apart(prompt.messages, partial(size_beside, prompt.messages)))
        above = self.recorder.turns[prompt.parent] if continues and prompt.parent is not None else None
        engine_id = self._engine_ids.take(above)
        draw, stop = (number, request.seed or 0), request.stop
        try:
            sampled = await self.sampler.sample(
                prompt, *draw, engine_id=engine_id, max_tokens=request.max_tokens, stop=stop
            )
        except BaseException:
            self._engine_ids.give_back(engine_id)
            raise
        tools = self._tools_once(request.tools)
        turn = self.recorder.add(
            prompt,
            sampled.completion,
            self.renderer.text(sampled.completion.token_ids),
            seconds=sampled.seconds,
            number=number,
            received=ReceivedRequest(
                tuple(item.id for item in images_of(messages)), prompt.parent if continues else None, tools
            ),
        )
        self._engine_ids.give_back(engine_id, turn)
        known = self._images_not_shown[prompt.parent] if continues and prompt.parent is not None else 0
        self._images_not_shown.append(not_shown)
        if not_shown > known:
            turn.metrics["images_not_shown"] = float(not_shown - known)
        return self._record(number, turn, sampled.completion.prompt_tokens, request, found)

    def _tools_once(self, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """These tools, as an earlier request of the episode has them if one does: many are long, and all requests repeat them."""
        earlier = (turn.received.tools for turn in reversed(self.recorder.turns) if turn.received is not None)
        return next((known for known in earlier if known == tools), None) or tools

    def _find(self, messages: list[Message], tools: list[dict[str, Any]]) -> Found:
        """What is known of a request. Raises TooLongError for one that is too long to be looked up and rendered."""
        self.renderer.check_length(messages, tools, self.config.max_tokens)
        return self._tree.find(messages, tools)

    def _count_beside(self, size: int) -> None:
        """Count what no template need show of a prompt's new messages. Raises ChatError if it is too much for one episode."""
        if size and self._beside + size > MAX_BESIDE:
            rule = f"an episode keeps at most {MAX_BESIDE} characters of reasoning and calls: send less of them back."
            raise ChatError(400, "messages", rule)
        self._beside += size

    async def _load(self, messages: list[Message]) -> tuple[list[Message], int]:
        """The messages with their images loaded, and how many cannot be shown. Raises TooLongError for more messages than tokens.

        After the first response such an image becomes a text that says why, as in the turn loop: the policy may have made it.
        """
        if len(messages) > self.config.max_tokens:  # a message has a token or more
            raise TooLongError(len(messages))
        if self.store is None:
            if count := len(images_of(messages)):
                raise ChatError(400, "messages", f"messages hold {count} images, but the model reads text only.")
            return messages, 0
        try:
            if not self.recorder.turns:
                return await load_images(messages, self.store, self.config.env_timeout), 0
            where = f"trajectory {self.trajectory.id}"
            return await load_answer_images(messages, self.store, self.config.env_timeout, where)
        except (EnvError, ValueError) as error:
            passing = any(isinstance(each, ImageUnavailableError) for each in (error, error.__cause__))
            raise ChatError(503 if passing else 400, "image_url", str(error)) from error

    async def _prompt(self, messages: list[Message], tools: list[dict[str, Any]]) -> tuple[Found, Prompt, bool]:
        """What is known of a request, its prompt, and whether that continues a response. Raises TooLongError."""
        found = await self._apart((messages, tools), partial(self._find, messages, tools))
        return found, *await self._render(found, messages, tools)

    async def _render(self, found: Found, messages: list[Message], tools: list[dict[str, Any]]) -> tuple[Prompt, bool]:
        """The prompt of a request, and whether it continues a response: that response's context with what is new, or a full render."""
        renderer, recorder, limit = self.renderer, self.recorder, self.config.max_tokens
        if found.continues is not None:
            new = messages[found.new_from :]
            response = recorder.turns[found.continues].response_ids
            shown = renderer.adapt_tool_messages(new)
            with suppress(_NotRenderedError):  # some templates take a system message in first place only
                added = await self._encode(
                    (new, tools), partial(renderer.delta, shown, tools, response=response, limit=limit)
                )
                return recorder.following(found.continues, added.token_ids, added.media, new), True
        shown = renderer.adapt_tool_messages(messages)
        try:
            whole = await self._encode((messages, tools), partial(renderer.prompt, shown, tools, limit=limit))
        except _NotRenderedError as error:
            raise ChatError(400, "messages", f"the messages cannot be rendered: {error}") from error
        new = messages[min(found.shared, len(messages) - 1) :]
        return recorder.branching(
            found.nearest, replace(whole, messages=new, rewritten=self._shared(found, messages))
        ), False

    def _shared(self, found: Found, messages: list[Message]) -> list[Message]:
        """The messages of a branch, of which those that the nearest branch has, too, are not kept twice."""
        turns, place = self.recorder.turns, found.nearest
        while place is not None and turns[place].rewritten is None:
            place = turns[place].parent
        known = [] if place is None else turns[place].rewritten or []
        same = [old if same_messages([old], [new]) else new for old, new in zip(known, messages, strict=False)]
        return same + messages[len(same) :]

    async def _encode(self, read: Any, render: Callable[[], Rendered]) -> Prompt:
        """``render()``, which reads ``read``, with all tokens of the images."""
        try:
            rendered = await self._apart(read, render)
        except (ChatError, TooLongError):
            raise
        except Exception as error:  # templates raise what they like
            raise _NotRenderedError(f"{type(error).__name__}: {error}") from error
        media: list[MediaItem] = rendered.images  # they are loaded
        return Prompt(expand(rendered.token_ids, self.renderer.image_token_id, media), media)

    async def _apart(self, read: Any, work: Callable[[], T]) -> T:
        """``work()``; in a thread if the texts that it reads are long, which would stop the event loop."""
        if not is_long(read):
            return work()
        try:
            async with self._one_long:
                return await cpu_pool().run(self.config.env_timeout, work)
        except DeadlineError as error:
            raise ChatError(503, "messages", f"the messages were not rendered in time: {error}.") from error

    def _record(self, number: int, turn: Turn, prompt_tokens: int, request: ChatRequest, found: Found) -> ChatResponse:
        """Make the response of a turn, and keep which one it is."""
        opening = self.renderer.opening
        sampled = turn.text.removeprefix(opening)
        content, reasoning, calls = split_response(
            sampled,
            request.tools,
            self.renderer.tool_format,
            reads_calls=request.reads_calls,
            stop=(*self.config.stop, *request.stop),
            opening=opening,
        )
        name = f"{derive_seed(self.sampler.seed, self.trajectory.id, number):016x}"
        cut = turn.stop_reason == "length"
        response = ChatResponse(
            id=f"chatcmpl-{name}",
            content=content,
            reasoning=reasoning,
            tool_calls=tuple(
                IssuedCall(f"call_{name}_{index}", call.name, call.arguments) for index, call in enumerate(calls)
            ),
            finish_reason="length" if cut else "tool_calls" if calls else "stop",
            token_ids=turn.response_ids,
            tokens=self.renderer.token_texts(turn.response_ids),
            logprobs=turn.logprobs,
            prompt_tokens=prompt_tokens,
            stop=next((stop for stop in request.stop if stop in sampled), None),  # sampling ends at the first
        )
        place = len(self.recorder.turns) - 1
        self._places[response.id] = place
        self._tree.add(place, found, response)
        self._counts["sampling_overridden"] += bool(request.overridden)
        return response

    def _metrics(self, sampled: int) -> dict[str, float]:
        turns = self.trajectory.turns
        counts = {
            "requests_cancelled": self._counts["requests_cancelled"],
            "responses_undelivered": sampled - len(turns),
            "sampling_overridden": self._counts["sampling_overridden"],
            "branches": sum(not self.trajectory.continues(number) for number in range(len(turns))),
        }
        metrics = {name: float(count) for name, count in counts.items()}
        if len(turns) > 1:
            continued = sum(turn.received is not None and turn.received.continues is not None for turn in turns)
            metrics["requests_continued"] = continued / (len(turns) - 1)
        return metrics


class _NotRenderedError(Exception):
    """The chat template does not render the messages."""


def _is_cancelled() -> bool:
    """Whether the running task is cancelled, and not only one that it waited for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
