"""Envs, factories and reward functions, resolved and checked before the first episode."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from testing.episodes import play

from vlmrl import Config, Data, Env, Part, Rollout, Task, obs
from vlmrl.config import resolve_config
from vlmrl.config.saved import from_plain
from vlmrl.env.base import resolve_env, resolve_envs
from vlmrl.report.records import plain

TASK = Task("t", [{"role": "user", "content": "2+2?"}], answer="4", seed=11)


class Echo(Env):
    def __init__(self, task: Task, suffix: str = "!", *, times: int = 1) -> None:
        super().__init__(task)
        self.suffix, self.times = suffix, times

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        return obs((response_text + self.suffix) * self.times), True, {"reward": 1.0}


def build_echo(task: Task, suffix: str = "?") -> Echo:
    return Echo(task, suffix)


def right(text: str, task: Task) -> float:
    return float(text == task.answer)


def test_a_class_becomes_an_env_per_task():
    spec = resolve_env(Echo, options={"times": 2})
    first, second = spec.build(TASK), spec.build(TASK)
    assert spec.name == "Echo"
    assert first is not second
    assert first.step("a")[0] == {"obs_str": "a!a!"}
    assert (first.task, first.seed) == (TASK, 11)


def test_a_factory_is_as_good_as_a_class():
    spec = resolve_env(build_echo, options={"suffix": "..."})
    assert spec.build(TASK).step("a")[0] == {"obs_str": "a..."}
    assert spec.build(TASK).seed == 11


def test_seed_and_shared_are_there_when_init_runs():
    class Early(Echo):
        @classmethod
        def setup(cls, **options: Any) -> str:
            return "index"

        def __init__(self, task: Task) -> None:
            self.found = (self.seed, self.shared, self.task.id)

    assert resolve_env(Early).build(TASK).found == (11, "index", "t")


def test_a_file_and_a_module_are_named_by_a_string(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = "from vlmrl import Env, obs\nclass Mine(Env):\n    def step(self, text): return obs('mine'), True, {}\n"
    (tmp_path / "my_env_module.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    spec = resolve_env("my_env_module.py:Mine")
    assert spec.build(TASK).step("a") == ({"obs_str": "mine"}, True, {})
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve_env("my_env_module:Mine").build(TASK).step("a")[0] == {"obs_str": "mine"}
    with pytest.raises(ValueError, match="Nobody"):
        resolve_env("my_env_module.py:Nobody")


def test_a_reward_function_is_a_whole_env():
    env = resolve_env(None, right).build(TASK)
    assert env.step("4") == ({"obs_str": ""}, True, {"reward": 1.0})
    assert env.step("5")[2] == {"reward": 0.0}


@pytest.mark.parametrize(("ending", "reward"), [("length", 1.0), ("max_tokens", 1.0), ("env_done", None)])
def test_a_reward_function_scores_every_response_once(ending: str, reward: float | None):
    env = resolve_env(None, right).build(TASK)
    env.last_response = "4"
    assert env.finish(ending) == reward


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        (Echo, {"sufix": "?"}, r"do not fit Echo: .*sufix.*suffix.* = '!'.*times.* = 1"),
        (build_echo, {"times": 2}, r"env_options do not fit build_echo: .*times.*suffix"),
        (lambda task, needed: None, {}, "needed"),
        (lambda: None, {}, "too many positional arguments"),
    ],
)
def test_options_are_checked_against_the_signature(target: Any, options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        resolve_env(target, options=options)


def test_an_object_that_is_not_an_env_is_an_error_at_startup():
    class NoStep(Env):
        pass

    class Stranger:
        def __init__(self, task: Task) -> None: ...

        def step(self, response_text: str) -> None: ...

    with pytest.raises(ValueError, match=r"NoStep must define step\(self, response_text\)"):
        resolve_env(NoStep)
    with pytest.raises(ValueError, match=r"Stranger must subclass vlmrl.Env, but its bases are \['object'\]"):
        resolve_env(Stranger)
    with pytest.raises(ValueError, match="must be a class or a function that builds an env, but it is a int"):
        resolve_env(7)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="env must be set, or in its place reward, agent"):
        resolve_env(None, None)
    with pytest.raises(ValueError, match="env and reward cannot both be set"):
        resolve_env(Echo, right)


def test_a_reward_with_another_signature_is_an_error():
    with pytest.raises(ValueError, match=r"reward must be callable as .*\(text, task\)"):
        resolve_env(None, lambda text: 1.0)
    with pytest.raises(ValueError, match=r"reward must be a function \(text, task\)"):
        resolve_env(None, 7)  # type: ignore[arg-type]


def test_a_reward_function_in_the_form_of_trl_or_verl_is_named():
    def accuracy(completions, solution, **kwargs):
        return [1.0 for _ in completions]

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return 1.0

    with pytest.raises(
        ValueError, match=r"accuracy\(completions, .*has the parameter 'completions' .*porting.md#reward-functions"
    ):
        resolve_env(None, accuracy)
    with pytest.raises(ValueError, match=r"has the parameter 'solution_str' of TRL's or verl's reward functions"):
        resolve_env(None, compute_score)


def test_a_part_of_a_mixture_gives_the_runs_env_options_of_its_own():
    data = Data(generator=lambda index, seed: {"prompt": ""}, size=4)
    parts = {
        "a": Part(data=data),
        "b": Part(data=data, env_options={"suffix": "?"}),
        "c": Part(data=data, env=build_echo),
    }
    spec = resolve_envs(Config(env=Echo, env_options={"times": 2}, mixture=parts))
    envs = [spec.build(replace(TASK, part=name)) for name in parts]
    assert [(env.suffix, env.times) for env in envs if isinstance(env, Echo)] == [("!", 2), ("?", 2), ("?", 1)]


def test_a_factory_that_returns_something_else_is_named():
    spec = resolve_env(lambda task: "an env")
    with pytest.raises(ValueError, match=r"must return a vlmrl.Env, but it returned a str"):
        spec.build(TASK)


def test_setup_runs_once_with_the_options_and_all_envs_share_its_result():
    calls: list[dict[str, Any]] = []

    class Shared(Echo):
        @classmethod
        def setup(cls, **options: Any) -> list[str]:
            calls.append(options)
            return ["index"]

    spec = resolve_env(Shared, options={"suffix": "?"})
    first, second = spec.build(TASK), spec.build(TASK)
    assert calls == [{"suffix": "?"}]
    assert first.shared == ["index"]
    assert first.shared is second.shared


def test_an_async_setup_is_an_error():
    class Late(Echo):
        @classmethod
        async def setup(cls) -> str:
            return "index"

    with pytest.raises(ValueError, match=r"env .*Late: setup must be a plain classmethod"):
        resolve_env(Late)


def test_half_a_surrogate_pair_in_an_observation_becomes_a_question_mark():
    assert obs("\ud800 page \U0001f600") == {"obs_str": "? page \U0001f600"}


def test_observations_become_user_messages_with_the_images_first():
    crop = Image.new("RGB", (4, 4))
    env = Echo(TASK)
    assert obs("Closer:", images=[crop]) == {"obs_str": "Closer:", "multi_modal_data": {"image": [crop]}}
    assert env.format_observation(obs("Closer:", images=[crop])) == {
        "role": "user",
        "content": [{"type": "image", "image": crop}, {"type": "text", "text": "Closer:"}],
    }
    assert env.format_observation(obs(images=[crop])) == {"role": "user", "content": [{"type": "image", "image": crop}]}
    assert env.format_observation(obs("plain")) == {"role": "user", "content": "plain"}
    assert env.format_observation({}) == {"role": "user", "content": ""}


def test_the_reward_of_an_unfinished_episode_is_declared_once():
    class Declares(Env):
        unfinished_reward = -0.5

        def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
            return obs("Again."), False, {}

    env = Declares(Task("t", []))
    assert [env.finish(ending) for ending in ("env_done", "max_turns", "max_tokens", "length")] == [
        None,
        -0.5,
        -0.5,
        -0.5,
    ]
    cut = play(Declares, ["a", "b"], max_turns=2)
    assert (cut.ending, cut.reward) == ("max_turns", -0.5)


def short(text: str, task: Task) -> float:
    return float(len(text) < 3)


async def later(text: str, task: Task) -> float:
    return 0.25


@pytest.mark.parametrize(("limit", "ending"), [(100, "env_done"), (1, "length")])
@pytest.mark.parametrize(("given", "reward"), [(later, 0.25), ((later, short), 1.25), ({short: 2.0, later: 4.0}, 3.0)])
def test_reward_functions_may_be_async(limit: int, ending: str, given: Any, reward: float):
    trajectory = play(resolve_env(None, given), ["no"], max_turns=1, max_response_tokens=limit)
    assert (trajectory.ending, trajectory.reward) == (ending, reward)


@pytest.mark.parametrize(("given", "reward"), [((right, short), 1.0), ({right: 2.0, short: 0.5}, 0.5)])
def test_several_rewards_are_added_by_weight_and_each_is_a_metric(given: Any, reward: float):
    config = Config(reward=given, rollout=Rollout(max_turns=1))
    spec = resolve_envs(resolve_config(config))
    _, done, info = spec.build(Task("a", [], answer="yes")).step("no")
    assert done and info == {"reward": reward, "right": 0.0, "short": 1.0}
    saved = from_plain(Config, json.loads(json.dumps(plain(config)))).reward
    assert [str(code).partition(":")[2] for code in saved] == ["right", "short"]


@pytest.mark.parametrize("given", [(right, short), {right: 2.0, short: 1.0, later: 0.0}])
def test_each_of_several_rewards_is_a_metric_also_of_a_response_that_was_cut_off(given: Any):
    """It was one of whole responses alone: the mean of `env/right` was that of the few that ended in time."""
    whole, cut = (play(resolve_env(None, given), ["no"], max_turns=1, max_response_tokens=limit) for limit in (100, 1))
    assert (cut.ending, cut.reward) == ("length", 1.0)
    assert cut.turns[0].metrics == whole.turns[0].metrics
    assert (cut.turns[0].metrics["right"], cut.turns[0].metrics["short"]) == (0.0, 1.0)


def test_a_function_named_reward_is_one_of_several_and_not_their_sum():
    def reward(text: str, task: Task) -> float:
        return 0.25

    reward.__qualname__ = "reward"  # as of a function of a file
    for limit, ending in ((100, "env_done"), (1, "length")):
        for given, expected in (((reward, short), 1.25), ({reward: 2.0, short: 10.0}, 10.5), ({reward: 2.0}, 0.5)):
            trajectory = play(resolve_env(None, given), ["no"], max_turns=1, max_response_tokens=limit)
            assert (trajectory.ending, trajectory.reward) == (ending, expected)
