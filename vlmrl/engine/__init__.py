"""Inference engines: `base.py` says what the turn loop needs of any engine, `backend.py` what a server program has to provide."""
