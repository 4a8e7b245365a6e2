"""`vlmrl env serve` and `vlmrl retriever serve`: envs and retrievers as HTTP servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vlmrl.env.remote import env_server
from vlmrl.retrieval import retrieval_server


@dataclass(frozen=True)
class ServeEnvCommand(env_server.EnvServerArguments):
    """Serve an env over HTTP, for runs in other processes."""

    def run(self, options: Sequence[str]) -> None:
        env_server.serve_env(self)


@dataclass(frozen=True)
class ServeRetrieverCommand(retrieval_server.RetrieverServerArguments):
    """Serve a corpus of passages over HTTP, for search envs."""

    def run(self, options: Sequence[str]) -> None:
        retrieval_server.serve_retriever(self)
