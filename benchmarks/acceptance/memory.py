"""Peak memory of two steps of the trainer on the 2B's shape, full and LoRA, beside what the memory plan computes for them."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import torch
from acceptance.models import lora, noise, random_folder, random_model
from acceptance.report import NotTried, Report, gib, require

from vlmrl.config import Algo, Config, Data, Lora, Optim, Rollout, Train
from vlmrl.model.loading import LoadedModel
from vlmrl.multimodal.placeholders import image_ids
from vlmrl.train.trainer import Trainer, TrainerSpec
from vlmrl.types import Sample

# A group is a whole micro-batch of 16,384 tokens, which is what is planned for.
PROMPT, RESPONSE, MEMBERS = 1024, 1024, 15
TINY = (96, 16, 3)
APART = 0.15  # of the plan


def run(report: Report) -> None:
    report.check("full training", lambda: peak(report, Lora()))
    report.check("LoRA", lambda: peak(report, lora()))
    report.check("a row of 32,768 tokens", lambda: one_row(report, 512 if report.tiny else 32768, images=1))
    report.check(
        "a row with 128 images", lambda: one_row(report, 512 if report.tiny else 8192, images=8 if report.tiny else 128)
    )


def peak(report: Report, adapters: Lora) -> str:
    """Two steps: the optimizer state arrives in the first."""
    if not report.tiny:
        report.need_gpu()
    config = configured(report, adapters)
    loaded = random_model(report, lora=adapters, max_image_pixels=512 * 512)
    loaded.policy.enable_gradient_checkpointing()
    budget = config.train.tokens_per_micro_batch
    trainer = Trainer(loaded.policy, TrainerSpec(Algo(), config.optim, total_steps=2, tokens_per_micro_batch=budget))
    samples, peaks = groups(loaded, config), []
    for _ in range(2):
        if report.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        trainer.step(samples)
        peaks.append(torch.cuda.max_memory_allocated() if report.device.type == "cuda" else 0)
    if report.device.type != "cuda":
        raise NotTried("two steps were taken; their memory is measured on a GPU only")
    wanted, phase = planned(config)
    text = f"first step {gib(peaks[0])}, second {gib(peaks[1])}; planned {gib(wanted)}, in {phase}"
    require(report.tiny or abs(max(peaks) / wanted - 1) <= APART, f"more than {APART:.0%} from the plan: {text}")
    return text


def one_row(report: Report, tokens: int, images: int) -> str:
    """Two steps on one row of this many tokens, half of them sampled, with images of 64 x 64 pixels."""
    if not report.tiny:
        report.need_gpu()
    loaded = random_model(report)
    loaded.policy.enable_gradient_checkpointing()
    store = loaded.new_store()
    assert store is not None
    family, media = loaded.policy.family, [store.load(noise(number, 64)) for number in range(images)]
    shown = [[loaded.policy.config.vision_start_token_id, *image_ids(item, family.image_token_id)] for item in media]
    prompt = [token for image in shown for token in image]
    prompt += [7] * (tokens // 2 - len(prompt))
    length = tokens - len(prompt)
    lists = (prompt, [9] * length, [1] * length, [-5.0] * length, [0] * length)
    row = Sample(*lists, "g", "g/0", True, "length", media, 1.0)
    spec = TrainerSpec(Algo(), Optim(lr=1e-9), total_steps=2, tokens_per_micro_batch=tokens)
    trainer = Trainer(loaded.policy, spec)
    trainer.step([row])
    began = time.perf_counter()
    norm = trainer.step([row]).metrics["grad_norm"]
    seconds = time.perf_counter() - began
    require(norm > 0, f"the gradient norm is {norm}")
    text = f"{tokens / seconds:.0f} tokens a second, gradient norm {norm:.2g}"
    return f"{text}, peak {gib(torch.cuda.max_memory_allocated())}" if report.device.type == "cuda" else text


def configured(report: Report, adapters: Lora) -> Config:
    """The settings of a run that makes these samples, and no others that are larger."""
    prompt, response, members = TINY if report.tiny else (PROMPT, RESPONSE, MEMBERS)
    config = Config(
        data=Data(generator=lambda index, seed: {"prompt": "-"}, size=1, max_prompt_tokens=prompt),
        reward=lambda text, task: 0.0,
        rollout=Rollout(group_size=members, max_tokens=prompt + response, max_response_tokens=response),
        optim=Optim(lr=1e-6),
        train=Train(groups_per_batch=2, tokens_per_micro_batch=prompt + members * response),
        output_dir=str(report.scratch),
    )
    model = replace(config.model, path=str(random_folder(report)), lora=adapters, max_image_pixels=512 * 512)
    return replace(config, model=replace(model, path=f"random:{model.source}", dtype="bfloat16"))


def groups(loaded: LoadedModel, config: Config) -> list[Sample]:
    """Two groups of the longest rows, each about one image."""
    dice, samples, store = random.Random(0), [], loaded.new_store()
    assert store is not None
    family, prompt_tokens = loaded.policy.family, config.data.max_prompt_tokens or 0
    side, response_tokens = 512 if prompt_tokens == PROMPT else 64, config.rollout.max_response_tokens
    for group in "ab":
        item = store.load(noise(ord(group), side))
        image = [loaded.policy.config.vision_start_token_id, *image_ids(item, family.image_token_id)]
        prompt = image + [dice.randrange(200) for _ in range(prompt_tokens - len(image))]
        for member in range(config.rollout.group_size):
            response = [dice.randrange(200) for _ in range(response_tokens)]
            lists = (prompt, response, [1] * response_tokens, [-5.0] * response_tokens, [0] * response_tokens)
            advantage = dice.uniform(-1, 1)
            samples.append(Sample(*lists, group, f"{group}/{member}", True, "length", [item], advantage))
    return samples


def planned(config: Config) -> tuple[float, str]:
    """The bytes of tensors at the fullest phase of the trainer's step, without the plan's reserve, and the phase."""
    from vlmrl.plan.memory_plan import plan_memory
    from vlmrl.train.ranks import Ranks

    phases = plan_memory(config, Ranks()).phases
    sums = {
        name: sum(size for part, size in phases[name].items() if part != "reserve")
        for name in ("forward and backward", "optimizer step")
    }
    phase = max(sums, key=lambda name: sums[name])
    return sums[phase], phase
