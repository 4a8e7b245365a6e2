"""Inference engines: the protocol in `base.py`, one file for each way to sample."""
