"""Trackers: what each built-in one writes, read back by its own reader, and what a slow or failing one does to the run."""

import contextlib
import json
import threading
import time
from pathlib import Path

import pytest
from PIL import Image
from testing.trajectories import IMAGE, trajectory, turn

from vlmrl.cli.main import main
from vlmrl.config.code import load_object
from vlmrl.report.run_log import RunLog, read_rows
from vlmrl.report.trackers import TRACKERS, TableRow, Tracker, Trackers, open_trackers, tracker_classes, tracker_threads
from vlmrl.run.program import run_training

CONFIG = {"name": "geo3k", "optim": {"lr": 0.5}}
SEEN = trajectory([turn(1.0, media=[IMAGE])])


class ToyTracker(Tracker):
    """Keeps what it receives."""

    def __init__(self, folder, config):
        self.folder, self.config, self.calls = folder, config, []

    def log(self, step, values):
        self.calls.append((step, dict(values)))

    def log_trajectories(self, step, kind, rows):
        self.calls.append((step, kind, [row.id for row in rows]))

    def log_image(self, name, path):
        self.calls.append((name, path.name))

    def close(self, status):
        self.calls.append(status)


def trackers_of(tracker, folder, **more):
    return Trackers({"toy": tracker}, folder, **more)


def test_a_registered_tracker_receives_each_row_and_the_status(tmp_path, monkeypatch):
    made = []
    monkeypatch.setitem(TRACKERS, "toy", type("Toy", (ToyTracker,), {"close": lambda self, status: made.append(self)}))
    with RunLog(tmp_path, trackers=open_trackers(("toy",), tmp_path, {"name": "geo3k"})) as log:
        log.log(1, {"reward/mean": 0.25, "kl": None})
        with pytest.raises(ValueError, match="'loss'"):
            log.log(2, {"loss": float("nan")})
        log.log(2, {"loss": 0.5})
    (toy,) = made
    assert toy.calls == [(1, {"reward/mean": 0.25, "kl": None}), (2, {"loss": 0.5})]
    assert (toy.folder, toy.config) == (tmp_path, {"name": "geo3k"})
    assert [row["step"] for row in log.rows()] == [1, 2]


def test_the_curve_comes_before_the_end(tmp_path):
    toy = ToyTracker(tmp_path, {})
    (tmp_path / "reward.png").write_bytes(b"png")
    log = RunLog(tmp_path, trackers=trackers_of(toy, tmp_path))
    log.log(1, {"loss": 1})
    with pytest.raises(KeyError), log:
        raise KeyError
    assert toy.calls == [(1, {"loss": 1}), ("reward", "reward.png"), "failed"]


def test_tables_are_of_evaluations_and_of_some_steps(tmp_path):
    toy = ToyTracker(tmp_path, {})
    trackers = trackers_of(toy, tmp_path, table_every=3)
    for step in range(1, 7):
        trackers.log_trajectories(step, "train", [trajectory([turn()])] * 20)
    trackers.log_trajectories(5, "eval", [trajectory([turn()])])
    trackers.log_trajectories(6, "eval", [])
    trackers.close("finished")
    assert [(step, kind, len(ids)) for step, kind, ids in toy.calls[:-1]] == [
        (1, "train", 8),
        (3, "train", 8),
        (6, "train", 8),
        (5, "eval", 1),
    ]


def test_a_table_row_has_the_responses_and_the_images_side_by_side():
    row = TableRow.of(4, "eval", trajectory([turn(0.5, media=[IMAGE]), turn(0.25, media=[IMAGE])]))
    assert row.text() == {
        "step": 4,
        "kind": "eval",
        "id": "t#0",
        "prompt": "2+2?",
        "response": "ok\n\nok",
        "reward": 0.75,
        "ending": "env_done",
    }
    assert row.sheet().size == (16, 8)
    assert row.sheet().getpixel((15, 7)) == (255, 0, 0)
    assert TableRow.of(1, "train", trajectory([])).sheet() is None


def test_a_failing_tracker_is_said_once_and_the_run_goes_on(tmp_path):
    class Failing(ToyTracker):
        remedy = "Set OFFLINE=1."

        def log(self, step, values):
            if step < 3:
                raise ConnectionError("no route")
            super().log(step, values)

    said, tracker = [], Failing(tmp_path, {})
    trackers = trackers_of(tracker, tmp_path, say=said.append)
    for step in (1, 2, 3):
        trackers.log(step, {"loss": step})
    trackers.close("finished")
    assert said == ["tracker toy failed: ConnectionError: no route; the run goes on. Set OFFLINE=1."]
    assert tracker.calls == [(3, {"loss": 3}), "finished"]


@pytest.mark.parametrize(
    ("status", "limit"), [("finished", "CLOSE_SECONDS"), ("failed", "CLOSE_SECONDS"), ("stopped", "STOPPED_SECONDS")]
)
def test_a_tracker_that_hangs_holds_nobody(tmp_path, monkeypatch, status, limit):
    monkeypatch.setattr(tracker_threads, limit, 0.0)
    monkeypatch.setattr(tracker_threads, "QUEUED", 2)
    hangs = threading.Event()

    class Hanging(ToyTracker):
        def log(self, step, values):
            hangs.wait()

    said = []
    trackers = trackers_of(Hanging(tmp_path, {}), tmp_path, say=said.append)
    for step in range(10):
        trackers.log(step, {"loss": step})
    trackers.close(status)
    hangs.set()
    slow, open_still = said
    assert "is slower than the run: 2 calls wait" in slow
    assert "is still sending; the run ends without it" in open_still


def test_a_tracker_that_exits_or_changes_a_row_harms_no_other(tmp_path):
    said, toy = [], ToyTracker(tmp_path, {})

    class Exits(ToyTracker):
        def log(self, step, values):
            values.clear()
            raise SystemExit(3)

    exits = Exits(tmp_path, {})
    with RunLog(tmp_path, trackers=Trackers({"exits": exits, "toy": toy}, tmp_path, say=said.append)) as log:
        log.log(1, {"loss": 1})
        log.log(2, {"loss": 2})
    assert toy.calls == [(1, {"loss": 1}), (2, {"loss": 2}), "finished"] and exits.calls == ["finished"]
    assert len(said) == 1 and "tracker exits failed: SystemExit: 3; the run goes on" in said[0]


def test_two_trackers_of_one_name_are_refused(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text("from vlmrl.report.trackers import Tracker\nclass Own(Tracker): pass\n")
    with pytest.raises(ValueError, match=r"report\.to must have each name once, but it has 'Own' several times"):
        tracker_classes([f"{tmp_path}/a.py:Own", f"{tmp_path}/b.py:Own"])


def test_a_tracker_is_named_by_its_file(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from vlmrl.report.trackers import Tracker\n"
        "class Lines(Tracker):\n"
        "    def __init__(self, folder, config): self.file = open(folder / config['name'], 'w')\n"
        "    def log(self, step, values): print(step, *values, file=self.file)\n"
        "    def close(self, status): self.file.close()\n"
        "class Other: pass\n"
    )
    folder = tmp_path / "runs/new"
    with RunLog(folder, trackers=open_trackers([f"{tmp_path}/mine.py:Lines"], folder, {"name": "run.txt"})) as log:
        log.log(3, {"loss": 0.5})
    assert (folder / "run.txt").read_text() == "3 loss\n"
    with pytest.raises(ValueError, match=r"report\.to Lines did not start: 'name'\.$"):
        open_trackers([f"{tmp_path}/mine.py:Lines"], folder, {})
    with pytest.raises(ValueError, match="must be a subclass of"):
        tracker_classes([f"{tmp_path}/mine.py:Other"])


def test_a_missing_package_is_an_error_that_names_the_extra(monkeypatch):
    monkeypatch.setattr(TRACKERS["wandb"], "package", "no_such_package")
    with pytest.raises(ValueError, match=r"needs no_such_package, .* pip install 'vlmrl\[wandb\]'"):
        tracker_classes(("wandb",))


def test_a_plan_refuses_an_unknown_tracker(tmp_path):
    (tmp_path / "recipe.py").write_text(RECIPE.replace('("toy",)', '("tyo",)'))
    try:
        with pytest.raises(ValueError, match="but one is 'tyo'"):
            run_training(load_object(f"{tmp_path}/recipe.py:config")(), dry_run=True)
    finally:
        TRACKERS.pop("toy", None)


def report(name, folder, steps=(1, 2), status="finished"):
    """A small run that reports all there is."""
    with RunLog(folder, {}, trackers=open_trackers((name,), folder, CONFIG)) as log:
        for step in steps:
            log.log(step, {"reward/mean": step / 4, "kl": None, "note": "warm"})
            log.trackers.log_trajectories(step, "train", [SEEN, trajectory([turn(0.0)])])
        SEEN.turns[0].media[0].image.save(folder / "reward.png")


def test_tensorboard_files_hold_numbers_config_text_and_images(tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard: pip install 'vlmrl[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    report("tensorboard", tmp_path)
    report("tensorboard", tmp_path, steps=(3,))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["reward/mean"]
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert "geo3k" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "2+2?" in events.Tensors("trajectories/train/0/text_summary")[0].tensor_proto.string_val[0].decode()
    assert sorted(events.Tags()["images"]) == ["reward", "trajectories/train/0"]
    assert (events.Images("reward")[0].width, events.Images("reward")[0].height) == (8, 8)


def wandb_records(folder):
    """The records of all offline runs in a folder, oldest first: logs in LevelDB's format of blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        data, place, whole = path.read_bytes(), 7, b""
        while len(data) - place >= 7:
            if 32768 - place % 32768 < 7:
                place += 32768 - place % 32768
                continue
            length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
            whole += data[place + 7 : place + 7 + length]
            place += 7 + length
            if kind in (1, 4):  # a whole record, or its last part
                yield Record.FromString(whole)
                whole = b""


def finished_wandb_records(folder, runs):
    """The records when all ``runs`` have ended: W&B's own process writes the last of them after `finish` has returned."""
    from google.protobuf.message import DecodeError

    for _ in range(6000):
        with contextlib.suppress(DecodeError):  # a record that is half written
            records = list(wandb_records(folder))
            if sum(record.HasField("exit") for record in records) == runs:
                return records
        time.sleep(0.1)
    raise AssertionError(f"W&B did not write the end of {runs} runs")


@pytest.mark.slow
def test_offline_wandb_runs_hold_numbers_config_table_and_curve_and_continue(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="needs wandb: pip install 'vlmrl[wandb]'")
    settings = {
        "MODE": "offline",
        "SILENT": "true",
        "ERROR_REPORTING": "false",
        "DATA_DIR": str(tmp_path / "data"),
        "PROJECT": "maths",
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    report("wandb", tmp_path)
    report("wandb", tmp_path, steps=(3,))
    records = finished_wandb_records(tmp_path, runs=2)
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    rewards = [(row["_step"], row["reward/mean"]) for row in rows if "reward/mean" in row]
    assert rewards == [(1, 0.25), (2, 0.5), (3, 0.75)]
    runs = [record.run for record in records if record.HasField("run")]
    assert {(run.run_id, run.project, run.display_name) for run in runs} == {
        ((tmp_path / "trackers/wandb.id").read_text().strip(), "maths", "geo3k")
    }
    assert {item.key: item.value_json for item in runs[0].config.update}["optim"] == '{"lr":0.5}'
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [0, 0]
    (table, *_) = tmp_path.glob("wandb/offline-run-*/files/media/table/trajectories/train*.table.json")
    content = json.loads(table.read_text())
    assert content["columns"] == ["step", "kind", "id", "prompt", "response", "reward", "ending", "images"]
    (seen, unseen) = content["data"]
    assert seen[3:7] == ["2+2?", "ok", 1.0, "env_done"]
    assert (seen[7], unseen[7]) == ("Image", None)
    files = [file for record in records if record.HasField("artifact") for file in record.artifact.manifest.contents]
    sheets = [Image.open(file.local_path) for file in files if file.path.endswith(".png")]
    assert sheets[0].size == (8, 8)
    assert sheets[0].getpixel((4, 4)) == (255, 0, 0)
    assert any(row.get("reward/_type") == "image-file" for row in rows)


@pytest.mark.slow
def test_the_mlflow_tracker_of_the_docs_records_numbers_and_continues(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="needs mlflow: pip install mlflow")
    pytest.importorskip("alembic", reason="needs mlflow's database")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "maths")
    page = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
    (tmp_path / "mlflow_tracker.py").write_text(page.rpartition("```python\n")[2].partition("```")[0])
    name, folder = f"{tmp_path}/mlflow_tracker.py:MlflowTracker", tmp_path / "runs/geo3k"
    report(name, folder)
    report(name, folder, steps=(3,))
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("maths").experiment_id])
    assert (run.info.run_name, run.info.status) == ("geo3k", "FINISHED")
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(each.step, each.value) for each in history] == [(1, 0.25), (2, 0.5), (3, 0.75)]


RECIPE = """
from pathlib import Path
from vlmrl import Config, Data, Model, Report, Rollout, Task, Train
from vlmrl.report.trackers import TRACKERS, Tracker

class Toy(Tracker):
    def __init__(self, folder, config):
        self.lines, self.file = [config["name"]], folder / "toy.txt"

    def log(self, step, values):
        self.lines.append(f"{step} {sorted(values)}")

    def log_trajectories(self, step, kind, rows):
        self.lines.append(f"{kind} {step} {len(rows)}")

    def log_image(self, name, path):
        self.lines.append(f"image {name} {path.name}")

    def close(self, status):
        self.file.write_text("\\n".join([*self.lines, status]))

TRACKERS["toy"] = Toy

def make_task(index, seed):
    return Task(str(index), [{"role": "user", "content": "?"}])

def reward(text, task):
    return len(text) / 100

def config():
    return Config(
        output_dir=str(Path(__file__).parent / "runs"),
        model=Model(path="tiny:qwen3"),
        data=Data(generator=make_task, size=4),
        reward=reward,
        rollout=Rollout(group_size=2, max_turns=1, max_tokens=64, max_response_tokens=8),
        train=Train(steps=2, groups_per_batch=1),
        report=Report(to=("toy",)),
        save_model=False,
    )
"""


def test_a_run_reports_rows_tables_curve_and_status(tmp_path, monkeypatch):
    (tmp_path / "recipe.py").write_text(RECIPE)
    monkeypatch.setattr("sys.argv", ["vlmrl", "train", str(tmp_path / "recipe.py")])
    try:
        main()
    finally:
        TRACKERS.pop("toy", None)
    rows = read_rows(tmp_path / "runs/run/metrics.jsonl")
    logged = [f"{row.pop('step')} {sorted(row.keys() - {'time'})}" for row in rows]
    lines = (tmp_path / "runs/run/toy.txt").read_text().splitlines()
    assert [line for line in lines if line in logged] == logged
    assert [line for line in lines if line not in logged] == ["run", "train 1 2", "image reward reward.png", "finished"]
    assert len(logged) == 2
