"""Environments that another process plays: `vlmrl env serve ENV`, and the env that asks it."""
