"""`vlmrl collect`: every episode is accounted for, none is played twice, and the folder loads and opens."""

import asyncio
import json
import os
import shutil
import signal
import sys
import threading
from collections import Counter
from functools import partial

import pytest
from safetensors.torch import load_file, save_file
from testing.episodes import a_task, image, new_store, renderer, script, turn_loop
from testing.fake_api import GARBAGE, call, fake_api
from testing.fakes import make_trajectory

from vlmrl import Env, load_run, obs
from vlmrl.cli import main as cli
from vlmrl.config import Rollout
from vlmrl.config.collection import Keep
from vlmrl.env.base import resolve_env
from vlmrl.multimodal.placeholders import collapse
from vlmrl.report.viewer.followed_run import FollowedRun
from vlmrl.report.viewer.page import write_snapshot
from vlmrl.rollout.asking_loop import AskingLoop
from vlmrl.rollout.history_policies import compact
from vlmrl.run.episode_rows import collected_fields, episode_row, read_recorded, write_episodes
from vlmrl.types import ReceivedRequest

RECIPE = '''
from PIL import Image
from vlmrl import Config, Data, Rollout, Task, ToolEnv


def tasks(index, seed):
    image = Image.new("RGB", (64, 64), (index, 0, 0))
    prompt = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": f"task {index}"}]}]
    return Task(f"look/{index}", prompt, [image])


def crop(left: int):
    """A part of the image.

    Args:
        left: Where it begins.
    """
    return Image.new("RGB", (32, 32), (0, left, 0))


class Look(ToolEnv):
    functions = [crop]

    def judge(self, response):
        return {"reward": float("good" in response), "words": len(response.split())}


def config():
    return Config(
        name="look",
        data=Data(generator=tasks, size=4, seed=None),
        env=Look,
        rollout=Rollout(max_turns=3, max_tokens=400, max_response_tokens=16, max_concurrent=4, truncated_reward=0.0),
    )
'''


def vlmrl(*arguments: object) -> None:
    before, sys.argv = sys.argv, ["vlmrl", *map(str, arguments)]
    try:
        cli.main()
    finally:
        sys.argv = before


class Player:
    """Crops the image, then gives an answer: ``good`` to every second episode of a task. ``answers`` counts those by task."""

    def __init__(self):
        self.answers = Counter()
        self.after = lambda: None
        self._lock = threading.Lock()

    def __call__(self, body):
        (text,) = [part["text"] for part in body["messages"][0]["content"] if part["type"] == "text"]
        if len(body["messages"]) == 1:
            return {"content": "looking", "tool_calls": [call("crop", '{"left": 9}')]}
        with self._lock:
            self.answers[text] += 1
            self.after()
            return {"content": "good" if self.answers[text] % 2 else "bad answer"}


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def collect(recipe, tmp_path):
    """``collect(url, *options)`` into the folder that it returns, by an API's model."""

    def run(url, *options):
        folder = tmp_path / "out"
        api = [] if url is None else ["--api", url, "--model", "gpt"]
        vlmrl("collect", recipe, "--output-dir", tmp_path / "runs", "--out", folder, *api, *options)
        return folder

    return run


def rows_of(folder):
    return [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.slow
def test_an_apis_episodes_are_rows_that_load_and_a_run_that_opens(collect, tmp_path):
    with fake_api(Player()) as (api, url):
        api.together = 4
        folder = collect(url, "--episodes", "2", "--tasks", "3")
    assert len(api.requests) == 12 and api.most_in_flight == 4  # rollout.max_concurrent
    rows = rows_of(folder)
    assert [row["id"] for row in rows] == [f"collect/{task:05d}/{m:02d}" for task in range(3) for m in range(2)]
    row = rows[2]
    assert (row["task"], row["ending"], row["model"]) == (1, "env_done", "gpt") and "responses" not in row
    assert sorted(each["reward"] for each in rows[2:4]) == [0.0, 1.0]
    assert row["metrics"]["tool_calls"] == 1 and row["metrics"]["api_prompt_tokens"] == 20
    user, asked, result, answer = row["messages"]
    assert asked == {"role": "assistant", "content": "looking", "tool_calls": [call("crop", '{"left": 9}')]}
    assert (result["role"], result["tool_call_id"]) == ("tool", "c1") and answer["role"] == "assistant"
    for part in (user["content"][0], result["content"][0]):
        assert part["type"] == "image" and (folder / part["image"]).is_file()
    assert row["tools"][0]["function"]["name"] == "crop"
    assert summary_of(folder) == {"played": 6, "failed": 0, "written": 6, "too_long": 0, "left": 0}

    from datasets import load_dataset

    data = {"train": str(folder / "episodes.jsonl")}
    loaded = load_dataset("json", data_files=data, split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded[2]["messages"] == row["messages"] and loaded["reward"][:] == [each["reward"] for each in rows]
    run = load_run(folder)
    assert [each["kind"] for each in run.trajectories()] == ["collect"] * 6
    assert run.image(run.trajectories()[0]["turns"][1]["images"][0]).size == (32, 32)
    write_snapshot([FollowedRun(folder)], tmp_path / "page.html", "collected")
    assert "looking" in (tmp_path / "page.html").read_text()


@pytest.mark.slow
def test_with_every_fault_each_episode_is_accounted_for_and_none_is_played_twice(collect):
    faults = ["429", "cut", "500", "hang", "", *GARBAGE, "", "cut", "429", "", "500"] * 2
    player = Player()
    with fake_api(player, faults) as (api, url):
        folder = collect(url, "--episodes", "3", "--rollout.engine-timeout", "20")  # 10 s for an answer
        assert len(rows_of(folder)) == 12 and summary_of(folder)["left"] == summary_of(folder)["failed"] == 0
        assert len({row["id"] for row in rows_of(folder)}) == 12 and api.answered == 24
        before = len(api.requests)
        collect(url, "--episodes", "3")
        assert len(api.requests) == before  # nothing was left to play


@pytest.mark.slow
def test_what_fails_for_good_is_recorded_with_its_reason_and_played_again_on_request(collect, capsys):
    with fake_api(Player(), ["400"]) as (api, url):
        folder = collect(url, "--rollout.max-failed-fraction", "1")
        assert summary_of(folder) == {"played": 3, "failed": 1, "written": 3, "too_long": 0, "left": 0}
        assert "1 not written: task ..., turn N: the API refused the request" in capsys.readouterr().out
        assert len(load_run(folder).failures) == 1
        answered = api.answered
        collect(url)
        assert api.answered == answered
        collect(url, "--retry-failed")
        assert api.answered == answered + 2 and summary_of(folder)["written"] == 4
        assert summary_of(folder)["failed"] == 0


@pytest.mark.slow
def test_an_api_that_is_down_stops_the_command(collect, capsys):
    with fake_api(Player(), ["400"] * 99) as (api, url), pytest.raises(SystemExit, match="1"):
        collect(url, "--rollout.max-concurrent", "1")
    captured = capsys.readouterr()
    assert "rollout.max_failed_fraction" in captured.err and "2 left" in captured.out and len(api.requests) == 2


@pytest.mark.slow
def test_ctrl_c_loses_nothing_and_the_same_command_continues(collect, capsys):
    player = Player()

    def interrupt_once():
        if player.answers.total() == 5:
            os.kill(os.getpid(), signal.SIGINT)

    player.after = interrupt_once
    with fake_api(player) as (api, url):
        with pytest.raises(SystemExit, match="130"):
            collect(url, "--episodes", "3", "--rollout.max-concurrent", "1")
        out = capsys.readouterr().out
        assert "the same command plays those that are left" in out
        api.requests.clear()
        folder = collect(url, "--episodes", "3", "--rollout.max-concurrent", "2")
        done = 12 - len({json.dumps(body["messages"][0]) for body in api.requests})
    assert done >= 0 and len(rows_of(folder)) == 12 and summary_of(folder)["left"] == 0
    assert 12 <= player.answers.total() <= 13  # the episode in flight at most is played again


@pytest.mark.slow
def test_a_crash_in_the_middle_of_a_line_loses_that_episode_alone(collect):
    player = Player()
    with fake_api(player) as (_, url):
        folder = collect(url, "--episodes", "2")
        log = folder / "trajectories.jsonl"
        log.write_bytes(log.read_bytes()[:-40])
        (folder / "episodes.jsonl").unlink()
        collect(url, "--episodes", "2")
    assert player.answers.total() == 9 and len(rows_of(folder)) == 8
    assert len(log.read_text().splitlines()) == 8


@pytest.mark.slow
def test_the_budget_stops_the_command_and_a_further_one_continues(collect, capsys):
    player = Player()
    with fake_api(player) as (_, url):
        folder = collect(url, "--budget", "60", "--rollout.max-concurrent", "1")  # 24 an episode
        assert summary_of(folder)["played"] == 2 and summary_of(folder)["left"] == 2
        assert "--budget 60: 60 tokens are spent" in capsys.readouterr().out
        collect(url, "--budget", "600", "--rollout.max-concurrent", "1")
    assert summary_of(folder)["written"] == 4 and player.answers.total() == 4


@pytest.mark.slow
def test_filters_choose_among_what_has_been_played_without_playing_again(collect, capsys):
    with fake_api(Player()) as (api, url):
        folder = collect(url, "--episodes", "3")
        played = len(api.requests)
        collect(url, "--episodes", "3", "--keep.min-reward", "1")
        assert [row["reward"] for row in rows_of(folder)] == [1.0] * 8
        collect(url, "--episodes", "3", "--keep.best", "1")
        assert [(row["task"], row["reward"]) for row in rows_of(folder)] == [(task, 1.0) for task in range(4)]
        assert "8 not written: --keep leaves them out" in capsys.readouterr().out
        collect(url, "--episodes", "3", "--keep.filters", "zero_variance")
        assert len(rows_of(folder)) == 12
        collect(url, "--episodes", "3", "--keep.max-tokens", "11")
        assert rows_of(folder) == [] and len(api.requests) == played


@pytest.mark.slow
def test_another_model_or_recipe_needs_another_folder(collect, capsys, tmp_path):
    with fake_api(Player()) as (_, url):
        collect(url, "--tasks", "1")
        collect(url, "--tasks", "1", "--optim.lr", "0.5", "--rollout.engine-timeout", "5")  # they change no episode
        for option in (["--model", "other"], ["--rollout.temperature", "0.5"]):
            with pytest.raises(SystemExit, match="1"):
                collect(url, *option)
            assert "name another folder with --out" in capsys.readouterr().err
    (tmp_path / "out/trajectories.jsonl").write_text('{"id": "step000001/00000/00"}\n')
    with pytest.raises(SystemExit, match="1"):
        collect(url)
    assert "holds a run" in capsys.readouterr().err


RECORD = {"id": "collect/00000/00", "group_id": "collect/00000", "task_id": "t", "ending": "env_done", "reward": 1.0}
RECORD |= {"metrics": {}, "tokens": 5, "episode": None}


@pytest.mark.parametrize(
    "wrong",
    [
        *(
            {"id": id}
            for id in ("x", "collect/" + "9" * 30 + "/00", "collect/-0001/00", "collect/00000/-1", "other/00000/00")
        ),
        {"reward": 10**400},
        {"reward": "1"},
        {"tokens": None},
        {"reason": ["disk"]},
        {"episode": "none"},
    ],
)
def test_a_line_that_no_command_writes_is_one_error_that_names_it(wrong, tmp_path):
    file = tmp_path / "trajectories.jsonl"
    file.write_text(json.dumps(RECORD) + "\n")
    assert list(read_recorded(tmp_path).episodes) == [(0, 0)]
    file.write_text(json.dumps(RECORD | wrong) + "\n")
    with pytest.raises(ValueError, match=rf"{file}: the line at byte 0 is not a record of an episode"):
        read_recorded(tmp_path)


def test_a_number_that_a_float_cannot_hold_is_refused_and_half_a_surrogate_pair_is_written(tmp_path):
    file = tmp_path / "trajectories.jsonl"
    good = json.dumps(RECORD | {"episode": {"id": "x", "messages": [{"role": "user", "content": "\ud800"}]}}) + "\n"
    file.write_text(good)
    assert write_episodes(tmp_path, Keep())["written"] == 1 and rows_of(tmp_path)[0]["messages"][0]["content"] == "?"
    file.write_text(good + good.replace("1.0", "1e999"))
    with pytest.raises(
        ValueError, match=rf"{file}: the line at byte {len(good)} is not JSON: 1e999 is too large a number"
    ):
        write_episodes(tmp_path, Keep())


@pytest.mark.slow
def test_episodes_of_another_program_are_not_replaced(collect, capsys):
    """Such as those of datasets/zoom_episodes.py, or of a folder whose trajectories.jsonl was deleted."""
    with fake_api(Player()) as (_, url):
        folder = collect(url, "--tasks", "2", "--keep.min-reward", "9")
        assert not rows_of(folder)
        (folder / "trajectories.jsonl").unlink()
        collect(url, "--tasks", "1")  # it replaces a file without rows
        (folder / "trajectories.jsonl").unlink()
        before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        with pytest.raises(SystemExit, match="1"):
            collect(url, "--tasks", "1")
    assert "trajectories.jsonl has no record of" in capsys.readouterr().err
    assert before == {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json"])
def test_logs_of_another_program_are_not_replaced(name, collect, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text('{"step": 1}\n')
    with fake_api(Player()) as (_, url), pytest.raises(SystemExit, match="1"):
        collect(url, "--tasks", "1")
    assert f"has {name}, and trajectories.jsonl has no record of" in capsys.readouterr().err
    assert (tmp_path / "out" / name).read_text() == '{"step": 1}\n'


@pytest.mark.slow
def test_our_policy_has_its_tokens_and_logprobs(collect):
    folder = collect(None, "--episodes", "2", "--tasks", "2", "--model.path", "tiny:qwen3_vl")
    rows = rows_of(folder)
    assert len(rows) == 4 and {row["model"] for row in rows} == {"tiny:qwen3_vl"}
    for row in rows:
        for response in row["responses"]:
            assert row["messages"][response["message"]]["role"] == "assistant"
            assert len(response["token_ids"]) == len(response["logprobs"]) <= 16
    collect(None, "--episodes", "2", "--tasks", "2", "--model.path", "tiny:qwen3_vl")
    assert rows_of(folder) == rows


@pytest.mark.slow
def test_a_model_that_trained_on_needs_another_folder(collect, capsys, tmp_path):
    """Under the same name it played on, so that rows and logprobs of one folder were of two policies."""
    collect(None, "--tasks", "1", "--model.path", "tiny:qwen3_vl")
    (built,) = (tmp_path / "runs/.models").glob("tiny-*")
    shutil.rmtree(tmp_path / "out")
    model = shutil.copytree(built, tmp_path / "model")
    folder = collect(None, "--tasks", "1", "--model.path", model)
    weights = load_file(model / "model.safetensors")
    save_file({name: weight * 1.01 for name, weight in weights.items()}, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(SystemExit, match="1"):
        collect(None, "--tasks", "2", "--model.path", model)
    assert "the weights of the model have changed since" in capsys.readouterr().err
    assert len(rows_of(folder)) == len((folder / "trajectories.jsonl").read_text().splitlines())
    # a folder of an earlier version, which has no hash
    settings = json.loads((folder / "config.json").read_text())
    del settings["collect"]["weights"]
    (folder / "config.json").write_text(json.dumps(settings))
    assert len({row["task"] for row in rows_of(collect(None, "--tasks", "2", "--model.path", model))}) == 2


@pytest.mark.slow
def test_a_dataset_whose_rows_are_others_needs_another_folder(recipe, collect, capsys, tmp_path):
    """Where rows were added, others are held out: the numbers of tasks moved, and some were played twice, others never."""
    rows = [json.dumps({"prompt": f"Look at {number}.", "answer": "x"}) + "\n" for number in range(12)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(rows[:6]))
    recipe.write_text(RECIPE.replace("generator=tasks, size=4, seed=None", f'path="{path}", held_out=2'))
    options = ("--model.path", "tiny:qwen3", "--rollout.max-turns", "1", "--tasks", "3")
    folder = collect(None, *options)
    for others in (rows, rows[6:], [rows[1], rows[0], *rows[2:6]]):
        path.write_text("".join(others))
        before = (folder / "trajectories.jsonl").read_bytes()
        with pytest.raises(SystemExit, match="1"):
            collect(None, *options)
        assert "the dataset data is now" in capsys.readouterr().err
        assert (folder / "trajectories.jsonl").read_bytes() == before
    path.write_text("".join(rows[:6]))
    collect(None, *options, "--tasks", "4")
    # a folder of an earlier version, which has no hash
    settings = json.loads((folder / "config.json").read_text())
    del settings["collect"]["rows"]
    (folder / "config.json").write_text(json.dumps(settings))
    assert len(rows_of(collect(None, *options, "--tasks", "4"))) == 4


@pytest.mark.slow
def test_rows_may_be_added_to_a_dataset_without_held_out_rows(recipe, collect, tmp_path):
    """No task's number moves."""
    rows = [json.dumps({"prompt": f"Look at {number}.", "answer": "x"}) + "\n" for number in range(6)]
    path = tmp_path / "rows.jsonl"
    recipe.write_text(RECIPE.replace("generator=tasks, size=4, seed=None", f'path="{path}"'))
    for count in (4, 6):
        path.write_text("".join(rows[:count]))
        folder = collect(None, "--model.path", "tiny:qwen3", "--rollout.max-turns", "1")
        assert len({row["task"] for row in rows_of(folder)}) == count


class Twice(Env):
    def step(self, response_text):
        return obs("again", images=[image("blue")]), self.turn == 1, {"reward": 0.5}


def test_messages_of_our_policys_episodes_render_to_the_sampled_ids():
    call_text = '<tool_call>\n{"name": "crop", "arguments": {"left": 1}}\n</tool_call>'
    loop = turn_loop(Twice, ["<think>a</think> b " + call_text, "the answer"])
    trajectory = asyncio.run(loop.play(a_task("Which?", [image("red")]), "collect/00000", "collect/00000/00"))
    row = episode_row(trajectory, "m")
    media = {f"images/{item.id}.png": item for turn in trajectory.turns for item in turn.media}
    assert [response["message"] for response in row["responses"]] == [1, 3]
    for response, (ids, shown) in zip(row["responses"], trajectory.prompts(), strict=True):
        rendered = renderer().prompt(row["messages"][: response["message"]])
        assert rendered.token_ids == collapse(ids, renderer().image_token_id, shown)
        assert [media[path] for path in rendered.images] == shown
        text = row["messages"][response["message"]]["content"]
        assert [*renderer().encode(text), renderer().end_of_turn_id] == response["token_ids"]


def test_an_episode_of_branches_is_no_row():
    trajectory = make_trajectory("collect/00003/01.2")
    assert collected_fields(trajectory, "m")["episode"]["id"] == "collect/00003/01"
    trajectory.turns[0].received, trajectory.turns[1].received = ReceivedRequest((), None), ReceivedRequest((), 0)
    assert collected_fields(trajectory, "m")["episode"] is not None
    trajectory.turns[1].received = ReceivedRequest((), None)
    assert collected_fields(trajectory, "m") == {"tokens": trajectory.num_tokens, "episode": None}


async def asks_and_keeps(messages, asker):
    await asker.ask([{"role": "user", "content": "Summarize."}])
    return messages


async def forgets(messages, asker):
    return messages[-1:]


def test_an_episode_whose_conversation_a_summary_replaced_is_no_row():
    """Its row had the task and the last response twice, and fine-tuning trained responses after what no policy saw."""
    rewriting = [partial(compact, turns=1), asks_and_keeps, forgets]
    for policy, has_row in [*((each, False) for each in rewriting), (partial(compact, turns=9), True)]:
        options = Rollout(max_turns=3, max_tokens=900, max_response_tokens=60, samples="merged")
        parts = (resolve_env(Twice), script(["look", "a summary", "the answer"]), renderer(), new_store(), options, 0)
        loop = AskingLoop(*parts, policy)
        trajectory = asyncio.run(loop.play(a_task("Which?", [image("red")]), "collect/00000", "collect/00000/00"))
        assert trajectory.ending == "env_done" and len(trajectory.turns) > 1
        assert (collected_fields(trajectory, "m")["episode"] is not None) == has_row


AGENT = """
import httpx
from PIL import Image
from vlmrl import Config, Data, Model, Rollout, Task, openai_messages


def tasks(index, seed):
    image = Image.new("RGB", (32, 32), (index, 0, 0))
    return Task(f"t/{index}", [{"role": "user", "content": [{"type": "image", "image": image}]}], [image])


async def twice(task, client):
    messages = openai_messages(task.prompt)
    async with httpx.AsyncClient(trust_env=False, timeout=600) as http:
        for number in range(2):
            if task.id == "t/1" and number:
                messages = [{"role": "user", "content": "another conversation"}]
            body = {"model": client.model, "messages": messages}
            headers = {"authorization": f"Bearer {client.api_key}"}
            response = await http.post(f"{client.base_url}/chat/completions", json=body, headers=headers)
            messages += [response.json()["choices"][0]["message"], {"role": "user", "content": "more"}]
    return 1.0


def config():
    return Config(
        name="twice",
        model=Model(path="tiny:qwen3_vl"),
        data=Data(generator=tasks, size=2, seed=None),
        agent=twice,
        rollout=Rollout(max_turns=2, max_tokens=256, max_response_tokens=6, samples="merged", truncated_reward=0.0),
    )
"""


@pytest.mark.slow
def test_an_agents_conversation_is_a_row_and_its_branches_are_counted(recipe, collect, capsys):
    recipe.write_text(AGENT)
    folder = collect(None)
    (row,) = rows_of(folder)
    assert [each["role"] for each in row["messages"]] == ["user", "assistant", "user", "assistant"]
    assert row["messages"][2]["content"] == "more" and [each["message"] for each in row["responses"]] == [1, 3]
    assert "1 not written: its turns are not one conversation" in capsys.readouterr().out
    assert summary_of(folder) == {"played": 2, "failed": 0, "written": 1, "too_long": 0, "left": 0}
