"""The experts of sampled tokens go with them into every form of rows, and the audit looks at them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from testing.fakes import Router, make_trajectory
from torch import nn

from vlmrl.model.expert_routing import ExpertRouters
from vlmrl.rollout.record import Prompt, TurnRecorder
from vlmrl.samples import AuditError, audit, concat, merge_prefixes, step_wise
from vlmrl.types import Completion, ExpertRouting, Trajectory

ROUTING = ExpertRouters(nn.ModuleList([Router()]), "Router")  # one layer, two of three experts


def route(first: int, second: int) -> ExpertRouting:
    return ExpertRouting(bytes([first, 0, second, 0]), top_k=2)


A, B, C = route(0, 1), route(1, 2), route(2, 0)


def two_turns(routing: list[ExpertRouting | None], kept: int = 4, first: bool = True) -> Trajectory:
    """Prompt 1 2, response 5 6, observation 7 after the first ``kept`` of these, response 8, for which the engine reported
    ``routing``."""
    trajectory = make_trajectory(turns=[])
    recorder = TurnRecorder(trajectory, None)
    known = [A, A, B, None] if first else []
    recorder.add(Prompt([1, 2], []), Completion([5, 6], [-0.1, -0.2], "stop", [3, 3], 2, known), "")
    recorder.add(Prompt([7], [], [], 0, kept), Completion([8], [-0.3], "stop", [3], kept + 1, routing), "")
    return trajectory


def test_a_responses_last_token_is_known_from_the_next_prompt():
    trajectory = two_turns([C, C, C, B, A, None])  # what was run before keeps its first experts
    assert [turn.expert_routing for turn in trajectory.turns] == [[A, A, B, B], [A, None]]
    (row,) = concat(trajectory)
    assert row.expert_routing == [A, A, B, B, A, None]
    assert [each.expert_routing for each in step_wise(trajectory)] == [[A, A, B, B], [A, A, B, B, A, None]]
    assert [each.expert_routing for each in merge_prefixes(step_wise(trajectory))] == [row.expert_routing]
    audit([row], [trajectory], routing=ROUTING)


def test_an_engine_may_leave_out_what_was_known():
    trajectory = two_turns([B, A, None])  # from the first response's last token on
    assert [turn.expert_routing for turn in trajectory.turns] == [[A, A, B, B], [A, None]]


def test_tokens_that_no_engine_ran_are_not_known():
    trajectory = two_turns([C, C, C, B, A, None])
    trajectory.tail_ids = [3, 4]
    (row,) = concat(trajectory)
    assert row.expert_routing[-3:] == [None] * 3 and len(row.expert_routing) == len(row)


def test_a_dropped_end_of_turn_takes_its_experts_with_it():
    trajectory = two_turns([C, C, C, A, None], kept=3)  # prompt 1 2, 5, observation 7
    assert [turn.expert_routing for turn in trajectory.turns] == [[A, A, B, None], [A, None]]
    assert concat(trajectory)[0].expert_routing == [A, A, B, A, None]
    assert [each.expert_routing for each in step_wise(trajectory)] == [[A, A, B, None], [A, A, B, A, None]]


def test_a_re_rendered_prompt_keeps_the_routing_of_its_prefix():
    trajectory = two_turns([C, B, None], kept=1)  # prompt 1 7, response 8
    assert [turn.expert_routing for turn in trajectory.turns] == [[A, A, B, None], [B, None]]
    assert [each.expert_routing for each in step_wise(trajectory)] == [[A, A, B, None], [A, B, None]]


def test_without_experts_nothing_is_told():
    trajectory = two_turns([], first=False)
    assert concat(trajectory)[0].expert_routing == [] and step_wise(trajectory)[1].expert_routing == []


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        ([A], "trajectory t: expert_routing has 1 entries, but the row has 6 tokens."),
        (
            [A, ExpertRouting(bytes(2), 1), *[None] * 4],
            "trajectory t, token 1: it was sent to 1 experts in each of 1 layers, but",
        ),
        (
            [A, ExpertRouting(bytes(8), 2), *[None] * 4],
            "trajectory t, token 1: it was sent to 2 experts in each of 2 layers, but",
        ),
        (
            [*[None] * 5, route(3, 0)],
            r"trajectory t, token 5, layer 0: it was sent to experts \[0, 3\], which must be different",
        ),
        (
            [route(1, 1), *[None] * 5],
            r"trajectory t, token 0, layer 0: it was sent to experts \[1, 1\], which must be different",
        ),
    ],
)
def test_experts_that_cannot_be_are_refused(routes, message):
    (row,) = concat(two_turns([]))
    with pytest.raises(AuditError, match=message):
        audit([replace(row, expert_routing=routes)], routing=ROUTING)


def test_experts_of_a_model_that_has_none_are_refused():
    (row,) = concat(two_turns([]))
    with pytest.raises(AuditError, match="expert_routing has 6 entries, but the model has no experts"):
        audit([replace(row, expert_routing=[A] * 6)])
