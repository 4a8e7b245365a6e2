"""recipes/quickstart.py on the device: the held-out reward must climb."""

from __future__ import annotations

import json

from acceptance.report import Report, need_dependencies, require, run_script

STEPS, CLIMB = 100, 0.1
TINY = "--train.steps 2 --train.groups-per-batch 2 --warm-start.steps 4 --eval.data.size 16 --data.size 64"


def run(report: Report) -> None:
    report.check(f"{2 if report.tiny else STEPS} steps after the warm start", lambda: quickstart(report))


def quickstart(report: Report) -> str:
    need_dependencies()
    options = TINY if report.tiny else f"--train.steps {STEPS} --eval.every 0"
    folder = report.scratch / "quickstart"
    run_script(["recipes/quickstart.py", *options.split(), "--no-save-model", "--output-dir", str(folder)])
    run_folder = folder / "quickstart"
    summary = json.loads((run_folder / "summary.json").read_text())
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "logprob_mismatch/max" in row]
    before, after, blank = (summary[f"reward_{name}"] for name in ("before", "after", "blanked"))
    seconds = sum(row["time/rollout"] + row["time/train"] for row in steps)
    text = (
        f"held-out reward {before:.3f} before, {after:.3f} after, {blank:.3f} with blank images; {seconds / len(steps):.2f} s a "
        f"step; logprob mismatch at most {max(row['logprob_mismatch/max'] for row in steps):.2e}"
    )
    require(report.tiny or after >= before + CLIMB, f"the reward did not climb by {CLIMB}: {text}")
    return text
