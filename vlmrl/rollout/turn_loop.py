"""The agent loop, the only one: text and pictures, one turn and many.

Encode the prompt; then until done: sample a reply, hand its text to the env, append what the observation adds. Sampled
ids are kept as they came; budgets cut at a turn's edge; a failure ends the trajectory as a failure, never as a reward.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import dataclass, field

from vlmrl.config import Rollout
from vlmrl.engine.base import Engine, EngineError, Request, SamplingParams
from vlmrl.env import EnvSpec, RetryTurn
from vlmrl.env_session import EnvContractError, EnvError, EnvSession
from vlmrl.media import MediaStore
from vlmrl.renderer import Rendered, Renderer, expand
from vlmrl.types import TRUNCATED, Completion, Ending, MediaItem, Message, Task, Trajectory, Turn


@dataclass
class _Context:
    """What the next reply is sampled from: the whole history in the engine's form, its pictures, and its true length."""

    engine_ids: list[int] = field(default_factory=list)
    media: list[MediaItem] = field(default_factory=list)
    length: int = 0


@dataclass(frozen=True)
class _Piece:
    """New tokens for the context: rendered messages with their pictures loaded."""

    engine_ids: list[int]
    token_ids: list[int]
    media: list[MediaItem]
    messages: list[Message]


class TurnLoop:
    """Plays one task at a time per call of :meth:`play`; any number of calls run side by side."""

    def __init__(
        self,
        spec: EnvSpec,
        engine: Engine,
        renderer: Renderer,
        store: MediaStore | None,
        config: Rollout,
        seed: int = 0,
    ) -> None:
        self.spec = spec
        self.engine = engine
        self.renderer = renderer
        self.store = store
        self.config = config
        self.seed = seed

    async def play(self, task: Task, group_id: str, trajectory_id: str) -> Trajectory:
        """One episode. A failure of env or engine is told by the trajectory's ``ending`` and ``error``, never raised."""
        trajectory = Trajectory(trajectory_id, group_id, task)
        config = self.config
        session = EnvSession(
            self.spec,
            task,
            max_turns=config.max_turns,
            timeout=config.env_timeout,
            max_retries=config.max_env_retries_per_turn,
        )
        try:
            trajectory.ending = await self._play(task, trajectory, session)
            if trajectory.ending != "aborted":
                await self._finish(trajectory, session)
        except (EnvError, EngineError) as error:
            trajectory.ending, trajectory.error = "error", str(error)
        finally:
            self.engine.release(trajectory_id)
            await session.close()
        trajectory.metrics |= {f"env_{kind}": float(count) for kind, count in session.counts.items()}
        trajectory.metrics["env_seconds"] = session.seconds
        return trajectory

    async def _play(self, task: Task, trajectory: Trajectory, session: EnvSession) -> Ending:
        messages = await session.start() or task.prompt
        context = _Context()
        piece = await self._load(self.renderer.prompt(messages, session.tools), messages)
        if len(piece.token_ids) >= self.config.max_tokens:
            raise EnvError(
                f"task {task.id}: the prompt has {len(piece.token_ids)} tokens and leaves no room for a reply within "
                f"rollout.max_tokens ({self.config.max_tokens}): raise it, or shrink the pictures (model.max_image_pixels)."
            )
        while True:
            turn, done = await self._turn(piece, context, trajectory, session)
            trajectory.turns.append(turn)
            if turn.stop_reason == "abort":
                return "aborted"
            if turn.stop_reason == "length":
                return "length" if len(turn.response_ids) == self.config.max_reply_tokens else "max_tokens"
            if done is None:
                return "env_done"
            if len(trajectory.turns) == self.config.max_turns:
                return "max_turns"
            close = turn.response_ids[-1:] != [self.renderer.end_of_turn_id]
            piece = await self._load(self.renderer.delta(done, session.tools, close=close), done)
            if context.length + len(piece.token_ids) >= self.config.max_tokens:
                return "max_tokens"

    async def _turn(
        self, piece: _Piece, context: _Context, trajectory: Trajectory, session: EnvSession
    ) -> tuple[Turn, list[Message] | None]:
        """Sample one reply and have the env answer it: the turn, and the observation's messages unless the episode is done."""
        context.engine_ids += piece.engine_ids
        context.media += piece.media
        context.length += len(piece.token_ids)
        resampled = 0
        while True:
            began = time.perf_counter()
            completion = await self._generate(context, trajectory, resampled)
            turn = self._new_turn(piece, completion)
            turn.engine_seconds = time.perf_counter() - began
            if completion.stop_reason != "stop":
                break
            began = time.perf_counter()
            try:
                result = await session.step(turn.text)
                break
            except RetryTurn as error:
                resampled += 1
                if resampled > self.config.max_env_retries_per_turn:
                    raise EnvError(
                        f"env {self.spec.name}, task {trajectory.task.id}: RetryTurn {resampled} times: {error}"
                    ) from error
        context.engine_ids += completion.token_ids
        context.length += len(completion.token_ids)
        if resampled:
            turn.metrics["turns_resampled"] = float(resampled)
        if completion.stop_reason != "stop":
            return turn, None
        turn.env_seconds = time.perf_counter() - began
        turn.reward = result.reward
        turn.metrics |= result.metrics
        return turn, None if result.done else result.messages

    async def _generate(self, context: _Context, trajectory: Trajectory, resampled: int) -> Completion:
        limit = min(self.config.max_reply_tokens, self.config.max_tokens - context.length)
        member = trajectory.id.rpartition("/")[2]
        seed = derive_seed(self.seed, trajectory.task.seed, member, len(trajectory.turns), resampled)
        c = self.config
        sampling = SamplingParams(limit, c.temperature, c.top_p, c.top_k, c.stop, seed)
        request = Request(trajectory.id, context.engine_ids, context.media, sampling)
        try:
            async with asyncio.timeout(c.engine_timeout):
                completion = await self.engine.generate(request)
        except TimeoutError:
            raise EngineError(
                f"trajectory {trajectory.id}: no reply in rollout.engine_timeout ({c.engine_timeout:g} s)."
            ) from None
        if completion.prompt_tokens != context.length:
            raise ValueError(
                f"trajectory {trajectory.id}, turn {len(trajectory.turns)}: the engine counted {completion.prompt_tokens} prompt "
                f"tokens, but the renderer {context.length}: they do not expand or resize pictures alike."
            )
        return completion

    def _new_turn(self, piece: _Piece, completion: Completion) -> Turn:
        return Turn(
            prompt_ids=piece.token_ids,
            media=piece.media,
            response_ids=completion.token_ids,
            logprobs=completion.logprobs,
            policy_versions=completion.policy_versions,
            stop_reason=completion.stop_reason,
            text=self.renderer.text(completion.token_ids),
            messages=piece.messages,
        )

    async def _load(self, rendered: Rendered, messages: list[Message]) -> _Piece:
        """Load a rendered piece's pictures, all at once."""
        media: list[MediaItem] = []
        if rendered.images:
            assert self.store is not None  # the renderer of a text model refuses pictures
            try:
                media += await asyncio.gather(*map(self.store.get, rendered.images))
            except ValueError as error:
                raise EnvError(str(error)) from error
        expanded = expand(rendered.token_ids, self.renderer.image_token_id, media)
        return _Piece(rendered.token_ids, expanded, media, messages)

    async def _finish(self, trajectory: Trajectory, session: EnvSession) -> None:
        assert trajectory.ending is not None
        trajectory.final_reward = await session.finish(trajectory.ending, trajectory.turns[-1].text)
        if trajectory.reward is None and trajectory.ending in TRUNCATED:
            trajectory.final_reward = self.config.truncated_reward
        if trajectory.reward is None:
            remedy = "give info['reward'] in step, or return a reward from finish"
            if trajectory.ending in TRUNCATED:
                remedy += ", or set rollout.truncated_reward"
            raise EnvContractError(
                f"env {self.spec.name}, task {trajectory.task.id}: the episode ended ({trajectory.ending}) without a reward: {remedy}."
            )


def derive_seed(*parts: object) -> int:
    """A 63-bit seed that differs when any part does, the same in every process."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
