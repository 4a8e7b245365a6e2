"""The parts of `benchmarks/vs_trl.py` that make it fair: its task's rules and its bare loop."""

from __future__ import annotations

import asyncio
import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

from vlmrl import Config, Data, Model, Rollout, Task, Train
from vlmrl.data import TaskStream
from vlmrl.engine.scripted import ScriptedEngine
from vlmrl.families import family_of
from vlmrl.run.build import build_run
from vlmrl.samples import concat
from vlmrl.train.packing import response_logprobs

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CALL = '<tool_call>\n{"name": "look", "arguments": {"page": 3}}\n</tool_call>'


@pytest.fixture
def scripts(monkeypatch):
    """`look_task` and `bare_loop`."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("look_task", "bare_loop"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("look_task"), importlib.import_module("bare_loop")


RESPONSES = {  # the response: whether the episode ends, and how many images are shown
    CALL: (False, 1),
    f"Two. {CALL}\n{CALL}": (False, 2),
    "Done.": (True, 0),
    CALL.replace("look", "peek"): (False, 0),
    CALL.replace("page", "number"): (False, 0),
    CALL.replace("}}", "}"): (True, 0),
    f"{CALL}\n<tool_call>\nlook\n</tool_call>": (True, 0),
    CALL.replace('"name": "look", ', ""): (True, 0),
}


@pytest.mark.parametrize("response", RESPONSES)
def test_a_response_ends_the_episode_or_is_answered(scripts, response):
    task, _ = scripts
    ends, images = RESPONSES[response]
    observation, done, _ = task.LookEnv(Task("t", []), turns=4, side=32).step(response)
    assert (done, len(observation.get("multi_modal_data", {}).get("image", []))) == (ends, images)


@pytest.mark.parametrize("own_images", [False, True])
def test_members_see_the_same_images_or_their_own(scripts, own_images):
    task, _ = scripts
    envs = [task.LookEnv(Task("t", []), turns=4, side=32, own_images=own_images) for _ in range(2)]
    theirs = [task.LookTRL(4, 32, own_images) for _ in range(2)]
    for env, other in zip(envs, theirs, strict=True):
        env.reset()
        other.reset(seed=0)
    ours = [env.step(CALL)[0]["multi_modal_data"]["image"][0].tobytes() for env in envs]
    shown = [other.look(3)[0]["image"].tobytes() for other in theirs]
    assert (len({*ours}), len({*shown}), len({*ours, *shown})) == ((2, 2, 4) if own_images else (1, 1, 1))


@pytest.mark.parametrize("response", RESPONSES)
def test_trl_reads_the_same_calls(scripts, tmp_path, response):
    pytest.importorskip("trl", reason="needs TRL: pip install 'vlmrl[bench]'")
    from transformers import AutoProcessor
    from trl.chat_template_utils import add_response_schema, parse_response, qwen3_vl_chat_template

    from vlmrl.model import tiny

    tokenizer = AutoProcessor.from_pretrained(tiny.build(tmp_path / "tiny")).tokenizer
    tokenizer.chat_template = qwen3_vl_chat_template
    ids = add_response_schema(tokenizer).encode(f"{response}<|im_end|>")
    calls = parse_response(tokenizer, ids, prefix=tokenizer.encode("<|im_start|>assistant\n")).get("tool_calls", [])
    ends, images = RESPONSES[response]
    assert (not calls) == ends
    right = [call for call in calls if call["function"]["name"] == "look" and "page" in call["function"]["arguments"]]
    assert len(right) == images


def test_the_bare_loop_runs_the_responses_that_were_sampled(scripts, tmp_path):
    """Its loss is the mean of the trainer's own logprobs, without the ban of placeholders."""
    task, bare_loop = scripts
    options = {"turns": 3, "side": 64}
    run = build_run(
        Config(
            name="bare",
            output_dir=str(tmp_path),
            model=Model(device="cpu", dtype="float32"),
            data=Data(generator=task.make_task, size=10, options=options),
            env=task.LookEnv,
            env_options=options,
            rollout=Rollout(max_turns=3, group_size=2),
            train=Train(groups_per_batch=2),
        )
    )
    run.model.save(run.folder / "model")
    engine = ScriptedEngine(lambda request, turn: CALL if turn < 2 else "Done.", run.model.renderer)
    played = asyncio.run(run.runner(engine=engine).play(TaskStream(run.tasks), 2, "p")).trajectories
    family = family_of(run.model.policy.config)
    bare = bare_loop.BareLoop(run.folder / "model", played, 2, family)
    assert min(bare.seconds()) > 0
    samples = [row for trajectory in played for row in concat(trajectory)]
    masks = [np.array(row.loss_mask) == 1 for row in samples]
    run.model.policy.banned_ids = []
    scores = response_logprobs(run.model.policy, samples, 1.0)
    mean = np.mean(np.concatenate([each[mask] for each, mask in zip(scores, masks, strict=True)]))
    assert bare._train() == pytest.approx(-mean, abs=1e-5)
    run.engine.close()
