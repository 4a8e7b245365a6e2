"""Runs whose episodes an agent plays over HTTP: training, evaluation, resume, other engines, and what is left at their end."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from PIL import Image
from testing.runs import RECIPES, repeatable, train

from vlmrl import Algo, Checkpoint, Config, Data, Eval, EvalData, Model, Optim, Part, Rollout, Train, load_run
from vlmrl.config.code import resolve_config
from vlmrl.multimodal.openai_messages import openai_messages
from vlmrl.run.eval_program import run_evaluation
from vlmrl.run.program import run_training

pytestmark = pytest.mark.slow


async def zoom_twice(task, client):
    """Shows the image, then a part of it. The reward is the share of sampled characters that are lower case letters."""
    messages = openai_messages(task.prompt)
    async with httpx.AsyncClient(trust_env=False, timeout=600) as http:

        async def ask():
            headers = {"authorization": f"Bearer {client.api_key}"}
            body = {"model": client.model, "messages": messages, "temperature": 0.1}
            response = await http.post(f"{client.base_url}/chat/completions", json=body, headers=headers)
            response.raise_for_status()
            messages.append(response.json()["choices"][0]["message"])
            return messages[-1]["content"] or ""

        text = await ask()
        crop = openai_messages(
            [{"role": "user", "content": [{"type": "image", "image": Image.new("RGB", (32, 32), "red")}]}]
        )
        messages.extend(crop)
        text += await ask()
    return sum(c.islower() for c in text) / max(1, len(text))


def small(tmp_path: Path, **changes) -> Config:
    shapes = "../datasets/shapes.py:make_task"
    config = Config(
        name="agents",
        output_dir=str(tmp_path / "runs"),
        model=Model(path="tiny:qwen3_vl"),
        data=Data(generator=shapes, size=32),
        agent=zoom_twice,
        rollout=Rollout(
            group_size=3, max_turns=2, max_tokens=256, max_response_tokens=6, samples="merged", truncated_reward=0.0
        ),
        optim=Optim(lr=1e-3, warmup_steps=0),
        train=Train(steps=2, groups_per_batch=2),
        eval=Eval(data=EvalData(generator=shapes, size=3, seed=1)),
        save_model=False,
    )
    return replace(resolve_config(config, RECIPES), **changes)


def agents_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(("vlmrl-agents", "vlmrl-gateway"))]


def test_an_agent_trains(tmp_path):
    run, rows, summary = train(small(tmp_path))
    run.close()
    steps = [row for row in rows if "groups/trained" in row]
    assert len(steps) == 2 and summary.keys() >= {"reward_before", "reward_after"}
    for row in steps:
        assert row["samples/unmerged"] == 2 * row["samples"] == 12
        assert row["trajectory/requests_continued"] == 1.0 and row["trajectory/sampling_overridden"] == 2.0
        assert row["logprob_mismatch/max"] < 1e-4
    assert agents_threads() == []
    record = load_run(run.folder).trajectories(step=1, kind="train")[0]
    assert [turn["continues"] for turn in record["turns"]] == [None, 0]
    assert [len(turn["images"]) for turn in record["turns"]] == [1, 1]


def without_image_counts(row):
    """A resumed run loads and encodes the images again that an earlier step shares with a later one."""
    return {name: value for name, value in row.items() if not name.startswith("images/")}


def test_a_deterministic_run_of_an_agent_resumes(tmp_path):
    """An agent that sends one request at a time: its episodes are batched as those of an env."""

    def rows(folder, config, resume=False):
        settings = replace(
            config, output_dir=str(tmp_path / folder), deterministic=True, checkpoint=Checkpoint(every=1)
        )
        run_training(settings, resume=resume)
        return [repeatable(row) for row in load_run(settings.folder).metrics]

    whole = rows("whole", small(tmp_path))
    one_step = replace(small(tmp_path).train, steps=1)
    rows("stopped", small(tmp_path, train=one_step))
    resumed = rows("stopped", small(tmp_path), resume=True)
    resumed, whole = (
        [without_image_counts(row) for row in each if "groups/trained" in row] for each in (resumed, whole)
    )
    assert len(resumed) == 2 and resumed == whole
    assert agents_threads() == []


def test_an_asynchronous_run_trains_with_an_agent(tmp_path):
    settings = small(tmp_path, algo=Algo(corrections=("token_truncation",)))
    run, rows, _ = train(replace(settings, train=replace(settings.train, max_staleness=2, steps=3)))
    run.close()
    assert [row["samples"] for row in rows if "groups/trained" in row] == [6, 6, 6]


COMMAND = """
import json, os, urllib.request
task = json.load(open(os.environ["VLMRL_TASK"]))
body = {"model": "any", "messages": task["messages"]}
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(), headers)
print("response:", json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""


def letters(trajectory) -> float:
    text = trajectory.turns[-1].text
    return sum(c.islower() for c in text) / max(1, len(text))


def test_a_command_is_an_agent(tmp_path):
    (tmp_path / "agent.py").write_text(COMMAND)
    command = f"{shlex.quote(sys.executable)} {tmp_path / 'agent.py'}"
    settings = small(tmp_path, agent=command, reward=letters, eval=Eval())
    run, rows, _ = train(replace(settings, train=Train(steps=1, groups_per_batch=1)))
    run.close()
    assert next(row for row in rows if "groups/trained" in row)["samples"] == 3
    logs = sorted((run.folder / "agents/step000001/00000").glob("*.log"))
    assert len(logs) == 3 and all(log.read_text().startswith("response:") for log in logs)


def test_an_agent_is_evaluated_and_images_can_be_blanked(tmp_path):
    settings = small(tmp_path)
    run_evaluation(replace(settings, eval=replace(settings.eval, blank_images=True)), out=tmp_path / "out.json")
    rows = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [row["blanked"] for row in rows] == [False, True]
    assert agents_threads() == []


def test_a_mixture_is_played_by_one_agent(tmp_path):
    shapes = resolve_config(small(tmp_path), RECIPES).data
    parts = {"a": Part(data=shapes), "b": Part(data=replace(shapes, seed=3))}
    run, rows, _ = train(small(tmp_path, data=Data(), mixture=parts, eval=Eval()))
    run.close()
    assert next(row for row in rows if "groups/trained" in row)["samples"] == 6
    with pytest.raises(ValueError, match=r"mixture.a.env and mixture.a.reward must be unset with agent"):
        small(tmp_path, data=Data(), mixture={"a": Part(data=shapes, reward=letters)}, eval=Eval())


STOPPED = """
from vlmrl import Config, Data, Model, Rollout, Train
from vlmrl.run.program import run_training

def tasks(index, seed):
    return {{"prompt": "Hi."}}

run_training(Config(
    name="agents",
    output_dir="{output}",
    model=Model(path="tiny:qwen3_vl"),
    data=Data(generator=tasks, size=4),
    agent="sh -c 'touch {pids}/$$; sleep 3600'",
    rollout=Rollout(group_size=2, max_tokens=64, max_response_tokens=4, samples="merged"),
    train=Train(steps=1, groups_per_batch=1),
))
"""


def test_a_stopped_run_ends_its_agents(tmp_path):
    (tmp_path / "pids").mkdir()
    code = STOPPED.format(pids=tmp_path / "pids", output=tmp_path / "runs")
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        while len(list((tmp_path / "pids").iterdir())) < 2:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 143, errors
    for pid in (path.name for path in (tmp_path / "pids").iterdir()):
        while Path(f"/proc/{pid}").exists():  # its guard ends it when the run is gone
            time.sleep(0.01)
