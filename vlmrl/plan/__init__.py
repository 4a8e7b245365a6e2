"""What a run needs before it starts: memory by part and moment, whether a GPU holds it, and an estimate of a step's time."""
