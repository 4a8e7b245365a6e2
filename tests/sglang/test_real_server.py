"""Rollouts, weight updates and runs with a real server."""

from __future__ import annotations

from testing.server_cases import (  # noqa: F401
    test_a_run_samples_from_the_trained_weights_also_after_a_resume,
    test_a_run_that_is_killed_leaves_no_server,
    test_a_server_gets_the_random_weights_of_the_trainer,
    test_a_server_is_a_teacher,
    test_a_server_wants_its_token,
    test_after_an_update_in_bfloat16_images_seen_before_have_new_features,
    test_all_ways_give_the_same_weights,
    test_episodes_with_images_in_their_observations_are_what_the_trainer_sees,
    test_server_and_trainer_agree_at_startup,
)
