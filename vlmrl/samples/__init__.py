"""Trajectories to trainable rows: `emit.py` makes them, `audit.py` checks them."""

from vlmrl.samples.audit import AuditError, audit
from vlmrl.samples.emit import concat

__all__ = ["AuditError", "audit", "concat"]
