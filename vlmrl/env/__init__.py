"""Environments: the contract in `base.py`, how one is run in `session.py`, and adapters to other kinds of environment."""
