"""Plays an env's episodes with a model behind a chat API: the turn loop, with messages in place of tokens.

Env, tools, images, turns, retries and endings are those of the turn loop. A turn has the response's message and text, but no tokens.
Token budgets are compared with the counts that the API reports.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vlmrl.config import Rollout
from vlmrl.engine.base import EngineError, SamplingParams
from vlmrl.engine.chat_engine import ApiResponse, ChatEngine
from vlmrl.env.base import EnvSpec
from vlmrl.env.session import EnvContractError, EnvSession, TaskError
from vlmrl.multimodal.images import data_uri
from vlmrl.multimodal.messages import images_of
from vlmrl.multimodal.openai_messages import answer_calls, request_messages, response_text, with_call_ids
from vlmrl.multimodal.renderer import Rendered, Renderer
from vlmrl.multimodal.store import MediaStore
from vlmrl.rollout.history import Append, Continuation, HistoryPolicy, asks, response_message
from vlmrl.rollout.history_policies import Conversation
from vlmrl.rollout.record import Prompt, TurnRecorder
from vlmrl.rollout.sampler import Sampled, Sampler
from vlmrl.rollout.turn_loop import Episode, TurnLoop
from vlmrl.types import Completion, Ending, Message, Trajectory, Turn
from vlmrl.utils.http import RefusedError


class ChatHistory(Append):
    """The conversation so far, and its form in the API's requests, in which each image is encoded once."""

    def __init__(self, renderer: Renderer, tools: Sequence[dict[str, Any]], policy: HistoryPolicy) -> None:
        super().__init__(renderer, tools)
        self.request: list[Message] = []
        """What the next response is sampled from."""
        self._messages = Conversation()
        self._policy = policy
        self._addresses: dict[str, str] = {}

    def prompt(self, messages: Sequence[Message]) -> Rendered:
        if images_of(messages) and self.renderer.image_token is None:
            raise ValueError(
                "messages hold images, but the recipe's model, whose image sizes the API gets, reads text only."
            )
        if not self._messages:
            self._messages.task = len(messages)
        self._messages += messages
        self.request = request_messages(self._policy(self._messages.copied()), self._address)
        return Rendered([], images_of(messages))

    def continuation(self, turn: Turn, messages: Sequence[Message]) -> Continuation:
        response = response_message(turn)
        self._messages.append(response)
        return Continuation(self.prompt(answer_calls(response, messages)))

    def is_long(self, messages: Sequence[Message]) -> bool:
        """Whether images are to be encoded."""
        return bool(images_of(messages))

    def _address(self, image: Any) -> str:
        if image.id not in self._addresses:
            self._addresses[image.id] = data_uri(image)
        return self._addresses[image.id]


class ChatSampler(Sampler):
    """Samples the responses of one episode. ``response`` is the last one."""

    response: ApiResponse

    def __init__(self, recorder: TurnRecorder, api: ChatEngine, config: Rollout, history: ChatHistory) -> None:
        super().__init__(recorder, api, config, seed=0)
        self.api = api
        self.history = history
        self.used = 0
        """The tokens of the last prompt and response, as the API counts them."""

    async def sample(self, prompt: Prompt, *draw: int, **options: Any) -> Sampled:
        config, began = self.config, time.perf_counter()
        limit = max(1, min(config.max_response_tokens, config.max_tokens - self.used))
        sampling = SamplingParams(limit, config.temperature, config.top_p, stop=config.stop)
        where = f"task {self.recorder.trajectory.task.id}, turn {draw[0]}"
        try:
            request = (self.history.request, self.history.tools, sampling, config.engine_timeout)
            self.response = await self.api.complete(*request)
        except RefusedError as error:
            raise TaskError(f"{where}: the API refused the request: {error}") from error
        except EngineError as error:
            raise EngineError(f"{where}: {error}") from error
        self.used = (self.response.prompt_tokens or 0) + (self.response.response_tokens or 0)
        completion = Completion([], [], self.response.stop_reason, [], self.response.prompt_tokens or 0)
        return Sampled(completion, time.perf_counter() - began)

    def cut(self, turn: Turn) -> Ending | None:
        return "max_tokens" if self.used >= self.config.max_tokens else "length"


class ChatLoop(TurnLoop):
    """Plays one episode per call of :meth:`play` with the model of ``api``. ``renderer`` is that of the policy, for its image sizes.

    Raises ValueError for a history that no chat API has.
    """

    def __init__(
        self,
        spec: EnvSpec,
        api: ChatEngine,
        renderer: Renderer,
        store: MediaStore | None,
        config: Rollout,
        history_policy: HistoryPolicy | None = None,
    ) -> None:
        if config.history == "inline":
            raise ValueError(
                "rollout.history must not be inline with --api: observations are messages of their own there."
            )
        if asks(history_policy):
            raise ValueError(
                "rollout.history must not ask the model with --api: its requests are the env's turns there."
            )
        config = replace(config, samples="step_wise")  # none are made
        super().__init__(spec, api, renderer, store, config, history_policy=history_policy)
        self.api = api
        self.tool_format = "json"

    def _begin(self, trajectory: Trajectory, session: EnvSession, is_task_prompt: bool) -> Episode:
        if session.tools and session.tool_format != "json":
            raise EnvContractError(
                f"env {self.spec.of(trajectory.task).name}: tool_format must be json, or unset, with --api, but it is "
                f"{session.tool_format!r}."
            )
        history = ChatHistory(self.renderer, trajectory.tools, self.history_policy or list)
        recorder = TurnRecorder(trajectory, None)
        sampler = ChatSampler(recorder, self.api, self.config, history)
        return Episode(trajectory, session, history, is_task_prompt, recorder, sampler)

    async def _turn(self, prompt: Prompt, episode: Episode) -> tuple[Turn, list[Message] | None]:
        turn, answer = await super()._turn(prompt, episode)
        assert isinstance(episode.sampler, ChatSampler)
        response = episode.sampler.response
        turn.message = response.message
        counts = {"api_prompt_tokens": response.prompt_tokens, "api_response_tokens": response.response_tokens}
        turn.metrics |= {name: float(count) for name, count in counts.items() if count is not None}
        return turn, None if answer is None else with_call_ids(response.message, answer)

    def _text(self, sampled: Sampled, episode: Episode) -> str:
        assert isinstance(episode.sampler, ChatSampler)
        return response_text(episode.sampler.response.message)

    async def _following(self, episode: Episode, turn: Turn, answer: list[Message]) -> Prompt | None:
        assert isinstance(episode.sampler, ChatSampler)
        if episode.sampler.used >= self.config.max_tokens:
            return None
        return await super()._following(episode, turn, answer)

    async def _prompt(self, rendered: Rendered, messages: list[Message], trajectory: Trajectory) -> Prompt:
        return Prompt([], list(rendered.images), messages)  # they are loaded
