"""Two ranks over gloo against one process: the same losses, the same weights."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from testing.fsdp_script import CASES, checkpoint_of
from torch.distributed.checkpoint import FileSystemReader, load

pytestmark = pytest.mark.slow

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]


@pytest.fixture(scope="module")
def folder(preloaded, qwen3_vl, tmp_path_factory):
    """The results and the checkpoints of one process and of two ranks."""
    out = tmp_path_factory.mktemp("parallel")
    for size in (2, 1):
        preloaded.run_ranks(size, "testing.fsdp_script", qwen3_vl, out)
    return out


@pytest.fixture(scope="module")
def results(folder):
    """Of one process and of two ranks."""
    return [json.loads((folder / f"of{size}.json").read_text()) for size in (1, 2)]


def checkpointed(checkpoint):
    """All tensors of a checkpoint by name, unsharded."""
    saved = FileSystemReader(checkpoint / "trainer").read_metadata().state_dict_metadata
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in saved.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "torch.distributed is uninitialized"
        load(tensors, checkpoint_id=checkpoint / "trainer", no_dist=True)
    return tensors


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_one(case, results):
    """Traps 7 and 20: a rank without images neither hangs nor changes the numbers; LoRA and KL included."""
    one, two = (result[case] for result in results)
    assert len({step["loss"] for step in one["steps"]}) == 5  # or equal losses would say nothing
    for mine, theirs in zip(one["steps"], two["steps"], strict=True):
        assert theirs == pytest.approx(mine, abs=1e-5, rel=1e-5)
    assert two["weights"] == pytest.approx(one["weights"], rel=1e-4)
    assert two["kl"] == pytest.approx(one["kl"], abs=1e-4)
    for mine, theirs in zip(one["logprobs"], two["logprobs"], strict=True):
        assert theirs == pytest.approx(mine, abs=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_have_the_weights_and_the_optimizer_state_of_one(case, folder):
    """A part without a gradient, as the vision tower in a step without images, has no optimizer step: Adam leaves it alone."""
    one, two = (checkpointed(checkpoint_of(folder, case, size)) for size in (1, 2))
    assert two.keys() == one.keys()
    for name, mine in one.items():
        if name.partition("/")[0] in ("step", "steps_done"):
            assert torch.equal(two[name], mine), (name, two[name], mine)
        else:  # Adam divides by the gradient's size, so where that is rounding, single numbers may differ
            assert (two[name] - mine).norm() <= 2e-3 * mine.norm() + 1e-9, name


@pytest.mark.parametrize(
    ("case", "steps"),
    [("images in some steps", 3), ("adapters of all parts, images in some steps", 2), ("images on one rank only", 5)],
)
def test_the_vision_tower_takes_the_steps_that_show_images(case, steps, folder):
    for size in (1, 2):
        tensors = checkpointed(checkpoint_of(folder, case, size))
        taken = {name: int(value) for name, value in tensors.items() if name.startswith("step/")}
        assert {count for name, count in taken.items() if "visual" in name} == {steps}
        assert {count for name, count in taken.items() if "visual" not in name} == {5}


def test_a_metric_that_one_rank_has_stays_apart_from_those_of_others(results):
    """Without an agreement on names, the sums of other metrics would be added up, or a collective would fail."""
    assert results[1]["metrics"] == {"first": 0.5, "both": 5.0, "second": 6.0, "first_max": 3.0}


def test_two_ranks_compute_in_bfloat16_as_one_process_does(results):
    one, two = (result["bfloat16"] for result in results)
    for mine, theirs in zip(one["scores"], two["scores"], strict=True):
        assert theirs == pytest.approx(mine, abs=1e-4)


def test_weights_keep_their_dtype_and_their_numbers_after_scoring(results, folder):
    one, two = (result["bfloat16"] for result in results)
    assert (one["dtypes"], two["dtypes"]) == (["torch.bfloat16"], ["torch.float32"])
    assert one["changed"] == two["changed"] == []
    assert len(two["sent"]) == len(set(two["sent"])) > 50  # to a server with a rank beside each trainer rank
    assert two["gathered"] == ["torch.bfloat16"]  # half of the bytes
    saved = checkpointed(checkpoint_of(folder, "bfloat16", 2))
    assert any(name.startswith("reference/") for name in saved)
    assert {weight.dtype for weight in saved.values() if weight.is_floating_point()} == {torch.float32}


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_of_two_ranks_resumes_on_two_and_on_one(case, results):
    one, two = (result[case]["following"] for result in results)
    assert two[1] == two[0]
    assert one[1] == one[0]
    assert one[2] == pytest.approx(two[0], abs=1e-5, rel=1e-4)


def test_a_recipe_runs_under_torchrun(tmp_path):
    """Rank 0 samples from a copy of its own: the mismatch to the sharded policy shows that it gets the merged weights."""
    recipe = Path(__file__).parents[2] / "recipes/quickstart.py"
    short = ["--warm-start.steps", "2", "--warm-start.trajectories-per-step", "8", "--rollout.group-size", "4"]
    short += ["--train.steps", "2", "--train.groups-per-batch", "2", "--data.size", "32", "--eval.no-blank-images"]
    options = [
        *short,
        "--model.lora.rank",
        "4",
        "--optim.lr",
        "1e-2",
        "--eval.data.size",
        "4",
        "--output-dir",
        str(tmp_path),
    ]
    command = [*TORCHRUN, "--rdzv-endpoint", "127.0.0.1:0", str(recipe), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2400)
    assert done.returncode == 0, done.stderr[-8000:]
    assert "on 2 ranks (FSDP2)" in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "quickstart/metrics.jsonl").read_text().splitlines()]
    mismatches = [row["logprob_mismatch/max"] for row in rows if "logprob_mismatch/max" in row]
    assert len(mismatches) == 2 and max(mismatches) < 1e-4
    assert (tmp_path / "quickstart/adapters/adapter_model.safetensors").exists()
