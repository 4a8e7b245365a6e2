"""GLM-4.1V on a real vLLM server."""

from __future__ import annotations

from testing.server_cases import test_glm_has_the_trainers_logprobs_before_and_after_updates  # noqa: F401
