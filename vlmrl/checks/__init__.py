"""Checks before and during a run: image swap, server parity, logprob mismatch."""
