"""The only agent loop: for text and images, one turn and many.

It encodes the prompt. Then, until the episode ends, it samples a response, passes its text to ``env.step`` and appends the
observation's tokens. Sampled ids are never re-encoded, token budgets end an episode only between turns, and a failure is never
turned into a reward.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from vlmrl.config import Rollout
from vlmrl.engine.base import Engine, EngineError
from vlmrl.env.base import EnvSpec, RetryTurn
from vlmrl.env.session import EnvContractError, EnvError, EnvSession, TaskError
from vlmrl.multimodal.images import ImageUnavailableError
from vlmrl.multimodal.masks import RowError
from vlmrl.multimodal.messages import copied
from vlmrl.multimodal.placeholders import expand
from vlmrl.multimodal.renderer import Rendered, Renderer, TooLongError
from vlmrl.multimodal.store import MediaStore
from vlmrl.rollout.history import Append, HistoryPolicy, Rerender, are_examples, new_history, response_message
from vlmrl.rollout.message_images import load_answer_images, load_images
from vlmrl.rollout.record import Prompt, TurnRecorder
from vlmrl.rollout.sampler import AbortedError, EpisodeLimitError, Sampled, Sampler
from vlmrl.samples.conversation import sample_of_episode
from vlmrl.types import TRUNCATED, Ending, MediaItem, Message, Sample, Task, Trajectory, Turn
from vlmrl.utils.work_pool import cpu_pool

T = TypeVar("T")


class _RejectedError(EnvError):
    """The env raised RetryTurn for the turn until no retry was left."""


@dataclass
class Episode:
    """One trajectory while it is played."""

    trajectory: Trajectory
    session: EnvSession
    history: Append
    plays_task_prompt: bool  # not one that the env's reset returned
    recorder: TurnRecorder
    sampler: Sampler
    is_compact_requested: bool = False  # by the env's last step


class TurnLoop:
    """Plays one episode per call of :meth:`play`; any number of calls may run at the same time.

    ``history_policy`` decides which messages a response is sampled from, if ``config.rerenders``.
    """

    def __init__(
        self,
        spec: EnvSpec,
        engine: Engine,
        renderer: Renderer,
        store: MediaStore | None,
        config: Rollout,
        seed: int = 0,
        history_policy: HistoryPolicy | None = None,
    ) -> None:
        self.spec = spec
        self.engine = engine
        self.renderer = renderer
        self.store = store
        self.config = config
        self.seed = seed
        self.history_policy = history_policy
        self.tool_format = renderer.tool_format

    async def play(self, task: Task, group_id: str, trajectory_id: str) -> Trajectory:
        """Play one episode. A failure of env or engine sets the trajectory's ``ending`` and ``error`` and does not raise."""
        trajectory = Trajectory(trajectory_id, group_id, task)
        config = self.config
        session = EnvSession(
            self.spec.of(task),
            task,
            max_turns=config.max_turns,
            timeout=config.env_timeout,
            max_retries=config.max_env_retries_per_turn,
            tool_format=self.tool_format,
        )
        try:
            messages = await session.start() or task.prompt
            # as they are now: an env may change its own later
            trajectory.tools = copied(session.tools) if session.sets_tools else session.tools
            episode = self._begin(trajectory, session, messages is task.prompt)
            trajectory.ending = await self._play(episode, await self._load_prompt(messages, trajectory))
            await self._finish(trajectory, session)
            if config.needs_rendered_rows:
                trajectory.samples = [await self._rendered_row(episode)]
        except AbortedError as error:
            trajectory.ending, trajectory.error = "aborted", str(error)
        except (EnvError, EngineError) as error:
            trajectory.ending, trajectory.error = "error", str(error)
            trajectory.rejected = isinstance(error, _RejectedError)
            greedy = config.temperature == 0  # playing the task again would give the same responses
            trajectory.non_retryable = isinstance(error, TaskError) or (trajectory.rejected and greedy)
        except asyncio.CancelledError:
            await session.abandon()
            raise
        finally:
            self.engine.release(trajectory_id)
            await session.close()
        trajectory.metrics |= {f"env_{kind}": float(count) for kind, count in session.counts.items()}
        trajectory.metrics |= {"env_seconds": session.seconds, "env_cpu_seconds": session.cpu_seconds}
        return trajectory

    def _begin(self, trajectory: Trajectory, session: EnvSession, is_task_prompt: bool) -> Episode:
        history = self._history(trajectory.tools)
        recorder = TurnRecorder(trajectory, self.renderer.image_token_id)
        sampler = Sampler(recorder, self.engine, self.config, self.seed)
        return Episode(trajectory, session, history, is_task_prompt, recorder, sampler)

    def _history(self, tools: list[dict[str, Any]]) -> Append:
        return new_history(self.config, self.renderer, tools, self.history_policy)

    async def _play(self, episode: Episode, messages: list[Message]) -> Ending:
        trajectory, history = episode.trajectory, episode.history
        prompt = await self._first_prompt(episode, messages)
        while True:
            turn, answer = await self._turn(prompt, episode)
            ending, following = self._ending(episode, turn, answer), None
            if ending is None and answer is not None:
                try:
                    following = await self._following(episode, turn, await self._load_answer(answer, episode))
                except EpisodeLimitError as error:  # of a response that the history policy asked for
                    ending = error.ending
            if following is None:
                trajectory.tail_ids = history.tail(turn)
                return ending or "max_tokens"
            prompt = following

    async def _first_prompt(self, episode: Episode, messages: list[Message]) -> Prompt:
        """The prompt of the first response. Raises TaskError; EnvError if tools that the env has set are at fault."""
        try:
            return await self._whole_prompt(episode, episode.history, messages)
        except TaskError as error:
            tools = episode.session.tools
            if not (tools and episode.session.sets_tools and await self._is_playable(episode, messages)):
                raise
            raise EnvError(
                f"{_where(episode.trajectory)}: with the {len(tools)} tools that its env has set, {error}"
            ) from error

    async def _is_playable(self, episode: Episode, messages: list[Message]) -> bool:
        """Whether the first messages make a prompt if there are no tools."""
        try:
            await self._whole_prompt(episode, self._history([]), messages)
        except TaskError:
            return False
        return True

    async def _whole_prompt(self, episode: Episode, history: Append, messages: list[Message]) -> Prompt:
        trajectory = episode.trajectory
        try:
            rendered = await self._render(episode, messages, history.prompt, messages)
        except TooLongError as error:
            raise self._prompt_too_long(trajectory, f"at least {error.least}") from error
        prompt = replace(await self._prompt(rendered, messages, trajectory), rewritten=history.shown)
        if prompt.length >= self.config.max_tokens:
            raise self._prompt_too_long(trajectory, str(prompt.length))
        return prompt

    async def _following(self, episode: Episode, turn: Turn, answer: list[Message]) -> Prompt | None:
        """The prompt after the last ``turn`` and the env's ``answer``, ``None`` if it leaves no room for a response."""
        trajectory, recorder = episode.trajectory, episode.recorder
        try:
            following = await self._render(episode, answer, episode.history.continuation, turn, answer)
        except TooLongError:
            return None
        prompt, last = await self._prompt(following.rendered, answer, trajectory), len(trajectory.turns) - 1
        if following.is_whole_prompt:
            prompt = recorder.branching(last, replace(prompt, rewritten=episode.history.shown))
        else:
            prompt = recorder.following(last, prompt.token_ids, prompt.media, answer, following.dropped)
        return prompt if prompt.length < self.config.max_tokens else None

    async def _render(self, episode: Episode, messages: list[Message], render: Callable[..., T], *args: Any) -> T:
        """``render(*args)``, in a thread if it encodes long texts, which would stop the event loop.

        Raises:
            TooLongError: the text is longer than the budget.
            TaskError, EnvError: ``messages``, the task's own or those of its env, cannot be rendered.
        """
        trajectory = episode.trajectory
        try:
            if not episode.history.is_long(messages):
                return render(*args)
            return await cpu_pool().run(self.config.env_timeout, render, *args)
        except TooLongError:
            raise
        except Exception as error:
            where = _where(trajectory)
            reason = f"{type(error).__name__}: {error}"
            if episode.plays_task_prompt and not trajectory.turns:
                raise TaskError(f"{where}: the prompt cannot be rendered: {reason}") from error
            raise EnvError(f"{where}: the env's messages cannot be rendered: {reason}") from error

    def _prompt_too_long(self, trajectory: Trajectory, tokens: str) -> TaskError:
        return TaskError(
            f"task {trajectory.task.id}: the prompt has {tokens} tokens and leaves no room for a response within "
            f"rollout.max_tokens ({self.config.max_tokens}): raise it, or shrink the images (model.max_image_pixels)."
        )

    def _ending(self, episode: Episode, turn: Turn, answer: list[Message] | None) -> Ending | None:
        """Why the episode ends after its last turn, ``None`` if it continues. ``answer`` is the observation, if there is one."""
        if turn.stop_reason == "length":
            return episode.sampler.cut(turn) or "max_tokens"
        if answer is None:
            return "env_done"
        return "max_turns" if episode.recorder.count == self.config.max_turns else None

    async def _turn(self, prompt: Prompt, episode: Episode) -> tuple[Turn, list[Message] | None]:
        """Sample one response, step the env with it, and record the turn. Returns the turn, and the observation's messages unless
        the episode is done."""
        trajectory, session = episode.trajectory, episode.session
        number, resampled, result = len(trajectory.turns), 0, None
        while True:
            sampled = await episode.sampler.sample(prompt, number, resampled)  # its seed differs in every epoch
            text = self._text(sampled, episode)
            if sampled.completion.stop_reason != "stop":
                break
            began = time.perf_counter()
            try:
                result = await session.step(text)
                break
            except RetryTurn as error:
                resampled += 1
                if resampled > self.config.max_env_retries_per_turn:
                    raise _RejectedError(
                        f"env {self.spec.of(trajectory.task).name}, task {trajectory.task.id}: RetryTurn {resampled} times: {error}"
                    ) from error
        turn = episode.recorder.add(prompt, sampled.completion, text, seconds=sampled.seconds)
        if resampled:
            turn.metrics["turns_resampled"] = float(resampled)
        if result is None:
            return turn, None
        turn.env_seconds = time.perf_counter() - began
        turn.reward = result.reward
        turn.metrics |= result.metrics
        turn.points = result.points
        episode.is_compact_requested = result.compact
        turn.next_state = result.state
        return turn, None if result.done else result.messages

    def _text(self, sampled: Sampled, episode: Episode) -> str:
        """The response as the env reads it."""
        opened = episode.history.opens_responses or not episode.trajectory.turns
        return self.renderer.text(sampled.completion.token_ids, opened)

    async def _load_prompt(self, messages: list[Message], trajectory: Trajectory) -> list[Message]:
        """The prompt with its images loaded."""
        try:
            return await load_images(messages, self.store, self.config.env_timeout)
        except ValueError as error:
            passing = isinstance(error, ImageUnavailableError)
            raise (EnvError if passing else TaskError)(f"{_where(trajectory)}: {error}") from error

    async def _load_answer(self, answer: list[Message], episode: Episode) -> list[Message]:
        """The observation with its images loaded, and a text for each that cannot be shown."""
        trajectory, seconds = episode.trajectory, self.config.env_timeout
        responses, line = [turn.text for turn in trajectory.turns], episode.session.step_line
        messages, not_shown = await load_answer_images(
            answer, self.store, seconds, _where(trajectory), line=line, responses=responses
        )
        if not_shown:
            trajectory.turns[-1].metrics["images_not_shown"] = float(not_shown)
        return messages

    async def _prompt(self, rendered: Rendered, messages: list[Message], trajectory: Trajectory) -> Prompt:
        """Rendered messages with the placeholders of their images expanded."""
        media: list[MediaItem] = []
        if rendered.images:
            assert self.store is not None  # the renderer of a text model refuses images
            seconds = self.config.env_timeout
            try:  # they are loaded already, unless a history policy has added some
                media = list(await asyncio.gather(*(self.store.get(image, seconds) for image in rendered.images)))
            except ValueError as error:
                raise EnvError(f"{_where(trajectory)}: {error}") from error
        expanded = expand(rendered.token_ids, self.renderer.image_token_id, media)
        return Prompt(expanded, media, messages)

    async def _rendered_row(self, episode: Episode) -> Sample:
        """The re-rendered conversation as one row. Its responses are encoded again, so it has no rollout logprobs.

        The row lacks what the history policy or the template removed from earlier responses; the last response is complete. Examples
        of responses in the task's messages are not trained.
        """
        trajectory, history = episode.trajectory, episode.history
        assert isinstance(history, Rerender)
        messages = [*history.rewritten(), response_message(trajectory.turns[-1])]
        shown = self.renderer.adapt_tool_messages(messages)
        examples = are_examples(shown, history.examples)
        rendered, marks = await self._render(episode, [], self.renderer.conversation, shown, history.tools, examples)
        whole = await self._prompt(rendered, messages, trajectory)
        sizes = iter(whole.media)
        is_image = [token == self.renderer.image_token_id for token in rendered.token_ids]
        mask = [
            mark
            for mark, image in zip(marks, is_image, strict=True)
            for _ in range(next(sizes).num_tokens if image else 1)
        ]
        try:
            return sample_of_episode(trajectory, whole.token_ids, whole.media, mask)
        except RowError as error:
            raise EnvError(f"trajectory {trajectory.id}: {error}") from error

    async def _finish(self, trajectory: Trajectory, session: EnvSession) -> None:
        assert trajectory.ending is not None
        last = next(turn for turn in reversed(trajectory.turns) if not turn.asked)
        number = sum(not turn.asked for turn in trajectory.turns) - 1
        trajectory.final_reward = await session.finish(trajectory.ending, last.text, number)
        last.metrics |= session.metrics_of_cut
        if trajectory.reward is None and trajectory.ending in TRUNCATED:
            trajectory.final_reward = self.config.truncated_reward
        if trajectory.reward is None:
            name = self.spec.of(trajectory.task).name
            raise EnvContractError(
                f"env {name}, task {trajectory.task.id}: the episode ended ({trajectory.ending}) without a reward: "
                f"{_reward_remedy(trajectory.ending, self.config.max_turns)}{session.step_line()}."
            )


def _reward_remedy(ending: Ending, max_turns: int) -> str:
    """How an episode that ended without a reward gets one."""
    if ending == "env_done":
        return "set info['reward'] in step, or return a reward from finish"
    if ending == "max_turns":
        return (
            f"step never returned done within rollout.max_turns ({max_turns}). Return done as True at the end of the episode. If this "
            "budget may end it, set unfinished_reward in the env's class, or return a reward from finish"
        )
    return "set unfinished_reward in the env's class, or rollout.truncated_reward, or return a reward from finish"


def _where(trajectory: Trajectory) -> str:
    """The place in a trajectory, for errors."""
    return f"task {trajectory.task.id}, turn {len(trajectory.turns)}"
