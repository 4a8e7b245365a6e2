"""The audit compares an agent's turns with what was received. Each fault is made in the turns and in the rows alike."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from testing.fakes import PAD, make_item, make_trajectory, make_turn

from vlmrl.samples import AuditError, audit, emit
from vlmrl.types import ReceivedRequest, Trajectory

RED, BLUE, GREEN = make_item("red", 2), make_item("blue", 3), make_item("green", 3)


def forked() -> Trajectory:
    """Turns 1 and 2 continue the response of turn 0, and turn 3 that of turn 2. Turn 1 shows two images more."""
    return make_trajectory(
        turns=[
            make_turn([1, PAD, PAD, 2], [5, 6], [-0.1, -0.2], media=[RED], received=ReceivedRequest(("red",), None)),
            make_turn(
                [7, PAD, PAD, PAD, 8, PAD, PAD, PAD, 8],
                [5, 4],
                [-0.3, -0.4],
                media=[BLUE, GREEN],
                received=ReceivedRequest(("red", "blue", "green"), 0),
            ),
            make_turn([7, 3], [6], [-0.5], parent=0, kept=6, kept_media=1, received=ReceivedRequest(("red",), 0)),
            make_turn([8], [4], [-0.6], received=ReceivedRequest(("red",), 2)),
        ]
    )


def check(trajectory: Trajectory) -> None:
    for how in ("merged", "step_wise"):
        audit(emit(trajectory, how), [trajectory], image_token_id=PAD)


def test_a_tree_of_requests_passes():
    check(forked())
    assert [row.loss_mask for row in emit(forked(), "merged")] == [[1, 1, *[0] * 9, 1, 1], [1, 0, 1]]


def test_a_turn_of_the_turn_loop_has_nothing_to_compare():
    check(make_trajectory())


OF_THREE = "3: it continues the response of turn {}, but its prompt keeps 9 tokens of turn 2."
FAULTS: dict[str, tuple[str, int, dict[str, object]]] = {
    "another image": (
        "1, image 1: the request had blue (3 images), but its prompt shows other (3 images).",
        1,
        {"media": [make_item("other", 3), GREEN]},
    ),
    "a lost image": (
        "1, image 2: the request had green (3 images), but its prompt shows nothing (2 images).",
        1,
        {"media": [BLUE], "prompt_ids": [7, PAD, PAD, PAD, 8, 8]},
    ),
    "swapped images": (
        "1, image 1: the request had blue (3 images), but its prompt shows green (3 images).",
        1,
        {"media": [GREEN, BLUE]},
    ),
    "an image of another branch": (
        "3, image 1: the request had nothing (1 images), but its prompt shows blue (2 images).",
        3,
        {"parent": 1, "kept": 11, "kept_media": 2},
    ),
    "a response that was encoded again": (
        "2: it continues the response of turn 0, but its prompt keeps 4 tokens of turn 0.",
        2,
        {"kept": 4, "prompt_ids": [11, 7, 3]},
    ),
    "a response that was cut": (
        "2: it continues the response of turn 0, but its prompt keeps 5 tokens of turn 0.",
        2,
        {"kept": 5, "prompt_ids": [7, 3]},
    ),
    "another branch": (OF_THREE.format(1), 3, {"received": ReceivedRequest(("red",), 1)}),
    "its own turn": (OF_THREE.format(3), 3, {"received": ReceivedRequest(("red",), 3)}),
    "a turn that is not there": (OF_THREE.format(7), 3, {"received": ReceivedRequest(("red",), 7)}),
}


@pytest.mark.parametrize(("message", "number", "changes"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_caught(message: str, number: int, changes: dict[str, object]):
    trajectory = forked()
    trajectory.turns[number] = replace(trajectory.turns[number], **changes)  # type: ignore[arg-type]
    with pytest.raises(AuditError, match=f"^{re.escape(f'trajectory t, turn {message}')}"):
        check(trajectory)
