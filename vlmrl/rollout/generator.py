"""A user's own generator in place of the turn loop: ``rollout.generate`` names an async function.

    async def generate(client, renderer, task):
        prompt = renderer.prompt(task.prompt)
        response = await client.generate(prompt.token_ids, prompt.images)
        return client.trajectory(reward=float(task.answer in renderer.text(response.token_ids)))

It plays one episode of ``task`` and returns ``client.trajectory(...)``, or columns (see `samples/columns.py`). The client records
every response, and the audit compares the rows with that record: only sampled tokens are trained.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, zip_longest
from typing import Any, get_args

from vlmrl.config import Rollout, name_of
from vlmrl.config.code import load_code
from vlmrl.engine.base import Engine, EngineError
from vlmrl.multimodal.images import copy_on_write
from vlmrl.multimodal.placeholders import expand
from vlmrl.multimodal.renderer import Renderer
from vlmrl.multimodal.store import MediaStore
from vlmrl.rollout.record import Prompt, TurnRecorder
from vlmrl.rollout.sampler import AbortedError, Sampler
from vlmrl.samples.audit import audit
from vlmrl.samples.columns import from_columns, rollout_metrics
from vlmrl.samples.emit import check_one_row
from vlmrl.types import Completion, Ending, ImageSource, MediaItem, ResponseSpan, Sample, Task, Trajectory, Turn
from vlmrl.utils.threads import await_user_code
from vlmrl.utils.users_line import describe_error
from vlmrl.utils.work_pool import abandonable, cpu_pool

LISTS = ("prompt_ids", "media", "response_ids", "logprobs", "policy_versions")
"""Of a turn."""

Generate = Callable[["Client", Renderer, Task], Awaitable[Trajectory | Mapping[str, Any]]]


class Client:
    """Samples the responses of one episode: token ids and images in, a Completion out. ``calls`` counts the responses."""

    def __init__(self, loop: GeneratorLoop, trajectory: Trajectory) -> None:
        self.trajectory_id = trajectory.id
        self.group_id = trajectory.group_id
        self.recorder = TurnRecorder(trajectory, loop.renderer.image_token_id)
        self.sampler = Sampler(self.recorder, loop.engine, loop.config, loop.seed)
        self._loop = loop
        self.ended = False

    @property
    def calls(self) -> int:
        return self.recorder.count

    async def generate(
        self,
        prompt_ids: Sequence[int],
        images: Sequence[ImageSource] = (),
        *,
        max_tokens: int | None = None,
        **sampling: Any,
    ) -> Completion:
        """Sample one response to a prompt with one placeholder per image, as the renderer returns it.

        ``max_tokens`` is a limit of this response, below those of the run. ``sampling`` overrides other fields of
        :class:`~vlmrl.engine.base.SamplingParams`, except ``temperature``, which the trainer uses too.

        Raises:
            EpisodeLimitError: a ValueError; the episode has had ``rollout.max_turns`` responses, or the prompt leaves no room within
                ``rollout.max_tokens``.
            RuntimeError: the episode has ended.
        """
        if self.ended:
            raise RuntimeError(f"trajectory {self.trajectory_id} has ended, so that nothing more is sampled for it.")
        if "temperature" in sampling:
            raise ValueError(
                "temperature cannot be set by a generator: set rollout.temperature, which the trainer uses too."
            )
        number, loop = self.sampler.begin(), self._loop
        try:
            media = await self.images(images)
            whole = Prompt(expand(prompt_ids, loop.renderer.image_token_id, media), media)
            prompt = self.recorder.continuing(whole)
            sampled = await self.sampler.sample(prompt, number, max_tokens=max_tokens, **sampling)
            found = sampled.completion
            # a copy: the caller may change its lists
            own = replace(found, token_ids=list(found.token_ids), logprobs=list(found.logprobs))
            text = loop.renderer.text(own.token_ids)
            self.recorder.add(prompt, own, text, seconds=sampled.seconds, number=number)
        finally:
            self.sampler.end(number)
            if self.ended:  # without this request: the engine may have kept something for it since
                loop.engine.release(self.trajectory_id)
        return found

    async def images(self, images: Sequence[ImageSource]) -> list[MediaItem]:
        """Load and process images; each distinct image is processed once."""
        if images and self._loop.store is None:
            raise ValueError(f"{len(images)} images for a model that reads text only.")
        store, seconds = self._loop.store, self._loop.config.env_timeout
        return list(await asyncio.gather(*(store.get(image, seconds) for image in images))) if store else []

    def trajectory(self, reward: float, *, metrics: Mapping[str, float] | None = None) -> Trajectory:
        """The finished episode: every response sampled so far, and its reward.

        Its ``ending`` is the budget that refused a request or cut a response, else ``env_done``.
        """
        return self._finished(self.recorder.ordered(), reward, metrics or {})

    def _finished(self, places: Sequence[int], reward: float, metrics: Mapping[str, float]) -> Trajectory:
        turns = [_with_own_lists(turn) for turn in self.recorder.selected(places)]
        return replace(
            self.recorder.trajectory,
            turns=turns,
            ending=self.sampler.limit(turns) or "env_done",
            final_reward=float(reward),
            metrics=dict(metrics),
        )

    def adopt(self, result: Any) -> Trajectory:
        """The result of a generator as this episode's trajectory. Raises ValueError if it is not what was sampled here."""
        from_columns = isinstance(result, Mapping)
        if from_columns:
            result = self.from_columns(result)
        if not isinstance(result, Trajectory):
            raise ValueError(
                f"a generator must return client.trajectory(...) or columns, but it returned {result!r:.100}."
            )
        if result.id != self.trajectory_id:
            raise ValueError(f"the trajectory must be {self.trajectory_id}, but its id is {result.id}.")
        if not result.turns:
            raise ValueError(f"trajectory {result.id}: it has no turns; sample with client.generate before it ends.")
        if result.ending not in get_args(Ending):
            endings = ", ".join(get_args(Ending))
            raise ValueError(
                f"trajectory {result.id}: its ending must be one of {endings}, but it is {result.ending!r:.100}."
            )
        if not is_finite_number(result.reward):
            raise ValueError(f"trajectory {result.id}: its reward must be a finite number, but it is {result.reward}.")
        for metrics in (result.metrics, *(turn.metrics for turn in result.turns)):
            for name, value in metrics.items():
                if not is_finite_number(value):
                    raise ValueError(
                        f"trajectory {result.id}: its metric {name!r} must be a finite number, but it is {value!r:.100}."
                    )
        result = replace(result, group_id=self.group_id, task=self.recorder.trajectory.task)
        if not from_columns:
            self._check_turns(result)
            if self._loop.config.samples == "concat":
                check_one_row(result)
        if result.samples is not None:
            self._check_rows(result)
        return result

    def _check_rows(self, trajectory: Trajectory) -> None:
        """The rules of a batch hold for the rows, or this trajectory would end the run. Experts are left to the batch's audit."""
        rows = [replace(sample, expert_routing=[]) for sample in trajectory.samples or []]
        if not trajectory.failed:
            audit(rows, [trajectory], image_token_id=self._loop.renderer.image_token_id)

    def _check_turns(self, trajectory: Trajectory) -> None:
        """The turns are those that were recorded; only what is no token, such as their rewards, may differ."""
        recorded = self.recorder.selected(self.recorder.ordered())
        names = (*LISTS, "parent", "kept", "kept_media")
        for number, (turn, own) in enumerate(zip_longest(trajectory.turns, recorded)):
            if turn is None or own is None or any(getattr(turn, name) != getattr(own, name) for name in names):
                raise ValueError(
                    f"trajectory {trajectory.id}, turn {number}: its response was never sampled by this generator's client, or "
                    "not after this prompt: return all turns of client.trajectory(...), or columns."
                )

    def from_columns(self, columns: Mapping[str, Any]) -> Trajectory:
        """The trajectory of this episode's columns. Responses that no row trains are counted as ``responses_unused``."""
        samples = from_columns(columns)
        if {sample.trajectory_id for sample in samples} != {self.trajectory_id}:
            names = sorted({sample.trajectory_id for sample in samples})
            raise ValueError(
                f"column 'trajectory_ids' must be {self.trajectory_id} in every row, but it holds {names}."
            )
        used = self._locate(samples)
        metrics = {"responses_unused": float(self.calls - len(used)), **rollout_metrics(columns)}
        trajectory = self._finished(used, sum(sample.reward for sample in samples), metrics)
        for sample in samples:
            sample.group_id = self.group_id
            versions: list[int | None] = [None] * len(sample.response_ids)
            logprobs = [0.0] * len(sample.response_ids)
            for span in sample.responses:
                turn = trajectory.turns[span.turn]
                versions[span.start : span.end] = turn.policy_versions
                logprobs[span.start : span.end] = turn.logprobs
            sample.policy_versions = _filled(versions)
            if sample.rollout_logprobs is None:
                sample.rollout_logprobs = logprobs
        trajectory.samples = samples
        return trajectory

    def _locate(self, samples: Sequence[Sample]) -> list[int]:
        """The places of the turns that the rows train, in order, with their spans written into the rows.

        Raises ValueError for trained tokens that were never sampled.
        """
        places, used = iter(range(self.calls)), list[int]()
        for sample in samples:
            for start, end in _trained_runs(sample):
                ids = sample.response_ids[start:end]
                place = next((each for each in places if self.recorder.turns[each].response_ids == ids), None)
                if place is None:
                    raise ValueError(
                        f"trajectory {self.trajectory_id}, response tokens {start} to {end - 1}: they have mask 1, but this "
                        f"generator's client never sampled them: {ids[:20]}."
                    )
                sample.responses.append(ResponseSpan(len(used), start, end))
                used.append(place)
        return used


def _with_own_lists(turn: Turn) -> Turn:
    """A copy whose lists a generator may change without changing the record, with which they are compared."""
    copy = replace(turn)
    for name in LISTS:
        setattr(copy, name, list(getattr(turn, name)))
    return copy


@dataclass(eq=False, repr=False)
class GeneratorLoop:
    """Plays episodes with the user's generator; has the interface of the turn loop."""

    generate: Generate
    engine: Engine
    renderer: Renderer
    store: MediaStore | None
    config: Rollout
    seed: int

    async def play(self, task: Task, group_id: str, trajectory_id: str) -> Trajectory:
        """Play one episode. An exception of the generator makes the trajectory fail."""
        trajectory = Trajectory(trajectory_id, group_id, task)
        client = Client(self, trajectory)
        limit = self.config.max_turns * (self.config.engine_timeout + self.config.env_timeout)
        try:
            async with asyncio.timeout(limit):
                own = await cpu_pool().run(math.inf, task.copy, copy_on_write)
                playing = await_user_code(self.generate(client, self.renderer, own))
                result = await abandonable(playing)  # it may ignore that it is cancelled
            if isinstance(result, Mapping):  # reading them takes microseconds for each token
                return await cpu_pool().run(math.inf, client.adopt, result)
            return client.adopt(result)
        except AbortedError as error:
            trajectory.ending, trajectory.error = "aborted", str(error)
        except EngineError as error:
            trajectory.ending, trajectory.error = "error", str(error)
        except asyncio.CancelledError:
            here = asyncio.current_task()
            if here is not None and here.cancelling():  # the run ends it
                raise
            trajectory.ending = "error"
            trajectory.error = f"{name_of(self.generate)}, task {task.id}: it cancelled itself."
        except Exception as error:
            reward, failure = self.config.truncated_reward, error
            if reward is not None and trajectory.turns and client.sampler.limit(trajectory.turns) is not None:
                try:
                    return client.adopt(client.trajectory(reward))  # as an agent that a budget stopped
                except ValueError as refused:  # it has branches
                    failure = refused
            late = isinstance(failure, TimeoutError)
            reason = f"no end within {limit:g} s" if late else describe_error(failure)
            trajectory.ending, trajectory.error = "error", f"{name_of(self.generate)}, task {task.id}: {reason}"
        finally:
            client.ended = True
            self.engine.release(trajectory_id)
        return trajectory


def resolve_generate(config: Rollout) -> Generate | None:
    """The function ``rollout.generate``. Raises ValueError unless it is an async function."""
    function = load_code("rollout.generate", config.generate)
    if function is not None and not inspect.iscoroutinefunction(function):
        raise ValueError(
            f"rollout.generate must be an async function (client, renderer, task), but it is {name_of(config.generate)}."
        )
    return function


def is_finite_number(value: Any) -> bool:
    """Whether a reward or a metric can be averaged; False for text, NaN and integers beyond floats."""
    try:
        return math.isfinite(value)
    except (TypeError, OverflowError):
        return False


def _trained_runs(sample: Sample) -> Iterator[tuple[int, int]]:
    """Where each run of tokens with mask 1 begins and ends."""
    end = 0
    for mask, run in groupby(sample.loss_mask):
        start, end = end, end + len(list(run))
        if mask:
            yield start, end


def _filled(versions: Sequence[int | None]) -> list[int]:
    """Replace each ``None`` with the next known version, or with the last one at the end."""
    filled: list[int] = []
    following = next((version for version in reversed(versions) if version is not None), 0)
    for version in reversed(versions):
        following = following if version is None else version
        filled.append(following)
    return filled[::-1]
