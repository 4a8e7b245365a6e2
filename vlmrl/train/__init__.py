"""Training: samples to micro-batches in `packing.py`, the optimizer's side in `trainer.py`."""
