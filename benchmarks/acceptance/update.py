"""benchmarks/gpu_update.py: an update of the 2B's shape, shared and packed."""

from __future__ import annotations

from acceptance.report import Report, need, require, run_script


def run(report: Report) -> None:
    report.check("tokens per second, utilisation, memory", lambda: update(report))


def update(report: Report) -> str:
    need("tyro")
    if not report.tiny:
        report.need_gpu()
    output = run_script(["benchmarks/gpu_update.py", *["--tiny"] * report.tiny])
    rows = [line for line in output.splitlines() if line.startswith("| ") and "---" not in line]
    require(len(rows) > 2, f"it printed no table: {output[-300:]}")
    names = cells(rows[0])[1:]
    return "; ".join(
        f"{title}: " + ", ".join(f"{value} {name}" for name, value in zip(names, values, strict=True))
        for title, *values in map(cells, rows[1:])
    )


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]
