"""New weights on their way from the trainer to the engine."""
