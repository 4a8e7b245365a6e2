"""The memory of a run, planned before it starts: by part and phase, and whether it fits a GPU."""
