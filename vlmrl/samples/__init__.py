"""Trajectories to trainable rows: `emit.py` makes them, `audit.py` checks them."""

from vlmrl.samples.audit import AuditError, Report, audit
from vlmrl.samples.emit import EMIT, concat, emit, merge_prefixes, step_wise

__all__ = ["EMIT", "AuditError", "Report", "audit", "concat", "emit", "merge_prefixes", "step_wise"]
