"""Inference engines: `base.py` is the interface of every engine, `server_backend.py` that of a server program."""
