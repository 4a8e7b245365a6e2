"""Two ranks over gloo against one process: the same losses, the same weights."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from testing.fsdp_script import CASES

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "testing/fsdp_script.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]


def run(command, folder, out):
    done = subprocess.run([*command, str(SCRIPT), str(folder), str(out)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-8000:]


@pytest.fixture(scope="module")
def results(qwen3_vl, tmp_path_factory):
    """Of one process and of two ranks."""
    out = tmp_path_factory.mktemp("parallel")
    run([*TORCHRUN, "--rdzv-endpoint", "127.0.0.1:0"], qwen3_vl, out)
    run([sys.executable], qwen3_vl, out)
    return [json.loads((out / f"of{size}.json").read_text()) for size in (1, 2)]


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
def test_a_checkpoint_of_two_ranks_resumes_on_two_and_on_one(case, results):
    one, two = (result[case]["following"] for result in results)
    assert two[1] == two[0]
    assert one[1] == one[0]
    assert one[2] == pytest.approx(two[0], abs=1e-5, rel=1e-4)


def test_a_recipe_runs_under_torchrun(tmp_path):
    """Rank 0 samples from a copy of its own: the mismatch to the sharded policy shows that it gets the merged weights."""
    recipe = Path(__file__).parents[2] / "recipes/quickstart.py"
    short = ["--warm-start.steps", "2", "--train.steps", "2", "--train.groups-per-batch", "2", "--data.size", "32"]
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
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-8000:]
    assert "on 2 ranks (FSDP2)" in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "quickstart/metrics.jsonl").read_text().splitlines()]
    mismatches = [row["logprob_mismatch/max"] for row in rows if "logprob_mismatch/max" in row]
    assert len(mismatches) == 2 and max(mismatches) < 1e-4
    assert (tmp_path / "quickstart/adapters/adapter_model.safetensors").exists()
