"""Each advisory fires where it should, and is silent where it should not."""

import time
from dataclasses import replace

import pytest

from vlmrl.config import Algo, Config, Eval, Optim, Rollout, Teacher, Train
from vlmrl.report.advisor import Advisor, idle_steps
from vlmrl.report.advisories import CHECKS, Observed, advisories
from vlmrl.report.run_log import RunLog, read_rows

CONFIG = Config(rollout=Rollout(max_tokens=256, max_response_tokens=16), optim=Optim(lr=1e-4))
DROPS = replace(CONFIG, train=Train(max_staleness=1, too_old="drop"))
SOUND = {  # a step of a run that is well
    "trajectories": 64.0,
    "reward/mean": 0.5,
    "reward/max": 1.0,
    "groups/played": 8.0,
    "groups/zero_variance": 1.0,
    "groups/trained": 7,
    "grad_norm": 0.5,
    "lr": 1e-4,
    "entropy": 0.8,
    "logprob_mismatch/mean": 1e-6,
    "kl": 0.01,
}
NO_SIGNAL = {"groups/zero_variance": 8.0, "grad_norm": 0.0, "reward/mean": 0.0}
CALLS, ERRORS = {"env/tool_calls": 1.0}, {"env/tool_errors": 1.0}
LONE = replace(CONFIG, rollout=replace(CONFIG.rollout, group_size=1))
TWO_GROUPS = NO_SIGNAL | {"groups/played": 2.0, "groups/zero_variance": 2.0}


def rows(*changes, count=1):
    """``count`` sound steps, then one for each of ``changes``."""
    sound = [SOUND | {"reward/mean": 0.5 + 0.01 * (number % 3)} for number in range(count)]
    return [{"step": number, **row} for number, row in enumerate([*sound, *(SOUND | c for c in changes)], start=1)]


def record(ending="env_done", tokens=(10,), observation="", images=()):
    error = "TimeoutError" if ending == "error" else None
    turns = [{"sampled_tokens": count, "observation": observation, "images": images} for count in tokens]
    return {"ending": ending, "error": error, "turns": turns}


def demonstrations(reward):
    return [{"step": number, "sft/reward": reward} for number in range(1, 12)]


def summaries(tokens, copied=0.1):
    """Two summaries an episode, of so many tokens each."""
    return {"trajectory/asked_turns": 2.0, "trajectory/asked_tokens": 2.0 * tokens, "env/copied": copied}


def evaluation(kind, reward, error=0.02):
    return {"step": 40, f"{kind}/reward/mean": reward, f"{kind}/standard_error": error}


TAUGHT = replace(CONFIG, teacher=Teacher(model="average"))
LONG = "turn/sampled_tokens/mean"
LENGTH = {LONG: 18.0}
ENV = replace(CONFIG, env="magnifier.py:Magnifier")
GUESSED = replace(CONFIG, eval=Eval(chance=0.25))
START = evaluation("eval", 0.3)
AT_CHANCE = [*demonstrations(0.475), evaluation("eval", 0.27)]
NO_FILE = record(tokens=(5, 5), observation="Look [This image cannot be shown: crops/1.png: there is no such file.]")
LOOKED = record(tokens=(5, 5), images=["3fa9"])
SEEN, UNSEEN = {"turn/with_images": 0.98}, {"turn/with_images": 0.02}
ENDLESS = {"ending/max_turns": 1.0, "ending/error": 0.0, "ending/aborted": 0.0, "reward/mean": 0.0, "reward/max": 0.0}
DONE, CUT, FULL = record(), record("length", [16]), record("max_tokens", [16] * 5)
CASES = {  # what is observed: where it fires, and where not
    "truncated": (
        [
            Observed(CONFIG, rows(), [CUT] * 8),
            Observed(CONFIG, rows(), [FULL] * 8),
            Observed(CONFIG, rows(), [CUT] * 19 + [DONE]),
        ],
        [
            Observed(CONFIG, rows(), [CUT] * 4 + [DONE] * 4),
            Observed(CONFIG, rows(), [CUT] * 3),
            Observed(CONFIG, rows()),
        ],
    ),
    "no_signal": (
        [
            Observed(CONFIG, rows(*[NO_SIGNAL | {"reward/mean": 1.0}] * 3)[1:]),  # too easy from the start
            Observed(CONFIG, rows(*[NO_SIGNAL] * 3)),
            Observed(CONFIG, rows(*[NO_SIGNAL] * 3), [CUT] * 8),
            Observed(CONFIG, rows(*[TWO_GROUPS] * 12)),
        ],
        [
            Observed(CONFIG, rows(*[NO_SIGNAL] * 2)),  # chance
            Observed(LONE, rows(*[NO_SIGNAL] * 3)),
            Observed(replace(CONFIG, algo=Algo(advantage="reinforce_pp")), rows(*[NO_SIGNAL] * 3)),  # with the batch
            Observed(CONFIG, rows(*[NO_SIGNAL | {"reward/mean": 1.0}] * 3)),  # the tasks are solved
            Observed(CONFIG, rows(NO_SIGNAL | {"groups/played": 0.0, "groups/zero_variance": 0.0})),
        ],
    ),
    "tool_calls_fail": (
        [Observed(CONFIG, rows(*[CALLS | {"env/tool_errors": 0.95}] * 5)), Observed(CONFIG, rows(*[ERRORS] * 5))],
        [
            Observed(CONFIG, rows(*[CALLS | {"env/tool_errors": 0.95}] * 4)),  # too early
            Observed(CONFIG, rows(*[CALLS | {"env/tool_errors": 0.3}] * 5)),
            Observed(
                CONFIG, rows(*[CALLS | {"env/tool_errors": 1.0, "env/tool_calls": 3.0}] * 5)
            ),  # of three calls a turn
        ],
    ),
    "zero_gradient": (
        [Observed(CONFIG, rows({"grad_norm": 0.0}))],
        [Observed(CONFIG, rows(NO_SIGNAL)), Observed(CONFIG, rows({"grad_norm": 0.0, "groups/trained": 0}))],
    ),
    "entropy_collapse": (
        [Observed(CONFIG, rows(*[{"entropy": 0.02, "groups/zero_variance": 8.0}] * 5, count=5))],
        [
            Observed(CONFIG, rows(*[{"entropy": 0.02}] * 5, count=5)),  # groups still differ
            Observed(
                CONFIG, rows(*[{"entropy": 0.02, "groups/zero_variance": 8.0, "reward/mean": 0.98}] * 5, count=5)
            ),  # solved
            Observed(CONFIG, rows(*[{"entropy": 0.02, "groups/zero_variance": 8.0}] * 2, count=3)),  # too early
        ],
    ),
    "mismatch_rising": (
        [Observed(CONFIG, rows(*[{"logprob_mismatch/mean": 0.05}] * 5, count=5))],
        [
            Observed(CONFIG, rows(*[{"logprob_mismatch/mean": 1e-4}] * 5, count=5)),  # rounding
            Observed(CONFIG, [row | {"logprob_mismatch/mean": 0.05} for row in rows(count=10)]),  # from the start
        ],
    ),
    "images_not_needed": (
        [
            Observed(CONFIG, rows(), (), [START, evaluation("eval", 0.6), evaluation("blanked", 0.57)]),
            Observed(
                GUESSED, rows(), (), [evaluation("eval", 0.6), evaluation("eval", 0.6), evaluation("blanked", 0.57)]
            ),
        ],
        [
            Observed(
                CONFIG, rows(), (), [evaluation("eval", 0.0), evaluation("eval", 0.0), evaluation("blanked", 0.0)]
            ),
            Observed(GUESSED, rows(), (), [START, evaluation("eval", 0.25), evaluation("blanked", 0.25)]),
            Observed(CONFIG, rows(), (), [evaluation("eval", 0.6), evaluation("blanked", 0.3)]),
            Observed(
                CONFIG, rows(), (), [evaluation("eval", 0.3), evaluation("eval", 0.6), evaluation("blanked", 0.3)]
            ),
            Observed(CONFIG, rows(), (), [evaluation("eval", 0.6)]),
        ],
    ),
    "starts_at_chance": (
        [
            Observed(GUESSED, [], (), AT_CHANCE),
            Observed(GUESSED, rows(), (), [*AT_CHANCE, evaluation("eval", 0.6)]),  # also where it rose later
            Observed(replace(GUESSED, train=Train(steps=0)), [], (), [evaluation("eval", 0.0), *AT_CHANCE]),
        ],
        [
            Observed(CONFIG, [], (), AT_CHANCE),
            Observed(
                replace(GUESSED, eval=Eval(chance=0.0)), [], (), [*demonstrations(0.475), evaluation("eval", 0.0)]
            ),  # no form
            Observed(
                replace(GUESSED, teacher=Teacher(model="self", sees=print)), [], (), AT_CHANCE
            ),  # it shows what decides
            Observed(GUESSED, [], (), AT_CHANCE[-1:]),  # no warm start
            Observed(GUESSED, [], (), [*demonstrations(0.3), evaluation("eval", 0.27)]),  # they guess, too
            Observed(GUESSED, [], (), [*demonstrations(0.475), evaluation("eval", 0.4)]),
            Observed(GUESSED, [], (), [*demonstrations(0.475), evaluation("eval", 0.1)]),  # it has not even the form
            Observed(GUESSED, rows(), (), [*demonstrations(0.475), evaluation("eval", 0.4), evaluation("eval", 0.25)]),
        ],
    ),
    "images_vanish": (
        [Observed(CONFIG, rows(*[{"turn/with_images": 0.98}] * 5, *[{"turn/with_images": 0.02}] * 5))],
        [
            Observed(CONFIG, rows(*[{"turn/with_images": 0.98}] * 4, *[{"turn/with_images": 0.02}] * 5)),  # too early
            Observed(CONFIG, rows(*[{"turn/with_images": 0.98}] * 5, *[{"turn/with_images": 0.2}] * 5)),
            Observed(CONFIG, rows(*[{"turn/with_images": 0.0}] * 10)),
            Observed(
                CONFIG, rows(*[SEEN | {"reward/mean": 0.1}] * 5, *[UNSEEN | {"reward/mean": 0.9}] * 5)
            ),  # needs none
        ],
    ),
    "images_not_shown": (
        [Observed(CONFIG, rows(), [NO_FILE] * 4), Observed(CONFIG, rows(), [NO_FILE] * 9 + [LOOKED])],
        [
            Observed(CONFIG, rows(), [NO_FILE] * 3),
            Observed(CONFIG, rows(), [NO_FILE] * 4 + [LOOKED]),
            Observed(CONFIG, rows(), [LOOKED] * 4),
        ],
    ),
    "never_done": (
        [
            Observed(ENV, rows(*[ENDLESS] * 5)[1:]),
            Observed(ENV, rows(*[ENDLESS | {"ending/max_turns": 0.9, "ending/error": 0.1}] * 5)[1:]),
        ],
        [
            Observed(ENV, rows(*[ENDLESS] * 4)[1:]),  # too early
            Observed(ENV, rows(ENDLESS | {"ending/max_turns": 0.98}, *[ENDLESS] * 5)[1:]),
            Observed(ENV, rows(*[ENDLESS | {"reward/mean": 0.4, "reward/max": 1.0}] * 5)[1:]),  # pays by turn
            Observed(
                ENV, rows(*[ENDLESS | {"reward/mean": 1.0, "reward/max": 1.0}] * 5)[1:]
            ),  # solved, paid in finish()
            Observed(CONFIG, rows(*[ENDLESS] * 5)[1:]),  # no env
        ],
    ),
    "long_trajectories_lost": (
        [
            Observed(CONFIG, rows(), [DONE] * 20 + [record("error", [40, 40])] * 4),
            Observed(DROPS, rows(*[{"length_bias/sampled_tokens": 0.7}] * 5)),
        ],
        [
            Observed(CONFIG, rows(), [DONE] * 20 + [record("error", [11])] * 4),  # as long as the others
            Observed(CONFIG, rows(), [DONE] * 20 + [record("error", [40, 40])]),  # one
            Observed(CONFIG, rows(), [DONE] * 20 + [record("error", [])] * 4),  # failed before the first response
            Observed(DROPS, rows(*[{"length_bias/sampled_tokens": 0.97}] * 5)),
            Observed(CONFIG, rows(*[{"length_bias/sampled_tokens": 0.7}] * 5)),  # long ones are still in progress
        ],
    ),
    "reward_below_start": (
        [Observed(CONFIG, rows(*[{"reward/mean": 0.3}, {"reward/mean": 0.32}] * 5, count=10))],
        [
            Observed(CONFIG, rows(count=20)),
            Observed(CONFIG, rows(*[{"reward/mean": 0.2}, {"reward/mean": 0.8}] * 5, count=10)),  # noise
            Observed(CONFIG, rows(*[{"reward/mean": 0.3}] * 5, count=10)),  # too early
        ],
    ),
    "zero_learning_rate": (
        [Observed(CONFIG, rows({"lr": 0.0}))],
        [Observed(CONFIG, rows({"lr": 1e-9})), Observed(CONFIG, [])],
    ),
    "high_kl": (
        [Observed(CONFIG, rows(*[{"kl": 2.0}] * 3))],
        [Observed(CONFIG, rows(*[{"kl": 2.0}] * 2)), Observed(CONFIG, [])],
    ),
    "summaries_grow_or_copy": (
        [
            Observed(CONFIG, rows(*[summaries(4)] * 5, *[summaries(8)] * 5)),
            Observed(CONFIG, rows(*[summaries(64, copied=0.6)] * 10)),
        ],
        [
            Observed(CONFIG, rows(*[summaries(4)] * 5, *[summaries(7)] * 5)),
            Observed(CONFIG, rows(*[summaries(3)] * 5, *[summaries(7)] * 5)),  # far from the limit of 16
            Observed(CONFIG, rows(*[summaries(4)] * 4, *[summaries(8)] * 5)),  # too early
            Observed(CONFIG, rows(*[summaries(8)] * 10)),
            Observed(CONFIG, rows(*[summaries(63, copied=1.0)] * 10)),
            Observed(CONFIG, rows(*[summaries(64, copied=0.4)] * 10)),
        ],
    ),
    "teacher_agrees": (
        [Observed(TAUGHT, rows(*[{"teacher/kl": -1e-5, "teacher/divergence": 1e-4}] * 5))],
        [
            Observed(TAUGHT, rows(*[{"teacher/kl": 1e-5, "teacher/divergence": 0.02}] * 5)),
            Observed(TAUGHT, rows({"teacher/kl": 0.3}, *[{"teacher/kl": 1e-5}] * 5)),  # it has been learned
            Observed(TAUGHT, rows(*[{"teacher/kl": 0.0}] * 4)),  # too early
        ],
    ),
    "teacher_kl_grows": (
        [Observed(TAUGHT, rows(*[{"teacher/kl": 0.1}] * 5, *[{"teacher/kl": 0.25}] * 5))],
        [
            Observed(TAUGHT, rows(*[{"teacher/kl": 0.25}] * 5, *[{"teacher/kl": 0.1}] * 5)),
            Observed(TAUGHT, rows(*[{"teacher/kl": 0.01}] * 5, *[{"teacher/kl": 0.05}] * 5)),  # small
        ],
    ),
    "teacher_changes_length": (
        [
            Observed(TAUGHT, rows(*[LENGTH | {LONG: 40.0}] * 5, *[LENGTH] * 5)),
            Observed(TAUGHT, rows(*[LENGTH] * 5, *[LENGTH | {LONG: 40.0}] * 5)),
        ],
        [
            Observed(CONFIG, rows(*[LENGTH | {LONG: 40.0}] * 5, *[LENGTH] * 5)),  # no teacher
            Observed(TAUGHT, rows(*[LENGTH] * 5, *[LENGTH | {LONG: 30.0}] * 5)),
        ],
    ),
    "stops_looking": (  # as GeoGuesser did
        [Observed(CONFIG, rows(*[{"turns/mean": 6.7}] * 10, *[{"turns/mean": 1.1, "reward/mean": 0.7}] * 10))],
        [
            Observed(CONFIG, rows(*[{"turns/mean": 6.7}] * 10, *[{"turns/mean": 1.1, "reward/mean": 0.3}] * 10)),
            Observed(CONFIG, rows(*[{"turns/mean": 6.7}] * 10, *[{"turns/mean": 3.0, "reward/mean": 0.7}] * 10)),
            Observed(CONFIG, rows(*[{"turns/mean": 1.0}] * 10, *[{"turns/mean": 1.0, "reward/mean": 0.7}] * 10)),
        ],
    ),
}


@pytest.mark.parametrize("name", CHECKS)
def test_an_advisory_fires_and_is_silent(name):
    fires, silent = CASES[name]
    for seen in fires:
        [found] = [each for each in advisories(seen) if each.name == name]
        assert found.message.endswith(".")
        section, _, field = found.setting.partition(".")
        settings = getattr(seen.config, section)
        assert not field or hasattr(settings, field)
    for seen in silent:
        assert name not in [each.name for each in advisories(seen)]


def test_a_run_that_is_well_has_no_advisory():
    well = Observed(
        CONFIG, rows(count=40), [DONE] * 60 + [CUT] * 4, [evaluation("eval", 0.6), evaluation("blanked", 0.2)]
    )
    assert advisories(well) == []
    assert advisories(Observed(CONFIG, [])) == []


UNLEARNED = [CALLS | {"env/tool_errors": 0.27}, *[CALLS | ERRORS | {"reward/mean": 0.3}] * 5]


@pytest.mark.parametrize(
    ("seen", "message"),
    [
        (
            Observed(CONFIG, rows(NO_SIGNAL)[1:], [CUT] * 8),
            "every response was cut at rollout.max_response_tokens (16) before step() was called: raise it, or set rollout.stop "
            "to the text that ends a response.",
        ),
        (
            Observed(replace(CONFIG, reward="mine.py:reward"), rows(NO_SIGNAL)[1:], [CUT] * 8),
            "every response was cut at rollout.max_response_tokens (16): raise it, or",
        ),
        (
            Observed(CONFIG, rows(*UNLEARNED), [DONE] * 8),
            "100% of the tool calls of the last five steps failed, and 27% in the first step",
        ),
        (
            Observed(ENV, rows(), [NO_FILE] * 8),
            "8 of 8 images of Magnifier cannot be shown, and the model reads a text instead, most often: crops/1.png: there is no "
            "such file. ",
        ),
    ],
)
def test_a_message_names_what_was_seen(seen, message):
    [found] = advisories(seen)
    assert found.message.startswith(message)


def test_an_observation_is_searched_for_lost_images_in_linear_time():
    """What a tool answers may begin such a text 10,000 times in a line, and end none: the run's event loop searches it."""
    begun = record(tokens=(5, 5), observation="[This image cannot be shown: " * 10_000 + "\n")
    began = time.thread_time()
    assert advisories(Observed(CONFIG, rows(), [begun])) == []
    assert time.thread_time() - began < 5  # milliseconds; it was 20 s


@pytest.mark.parametrize(
    ("ending", "cut", "message"),
    [
        ("length", 8, "a response of every episode was cut at rollout.max_response_tokens (16): raise it"),
        ("length", 15, "a response of 15 of 16 episodes was cut at rollout.max_response_tokens (16): raise it"),
        ("max_tokens", 8, "a request of every episode reached rollout.max_tokens (256): raise it"),
    ],
)
def test_with_an_agent_any_request_of_an_episode_may_have_met_the_limit(ending, cut, message):
    config = replace(CONFIG, agent="agent.py:play", rollout=replace(CONFIG.rollout, samples="merged"))
    records = [record(ending)] * cut + [DONE] * (cut % 8 != 0)
    [found] = advisories(Observed(config, rows(NO_SIGNAL)[1:], records))
    assert found.message.startswith(message)


@pytest.mark.parametrize(
    ("changed", "records", "message", "setting"),
    [
        ({}, [DONE] * 8, "nothing is learned: the tasks are too hard or too easy", "data"),
        ({}, [CUT] * 8, "nothing is learned: episodes are cut before they can", "rollout.max_response_tokens"),
        (
            {"grad_norm": 3.13},
            [DONE] * 8,
            "rewards teach nothing; the gradient of norm 3.1 is of other terms: ",
            "data",
        ),
    ],
)
def test_equal_rewards_are_blamed_on_what_the_metrics_show(changed, records, message, setting):
    [found] = [
        each
        for each in advisories(Observed(CONFIG, rows(*[NO_SIGNAL | changed] * 3), records))
        if each.name == "no_signal"
    ]
    assert message in found.message and found.setting == setting


def test_each_advisory_is_printed_and_written_once_also_after_a_resume(tmp_path):
    said = []
    with RunLog(tmp_path) as log:
        advisor = Advisor(log, CONFIG, said.append)
        for step in (1, 2):
            log.log(step, SOUND)
            advisor.after_step({"step": step, **SOUND}, [CUT] * 8)
        sizes = log.sizes()
    with RunLog(tmp_path, sizes) as log:
        Advisor(log, CONFIG, said.append).after_step({"step": 3, **SOUND, "lr": 0.0}, [CUT] * 8)
    assert [line.split(":")[0] for line in said] == ["advisory    step 1", "advisory    step 3"]
    assert [(row["name"], row["step"]) for row in read_rows(tmp_path / "advisories.jsonl")] == [
        ("truncated", 1),
        ("zero_learning_rate", 3),
    ]


def test_evaluations_are_judged_when_all_are_there(tmp_path):
    said = []
    with RunLog(tmp_path) as log:
        advisor = Advisor(log, CONFIG, said.append)
        log.log(1, SOUND)
        for each in (START, evaluation("eval", 0.5), evaluation("blanked", 0.5)):
            log.log(1, {key: value for key, value in each.items() if key != "step"})
        advisor.after_evaluations()
        advisor.after_evaluations()
        advisor.after_step({"step": 2, **SOUND}, [CUT] * 8)
        advisor.after_evaluations()
    assert [line.split(":")[1][:20] for line in said] == [" with blanked images", " every response was "]
    assert "within two standard errors" in said[0]


@pytest.mark.parametrize(
    ("config", "changes", "count"),
    [
        (CONFIG, [NO_SIGNAL] * 3, 3),
        (CONFIG, [NO_SIGNAL, {}, NO_SIGNAL], 1),
        (CONFIG, [{"grad_norm": 0.0}] * 2, 2),
        (CONFIG, [{"grad_norm": None, "groups/trained": 0}], 1),  # every group was filtered
        (CONFIG, [NO_SIGNAL | {"grad_norm": 0.5}], 1),  # a KL alone moves the weights
        (LONE, [NO_SIGNAL | {"grad_norm": 0.5}], 0),
        (TAUGHT, [NO_SIGNAL | {"grad_norm": 0.5}], 0),  # by the teacher
        (replace(CONFIG, algo=Algo(advantage="reinforce_pp")), [NO_SIGNAL | {"grad_norm": 0.5}], 0),
        (
            replace(CONFIG, algo=Algo(advantage="none", kl_coef=1.0)),
            [NO_SIGNAL | {"grad_norm": 0.5}],
            0,
        ),  # a teacher does
    ],
)
def test_steps_that_taught_nothing_are_counted_from_the_last_one_back(config, changes, count):
    assert idle_steps(rows(*changes), config) == count


def test_a_policy_that_has_lost_the_end_of_its_responses_is_not_advised_to_write_longer_ones():
    """A learning rate that is too high did that within a step; what it needed was said to be rollout.max_response_tokens."""
    for reward, setting in ((0.0, "optim.lr"), (0.6, "rollout.max_response_tokens")):
        steps = rows({"truncated": 1.0, "reward/mean": reward})
        steps[0]["truncated"] = 0.02
        message, named = CHECKS["truncated"](Observed(CONFIG, steps, [CUT] * 8))
        assert named == setting
        assert message.startswith("every episode reached a limit, and 2% in the first step") == (setting == "optim.lr")
