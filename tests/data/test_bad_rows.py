"""Rows that cannot be played: each is named and counted, and the rest is played. Rows are read outside the event loop."""

from __future__ import annotations

import asyncio
import http.server
import io
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from testing.clocks import pass_time
from testing.episodes import a_task, image, new_store, renderer, turn_loop
from testing.fakes import make_trajectory
from testing.templates import real_renderer

from vlmrl import Env, obs
from vlmrl.config import Algo, Data, Train
from vlmrl.data import PromptLength, TaskSource, TaskStream, load_tasks
from vlmrl.multimodal.store import MediaStore
from vlmrl.rollout.batches import fill
from vlmrl.rollout.buffer import AsynchronousBuffer
from vlmrl.rollout.runner import RolloutError, Runner
from vlmrl.types import Task
from vlmrl.utils import work_pool

LIMIT = 600.0  # seconds, for a machine that is ten times too slow


class Once(Env):
    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        return obs(), True, {"reward": 1.0}


def rows(folder: Path, *rows: dict[str, Any], **options: Any) -> TaskSource:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_tasks(Data(str(folder / "rows.jsonl"), seed=None, **options))


def four_rows(folder: Path, **options: Any) -> TaskSource:
    """Four rows of one image each, of which the third does not decode."""
    for number in range(4):
        Image.new("RGB", (64, 64), (number * 50, 0, 0)).save(folder / f"{number}.png")
    (folder / "2.png").write_bytes(b"\x89PNG broken")
    return rows(folder, *({"prompt": f"what {n}", "images": [f"{n}.png"], "answer": "x"} for n in range(4)), **options)


def runner(store: MediaStore | None = None, **rollout: Any) -> Runner:
    loop = turn_loop(Once, lambda request, turn: "x", group_size=2, **{"max_failed_fraction": 1.0} | rollout)
    loop.store = store or loop.store
    return Runner(loop)


def stream(tasks: TaskSource, store: MediaStore | None = None, **options: Any) -> TaskStream:
    return TaskStream(tasks, PromptLength(renderer(), store or new_store(), lambda task: []), **options)


@pytest.mark.parametrize("limit", [None, 500])
def test_an_image_that_does_not_decode_drops_its_row_and_not_the_run(tmp_path: Path, limit: int | None):
    tasks = stream(four_rows(tmp_path, max_prompt_tokens=limit))
    rollouts = asyncio.run(runner().play(tasks, 3, "x"))
    assert [group[0].task.id.rpartition("/")[2] for group in rollouts.groups] == ["0", "1", "3"]
    assert (rollouts.dropped_groups, len(rollouts.failed), len(rollouts.bad_rows)) == (1, 2, 1)
    assert "/2" in rollouts.bad_rows[0] and "2.png" in rollouts.bad_rows[0]


GOOD = {"prompt": [{"role": "user", "content": "fine"}], "images": [], "answer": "x", "uid": "good"}
BAD: dict[str, Any] = {
    "an image that does not exist": {"images": ["gone.png"]},
    "more images than marks": {"prompt": [{"role": "system", "content": "no place"}], "images": ["a.png"]},
    "more marks than images": {"prompt": [{"role": "user", "content": "<image><image>"}], "images": ["a.png"]},
    "an answer that is empty": {"answer": None},
    "a prompt that is empty": {"prompt": []},
    "a prompt that is missing": {"prompt": None},
    "a message without a role": {"prompt": [{"role": None, "content": "x"}]},
}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("limit", [None, 500])
@pytest.mark.parametrize("bad", BAD)
def test_a_row_that_makes_no_task_is_named_and_the_rest_is_played(
    tmp_path: Path, bad: str, limit: int | None, asynchronous: bool
):
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    made = rows(tmp_path, GOOD, GOOD | BAD[bad], GOOD, max_prompt_tokens=limit, columns={"answer": "answer"})

    async def go() -> Any:
        tasks, player = stream(made), runner()
        if not asynchronous:
            return (await fill(player, tasks, 2, "x", [], "off")).rollouts
        buffer = AsynchronousBuffer(player, tasks, [], Algo(), Train(groups_per_batch=2, max_staleness=1))
        try:
            return (await buffer.take(1)).rollouts
        finally:
            await buffer.close()

    rollouts = asyncio.run(asyncio.wait_for(go(), LIMIT))
    assert {group[0].task.id.rpartition("/")[2] for group in rollouts.groups} == {"0", "2"}
    if not asynchronous:  # which starts more groups than it needs
        assert (rollouts.dropped_groups, len(rollouts.failed)) == (1, 2)
    assert {*rollouts.bad_rows} == {t.error for t in rollouts.failed}
    assert len({*rollouts.bad_rows}) == 1
    assert rollouts.bad_rows[0].startswith(f"row 1 of '{tmp_path}/rows.jsonl' (train): ")


def test_a_prompt_that_the_template_refuses_is_a_bad_row():
    player = runner()
    prompts = [[{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}], [{"role": "user", "content": "x"}]]
    tasks = iter([Task(str(number), prompt) for number, prompt in enumerate(prompts)])
    rollouts = asyncio.run(player.play(tasks, 1, "x"))
    assert [group[0].task.id for group in rollouts.groups] == ["1"]
    assert [reason.partition(":")[0] for reason in rollouts.bad_rows] == ["task 0, turn 0"]


def test_too_many_bad_rows_stop_the_run_and_are_named(tmp_path: Path):
    gone = rows(tmp_path, *({"prompt": f"what {number}", "images": [f"{number}.png"]} for number in range(100)))
    with pytest.raises(RolloutError) as raised:
        asyncio.run(runner(max_failed_fraction=0.25).play(stream(gone), 4, "x"))
    assert str(raised.value).startswith("3 trajectories failed where 8 were requested")  # 3 of 2 rows of 2
    such_as = f"row 0 of '{tmp_path}/rows.jsonl' (train): no image '0.png'"
    assert f"\n  3 failures of one kind, such as: {such_as}" in str(raised.value)


class Broken(Exception): ...


def fail(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda: fail(Broken("no luck")), "Broken: no luck"),
        (lambda: fail(StopIteration()), "StopIteration"),
        (lambda: fail(KeyError("prompt")), "KeyError: 'prompt'"),
        (lambda: {"prompt": "x", "images": [3]}, "an image must be bytes, a path, a URL or a PIL image, not 3"),
        (
            lambda: {"prompt": [{"role": "user", "content": [7]}]},
            "AttributeError: 'int' object has no attribute 'items'",
        ),
        (
            lambda: {"prompt": [{"role": "user", "content": [{"type": "image", "base64": "abc"}]}]},
            "Incorrect padding",
        ),
        (lambda: None, "it must return a Task or a dict with a prompt, but it returned None"),
    ],
)
def test_an_error_of_a_generator_is_a_bad_row(answer: Callable[[], Any], reason: str):
    def make(index: int, seed: int) -> Any:
        return answer() if index == 1 else {"prompt": "x"}

    tasks = stream(load_tasks(Data(generator=make, size=3, seed=None, max_prompt_tokens=100)))
    good, bad, also = asyncio.run(tasks.take(3))
    assert (good.error, also.error) == (None, None)
    assert bad.error is not None and bad.error.startswith("task 1 of generator 'make': ") and reason in bad.error


# Outside the event loop


def test_a_generator_that_blocks_leaves_the_event_loop_free_and_never_runs_twice_at_once():
    release, running = threading.Event(), []

    def make(index: int, seed: int) -> dict[str, Any]:
        running.append(threading.current_thread())
        assert len(running) == 1
        assert release.wait(LIMIT)
        running.pop()
        return {"prompt": "x"}

    async def go() -> list[Any]:
        tasks = TaskStream(load_tasks(Data(generator=make, size=8)), timeout=LIMIT)
        taking = asyncio.gather(tasks.take(3), tasks.take(2))
        while not running:
            await asyncio.sleep(0.001)  # the loop runs while the generator blocks
        assert running[0] is not threading.current_thread()
        release.set()
        return await taking

    first, second = asyncio.run(go())
    assert sorted(draw.number for draw in [*first, *second]) == [0, 1, 2, 3, 4]


def test_a_generator_that_hangs_is_a_bad_row_and_the_next_rows_are_read(monkeypatch):
    hung, passed, loops = threading.Event(), [0.0], []
    monkeypatch.setattr(work_pool, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0]))

    def make(index: int, seed: int) -> dict[str, Any]:
        if index == 0:
            passed[0] += 2 * LIMIT
            pass_time(loops[0], 2 * LIMIT)
            hung.wait(LIMIT)
        return {"prompt": "x"}

    tasks = TaskStream(load_tasks(Data(generator=make, size=3, seed=None)), timeout=LIMIT)

    async def go() -> list[Any]:
        loops.append(asyncio.get_running_loop())
        return await tasks.take(3)

    draws = asyncio.run(go())
    hung.set()
    assert [draw.error for draw in draws] == ["not read within 600 s", None, None]
    tasks.close()


class Images(http.server.BaseHTTPRequestHandler):
    """Answers a path with a PNG that belongs to it, once ``release`` is set, and counts the requests."""

    hits: Counter[str]
    release: threading.Event

    def do_GET(self) -> None:
        self.hits[self.path] += 1
        assert self.release.wait(LIMIT)
        buffer = io.BytesIO()
        Image.new("RGB", (64, 32), (int(self.path[1:]) * 20, 0, 0)).save(buffer, "PNG")
        self.send_response(200)
        self.send_header("Content-Length", str(len(buffer.getvalue())))
        self.end_headers()
        self.wfile.write(buffer.getvalue())

    def log_message(self, *args: Any) -> None: ...


@contextmanager
def web(kind: type[Images]) -> Iterator[str]:
    kind.hits, kind.release = Counter(), threading.Event()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        kind.release.set()
        server.shutdown()
        server.server_close()


@pytest.mark.slow
def test_an_image_with_a_url_is_downloaded_once_and_outside_the_event_loop(tmp_path: Path):
    with web(Images) as url:
        made = rows(
            tmp_path, *({"prompt": f"what {n}", "images": [f"{url}/{n}"]} for n in range(3)), max_prompt_tokens=500
        )
        store = new_store()

        async def go() -> Any:
            playing = asyncio.create_task(runner(store).play(stream(made, store), 3, "x"))
            while sum(Images.hits.values()) < 3:  # all three at once, and the loop runs while they are served
                await asyncio.sleep(0.001)
            Images.release.set()
            return await playing

        rollouts = asyncio.run(asyncio.wait_for(go(), LIMIT))
    assert [[t.reward for t in group] for group in rollouts.groups] == [[1.0, 1.0]] * 3
    assert Images.hits == {"/0": 1, "/1": 1, "/2": 1}
    assert store.processed == 3


def test_the_length_of_a_prompt_with_a_downloaded_image_counts_every_token():
    class Downloads(PromptLength):
        async def download(self, urls: Any) -> Any:
            return [await store.get(image(size=(320, 64))) for url in urls]

    store = new_store()
    length = Downloads(renderer(), store, lambda task: [])
    prompt = [{"role": "user", "content": [{"type": "image", "image": "http://there/a.png"}]}]
    local, urls = length.local(Task("t", prompt))
    assert urls == ["http://there/a.png"]
    whole = PromptLength(renderer(), store, lambda task: [])(a_task("", [image(size=(320, 64))]))
    assert local + 19 == whole  # 20 visual tokens, one of which is the placeholder

    def one(limit: int) -> Any:
        data = Data(generator=lambda index, seed: {"prompt": prompt}, size=1, max_prompt_tokens=limit)
        return asyncio.run(TaskStream(load_tasks(data), length, once=True).take(1))

    assert [draw.media[0].num_tokens for draw in one(whole)] == [20]
    assert one(whole - 1) == []


def test_a_slow_draw_that_fits_is_not_mistaken_for_an_epoch_that_does_not():
    """Three of four prompts are too long and are measured at once; the one that fits takes longer."""
    measured, release = [], asyncio.Event()

    class Slow(PromptLength):
        def local(self, task: Task, limit: int | None = None) -> tuple[int, list[Any]]:
            measured.append(task.id)
            fits = task.prompt[0]["content"] == "0"
            return 1 if fits else 9, ["http://there"] if fits else []

        async def download(self, urls: Any) -> list[Any]:
            if urls:
                await release.wait()
            return []

    async def go() -> Any:
        data = Data(generator=lambda index, seed: {"prompt": str(index)}, size=4, seed=None, max_prompt_tokens=1)
        tasks = TaskStream(load_tasks(data), Slow(renderer(), new_store(), lambda task: []))
        numbers = [tasks.claim() for _ in range(12)]
        loading = [asyncio.create_task(tasks.load(number)) for number in numbers]
        while len(measured) < 12:
            await asyncio.sleep(0.001)
        release.set()
        return [draw is not None for draw in await asyncio.gather(*loading)]

    assert asyncio.run(asyncio.wait_for(go(), LIMIT)) == [True, False, False, False] * 3


def test_failed_rows_of_a_group_are_in_the_metrics_of_the_step():
    from vlmrl.rollout.runner import Rollouts

    rollouts = Rollouts()
    failed = {"ending": "error", "turns": []}
    rollouts.drop([make_trajectory("a", **failed, error="row 1: bad", non_retryable=True), make_trajectory("b")])
    rollouts.drop([make_trajectory("c", **failed, error="no", rejected=True, non_retryable=True)])
    rollouts.drop([make_trajectory("d", **failed, error="the browser crashed")])
    assert (rollouts.dropped_groups, rollouts.bad_rows, rollouts.rejected_groups) == (3, ["row 1: bad"], 1)


@pytest.mark.parametrize("message", [{"text": "what?"}, {"value": "what?"}, {"content": None}])
def test_a_message_without_content_is_a_bad_row(tmp_path, message):
    """Its text may have another name: the model would read nothing, and be trained on that."""
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    calls = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": None}]
    source = rows(
        tmp_path, {"prompt": [{"role": "user"} | message]}, {"prompt": [{"role": "user", "content": "a"}, *calls]}
    )
    with pytest.raises(ValueError, match=r"row 0 .* a message of the role 'user' has no 'content', only 'role'"):
        source[0]
    assert len(source[1].prompt) == 3


@pytest.mark.parametrize("role", ["human", "developer", "function", "User"])
def test_a_message_of_a_role_that_the_template_leaves_out_is_a_bad_row(tmp_path, shared, role):
    """Qwen's templates write nothing for ``human``: the question was lost, and the policy trained without it."""
    source = rows(tmp_path, {"prompt": [{"role": "user", "content": "a"}, {"role": role, "content": "what?"}]})
    loop = turn_loop(Once, lambda request, turn: "x")
    loop.renderer = real_renderer(shared, "qwen3-vl", "qwen3_vl")
    played = asyncio.run(loop.play(source[0], "g", "g/0"))
    assert played.non_retryable and f"leaves out messages of the role '{role}'" in played.error
    assert loop.renderer.prompt([{"role": "user", "content": "what?"}]).token_ids


@pytest.mark.parametrize(
    ("prompt", "columns"),
    [
        ("<video>what?", {"videos": ["a.mp4"]}),
        ([{"role": "user", "content": "<image><video>what?"}], {"images": ["0.png"], "videos": [{"video": "a.mp4"}]}),
        ("<image>what?", {"video": "a.mp4"}),
        ("<audio>what?", {"audio_path": "a.wav"}),
    ],
)
def test_a_mark_of_a_video_or_an_audio_of_its_row_is_a_bad_row(tmp_path, prompt, columns):
    """In a file of images and videos, the model read the mark as text, and was trained without the video."""
    Image.new("RGB", (64, 64)).save(tmp_path / "0.png")
    none = dict.fromkeys(columns)
    source = rows(
        tmp_path, {"prompt": prompt} | columns, {"prompt": "what is <video>?"} | none, {"prompt": "x"} | columns
    )
    with pytest.raises(ValueError, match=r"row 0 .* the mark <(video|image|audio)> of its column '(video|audio)"):
        source[0]
    assert source[1].prompt and source[2].prompt


def test_counts_of_videos_and_images_that_a_message_shows_make_no_bad_row(tmp_path):
    Image.new("RGB", (64, 64)).save(tmp_path / "0.png")
    shown = {"role": "user", "content": [{"type": "image", "image": "0.png"}], "image_path": "original.png"}
    source = rows(tmp_path, {"prompt": "what is <video>?", "video_count": 0}, {"prompt": [shown]})
    assert source[0].prompt and len(source[1].images) == 1


@pytest.mark.parametrize(
    ("role", "name"), [("user", "images"), ("user", "image"), ("tool", "images"), ("user", "videos")]
)
def test_images_beside_the_content_of_a_message_are_a_bad_row(tmp_path, role, name):
    """As in requests of Ollama: the model read the text alone, and was trained without the images."""
    Image.new("RGB", (64, 64)).save(tmp_path / "0.png")
    message = {"role": role, "content": "what?"}
    question = {"role": "user", "content": "a"}
    source = rows(
        tmp_path, {"prompt": [question, message | {name: ["0.png"]}]}, {"prompt": [question, message | {name: []}]}
    )
    with pytest.raises(ValueError, match=rf"row 0 .* a message of the role '{role}' has '{name}' beside its content"):
        source[0]
    assert len(source[1].prompt) == 2
