"""A small part of `make drill`: a run is ended by signals in its stages, continued each time, and gives the uninterrupted numbers."""

import random
import signal

import pytest
from testing.drill import drill


@pytest.mark.slow
@pytest.mark.long
def test_a_run_that_is_ended_again_and_again_gives_the_numbers_of_one_that_is_not(tmp_path):
    moments = [(signal.SIGKILL, "checkpoint"), (signal.SIGTERM, "rollouts")]
    drill("LoRA", tmp_path, moments, random.Random(0))
