"""A tracker that keeps the steps of the rows that it gets."""

import json

from vlmrl.report.trackers.base import Tracker


class Steps(Tracker):
    def __init__(self, folder, config) -> None:
        self.path, self.steps = folder / "steps.json", []

    def log(self, step, values) -> None:
        self.steps.append(step)

    def close(self, status) -> None:
        self.path.write_text(json.dumps(self.steps))
