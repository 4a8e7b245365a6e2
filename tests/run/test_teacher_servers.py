"""A whole run whose teacher is on a server: connected, checked, asked for each batch, and closed."""

from __future__ import annotations

import json
import signal
from dataclasses import replace

import pytest
from aiohttp import web
from testing.fake_sglang import END, FakeSGLang, logprob_of

from vlmrl import Algo, Checkpoint, Config, Data, Model, Rollout, Teacher, Train
from vlmrl.checks.doctor_model import highest_id
from vlmrl.checks.server_parity import ParityError
from vlmrl.engine.base import EngineError
from vlmrl.model import tiny
from vlmrl.model.loading import load_reader
from vlmrl.report.run_log import read_rows
from vlmrl.run.program import run_training
from vlmrl.run.stopping import StopRequest
from vlmrl.train.checkpoint import newest_checkpoint

FIRST_STEP = 3 + 3 + 1
"""The requests to score until the first step is trained: checks at the start, its episodes, and the check of the model."""


def with_hint(task, trajectory, turn):
    return [{"role": "user", "content": f"The answer is a. {turn}"}]


@pytest.fixture
def run(tmp_path):
    """A run and its teacher, which has the tokenizer of its policy, and samples as it scores."""
    fake = FakeSGLang()
    folder = tiny.build(tmp_path / "model", "qwen3")
    tokenizer = load_reader(Model(path=str(folder)), tmp_path).tokenizer
    fake.encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
    fake.finish = {"type": "length"}
    fake.meta = {"output_token_logprobs": [[logprob_of(token), token, None] for token in (5, 6, END)]}
    config = Config(
        name="served",
        output_dir=str(tmp_path),
        model=Model(path=str(folder), device="cpu", dtype="float32"),
        data=Data(generator=lambda index, seed: {"prompt": "Say a."}, size=8),
        reward=lambda text, task: 0.0,
        rollout=Rollout(group_size=1, max_tokens=128, max_response_tokens=6),
        algo=Algo(advantage="none"),
        teacher=Teacher(model=f"sglang:{fake.url}", sees=with_hint, top_k=1),
        train=Train(steps=2, groups_per_batch=3),
        checkpoint=Checkpoint(every=9),
        save_model=False,
    )
    yield config, fake
    fake.close()


@pytest.mark.slow
def test_a_run_learns_from_a_server(run, capfd):
    config, fake = run
    run_training(config)
    rows = [row for row in read_rows(config.folder / "metrics.jsonl") if "teacher/share" in row]
    assert [row["teacher/share"] for row in rows] == [1, 1]
    assert all(row["teacher/divergence"] > 0 and row["grad_norm"] > 0 for row in rows)
    assert [row["teacher/retried"] for row in rows] == [0, 0]
    assert "scores what it samples within" in capfd.readouterr().out
    asked = [body for body in fake.bodies_of("/generate") if "logprob_start_len" in body]
    assert len(asked) == 2 + 2 * (3 + 1)  # the checks, and each episode of two steps with a check of the model


@pytest.mark.slow
def test_rows_with_ids_of_no_token_are_not_scored_and_lower_the_share(run):
    """The policy's head has more rows than the tokenizer tokens. The server's has not, and lists ids that the policy's has not."""
    config, fake = run
    highest, answer = highest_id(load_reader(config.model, config.output_dir).tokenizer), fake._generate

    async def checked(body):
        if max(body["input_ids"]) > highest:
            return web.json_response({"error": {"message": "input_ids beyond the vocabulary"}}, status=400)
        response = await answer(body)
        content = json.loads(response.body)
        for listed in content["meta_info"].get("input_top_logprobs", []):
            for entry in (listed or [])[1:]:
                entry[1] += 10_000
        return web.json_response(content)

    fake._generate = checked
    config = replace(config, teacher=replace(config.teacher, top_k=2))
    run_training(replace(config, rollout=replace(config.rollout, max_response_tokens=60)))
    rows = [row for row in read_rows(config.folder / "metrics.jsonl") if "teacher/share" in row]
    assert min(row["teacher/share"] for row in rows) < 1 and max(row["teacher/share"] for row in rows) > 0
    assert all(row["grad_norm"] > 0 for row in rows if row["teacher/share"])


@pytest.mark.slow
def test_a_teacher_that_dies_ends_the_run_with_one_error_and_the_last_step_is_saved(run, monkeypatch):
    config, fake = run
    monkeypatch.setattr("vlmrl.engine.server.LONGEST_BACKOFF", 0.01)
    answer, asked = fake._generate, []

    async def dies(body):
        asked.append(body)
        fake.dropping = {"/generate"} if len(asked) > FIRST_STEP else set()  # in the second step
        return await answer(body)

    fake._generate = dies
    with pytest.raises(EngineError, match=r"no SGLang server answered in 9 attempts"):
        run_training(config)
    assert newest_checkpoint(config.folder / "checkpoints") == config.folder / "checkpoints/step000001"


@pytest.mark.slow
def test_a_stop_does_not_wait_for_a_teacher_that_hangs_and_the_last_step_is_saved(run):
    """It waited for rollout.engine_timeout. SIGTERM ended the process before, and all steps since the last checkpoint were lost."""
    config, fake = run
    answer, asked, stop = fake._generate, [], StopRequest()

    async def hangs(body):
        asked.append(body)
        if len(asked) > FIRST_STEP:  # in the second step
            fake.hangs = True
            stop.request(signal.SIGTERM)
        return await answer(body)

    fake._generate = hangs
    run_training(config, stop=stop)
    assert newest_checkpoint(config.folder / "checkpoints") == config.folder / "checkpoints/step000001"
    fake.release_requests()


@pytest.mark.slow
def test_a_teacher_that_comes_back_with_another_model_ends_the_run_before_its_batch_is_trained(run):
    """It answered at the same address, and its logprobs were learned as those of the teacher that the run began with."""
    config, fake = run
    answer, asked = fake._generate, []

    async def replaced(body):
        asked.append(body)
        fake.scale = 2.0 if len(asked) > FIRST_STEP else 1.0  # from the second step on
        return await answer(body)

    fake._generate = replaced
    with pytest.raises(
        ParityError, match=r"serves another model than at the start of the run, .* differ by 0\.\d+ nats"
    ):
        run_training(config)
    assert newest_checkpoint(config.folder / "checkpoints") == config.folder / "checkpoints/step000001"
    fake.scale, fake._generate = 1.0, answer  # the first one is back
    run_training(config, resume=True)
    assert [row["step"] for row in read_rows(config.folder / "metrics.jsonl") if "loss" in row] == [1, 2]
