"""Training: `packing.py` makes micro-batches of samples, `trainer.py` takes optimizer steps on them."""
