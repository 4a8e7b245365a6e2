"""Norms that a GPU computes by one kernel: the same formula as transformers' own, for every family."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from vlmrl.config import Model
from vlmrl.families import FAMILIES
from vlmrl.model.fused_norms import by_kernel, fusible_norms
from vlmrl.model.loading import load_model

OTHER_FORMULA = {"qwen3_5": "Qwen3_5RMSNorm"}  # its weight is added to 1


@pytest.mark.parametrize("name", FAMILIES)
def test_the_kernel_computes_what_the_module_computes(name, tmp_path):
    model = load_model(Model(path=f"tiny:{name}", device="cpu", dtype="float32"), tmp_path, seed=0).policy.model
    norms = fusible_norms(model)
    for norm in norms:
        torch.nn.init.normal_(norm.weight)
        hidden = torch.randn(3, 5, len(norm.weight))
        torch.testing.assert_close(by_kernel(norm, norm.weight, hidden), norm(hidden), rtol=2e-6, atol=2e-6)
    others = {type(each).__name__ for each in model.modules() if type(each).__name__.endswith("RMSNorm")} - {
        type(norm).__name__ for norm in norms
    }
    assert others == {OTHER_FORMULA[name]} if name in OTHER_FORMULA else norms and not others, others


class ShiftedRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) + hidden_states


def test_another_formula_is_left_alone():
    without = LlamaRMSNorm(8)
    without.weight = None
    assert not fusible_norms(without)
    assert fusible_norms(LlamaRMSNorm(8)) and not fusible_norms(ShiftedRMSNorm(8))
    with torch.device("meta"):
        assert fusible_norms(LlamaRMSNorm(8)) and not fusible_norms(ShiftedRMSNorm(8))
