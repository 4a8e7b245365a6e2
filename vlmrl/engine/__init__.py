"""Inference engines: `base.py` says what the turn loop needs of any engine, `server_backend.py` what a server program provides."""
