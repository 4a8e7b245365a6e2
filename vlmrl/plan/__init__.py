"""What a run needs before it starts: memory by part and phase, and whether a GPU holds it."""
