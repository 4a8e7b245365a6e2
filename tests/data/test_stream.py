"""The order of draws: epochs, mixtures by weight, prompts that are too long, resuming from a state; and the length of prompts."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testing.episodes import a_task, image, new_store, play, renderer

from vlmrl import Env, obs
from vlmrl.config import Config, Data, Eval, EvalData, Part
from vlmrl.data import PromptLength, TaskMixture, TaskSource, TaskStream, load_run_tasks, load_tasks
from vlmrl.types import Task


def numbered(size: int, **options: Any) -> TaskSource:
    return load_tasks(Data(generator=lambda index, seed: {"prompt": str(index)}, size=size, **options))


def take(stream: TaskStream, count: int) -> list[Task]:
    """The next ``count`` tasks, none of which is a bad row."""
    draws = asyncio.run(stream.take(count))
    assert [draw.error for draw in draws] == [None] * len(draws)
    return [draw.task for draw in draws]


def prompts(tasks: Iterable[Task]) -> list[str]:
    return [task.prompt[0]["content"] for task in tasks]


def test_a_stream_plays_every_task_once_an_epoch_in_its_own_order():
    source = numbered(8)
    drawn = prompts(take(TaskStream(source), 24))
    assert drawn[:8] == ["0", "2", "1", "4", "6", "7", "3", "5"]
    assert [sorted(drawn[start : start + 8]) for start in (0, 8, 16)] == [list("01234567")] * 3
    assert len({tuple(drawn[start : start + 8]) for start in (0, 8, 16)}) == 3


def test_a_stream_goes_on_from_its_state():
    stream = TaskStream(numbered(5))
    prompts(take(stream, 7))
    state = json.loads(json.dumps(stream.state()))
    assert state == {"drawn": 7, "too_long": 0}
    resumed = TaskStream(numbered(5))
    resumed.restore(state)
    assert prompts(take(resumed, 9)) == prompts(take(stream, 9))


def test_a_draw_can_be_had_again_by_its_number():
    stream = TaskStream(numbered(3))
    drawn = prompts(take(stream, 7))
    assert prompts(stream.at(number) for number in (6, 0, 3)) == [drawn[6], drawn[0], drawn[3]]
    assert stream.drawn == 7


# Mixtures


def part(size: int, weight: float = 1.0, **options: Any) -> Part:
    data = Data(generator=lambda index, seed: {"prompt": str(index)}, size=size, seed=None, **options)
    return Part(data=data, weight=weight)


def mixture(**parts: Part) -> TaskMixture:
    tasks, _ = load_run_tasks(Config(mixture=parts))
    assert isinstance(tasks, TaskMixture)
    return tasks


def names(tasks: Iterable[Task]) -> list[str]:
    return [task.part + task.prompt[0]["content"] for task in tasks]


def test_a_mixture_draws_by_weight_and_each_part_has_its_own_epochs():
    stream = TaskStream(mixture(a=part(3, weight=2), b=part(2)))
    assert names(take(stream, 9)) == ["a0", "b0", "a1", "a2", "b1", "a0", "a1", "b0", "a2"]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=4), st.integers(0, 500))
def test_every_draw_is_where_drawing_from_the_first_on_comes_to(weights, number):
    mixed = mixture(**{f"p{index}": part(7, weight) for index, weight in enumerate(weights)})
    counts = dict.fromkeys(mixed.parts, 0)
    for _ in range(number):
        due = {name: (counts[name] + 0.5) / mixed.weights[name] for name in counts}
        counts[min(due, key=lambda name: due[name])] += 1
    after = Counter(task.part for task in (mixed.draw(index) for index in range(max(0, number - 20), number)))
    before = Counter(task.part for task in take(TaskStream(mixed), max(0, number - 20)))
    assert before + after == Counter({name: count for name, count in counts.items() if count})


def test_a_parts_tasks_carry_its_name_and_by_default_as_their_source():
    [task] = take(TaskStream(mixture(geo=part(1))), 1)
    assert (task.part, task.source) == ("geo", "geo")


def test_each_part_is_evaluated_on_its_own_tasks_and_with_no_others():
    kept_back = part(40, held_out=5)
    own = replace(part(3), eval_data=EvalData(generator=lambda index, seed: {"prompt": f"e{index}"}, size=2))
    tasks, held_out = load_run_tasks(Config(mixture={"a": kept_back, "b": own, "c": part(3)}))
    assert held_out is not None
    assert Counter(task.part for task in held_out) == {"a": 5, "b": 2}
    assert names(held_out)[5:] == ["be0", "be1"]
    assert not set(names(held_out)) & {task.part + task.prompt[0]["content"] for task in tasks}
    assert len(tasks) == 35 + 3 + 3


def test_one_dataset_is_evaluated_on_what_it_holds_out():
    data = Data(generator=lambda index, seed: {"prompt": str(index)}, size=20, held_out=4)
    tasks, held_out = load_run_tasks(Config(data=data))
    assert held_out is not None
    assert sorted(prompts([*tasks, *held_out]), key=int) == [str(number) for number in range(20)]
    assert load_run_tasks(Config(data=replace(data, held_out=0)))[1] is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Config(mixture={"a": part(3)}, data=Data("x")), "data and mixture exclude each other"),
        (
            lambda: Config(mixture={"a": part(3)}, eval=Eval(data=EvalData("x"))),
            r"eval\.data and mixture .*NAME\.eval_data",
        ),
        (lambda: Config(mixture={"a/b": part(3)}), "mixture must be named by identifiers, but it is 'a/b'"),
        (lambda: part(3, weight=0.0), r"mixture\.NAME\.weight must be greater than 0"),
        (lambda: Part(), r"mixture\.NAME\.data must be given a path or a generator"),
        (lambda: Config(data=Data("x", held_out=0.1), eval=Eval(data=EvalData("y"))), "held_out and eval.data exclude"),
        (lambda: Data("x", held_out=2.5), r"data\.held_out must be a fraction or a count of rows, but it is 2\.5"),
        (lambda: Data("x", held_out=-1), r"data\.held_out must be a fraction or a count"),
        (lambda: load_run_tasks(Config()), "data must be set"),
    ],
)
def test_impossible_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Config(mixture={"a": part(3)}, data=Data(seed=7)), r"data\.seed must be unset with mixture.*It is 7"),
        (Config(mixture={"a": part(3)}, data=Data(system_prompt="Hi")), r"data\.system_prompt must be unset"),
        (Config(mixture={"a": part(3)}, data=Data(max_prompt_tokens=5)), r"data\.max_prompt_tokens must be unset"),
        (Config(mixture={"a": part(3)}, eval=Eval(data=EvalData(size=5))), r"eval\.data\.size .*NAME\.eval_data"),
        (
            Config(data=Data("x", held_out=8), eval=Eval(data=EvalData(size=5))),
            r"eval\.data\.size must be unset without eval\.data\.path",
        ),
        (Config(data=Data("x"), eval=Eval(data=EvalData(split="test"))), r"eval\.data\.split must be unset"),
        (Config(data=Data(generator=part, size=9, split="train[:3]")), r"data\.split must be unset with a generator"),
        (Config(mixture={"a": Part(Data("x", options={"n": 1}))}), r"mixture\.a\.data\.options must be unset"),
    ],
)
def test_settings_of_data_that_nothing_reads_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        load_run_tasks(config)


# Prompts that are too long


class Number(PromptLength):
    """Measures a prompt by the number that it is."""

    def __init__(self) -> None:
        super().__init__(renderer(), None, lambda task: [])

    def local(self, task: Task, limit: int | None = None) -> tuple[int, list[Any]]:
        return int(task.prompt[0]["content"]), []


def test_prompts_that_are_too_long_are_passed_over_and_counted():
    source = numbered(10, seed=None, max_prompt_tokens=3)
    stream = TaskStream(source, Number())
    assert prompts(take(stream, 6)) == ["0", "1", "2", "3", "0", "1"]
    assert stream.metrics() == {"data/drawn": 12.0, "data/too_long": 6.0, "data/epochs": 1.2}
    resumed = TaskStream(source, Number())
    resumed.restore(stream.state())
    assert prompts(take(resumed, 3)) == ["2", "3", "0"]
    assert resumed.too_long == 12


def test_a_prompt_that_is_far_too_long_is_passed_over_without_being_encoded(monkeypatch):
    """It would take 240 times its size in memory."""
    source, reader, encoded = numbered(2, seed=None, max_prompt_tokens=100), renderer(), [0]
    encode, tasks = reader.encode_written, [Task("long", [{"role": "user", "content": "a" * 100_000}]), source[0]]
    monkeypatch.setattr(reader, "encode_written", lambda text: encoded.append(len(text)) or encode(text))
    monkeypatch.setattr(TaskSource, "draw", lambda source, number: tasks[number])
    stream = TaskStream(source, PromptLength(reader, None, lambda task: []))
    assert prompts(take(stream, 1)) == ["0"] and stream.too_long == 1
    assert max(encoded) < 2000


def test_each_part_of_a_mixture_has_its_own_limit():
    mixed = mixture(a=part(4, max_prompt_tokens=1), b=part(4))
    assert names(take(TaskStream(mixed, Number()), 6)) == ["a0", "b0", "a1", "b1", "b2", "b3"]


def test_a_limit_that_nothing_fits_ends_with_an_error():
    data = Data(generator=lambda index, seed: {"prompt": "2"}, size=4, max_prompt_tokens=1)
    with pytest.raises(ValueError, match=r"max_prompt_tokens \(1\) leaves nothing: 4 prompts in a row .*one 2 tokens"):
        take(TaskStream(load_tasks(data), Number()), 1)


# A prompt's length before it is played is its length when it is played

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


class Judge(Env):
    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        return obs(), True, {"reward": 1.0}


class Tooled(Judge):
    tools = [TOOL]  # noqa: RUF012


@pytest.mark.parametrize("env", [Judge, Tooled])
@pytest.mark.parametrize(
    "task",
    [
        a_task("What is 2+2?"),
        a_task("Which?", [image("red", (100, 64)), image("blue", (300, 40))]),
        a_task("The text <|image_pad|> is no image.", [image()]),
    ],
)
def test_a_prompt_is_as_long_as_when_it_is_played(env: type[Env], task: Task):
    count = PromptLength(renderer(), new_store(), lambda task: env.tools)
    assert count(task) == len(play(env, ["a"], task).turns[0].prompt_ids)


def test_images_count_with_every_token_and_none_is_processed():
    store = new_store()
    count = PromptLength(renderer(), store, lambda task: [])
    assert count(a_task("Which?", [image(size=(320, 64))])) - count(a_task("Which?", [image(size=(32, 64))])) == 18
    assert store.processed == 0


def test_evaluation_reads_other_rows_as_the_training_data_is_read():
    data = Data("train.json", columns={"prompt": "question"}, system_prompt="Be short.", held_out=0.1, seed=None)
    rows = data.with_rows(EvalData("test.json", size=4))
    assert rows == Data("test.json", columns={"prompt": "question"}, system_prompt="Be short.", size=4)
    of_images = Data("photos", prompt="<image>What is this?")
    assert of_images.with_rows(EvalData(generator=print, size=2)).prompt is None
