"""Peak memory of two steps of the trainer on the 2B's shape, full and LoRA, and what `vlmrl plan` computes for them."""

from __future__ import annotations

import torch
from acceptance.models import lora, random_model
from acceptance.report import NotTried, Report, gib, need

from vlmrl.config import Algo, Lora, Optim
from vlmrl.train.trainer import Trainer, TrainerSpec


def run(report: Report) -> None:
    report.check("full training, 2B", lambda: peak(report, Lora()))
    report.check("LoRA, 2B", lambda: peak(report, lora()))


def peak(report: Report, adapters: Lora) -> str:
    """Two steps: the optimizer state arrives in the first."""
    need("tyro")
    if not report.tiny:
        report.need_gpu()
    import gpu_update

    settings = gpu_update.Settings(**({"tiny": True, **gpu_update.SMALL} if report.tiny else {}))
    loaded = random_model(report, lora=adapters)
    samples = gpu_update.samples_of(settings, loaded.policy.config, loaded.new_store())
    loaded.policy.enable_gradient_checkpointing()
    spec = TrainerSpec(Algo(), Optim(lr=1e-6), total_steps=2, tokens_per_micro_batch=settings.budget)
    trainer = Trainer(loaded.policy, spec)
    peaks = []
    for _ in range(2):
        if report.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        trainer.step(samples)
        peaks.append(torch.cuda.max_memory_allocated() if report.device.type == "cuda" else 0)
    if report.device.type != "cuda":
        raise NotTried("two steps were taken; their memory is measured on a GPU only")
    return f"first step {gib(peaks[0])}, second {gib(peaks[1])}"
