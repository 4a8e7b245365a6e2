"""Random weights for models of `random:` folders, until the trainer sends its own."""

from __future__ import annotations

import torch
from vllm.config import ModelConfig
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader


class RandomWeights(DummyModelLoader):
    """Draws parameters only.

    vLLM's own loader also overwrites the buffers that a layer computes at its start, such as the mean and the deviation of images. No
    weight update brings them back.
    """

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        computed = {name: buffer.clone() for name, buffer in model.named_buffers()}
        super().load_weights(model, model_config)
        for name, buffer in model.named_buffers():
            buffer.copy_(computed[name])
