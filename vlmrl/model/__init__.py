"""The model: `policy.py` runs it, `families/` is what differs between model families, `loading.py` loads it."""
