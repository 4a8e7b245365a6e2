"""Rows whose responses were rendered, not sampled, and so have no rollout logprobs: recorded conversations, re-rendered episodes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from vlmrl.multimodal.images import ImageError
from vlmrl.multimodal.masks import MaskedRow, RowError, check_length, masked_rows
from vlmrl.multimodal.placeholders import expand
from vlmrl.multimodal.renderer import Renderer
from vlmrl.multimodal.store import MediaStore
from vlmrl.types import MediaItem, ResponseSpan, Sample, Task, Trajectory
from vlmrl.utils.work_pool import DeadlineError, cpu_pool


async def samples_of_conversation(
    task: Task,
    renderer: Renderer,
    store: MediaStore | None,
    *,
    max_tokens: int,
    seconds: float,
    name: str | None = None,
) -> list[Sample]:
    """The rows of a conversation of :func:`vlmrl.data.conversations.load_conversations`, called trajectory ``name``.

    Text is rendered and images are loaded in the process's threads, in at most ``seconds`` each.

    Raises:
        RowError: the conversation cannot be trained on: an image does not load, it is longer than ``max_tokens``, the chat template
            refuses it or changes the text of a response that our policy sampled, or a field has another type.
    """
    try:
        rows = await cpu_pool().run(seconds, render_conversation, task, renderer, max_tokens)
        samples = [await _sample(row, task, renderer, store, seconds, name or task.id) for row in rows]
        check_length(max(map(len, samples)), max_tokens)
    except ImageError as error:
        raise RowError("images", f"task {task.id}: {error}") from error
    except DeadlineError as error:
        raise RowError("timeout", f"task {task.id}: the chat template did not write it in time: {error}.") from error
    except RowError as error:
        raise RowError(error.reason, f"task {task.id}: {error}") from error
    except (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError) as error:
        # a field of another type, or an id of more than 32 bits
        raise RowError("unreadable", f"task {task.id}: {type(error).__name__}: {error}") from error
    samples[-1].is_last_step = True
    return samples


def render_conversation(task: Task, renderer: Renderer, max_tokens: float = math.inf) -> list[MaskedRow]:
    """The rows of a conversation with their masks; responses that our policy sampled have the sampled ids.

    The end of a last response that a length limit cut has no loss, since nothing sampled it.

    Raises RowError, also for one that is longer than ``max_tokens``.
    """
    rows = masked_rows(renderer, task.prompt, task.data["tools"], task.data["trained"], max_tokens)
    cut = len(task.data["trained"]) - 1 if task.data.get("is_cut") else None
    for row in rows:
        for number, rendered in list(row.responses.items()):
            if number == cut and len(rendered) == 1:
                raise RowError("untrained", f"response {number} was cut before a text that the chat template writes.")
            ids = task.data["sampled"].get(number, rendered[:-1] if number == cut else rendered)
            end = [] if _writes_the_same(renderer, ids, rendered) else rendered[-1:]  # the policy did not sample it
            if end and not _writes_the_same(renderer, ids, rendered[:-1]):
                raise RowError(
                    "sampled",
                    f"response {number} renders to other tokens than the {len(ids)} sampled ones, {renderer.decode(rendered)!r:.60}: "
                    "the chat template changes its text, or a special token was sampled, which is text in a message.",
                )
            row.train_on(number, list(ids), end)
    return rows


def _writes_the_same(renderer: Renderer, ids: Sequence[int], rendered: Sequence[int]) -> bool:
    """Whether ``ids``, which a file names, are tokens with the text of ``rendered``, and with the same added tokens."""
    if not all(type(each) is int and each >= 0 for each in ids):
        return False
    if list(ids) == list(rendered):
        return True
    tokenizer = renderer.tokenizer
    added = set(tokenizer.added_tokens_decoder)
    same_added = [each for each in ids if each in added] == [each for each in rendered if each in added]
    is_known = None not in tokenizer.convert_ids_to_tokens(list(ids))
    return same_added and is_known and renderer.decode(ids) == renderer.decode(rendered)


async def _sample(
    row: MaskedRow, task: Task, renderer: Renderer, store: MediaStore | None, seconds: float, name: str
) -> Sample:
    media = [] if store is None else list(await asyncio.gather(*(store.get(image, seconds) for image in row.images)))
    prompt: list[int] = []
    response: list[int] = []  # from the first trained one
    mask: list[int] = []
    spans, used, numbers = [], 0, iter(row.responses)
    for short, is_trained in row.pieces:
        count = 0 if renderer.image_token_id is None else short.count(renderer.image_token_id)
        ids = expand(short, renderer.image_token_id, media[used : used + count])
        used += count
        if is_trained:
            spans.append(ResponseSpan(next(numbers), len(response), len(response) + len(ids)))
        if spans:
            response += ids
            mask += [int(is_trained)] * len(ids)
        else:
            prompt += ids
    return Sample(
        prompt_token_ids=prompt,
        response_ids=response,
        loss_mask=mask,
        rollout_logprobs=None,
        policy_versions=[0] * len(response),
        group_id=name,
        trajectory_id=name,
        is_last_step=False,
        stop_reason="stop",
        media=media,
        advantage=0.0,  # the trainer requires one, cross entropy does not use it
        responses=spans,
    )


def sample_of_episode(trajectory: Trajectory, token_ids: list[int], media: list[MediaItem], mask: list[int]) -> Sample:
    """The whole re-rendered episode as one row, from its first token with mask 1 on a response.

    ``mask``: 1 for the tokens of ``token_ids`` that the chat template's generation markers enclose.

    Raises:
        RowError: they enclose none.
    """
    if 1 not in mask:
        raise RowError("template", "the chat template's generation markers enclose no token of its responses.")
    first, last = mask.index(1), len(mask) - 1 - mask[::-1].index(1)
    turn = trajectory.turns[-1]
    return Sample(
        prompt_token_ids=token_ids[:first],
        response_ids=token_ids[first:],
        loss_mask=mask[first:],
        rollout_logprobs=None,
        policy_versions=turn.policy_versions[-1:] * (len(mask) - first),
        group_id=trajectory.group_id,
        trajectory_id=trajectory.id,
        is_last_step=True,
        stop_reason=turn.stop_reason,
        media=media,
        rewards={last - first: trajectory.reward or 0.0},
    )
