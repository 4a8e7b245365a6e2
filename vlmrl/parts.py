"""The parts of a training loop of your own: docs/library.md and recipes/minimal_grpo.py are built from them."""

from vlmrl.checks.logprob_mismatch import summarize, turn_mismatches
from vlmrl.data import load_tasks
from vlmrl.engine.base import paused
from vlmrl.engine.hf.engine import HFEngine
from vlmrl.engine.scripted import ScriptedEngine
from vlmrl.env.base import resolve_env
from vlmrl.model.loading import load_model
from vlmrl.model.policy import Policy
from vlmrl.rollout.runner import Runner
from vlmrl.rollout.turn_loop import TurnLoop
from vlmrl.samples import audit, concat, emit, merge_prefixes, step_wise
from vlmrl.train.packing import MicroBatchPlan, pack, per_token
from vlmrl.train.trainer import Trainer, TrainerSpec

__all__ = [
    "HFEngine",
    "MicroBatchPlan",
    "Policy",
    "Runner",
    "ScriptedEngine",
    "Trainer",
    "TrainerSpec",
    "TurnLoop",
    "audit",
    "concat",
    "emit",
    "load_model",
    "load_tasks",
    "merge_prefixes",
    "pack",
    "paused",
    "per_token",
    "resolve_env",
    "step_wise",
    "summarize",
    "turn_mismatches",
]
