"""What every engine must do. Each case is a function of an :class:`EngineDriver`; those of servers are in `server_conformance.py`.

    @pytest.mark.parametrize("case", CASES + SERVER_CASES, ids=name_of)
    def test_conforms(driver, case):
        run_case(driver, case)

Weights change by updates within the cases, so that each of them also runs after many others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from testing.engine_drivers import EngineDriver, ServerDriver, prompt_tokens
from testing.episodes import image
from testing.fakes import item_of
from testing.real_servers import TRIES

from vlmrl.engine.base import EngineError, Request, SamplingParams, paused
from vlmrl.types import Completion

LONG = 300  # tokens of a response that is interrupted
CANARY = 10  # a mistake moves logprobs by at least this many times the tolerance
Case = Callable[[Any], None]


def run_case(driver: EngineDriver, case: Case) -> None:
    driver.use(driver.sharp)
    try:
        case(driver)
    finally:
        if isinstance(driver, ServerDriver):
            driver.reset()


def name_of(case: Case) -> str:
    return case.__name__


# Ids and images


def text_prompts_have_the_trainers_logprobs(d: EngineDriver) -> None:
    request = d.request("text", text="The color of the square, please.")
    d.check([request], d.ask(request))


def ids_are_not_decoded_and_encoded_again(d: EngineDriver) -> None:
    request = d.request("letters", ["red"], text="What")
    [word], letters = d.renderer.encode("What"), d.letters("What")
    ids = list(request.prompt_ids)
    place = ids.index(word)
    spelled = replace(request, prompt_ids=[*ids[:place], *letters, *ids[place + 1 :]])
    [response] = d.ask(spelled)
    d.check([spelled], [response])
    assert d.difference(request, response) > CANARY * d.tolerance


def images_of_different_sizes_are_seen_in_their_order(d: EngineDriver) -> None:
    shown = [image("red", (96, 64)), image("blue", (64, 96)), image("green", (32, 160)), "white"]
    request = d.request("sizes", shown)
    assert [item.num_tokens for item in request.media] == [6, 6, 5, 4]
    [response] = d.ask(request)
    d.check([request], [response])
    first, second, *rest = request.media
    assert d.difference(replace(request, media=[second, first, *rest]), response) > CANARY * d.tolerance


def an_image_may_be_shown_twice(d: EngineDriver) -> None:
    requests = [
        d.request("twice", ["red", "blue", "red"]),
        d.request("again", ["red"]),
        d.request("pair", ["red", "red"]),
    ]
    d.check(requests, d.ask(*requests))
    d.check(requests, d.ask(*requests))


def a_trajectory_continues_with_the_ids_that_were_sampled(d: EngineDriver) -> None:
    request = d.request("turns", ["red"], tokens=24)
    for color in ("blue", "red", "green"):
        [response] = d.ask(request)
        d.check([request], [response])
        request = d.next_turn(request, response, d.request("more", [color], text="More."))
    d.engine.release("turns")
    d.engine.release("never seen")
    d.check([request], d.ask(request))


def concurrent_requests_get_their_own_responses(d: EngineDriver) -> None:
    colors = ("red", "blue", "green", "white", "black", "yellow")
    texts = ("What?", "Which one of these is it, left or right?", "Go on.", "The color of the square, " * 4)
    requests = [
        d.request(
            f"{number}/{text[:2]}",
            colors[:number],
            text=text,
            tokens=8 + 3 * number,
            seed=number,
            temperature=temperature,
        )
        for number, text, temperature in ((n, t, 0.7 + 0.1 * i) for n in range(6) for i, t in enumerate(texts))
    ]
    responses = d.ask(*requests)
    d.check(requests, responses)
    assert len({tuple(response.token_ids) for response in responses}) == len(requests)


def requests_may_come_all_at_once(d: EngineDriver) -> None:
    """With more prompt tokens than a server computes in one forward, so that it computes one prompt in parts."""
    text = "The color of the square, " * 40
    requests = [
        d.request(f"burst/{n}", ["red", "blue"][n % 2 :], text=f"{n} {text}", tokens=4, seed=n) for n in range(40)
    ]
    d.check(requests, d.ask(*requests))
    assert sum(map(prompt_tokens, requests)) > 4096


def wrong_counts_of_images_are_refused_and_harm_no_other_request(d: EngineDriver) -> None:
    good = d.request("good", ["red"])
    wrong = [
        replace(good, trajectory_id="wrong/0", media=[]),
        replace(good, trajectory_id="wrong/1", media=[*good.media] * 2),
        replace(good, trajectory_id="wrong/2", prompt_ids=[*good.prompt_ids, d.policy.image_token_id]),
        replace(good, trajectory_id="wrong/3", prompt_ids=[t for t in good.prompt_ids if t != d.policy.image_token_id]),
    ]

    async def ask() -> list[Any]:
        return await asyncio.gather(*map(d.engine.generate, [*wrong, good]), return_exceptions=True)

    *errors, response = d.wait(ask())
    d.check([good], [response])
    for request, error in zip(wrong, errors, strict=True):
        assert (
            isinstance(error, ValueError) and "image placeholders" in str(error) and request.trajectory_id in str(error)
        )
    d.check([good], d.ask(good))


def an_image_larger_than_the_models_limit_is_exact_or_refused(d: EngineDriver) -> None:
    """The renderer's processor makes none; a server that scales it down must not go unnoticed."""
    huge = item_of("huge", image("blue", (512, 512)), 256)
    good = d.request("good", ["red"])
    request = replace(good, trajectory_id="huge", media=[huge])

    async def ask() -> list[Any]:
        return await asyncio.gather(*map(d.engine.generate, [request, good]), return_exceptions=True)

    response, other = d.wait(ask())
    d.check([good], [other])
    if isinstance(response, Completion):
        d.check([request], [response])
    else:
        assert isinstance(response, ValueError) and "huge" in str(response) and "tokens" in str(response), response
    d.check([good], d.ask(good))


# Sampling


def logprobs_are_those_after_temperature(d: EngineDriver) -> None:
    for temperature in (0.5, 1.0, 1.7):
        request = d.request("warm", ["red"], temperature=temperature)
        [response] = d.ask(request)
        d.check([request], [response])
        other = replace(request, sampling=replace(request.sampling, temperature=1.2))
        assert d.difference(other, response) > CANARY * d.tolerance


def logprobs_are_those_before_top_p_and_top_k_or_both_are_refused(d: EngineDriver) -> None:
    for options in ({"top_p": 0.5}, {"top_k": 3}, {"top_p": 1e-6}):
        request = d.request("filtered", ["red"], **options)
        if not d.filters:
            with pytest.raises(ValueError, match="top_p must be 1 and top_k 0"):
                d.ask(request)
            continue
        [response] = d.ask(request)
        d.check([request], [response])
        if "top_k" not in options:
            continue
        others = [d.request(f"first/{seed}", ["red"], tokens=1, seed=seed, top_k=3) for seed in range(24)]
        assert len({tuple(response.token_ids) for response in d.ask(*others)}) <= 3


def banned_ids_are_never_sampled_and_their_mass_is_removed(d: EngineDriver) -> None:
    banned = d.policy.banned_ids
    assert len(banned) == 2
    for order in (banned, banned[::-1]):
        d.use(d.speaking(order))
        requests = [
            d.request(f"ban/{seed}", ["red"], seed=seed, temperature=temperature)
            for seed, temperature in enumerate((0.0, 0.6, 1.0, 1.5))
        ]
        responses = d.ask(*requests)
        d.check(requests, responses)
        assert not {token for response in responses for token in response.token_ids} & set(banned)
        d.policy.banned_ids = []
        try:
            difference = d.difference(requests[2], responses[2])
        finally:
            d.policy.banned_ids = banned
        assert difference > 1  # without the ban they would have nearly all of the mass


def greedy_responses_are_equal_and_the_likeliest(d: EngineDriver) -> None:
    requests = [d.request(f"greedy/{seed}", ["red"], tokens=24, seed=seed, temperature=0.0) for seed in range(3)]
    responses = d.ask(*requests)
    d.check(requests, responses)  # their logprobs are those of temperature 1
    assert [response.token_ids for response in responses] == [responses[0].token_ids] * 3
    free = d.ask(*(d.request(f"free/{seed}", ["red"], tokens=1, seed=seed) for seed in range(24)))
    first = responses[0].logprobs[0]
    assert all(
        response.token_ids[0] == responses[0].token_ids[0] or response.logprobs[0] < first + d.tolerance
        for response in free
    )


def members_of_a_group_differ(d: EngineDriver) -> None:
    requests = [d.request(f"group/{seed}", ["red", "blue"], tokens=24, seed=seed) for seed in range(8)]
    responses = d.ask(*requests)
    d.check(requests, responses)
    assert len({tuple(response.token_ids) for response in responses}) == 8


def the_same_seed_gives_the_same_response_where_that_is_promised(d: EngineDriver) -> None:
    if not d.promises_seeds:
        pytest.skip("this engine promises nothing for a seed")
    request = d.request("seed", ["red"], tokens=24, seed=5)
    [alone] = d.ask(request)
    others = [d.request(f"other/{seed}", ["blue"], tokens=24, seed=seed) for seed in range(4)]
    again, *_ = d.ask(request, *others)
    [another] = d.ask(replace(request, sampling=replace(request.sampling, seed=6)))
    assert again.token_ids == alone.token_ids != another.token_ids


# Endings


def each_stop_id_ends_a_response_and_stays_in_it(d: EngineDriver) -> None:
    stops = sorted(d.renderer.stop_ids)
    assert len(stops) == 2
    seen = set()
    for order in (stops, stops[::-1]):
        d.use(d.speaking(order))
        request = d.request("stop", ["red"], tokens=40)
        [response] = d.ask(request)
        d.check([request], [response])
        assert response.stop_reason == "stop" and response.token_ids[-1] in stops
        assert not set(response.token_ids[:-1]) & set(stops)
        seen.add(response.token_ids[-1])
    assert seen == set(stops)


def a_stop_string_ends_a_response_and_stays_in_it(d: EngineDriver) -> None:
    d.use(d.speaking(d.letters("abab")[:2]))
    for prompt in ("What?", "aa ab ba bb"):  # in the prompt it ends nothing
        request = d.request("strings", ["red"], text=prompt, tokens=40, stop=("never", "aa", "ab", "ba", "bb"))
        [response] = d.ask(request)
        d.check([request], [response])
        text = d.renderer.decode(response.token_ids)
        assert response.stop_reason == "stop" and len(text) == 2 and set(text) <= set("ab"), text


def a_response_at_its_limit_ends_by_length(d: EngineDriver) -> None:
    d.use(d.speaking(d.letters()))
    for limit in (1, 7):
        request = d.request("limit", ["red"], tokens=limit)
        [response] = d.ask(request)
        d.check([request], [response])
        assert response.stop_reason == "length" and len(response.token_ids) == limit


# Interruptions


async def long_responses(d: EngineDriver, count: int = 4) -> tuple[list[Request], list[asyncio.Task[Completion]]]:
    """Requests that are being sampled: a short one, sent with them, has been answered."""
    requests = [d.request(f"long/{seed}", ["red", "blue"][: seed % 3], tokens=LONG, seed=seed) for seed in range(count)]
    tasks = [asyncio.create_task(d.engine.generate(request)) for request in requests]
    await d.engine.generate(d.request("short", tokens=16))
    return requests, tasks


def interrupted_responses_keep_their_tokens_and_continue_with_the_new_weights(d: EngineDriver) -> None:
    old = d.speaking(d.letters())
    new = d.changed(old, seed=1)

    async def interrupt() -> tuple[list[Request], list[Completion]]:
        requests, tasks = await long_responses(d)
        await d.update(new)
        return requests, list(await asyncio.gather(*tasks))

    for _ in range(TRIES):
        d.use(old)
        version = d.version
        requests, responses = d.wait(interrupt())
        begun = [response.policy_versions.count(version) for response in responses]
        if all(0 < count < LONG for count in begun):
            break
    assert all(0 < count < LONG for count in begun), begun
    for request, response, count in zip(requests, responses, begun, strict=True):
        assert response.stop_reason == "length" and response.prompt_tokens == prompt_tokens(request)
        assert response.policy_versions == [version] * count + [version + 1] * (LONG - count)
        before, after = d.scores(request, response, old), d.scores(request, response, new)
        expected = np.concatenate([before[:count], after[count:]])
        assert np.abs(expected - response.logprobs).max() < d.tolerance
        assert np.abs(before - after).max() > CANARY * d.tolerance


def a_pause_without_new_weights_changes_nothing(d: EngineDriver) -> None:
    d.use(d.speaking(d.letters()))

    async def pause() -> tuple[list[Request], list[Completion]]:
        requests, tasks = await long_responses(d)
        async with paused(d.engine):
            await d.engine.pause()  # a second pause changes nothing
            requests.append(d.request("late", tokens=2))
            tasks.append(asyncio.create_task(d.engine.generate(requests[-1])))
            waiting = [task for task in tasks if not task.done()]
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)), 0.5)
        return requests, list(await asyncio.gather(*tasks))

    requests, responses = d.wait(pause())
    d.check(requests, responses)
    assert [len(response.token_ids) for response in responses] == [LONG] * 4 + [2]


def an_error_within_a_pause_ends_it(d: EngineDriver) -> None:
    async def fail() -> None:
        with pytest.raises(ZeroDivisionError):
            async with paused(d.engine):
                1 / 0  # noqa: B018

    d.wait(fail())
    request = d.request("afterwards")
    d.check([request], d.ask(request))


def a_cancelled_request_is_sampled_no_further(d: EngineDriver) -> None:
    d.use(d.speaking(d.letters()))

    async def cancel() -> tuple[bool, Completion]:
        given_up = asyncio.create_task(d.engine.generate(d.request("given up", ["red"], tokens=LONG)))
        kept = asyncio.create_task(d.engine.generate(d.request("kept", ["red"], tokens=LONG - 50)))
        await d.engine.generate(d.request("short", tokens=8))
        given_up.cancel()
        cancelled = (await asyncio.gather(given_up, return_exceptions=True))[0]
        while await d.running() > 1:
            await asyncio.sleep(0.01)
        # If the kept one has ended, the other one may have been sampled to its end.
        return isinstance(cancelled, asyncio.CancelledError) and not kept.done(), await kept

    for _ in range(TRIES):
        is_shorter, kept = d.wait(cancel())
        assert len(kept.token_ids) == LONG - 50
        if is_shorter:
            break
    assert is_shorter


# New weights


def images_seen_before_an_update_are_seen_with_the_new_weights(d: EngineDriver) -> None:
    """Keys and values, features of images and caches of prompts must not survive, whichever part of the model has changed."""
    seen = d.request("seen", ["red", image("blue", (96, 64))], tokens=24)
    text = d.request("text", text="The color of the square, " * 4)
    for number, part in enumerate(("visual", "language_model", "")):
        first = d.request(f"turns/{part}", ["red"], tokens=24)
        [turn, *responses] = d.ask(first, seen, text)
        d.check([first, seen, text], [turn, *responses])
        old = d.weights
        d.use(d.changed(d.sharp, seed=number, part=part))
        second = d.next_turn(first, turn, d.request("more", ["red"], text="More."))
        requests = [second, seen, replace(seen, trajectory_id=f"new/{part}")]
        responses = d.ask(*requests, text)
        d.check([*requests, text], responses)
        assert all(d.difference(*pair, old) > CANARY * d.tolerance for pair in zip(requests, responses, strict=False))


# Failures


def an_engine_that_fails_gives_a_named_error_and_serves_on(d: EngineDriver) -> None:
    if isinstance(d, ServerDriver):
        d.set(retries=0)
    request = d.request("failing", ["red"])
    d.fail(1)
    with pytest.raises(EngineError, match="set by the test"):
        d.ask(request)
    d.check([request], d.ask(request))


def a_failed_episode_gets_no_reward(d: EngineDriver) -> None:
    if isinstance(d, ServerDriver):
        d.set(retries=0)
    d.fail(1)
    rollouts = d.wait(d.run.runner(engine=d.engine).play(iter([d.run.tasks[0]]), 1, "episodes"))
    assert rollouts.failed and len(rollouts.trajectories) == d.run.config.rollout.group_size
    for trajectory in rollouts.failed:
        assert "set by the test" in str(trajectory.error) and trajectory.final_reward is None and not trajectory.turns
    assert not any(trajectory.failed for trajectory in rollouts.trajectories)


def a_closed_engine_answers_nobody_and_lets_nobody_wait(d: EngineDriver) -> None:
    """The last case: there is no engine any more."""
    d.use(d.speaking(d.letters()))

    async def close() -> None:
        _, tasks = await long_responses(d)
        await asyncio.to_thread(d.close)
        for response in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(response, EngineError | Completion), response
        with pytest.raises(EngineError, match="closed"):
            await d.engine.generate(Request("late", [1, 2], [], SamplingParams(2)))

    d.wait(close())
    d.check_nothing_is_left()
    d.run.close()  # a second time changes nothing


CASES: list[Case] = [
    text_prompts_have_the_trainers_logprobs,
    ids_are_not_decoded_and_encoded_again,
    images_of_different_sizes_are_seen_in_their_order,
    an_image_may_be_shown_twice,
    a_trajectory_continues_with_the_ids_that_were_sampled,
    concurrent_requests_get_their_own_responses,
    requests_may_come_all_at_once,
    wrong_counts_of_images_are_refused_and_harm_no_other_request,
    an_image_larger_than_the_models_limit_is_exact_or_refused,
    logprobs_are_those_after_temperature,
    logprobs_are_those_before_top_p_and_top_k_or_both_are_refused,
    banned_ids_are_never_sampled_and_their_mass_is_removed,
    greedy_responses_are_equal_and_the_likeliest,
    members_of_a_group_differ,
    the_same_seed_gives_the_same_response_where_that_is_promised,
    each_stop_id_ends_a_response_and_stays_in_it,
    a_stop_string_ends_a_response_and_stays_in_it,
    a_response_at_its_limit_ends_by_length,
    interrupted_responses_keep_their_tokens_and_continue_with_the_new_weights,
    a_pause_without_new_weights_changes_nothing,
    an_error_within_a_pause_ends_it,
    a_cancelled_request_is_sampled_no_further,
    images_seen_before_an_update_are_seen_with_the_new_weights,
    an_engine_that_fails_gives_a_named_error_and_serves_on,
    a_failed_episode_gets_no_reward,
]
"""For all engines."""
