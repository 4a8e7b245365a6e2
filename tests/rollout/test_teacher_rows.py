"""What a teacher sees of an episode: by default the policy's own contexts, otherwise the recipe's messages before the sampled ids."""

from __future__ import annotations

import asyncio

import pytest
from testing.episodes import PAD, a_task, decoded, image, new_store, play, renderer, turn_loop

from vlmrl import Env, obs
from vlmrl.rollout.history import resolve_policy
from vlmrl.rollout.teacher_rows import TeacherRows, seen_messages
from vlmrl.samples import concat, step_wise
from vlmrl.samples.audit import audit_teacher
from vlmrl.samples.audit_origin import AuditError


class Closer(Env):
    """Shows another image after the first response, and ends after the second."""

    def __init__(self, task):
        self.task = task

    def step(self, response_text):
        return obs("Closer:", images=[image("blue")]), self.turn == 1, {"reward": 1.0}


def taught(sees, form=concat):
    """An episode of two turns, its samples, and their teacher's rows by turn."""
    trajectory = play(Closer, ["look", "four"], a_task("<image>What?", [image("red")]), max_turns=2)
    samples = form(trajectory)
    TeacherRows(sees, renderer(), new_store()).attach(samples, [trajectory])
    audit_teacher(samples, [trajectory], image_token_id=renderer().image_token_id)
    return trajectory, samples, [row for sample in samples for row in sample.teacher_rows]


@pytest.mark.parametrize("form", [concat, step_wise])
def test_the_policys_own_messages_give_the_policys_own_context(form):
    """Token by token, with the ids that were sampled, not those of their text."""
    trajectory, _, rows = taught(lambda task, trajectory, turn: seen_messages(trajectory, turn), form)
    for number, (row, (ids, media)) in enumerate(zip(rows, trajectory.prompts(), strict=True)):
        assert row.prompt_token_ids == ids and row.image_ids == [item.id for item in media]
        assert row.response_ids == trajectory.turns[number].response_ids
    assert rows[1].media[0].id == rows[0].media[0].id


def test_a_template_that_can_append_no_image_writes_the_teachers_context_as_a_whole(monkeypatch):
    """The update ended with the template's error, as one of the user's function."""
    trajectory = play(Closer, ["look", "four"], a_task("<image>What?", [image("red")]), max_turns=2)
    samples, numbering = concat(trajectory), renderer()
    monkeypatch.setattr(numbering, "_numbers_images", True)
    TeacherRows(lambda task, trajectory, turn: seen_messages(trajectory, turn), numbering, new_store()).attach(
        samples, [trajectory]
    )
    for row, (ids, media) in zip(samples[0].teacher_rows, trajectory.prompts(), strict=True):
        assert decoded(row.prompt_token_ids) == decoded(ids) and row.image_ids == [item.id for item in media]


NOTE = {"role": "system", "content": ""}


def hinted(messages):
    """The last three messages, after a system message that the policy keeps and changes."""
    NOTE["content"] = f"{len(messages)} messages."
    return [NOTE, *messages[-3:]]


@pytest.mark.parametrize(
    ("history", "history_options"),
    [("rerender", {}), ("last_turns", {"k": 0}), ("keep_last_images", {"k": 1}), (hinted, {})],
)
def test_the_policys_own_messages_are_those_that_its_history_left(history, history_options):
    """The teacher saw the last observation alone, without the task and its image."""
    options = {"history": history, "history_options": history_options, "samples": "step_wise", "max_turns": 2}
    loop = turn_loop(Closer, ["look", "four"], **options)
    loop.history_policy = resolve_policy(loop.config)
    trajectory = asyncio.run(loop.play(a_task("<image>What?", [image("red")]), "g", "g/00"))
    samples = step_wise(trajectory)
    rows = TeacherRows(lambda task, trajectory, turn: seen_messages(trajectory, turn), renderer(), new_store())
    rows.attach(samples, [trajectory])
    for sample, (ids, media) in zip(samples, trajectory.prompts(), strict=True):
        (row,) = sample.teacher_rows
        assert decoded(row.prompt_token_ids) == decoded(ids) and row.image_ids == [item.id for item in media]


def test_the_answer_in_the_system_prompt_goes_through_all_turns_and_a_turn_can_be_left_out():
    def sees(task, trajectory, turn):
        system = {"role": "system", "content": f"The answer is {task.answer}."}
        return [system, *seen_messages(trajectory, turn)] if turn else None

    trajectory, _, rows = taught(sees)
    assert rows[0] is None
    text = renderer().decode(rows[1].prompt_token_ids)
    assert "The answer is" in text and "Closer:" in text and "look" in text and PAD in text
    assert rows[1].response_ids == trajectory.turns[1].response_ids and len(rows[1].media) == 2


def test_what_a_function_changes_in_the_messages_is_part_of_its_own_turn_alone():
    def sees(task, trajectory, turn):
        messages = seen_messages(trajectory, turn)
        messages[0]["content"][-1]["text"] += f" Hint {turn}."
        return messages

    trajectory, _, rows = taught(sees)
    texts = [decoded(row.prompt_token_ids) for row in rows]
    assert ["Hint 0" in text for text in texts] == [True, False] and "Hint 1" in texts[1]
    assert "Hint" not in str(trajectory.turns[0].messages) + str(trajectory.task.prompt)


def test_a_function_that_fails_is_named_with_its_trajectory_and_turn():
    with pytest.raises(ValueError, match=r"trajectory .*, turn 0: teacher\.sees .*KeyError: 'nothing'"):
        taught(lambda task, trajectory, turn: task.data["nothing"])


@pytest.mark.parametrize("fault", ["another token", "a token less", "another image"])
def test_the_audit_finds_a_changed_row(fault):
    trajectory, samples, rows = taught(lambda task, trajectory, turn: seen_messages(trajectory, turn))
    if fault == "another token":
        rows[1].response_ids[0] += 1
    elif fault == "a token less":
        del rows[1].response_ids[-1], rows[1].loss_mask[-1]
    else:
        rows[1].media = [new_store().load(image("green", (128, 32))), rows[1].media[1]]
    with pytest.raises(AuditError, match=r"turn 1: the teacher's row|placeholder tokens"):
        audit_teacher(samples, [trajectory], image_token_id=renderer().image_token_id)
