"""The small search recipe's world: the answer is in one passage, and held-out things never occur in training."""

from pathlib import Path

from vlmrl.config.code import load_object

LOOKUP = Path(__file__).parents[2] / "datasets/lookup.py"
NAMES = ("make_task", "make_task_or_hinted", "passages")
make_task, make_task_or_hinted, passages = (load_object(f"{LOOKUP}:{name}") for name in NAMES)


def test_the_answer_is_in_the_passage_about_the_thing_and_not_in_the_question():
    by_id = {passage["id"]: passage["text"] for passage in passages()}
    tasks = [make_task(index, seed=0) for index in range(100)]
    assert len(by_id) == 7200
    for task in tasks:
        assert by_id[task["thing"]] == f"The {task['thing']} is {task['answer']}."
        assert task["prompt"] == f"What color is the {task['thing']}?"


def test_held_out_things_are_others_and_no_color_is_much_more_frequent():
    trained = [make_task(index, seed=0) for index in range(7000)]
    held_out = [make_task(index, seed=0, first=7000, count=200) for index in range(200)]
    assert not {task["thing"] for task in trained} & {task["thing"] for task in held_out}
    colors = [task["answer"] for task in held_out]
    assert all(40 <= colors.count(color) <= 60 for color in ("red", "green", "blue", "yellow"))


def test_a_hint_is_right_as_often_as_a_guess():
    """A right hint would teach a model to answer what it read, so that a control with wrong hints would teach it too."""
    tasks = [make_task_or_hinted(index, seed=0) for index in range(2000)]
    assert tasks[::2] == [make_task(index, seed=0) for index in range(0, 2000, 2)]
    hinted = tasks[1::2]
    assert all(task["prompt"] == f"What color is the {task['thing']}? It is {task['hint']}." for task in hinted)
    assert 200 < sum(task["hint"] == task["answer"] for task in hinted) < 300
