"""The logprob mismatch of a mixture of experts, with the rollout's expert routing replayed and without.

The engine samples in bfloat16, the trainer computes in float32. Replay removes the mismatch of tokens that went to other experts;
rounding remains.

    python benchmarks/routing_replay.py
"""

from __future__ import annotations

import asyncio
import copy
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from vlmrl.config import Algo, Model, Optim
from vlmrl.engine.base import Request, SamplingParams
from vlmrl.engine.hf.engine import HFEngine
from vlmrl.model.expert_routing import indices_from_routing
from vlmrl.model.loading import LoadedModel, load_model
from vlmrl.model.policy import Policy
from vlmrl.train.trainer import Trainer, TrainerSpec
from vlmrl.types import Sample

RESPONSES, TOKENS = 64, 128


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = load_model(Model(path="tiny:qwen3_vl_moe", device="cpu", dtype="float32"), Path(folder), seed=0)
    with torch.no_grad():
        for name, parameter in model.policy.named_parameters():
            if "mlp.experts" in name:  # or random experts would hardly differ
                parameter.mul_(8)
    samples = sample(model)
    tokens = sum(len(each.response_ids) for each in samples)
    print(f"{tokens} tokens of {RESPONSES} responses; {moved(model, samples):.1%} of choices differ between the two")
    print("| routing | mean mismatch | 99.9% of tokens | largest mismatch |\n| --- | --- | --- | --- |")
    for name, replay in (("the trainer's own", False), ("replayed", True)):
        differences = mismatch(model, samples, replay)
        print(
            f"| {name} | {differences.mean():.1e} | {np.quantile(differences, 0.999):.1e} | {differences.max():.1e} |"
        )


def sample(model: LoadedModel) -> list[Sample]:
    """Responses that a bfloat16 copy of the policy samples."""
    sampler = Policy(copy.deepcopy(model.policy.model).to(torch.bfloat16)).eval()
    engine = HFEngine(sampler, model.renderer, record_expert_routing=True)
    prompts = [
        model.renderer.prompt([{"role": "user", "content": f"What is {n}?"}]).token_ids for n in range(RESPONSES)
    ]
    requests = [Request(f"{n:03d}", ids, [], SamplingParams(TOKENS, seed=n)) for n, ids in enumerate(prompts)]
    responses = asyncio.run(engine.generate_batch(requests))
    engine.close()
    rows = []
    for ids, request, response in zip(prompts, requests, responses, strict=True):
        size = len(response.token_ids)
        lists = (ids, response.token_ids, [1] * size, response.logprobs, [0] * size)
        name = request.trajectory_id
        rows.append(
            Sample(
                *lists,
                name,
                name,
                True,
                response.stop_reason,
                advantage=1.0,
                expert_routing=list(response.expert_routing),
            )
        )
    return rows


def mismatch(model: LoadedModel, samples: list[Sample], replay: bool) -> np.ndarray:
    """Every response token's |trainer - rollout|, in nats."""
    spec = TrainerSpec(Algo(), Optim(), total_steps=1, tokens_per_micro_batch=16384, replay_routing=replay)
    trainer = Trainer(model.policy, spec)
    scored = trainer.score(samples)
    return np.concatenate([np.abs(logprobs - s.rollout_logprobs) for logprobs, s in zip(scored, samples, strict=True)])


def moved(model: LoadedModel, samples: list[Sample]) -> float:
    """The share of expert choices (per token and layer) that differ in float32."""
    routing = model.policy.routing
    assert routing is not None
    trainer = Trainer(model.policy, TrainerSpec(Algo(), Optim(), total_steps=1, tokens_per_micro_batch=1))
    other = []
    for each in samples:
        with routing.recorded() as layers:
            trainer.score([replace(each, expert_routing=[])])
        own, recorded = torch.stack(layers, 1).numpy()[:-1], indices_from_routing(each.expert_routing)[:-1]
        other.append((np.sort(own, -1) != np.sort(recorded, -1)).any(-1).mean())
    return float(np.mean(other))


if __name__ == "__main__":
    main()
