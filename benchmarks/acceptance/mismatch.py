"""In bfloat16, the logprobs of the embedded engine and of trees against those of single rows, which the trainer also computes."""

from __future__ import annotations

from acceptance.models import random_model, rollout_logprobs, sampled
from acceptance.report import Report, mismatch, within

from vlmrl.config import Algo, Model, Optim
from vlmrl.model.loading import LoadedModel, load_model
from vlmrl.train.trainer import Trainer, TrainerSpec

# Nats, of a random 2B, which has 0.02 on a CPU; the startup parity check of servers allows 0.1.
MEAN, LARGEST = 5e-2, 0.5


def run(report: Report) -> None:
    report.check("tiny:qwen3_vl", lambda: compare(tiny(report)))
    if not report.tiny:
        report.check("random 2B", lambda: compare(random_model(report), groups=4, members=8, response=128, side=512))


def tiny(report: Report) -> LoadedModel:
    model = Model(path="tiny:qwen3_vl", device=str(report.device), dtype="bfloat16")
    return load_model(model, report.scratch, seed=0)


def compare(loaded: LoadedModel, **sizes: int) -> str:
    rows = sampled(loaded, **sizes)
    trainer = Trainer(loaded.policy, TrainerSpec(Algo(), Optim(), total_steps=1, tokens_per_micro_batch=16384))
    tree = trainer.score(rows)
    single = [trainer.score([row])[0] for row in rows]
    pairs = {"rollout": rollout_logprobs(rows), "single rows": single}
    found = []
    for name, other in pairs.items():
        mean, largest = mismatch(tree, other)
        found.append(f"trees - {name}: " + within(mean=(mean, MEAN), max=(largest, LARGEST)))
    return f"{sum(len(row.response_ids) for row in rows)} tokens; {'; '.join(found)}"
