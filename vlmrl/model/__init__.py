"""The model: `policy.py` runs it, `families/` holds what differs between model families, `loading.py` loads it."""
