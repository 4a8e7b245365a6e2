"""The audit: each rule is broken on purpose, and the message says where and with which numbers."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from testing.fakes import PAD, linked, make_item, make_trajectory, make_turn

from vlmrl.samples import AuditError, audit, concat, merge_prefixes, step_wise
from vlmrl.types import Sample

BANNED = {PAD, 10}


def row(**changes) -> Sample:
    """The row of the literal trajectory: response 5 6 | 7 P P P 8 | 5 4 6, where P is the placeholder."""
    (sample,) = concat(make_trajectory())
    return replace(sample, **changes)


def check(*samples: Sample, trajectories=None) -> None:
    audit(samples, trajectories, image_token_id=PAD, banned_ids=BANNED)


def refuse(message: str, *samples: Sample, trajectories=None) -> None:
    with pytest.raises(AuditError, match=f"^{re.escape(message)}$"):
        check(*samples, trajectories=trajectories)


def changed(values: list, place: int, value) -> list:
    return [*values[:place], value, *values[place + 1 :]]


# What is right passes


@pytest.mark.parametrize("emit", [concat, step_wise])
def test_right_rows_pass(emit):
    first, second = make_trajectory("a"), make_trajectory("b")
    check(*emit(first), *emit(second), trajectories=[second, first])


def test_in_a_text_batch_the_placeholder_id_is_an_ordinary_token():
    trajectory = make_trajectory(turns=[make_turn([1, PAD], [5], [-0.1])])
    audit(concat(trajectory), [trajectory])


def test_one_image_twice_and_a_tail_that_was_not_sampled_pass():
    item = make_item("red", 2)
    trajectory = make_trajectory(
        turns=[
            make_turn([PAD, PAD, 1], [5], [0.0], media=[item]),
            make_turn([7, PAD, PAD, 1], [6], [-0.2], media=[item]),
        ]
    )
    trajectory.tail_ids = [5]  # an end-of-turn id that was added, not sampled
    check(*concat(trajectory), trajectories=[trajectory])


def test_merged_rows_pass_and_the_report_counts():
    trajectory = make_trajectory()
    report = audit(merge_prefixes(step_wise(trajectory)), [trajectory], image_token_id=PAD)
    assert (report.samples, report.trained_tokens, report.left_out) == (1, 5, {})
    assert audit(step_wise(trajectory), [trajectory], image_token_id=PAD).samples == 2


def test_a_dropped_end_of_turn_is_counted_in_one_row_and_trained_in_two():
    turns = [make_turn([1, 4], [5, 2], [-0.1, -0.2]), make_turn([7], [6, 2], [-0.3, -0.4])]
    trajectory = make_trajectory(turns=linked(turns, dropped=1))  # inline: the second prompt is 1 4 5 7
    (joined,) = concat(trajectory)
    assert (joined.prompt_token_ids, joined.response_ids, joined.loss_mask) == ([1, 4], [5, 7, 6, 2], [1, 0, 1, 1])
    assert audit([joined], [trajectory]).left_out == {"inline_end_of_turn": 1}
    rows = step_wise(trajectory)
    assert [(r.prompt_token_ids, r.response_ids) for r in rows] == [([1, 4], [5, 2]), ([1, 4, 5, 7], [6, 2])]
    assert audit(rows, [trajectory]).left_out == {}
    assert audit(merge_prefixes(rows), [trajectory]).samples == 2  # the first row's end of turn is in no later prompt


def test_a_dropped_end_of_turn_is_not_taken_for_the_next_response_after_an_empty_observation():
    turns = [make_turn([1, 4], [5, 2], [-0.1, -0.2]), make_turn([], [2], [-0.2])]
    trajectory = make_trajectory(turns=linked(turns, dropped=1))
    (joined,) = concat(trajectory)
    assert (joined.response_ids, joined.loss_mask) == ([5, 2], [1, 1])  # the 2 is the second response
    assert audit([joined], [trajectory]).left_out == {"inline_end_of_turn": 1}
    assert audit(step_wise(trajectory), [trajectory]).left_out == {}


def test_numbers_just_above_zero_pass():
    check(row(rollout_logprobs=changed(row().rollout_logprobs, 0, 1e-7)))


# One row


def test_an_empty_batch():
    with pytest.raises(AuditError, match="the batch holds no samples"):
        audit([])


@pytest.mark.parametrize("name", ["loss_mask", "rollout_logprobs", "policy_versions"])
def test_lists_of_unequal_length(name):
    refuse(f"trajectory t: {name} has 9 entries, but response_ids has 10.", row(**{name: getattr(row(), name)[:-1]}))


def test_an_empty_prompt_or_response():
    refuse("trajectory t: prompt and response must not be empty, but have 0 and 10 tokens.", row(prompt_token_ids=[]))
    empty = {name: [] for name in ("response_ids", "loss_mask", "rollout_logprobs", "policy_versions")}
    refuse("trajectory t: prompt and response must not be empty, but have 4 and 0 tokens.", row(**empty))


@pytest.mark.parametrize(("value", "shown"), [(2, "[0, 1, 2]"), (-1, "[-1, 0, 1]"), (0.5, "[0, 0.5, 1]")])
def test_mask_values(value, shown):
    message = f"trajectory t: loss_mask must hold 0 and 1 only, but it holds {shown}."
    refuse(message, row(loss_mask=changed(row().loss_mask, 3, value)))


def test_a_mask_of_zeros():
    refuse("trajectory t: no token has mask 1, so there is nothing to train on.", row(loss_mask=[0] * 10))


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf, 0.5])
def test_impossible_logprobs(value):
    message = (
        f"trajectory t, turn 1, response token 8: rollout_logprobs must be finite and at most 0, but it is {value}."
    )
    refuse(message, row(rollout_logprobs=changed(row().rollout_logprobs, 8, value)))


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
def test_rewards_that_are_not_finite(value):
    message = f"trajectory t, turn 0, response token 1: rewards must be finite, but it is {value}."
    refuse(message, row(rewards={1: value, 9: 1.0}))


def test_a_logprob_or_reward_on_an_unsampled_token():
    where = "trajectory t, turn 1, response token 2: it was not sampled (mask 0), so its"
    refuse(
        f"{where} logprob must be 0, but it is -0.3.", row(rollout_logprobs=changed(row().rollout_logprobs, 2, -0.3))
    )
    refuse(f"{where} reward must be 0, but it is 0.5.", row(rewards={2: 0.5, 9: 1.0}))


def test_a_reward_outside_the_response():
    message = "trajectory t, turn 1, response token 10: it has the reward 0.5, but the response has 10 tokens."
    refuse(message, row(rewards={10: 0.5}))


def test_a_final_reward_on_an_unsampled_last_token_passes():
    (sample,) = concat(make_trajectory())
    sample.response_ids += [7]
    sample.loss_mask += [0]
    sample.rollout_logprobs += [0.0]
    sample.policy_versions += [3]
    sample.rewards = {1: 0.25, 10: 1.0}
    check(sample)


@pytest.mark.parametrize("token", sorted(BANNED))
def test_a_sampled_media_placeholder(token):
    message = f"trajectory t, turn 1, response token 8: the banned id {token}, a media placeholder, was sampled."
    refuse(message, row(response_ids=changed(row().response_ids, 8, token)))


def test_a_banned_id_among_observations_is_no_sample():
    check(row(response_ids=changed(row().response_ids, 6, 10)))


# Images


def test_placeholder_runs_too_short_and_too_long():
    short = row(prompt_token_ids=[1, PAD, 2])
    message = "trajectory t, turn 0, image 0 (red): 1 placeholder tokens stand in the row, but the image of 64x32 pixels takes 2."
    refuse(message, short)
    long = row(response_ids=changed(row().response_ids, 6, PAD))
    message = "trajectory t, turn 1, image 1 (blue): 4 placeholder tokens stand in the row, but the image of 96x32 pixels takes 3."
    refuse(message, long)


def test_an_image_missing_and_one_too_many():
    red, blue = row().media
    has = "trajectory t: the row has 2 runs of placeholder tokens, of lengths [2, 3], but its"
    refuse(f"{has} 1 images (red) take 1.", row(media=[red]))
    refuse(f"{has} 0 images (none) take 0.", row(media=[]))
    refuse(f"{has} 3 images (red, blue, red) take 3.", row(media=[red, blue, red]))
    has = "trajectory t: the row has 1 runs of placeholder tokens, of lengths [3], but its"
    refuse(f"{has} 2 images (red, blue) take 2.", row(prompt_token_ids=[1, 2]))


def test_a_run_that_is_cut_in_two():
    has = "trajectory t: the row has 3 runs of placeholder tokens, of lengths [2, 1, 1], but its"
    refuse(f"{has} 2 images (red, blue) take 2.", row(response_ids=changed(row().response_ids, 4, 7)))


def test_an_image_of_several_runs_with_separators():
    item = replace(make_item("tiles", 5), separators={2: 198})
    turns = [make_turn([1, PAD, PAD, 198, PAD, PAD, 2], [5, 6], [-0.1, -0.2], media=[item])]
    tiles = step_wise(make_trajectory(turns=turns))[0]
    check(tiles)
    refuse(
        "trajectory t, turn 0, image 0 (tiles): tokens 1 to 6 of the row are not those of the image, whose ids between the "
        "placeholders are {2: 198}.",
        replace(tiles, prompt_token_ids=[1, PAD, PAD, 7, PAD, PAD, 2]),
    )
    whole = replace(tiles, prompt_token_ids=[1, PAD, PAD, PAD, PAD, PAD, 2])
    refuse(
        "trajectory t: the row has 1 runs of placeholder tokens, of lengths [5], but its 1 images (tiles) take 2.",
        whole,
    )


def test_images_of_unequal_size_in_the_wrong_order():
    message = "trajectory t, turn 0, image 0 (blue): 2 placeholder tokens stand in the row, but the image of 96x32 pixels takes 3."
    refuse(message, row(media=row().media[::-1]))


def test_images_in_a_batch_for_a_text_model():
    with pytest.raises(AuditError, match=r"^trajectory t: 2 images in a batch for a text model\.$"):
        audit([row()])


def test_the_second_row_is_named_with_its_turn():
    rows = step_wise(make_trajectory())
    rows[1].rollout_logprobs[2] = 1.0
    message = "trajectory t, turn 1, response token 2: rollout_logprobs must be finite and at most 0, but it is 1.0."
    refuse(message, *rows)


def three_turns():
    return make_trajectory(
        turns=[make_turn([1], [5, 6], [-0.1, -0.2]), *(make_turn([7, 8], [5], [-0.3]) for _ in "12")]
    )


@pytest.mark.parametrize(("place", "turn"), list(enumerate([0, 0, 1, 1, 1, 2, 2, 2])))
def test_the_turn_of_each_token_is_named(place, turn):
    (sample,) = concat(three_turns())  # 5 6 | 7 8 5 | 7 8 5
    sample.rewards[place] = math.nan
    refuse(f"trajectory t, turn {turn}, response token {place}: rewards must be finite, but it is nan.", sample)


def test_turns_are_counted_in_the_rows_of_the_same_trajectory_only():
    other, trajectory = make_trajectory("other"), three_turns()
    rows = [*concat(other), *step_wise(trajectory)]
    rows[3].rewards[0] = math.inf
    refuse("trajectory t, turn 2, response token 0: rewards must be finite, but it is inf.", *rows)


# The order of rows


def test_rows_that_are_not_contiguous():
    first, second = step_wise(make_trajectory("a"))
    other = concat(make_trajectory("b"))
    refuse("trajectory a: its rows are not contiguous in the batch.", first, *other, second)


def test_last_steps():
    first, second = step_wise(make_trajectory())
    message = "trajectory t: is_last_step must be set on its last row alone, but it is"
    refuse(f"{message} [False, False].", first, replace(second, is_last_step=False))
    refuse(f"{message} [True, True].", replace(first, is_last_step=True), second)
    refuse(f"{message} [True, False].", second, first)
    refuse(f"{message} [False].", replace(row(), is_last_step=False))


# Against the trajectories


def response(where: str, wanted: str, held: str, length: int, trained: int) -> str:
    return (
        f"trajectory t, {where} must be {wanted}, as sampled, but it is {held}; the response has {length} tokens, the row "
        f"{trained} with mask 1."
    )


def test_a_sampled_token_masked():
    sample = row(loss_mask=changed(row().loss_mask, 0, 0), rollout_logprobs=changed(row().rollout_logprobs, 0, 0.0))
    wanted = "id 5, logprob -0.1, policy version 3, mask 1"
    held = "id 5, logprob 0.0, policy version 3, mask 0"
    message = response("turn 0, token 0 of the response (response token 0)", wanted, held, 2, 4)
    refuse(message, sample, trajectories=[make_trajectory()])


def test_the_last_sampled_token_dropped():
    (sample,) = concat(trajectory := make_trajectory())
    for values in (sample.response_ids, sample.loss_mask, sample.rollout_logprobs, sample.policy_versions):
        values.pop()
    sample.rewards = {0: 0.25, 8: 1.0}
    wanted = "id 6, logprob -0.5, policy version 3, mask 1"
    held = "id nothing, logprob nothing, policy version nothing, mask nothing"
    message = response("turn 1, token 2 of the response (response token 9)", wanted, held, 3, 4)
    refuse(message, sample, trajectories=[trajectory])


@pytest.mark.parametrize(
    ("name", "value", "held"),
    [
        ("response_ids", 3, "id 3, logprob -0.4, policy version 3, mask 1"),
        ("rollout_logprobs", -0.45, "id 4, logprob -0.45, policy version 3, mask 1"),
        ("policy_versions", 4, "id 4, logprob -0.4, policy version 4, mask 1"),
    ],
)
def test_a_sampled_token_altered(name, value, held):
    wanted = "id 4, logprob -0.4, policy version 3, mask 1"
    message = response("turn 1, token 1 of the response (response token 8)", wanted, held, 3, 5)
    refuse(message, row(**{name: changed(getattr(row(), name), 8, value)}), trajectories=[make_trajectory()])


def test_a_turn_trained_twice():
    trajectory = make_trajectory()
    first, second = step_wise(trajectory)
    message = "trajectory t, turn 1, prompt token 4: the model saw 5 (11 tokens), but the row has nothing (4 tokens)."
    refuse(message, first, first, second, trajectories=[trajectory])
    again = replace(second, is_last_step=False, rewards={})
    message = "trajectory t: 3 tokens have mask 1 in a row after the last turn, but were never sampled."
    refuse(message, first, again, second, trajectories=[trajectory])


def test_a_turn_that_no_row_trains():
    trajectory = make_trajectory()
    first, _ = step_wise(trajectory)
    message = "trajectory t, turn 1: 3 tokens were sampled from here on, but no row holds them."
    refuse(message, replace(first, is_last_step=True), trajectories=[trajectory])


def test_a_prompt_that_the_model_did_not_see():
    trajectory = make_trajectory()
    first, second = step_wise(trajectory)
    altered = replace(second, prompt_token_ids=changed(second.prompt_token_ids, 6, 4))
    message = "trajectory t, turn 1, prompt token 6: the model saw 7 (11 tokens), but the row has 4 (11 tokens)."
    refuse(message, first, altered, trajectories=[trajectory])


def test_an_observation_altered_or_lost():
    message = (
        "trajectory t, turn 1, observation token 0 (response token 2): the env showed 7, which has mask 0, but the row has 4 "
        "with mask 0."
    )
    refuse(message, row(response_ids=changed(row().response_ids, 2, 4)), trajectories=[make_trajectory()])


def test_a_row_that_goes_on_over_a_re_rendered_prompt():
    trajectory = make_trajectory()
    (sample,) = concat(trajectory)
    trajectory.turns[1].kept, trajectory.turns[1].kept_media = 3, 1
    message = "trajectory t, turn 1: its prompt was re-rendered, so the row must end before it, but it goes on at response token 2."
    refuse(message, sample, trajectories=[trajectory])


def test_a_token_that_was_not_sampled_with_mask_1():
    observed = row(loss_mask=changed(row().loss_mask, 6, 1))
    message = (
        "trajectory t, turn 1, observation token 4 (response token 6): the env showed 8, which has mask 0, but the row has 8 "
        "with mask 1."
    )
    refuse(message, observed, trajectories=[make_trajectory()])


def test_a_row_of_another_group():
    refuse("trajectory t is of group g, but a row says h.", row(group_id="h"), trajectories=[make_trajectory()])
    first, last = step_wise(make_trajectory())
    message = "trajectory t is of group g, but a row says h."
    refuse(message, first, replace(last, group_id="h"), trajectories=[make_trajectory()])


def test_a_synthetic_end_of_turn_trained():
    (sample,) = concat(trajectory := make_trajectory())
    sample.response_ids += [2]
    sample.loss_mask += [1]
    sample.rollout_logprobs += [0.0]
    sample.policy_versions += [3]
    message = (
        "trajectory t: the row ends with 1 tokens from response token 10 on, 1 of them with mask 1, that no turn has."
    )
    refuse(message, sample, trajectories=[trajectory])


def same_size_images():
    turns = [
        make_turn([1, PAD, PAD, 2], [5], [-0.1], media=[make_item("red", 2)]),
        make_turn([7, PAD, PAD, 8, PAD, PAD], [6], [-0.2], media=[make_item("blue", 2), make_item("green", 2)]),
    ]
    return make_trajectory(turns=turns)


def test_images_of_one_size_swapped():
    trajectory = same_size_images()
    (sample,) = concat(trajectory)
    red, blue, green = sample.media
    message = "trajectory t, turn 1, image 1: the env showed blue, but the row holds green (3 images in the row)."
    refuse(message, replace(sample, media=[red, green, blue]), trajectories=[trajectory])
    message = "trajectory t, turn 0, image 0: the env showed red, but the row holds blue (3 images in the row)."
    refuse(message, replace(sample, media=[blue, red, green]), trajectories=[trajectory])


def test_images_swapped_in_a_row_that_is_not_the_last():
    trajectory = same_size_images()
    first, second = step_wise(trajectory)
    message = "trajectory t, turn 0, image 0: the env showed red, but the row holds blue (1 images in the row)."
    refuse(message, replace(first, media=second.media[1:2]), second, trajectories=[trajectory])


def test_an_image_lost_together_with_its_placeholders():
    trajectory = same_size_images()
    (sample,) = concat(trajectory)
    for values in (sample.response_ids, sample.loss_mask, sample.rollout_logprobs, sample.policy_versions):
        del values[5:7]
    message = "trajectory t, turn 1, image 2: the env showed green, but the row holds nothing (2 images in the row)."
    refuse(message, replace(sample, media=sample.media[:2], rewards={}), trajectories=[trajectory])


def test_rewards_that_do_not_add_up():
    message = "trajectory t: the rows' rewards add up to {}, but the trajectory's is {}."
    lost = row(rewards={9: 1.0})
    refuse(message.format(1.0, 1.25), lost, trajectories=[make_trajectory()])
    twice = [replace(sample, rewards={1: 1.25}) for sample in step_wise(make_trajectory())]
    refuse(message.format(2.5, 1.25), *twice, trajectories=[make_trajectory()])
    unrewarded = make_trajectory(turns=[make_turn([1], [5], [-0.1])], final_reward=None)
    refuse(message.format(0.0, None), *concat(unrewarded), trajectories=[unrewarded])


def test_rewards_whose_sum_depends_on_the_order_pass():
    """0.5 is lost beside 1e17."""
    turns = [make_turn([1], [5], [-0.1], reward=1e17), make_turn([2], [6], [-0.1], reward=-1e17)]
    trajectory = make_trajectory(turns=turns, final_reward=0.5)
    (whole,) = concat(trajectory)
    assert (whole.reward, trajectory.reward) == (0.0, 0.5)
    audit([whole], [trajectory], image_token_id=None)


@pytest.mark.parametrize("ending", ["error", "aborted"])
def test_a_failed_trajectory(ending):
    failed = make_trajectory(ending=ending, error="the env hung")
    refuse("trajectory t failed (the env hung) and must not be trained on.", row(), trajectories=[failed])


def test_a_trajectory_that_was_never_played_and_one_that_is_missing():
    refuse("trajectory t is in the batch, but it was never played.", row(), trajectories=[make_trajectory("a")])
    played = [make_trajectory("b"), make_trajectory("t"), make_trajectory("a")]
    refuse("trajectories ['a', 'b'] were played, but are not in the batch.", row(), trajectories=played)
