"""Inference engines: `base.py` is the interface of every engine, `server_backend.py` what a server program has to provide."""
