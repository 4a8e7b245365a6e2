"""What is checked before and while a run goes: image swap, server parity, logprob mismatch."""
