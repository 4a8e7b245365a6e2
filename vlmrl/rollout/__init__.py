"""Playing tasks: one trajectory in `turn_loop.py`, groups of them in `runner.py`."""
