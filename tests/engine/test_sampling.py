"""Drawing tokens: the inverse of a cumulative distribution, filters, and ids that must never come."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from vlmrl.engine.base import SamplingParams
from vlmrl.engine.hf.sampling import HEAD, RandomNumbers, Sampling

TENTHS = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
LAST = 1 - 2**-53  # the largest number that a draw can be


CPU = torch.device("cpu")


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], numbers: Sequence[float]
) -> tuple[list[int], list[float]]:
    return Sampling(params, CPU).draw(logits, numbers)


def draw(logits: torch.Tensor, number: float, **options: float) -> tuple[int, float]:
    (token,), (logprob,) = sample(logits, [SamplingParams(8, **options)], [number])  # type: ignore[arg-type]
    return token, logprob


@pytest.mark.parametrize(
    ("number", "token"),
    [(0.0, 0), (0.0999, 0), (0.1001, 1), (0.2999, 1), (0.3001, 2), (0.5999, 2), (0.6001, 3), (LAST, 3)],
)
def test_a_number_falls_into_its_tokens_share(number: float, token: int):
    assert draw(TENTHS, number) == (token, pytest.approx(TENTHS[0, token].item()))


@pytest.mark.parametrize(("number", "token"), [(0.0, 2), (0.4285, 2), (0.4287, 3), (LAST, 3)])  # 3/7 is 0.42857
def test_top_k_leaves_the_likeliest_and_logprobs_stay_those_of_the_whole(number: float, token: int):
    assert draw(TENTHS, number, top_k=2) == (token, pytest.approx(TENTHS[0, token].item()))


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (0.01, {3}),
        (0.35, {3}),
        (0.45, {2, 3}),
        (0.65, {2, 3}),
        (0.75, {1, 2, 3}),
        (0.95, {0, 1, 2, 3}),
        (1.0, {0, 1, 2, 3}),
    ],
)
def test_top_p_leaves_the_fewest_that_hold_it(top_p: float, kept: set[int]):
    assert {draw(TENTHS, number / 100, top_p=top_p)[0] for number in range(100)} == kept


def test_top_p_counts_what_top_k_left():
    # of 3, 2, 1 (0.4, 0.3, 0.2) the first two hold 0.78 of what is left, but only 0.7 of all
    assert {draw(TENTHS, number / 100, top_k=3, top_p=0.75)[0] for number in range(100)} == {2, 3}


@pytest.mark.parametrize("temperature", [0.3, 3.0, 100.0])
def test_a_nucleus_larger_than_the_sorted_head_is_whole(temperature: float):
    logprobs = (torch.randn(6, 4 * HEAD, generator=torch.Generator().manual_seed(0)) / temperature).log_softmax(-1)
    params = [SamplingParams(8, top_p=top_p, top_k=top_k) for top_p in (0.5, 0.99, 1.0) for top_k in (0, 100)]
    for number in [*torch.linspace(0, 1, 20).tolist()[:-1], LAST]:
        ids, _ = sample(logprobs, params, [number] * 6)
        for row, token, p in zip(logprobs, ids, params, strict=True):
            order = row.argsort(descending=True)[: p.top_k or None]
            mass = row[order].softmax(0)
            nucleus = order[mass.cumsum(0) - mass < p.top_p].sort().values
            shares = row[nucleus].double().exp().cumsum(0)
            assert token == nucleus[min(int((shares <= number * shares[-1]).sum()), len(nucleus) - 1)]


def test_each_row_has_its_own_options_and_number():
    logits = TENTHS.expand(5, -1)
    params = [
        SamplingParams(8),
        SamplingParams(8, temperature=0),
        SamplingParams(8, top_k=1),
        SamplingParams(8, top_p=0.65),
        SamplingParams(8, top_k=100),
    ]
    ids, logprobs = sample(logits, params, [0.05, 0.05, 0.05, 0.05, 0.15])
    assert ids == [0, 3, 3, 2, 1]
    assert logprobs == pytest.approx([TENTHS[0, token].item() for token in ids])


@pytest.mark.parametrize("number", [0.0, 0.5, LAST])
@pytest.mark.parametrize("options", [{}, {"top_k": 4}, {"top_p": 0.9999}, {"temperature": 0.0}])
@pytest.mark.parametrize("banned", [[0], [5], [0, 1, 4, 5]])
def test_banned_ids_are_never_drawn(banned: list[int], options: dict[str, float], number: float):
    logits = torch.tensor([[9.0, -3.0, 1.0, 2.0, 40.0, 90.0]])
    logits[:, banned] = torch.finfo(torch.float32).min
    token, logprob = draw(logits, number, **options)
    assert token not in banned
    assert -100 < logprob <= 0


def test_temperatures_are_per_row_and_greedy_rows_report_at_one():
    params = [SamplingParams(8, temperature=0.5), SamplingParams(8, temperature=0), SamplingParams(8)]
    assert Sampling(params, CPU).temperatures.tolist() == [[0.5], [1.0], [1.0]]


def test_a_seeds_numbers_depend_on_the_place_alone():
    first, again, other = RandomNumbers(7), RandomNumbers(7), RandomNumbers(8)
    backwards = [again[index] for index in reversed(range(200))][::-1]
    assert [first[index] for index in range(200)] == backwards
    assert len(set(backwards)) == 200
    assert all(0 <= number < 1 for number in backwards)
    assert not {other[index] for index in range(200)} & set(backwards)
    assert RandomNumbers(2**63 - 1)[0] != RandomNumbers(0)[0]
