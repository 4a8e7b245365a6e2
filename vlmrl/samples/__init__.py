"""Trajectories to trainable rows: `emit.py` makes them, `audit.py` checks them, `columns.py` converts them to columns and back."""

from vlmrl.samples.audit import AuditReport, audit
from vlmrl.samples.audit_origin import AuditError
from vlmrl.samples.columns import from_columns, to_columns
from vlmrl.samples.emit import EMIT, concat, emit, merge_prefixes, step_wise

__all__ = [
    "EMIT",
    "AuditError",
    "AuditReport",
    "audit",
    "concat",
    "emit",
    "from_columns",
    "merge_prefixes",
    "step_wise",
    "to_columns",
]
