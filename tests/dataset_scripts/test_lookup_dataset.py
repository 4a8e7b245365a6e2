"""The small search recipe's world: the answer is in one passage, and held-out things never occur in training."""

from pathlib import Path

from vlmrl.config.code import load_object

LOOKUP = Path(__file__).parents[2] / "datasets/lookup.py"
make_task, passages = (load_object(f"{LOOKUP}:{name}") for name in ("make_task", "passages"))


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
