"""Environments in another process: the server of `vlmrl env serve ENV`, and RemoteEnv, its client."""
