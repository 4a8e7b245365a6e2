"""The turn loop for a history policy that asks the model, for example for a summary before it drops earlier turns."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from vlmrl.engine.base import EngineError
from vlmrl.env.session import EnvError
from vlmrl.multimodal.messages import copied, same_messages
from vlmrl.multimodal.renderer import Rendered, TooLongError
from vlmrl.rollout.copies import longest_copy
from vlmrl.rollout.history import Append, response_message
from vlmrl.rollout.history_policies import Asker, Messages
from vlmrl.rollout.record import Prompt
from vlmrl.rollout.sampler import EpisodeLimitError
from vlmrl.rollout.turn_loop import Episode, TurnLoop
from vlmrl.types import Message, Turn
from vlmrl.utils.threads import await_user_code
from vlmrl.utils.users_line import describe_error
from vlmrl.utils.work_pool import abandonable


class Asking(Append):
    """As ``append``, with the messages that the last prompt renders, and those before the first response."""

    def prompt(self, messages: Sequence[Message]) -> Rendered:
        self.task: Messages = list(messages)
        self.messages = self.task
        return super().prompt(messages)

    def whole(self, messages: Messages) -> Rendered:
        """The prompt of all these messages."""
        return super().prompt(messages)


class AskingLoop(TurnLoop):
    """Plays episodes in which ``history_policy`` is a coroutine function that gets an :class:`Asker`.

    Responses and observations stay as sampled until the policy returns other messages: those are rendered as a whole, and begin a new
    branch of the episode. A response that the policy asks for is a turn (``Turn.asked``) that does not count as one of ``max_turns``.
    """

    def _history(self, tools: list[dict[str, Any]]) -> Append:
        return Asking(self.renderer, tools, self.config.max_tokens)

    async def _following(self, episode: Episode, turn: Turn, answer: list[Message]) -> Prompt | None:
        history, trajectory, limit = episode.history, episode.trajectory, self.config.max_tokens
        assert isinstance(history, Asking)
        appended = await super()._following(episode, turn, answer)
        tokens = limit if appended is None else appended.length
        before = [*history.messages, response_message(turn), *answer]
        ask = partial(self._ask, episode)
        asker = Asker(ask, tokens, limit, copied(history.task), copied(answer), episode.is_compact_requested)
        history.messages = await self._rewritten(before, asker)
        if same_messages(history.messages, before):
            return appended
        try:
            rendered = await self._render(episode, history.messages, history.whole, history.messages)
        except TooLongError:
            return None
        prompt = await self._prompt(rendered, history.messages, trajectory)
        prompt = replace(prompt, rewritten=history.messages)
        _count(episode, saved_tokens=tokens - prompt.length)
        return episode.recorder.branching(len(trajectory.turns) - 1, prompt) if prompt.length < limit else None

    async def _rewritten(self, messages: Messages, asker: Asker) -> Messages:
        """What the policy makes of ``messages``. It may take `rollout.env_timeout` seconds until it asks, and after each response."""
        assert self.history_policy is not None
        asking = 0

        async def ask(shown: Messages) -> str:
            nonlocal asking
            asking += 1
            deadline.reschedule(None)
            try:
                return await asker.ask(shown)
            finally:
                asking -= 1
                if not asking:
                    deadline.reschedule(asyncio.get_running_loop().time() + self.config.env_timeout)

        deadline = asyncio.timeout(self.config.env_timeout)
        try:
            async with deadline:
                rewriting = await_user_code(self.history_policy(copied(messages), replace(asker, ask=ask)))
                # It may ignore that it is cancelled.
                return copied(list(await abandonable(rewriting)))
        except (EnvError, EngineError, EpisodeLimitError):
            raise
        except Exception as error:
            late = f"no answer in {self.config.env_timeout:g} s (rollout.env_timeout)"
            raise EnvError(f"rollout.history: {late if deadline.expired() else describe_error(error)}") from error

    async def _ask(self, episode: Episode, messages: Messages) -> str:
        """The response to ``messages`` after the last turn, as a turn that the env does not get.

        Raises:
            EpisodeLimitError: there is no room for it, or a budget cuts it.
        """
        trajectory, sampler, number = episode.trajectory, episode.sampler, len(episode.trajectory.turns)
        shown = await self._load_prompt(messages, trajectory)
        prompt = await super()._following(episode, trajectory.turns[-1], shown)
        if prompt is None:
            raise sampler.too_long(f"at least {self.config.max_tokens}")
        sampled = await sampler.sample(prompt, number, 0)
        text = self._text(sampled, episode)
        turn = episode.recorder.add(prompt, sampled.completion, text, seconds=sampled.seconds)
        turn.asked, turn.next_state = True, trajectory.turns[number - 1].next_state
        seen = trajectory.context(number, turn.prompt_length).token_ids
        turn.metrics["copied"] = longest_copy(turn.response_ids, seen) / max(1, len(turn.response_ids))
        _count(episode, asked_turns=1, asked_tokens=len(turn.response_ids))
        if turn.stop_reason != "stop":
            raise sampler.refuse(sampler.cut(turn) or "max_tokens", "the response was cut.")
        return text


def _count(episode: Episode, **counts: int) -> None:
    metrics = episode.trajectory.metrics
    for name, count in counts.items():
        metrics[name] = metrics.get(name, 0.0) + count
