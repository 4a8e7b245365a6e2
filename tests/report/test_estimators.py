"""pass@k and bootstrap intervals, against numbers computed by hand."""

import pytest

from vlmrl.report.estimators import Estimate, bootstrap, ks_up_to, paired_difference, pass_at_k


@pytest.mark.parametrize(
    ("samples", "solved", "k", "expected"),
    [
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 / 2),  # 1 - C(3,2)/C(4,2) = 1 - 3/6
        (4, 1, 4, 1.0),
        (5, 2, 3, 9 / 10),  # 1 - C(3,3)/C(5,3) = 1 - 1/10
        (4, 0, 2, 0.0),
        (4, 4, 1, 1.0),
        (200, 1, 100, 1 / 2),  # exact where powers such as 1 - (1 - 1/200)^100 = 0.394 are biased
    ],
)
def test_pass_at_k(samples, solved, k, expected):
    assert pass_at_k(samples, solved, k) == pytest.approx(expected)


@pytest.mark.parametrize(("samples", "solved", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_of_impossible_numbers_is_refused(samples, solved, k):
    with pytest.raises(ValueError, match=f"pass@{k} needs"):
        pass_at_k(samples, solved, k)


def test_the_ks_are_powers_of_two():
    assert [ks_up_to(samples) for samples in (1, 2, 3, 4, 6)] == [[1], [1, 2], [1, 2], [1, 2, 4], [1, 2, 4]]


def test_the_interval_of_a_fair_coin():
    """The resampled mean is Binomial(100, 1/2) / 100, whose 2.5% and 97.5% quantiles are 0.40 and 0.60."""
    estimate = bootstrap([0.0, 1.0] * 50, seed=0)
    assert estimate == Estimate(0.5, pytest.approx(0.40, abs=0.01), pytest.approx(0.60, abs=0.01))
    assert bootstrap([0.0, 1.0] * 50, seed=0) == estimate


def test_with_four_tasks_the_interval_reaches_both_ends():
    """All four draws are the same with probability 1/16, more than 2.5%."""
    assert bootstrap([0.0, 0.0, 1.0, 1.0]) == Estimate(0.5, 0.0, 1.0)


def test_equal_values_have_no_width_and_no_values_are_refused():
    assert bootstrap([0.25] * 8) == Estimate(0.25, 0.25, 0.25)
    assert bootstrap([0.25]) == Estimate(0.25, 0.25, 0.25)
    with pytest.raises(ValueError, match="at least one task"):
        bootstrap([])


def test_a_paired_difference_does_not_see_how_tasks_differ():
    """Tasks spread over 0..0.9, each 0.1 better than before: the difference is 0.1 without any width."""
    before = {f"t{number}": number / 10 for number in range(10)}
    after = {task: value + 0.1 for task, value in before.items()}
    difference = paired_difference(after, before)
    assert difference == Estimate(*[pytest.approx(0.1)] * 3)
    assert bootstrap(list(after.values())).low < bootstrap(list(before.values())).high  # unpaired, they overlap


def test_a_paired_difference_is_over_the_tasks_that_both_have():
    assert paired_difference({"a": 1.0, "b": 1.0}, {"b": 0.5, "c": 0.0}) == Estimate(0.5, 0.5, 0.5)
    with pytest.raises(ValueError, match="at least one task"):
        paired_difference({"a": 1.0}, {"c": 0.0})
