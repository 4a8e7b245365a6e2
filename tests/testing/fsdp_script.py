"""What `test_fsdp.py` runs on one process and on two ranks: five steps for each case, and scores in bfloat16."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.distributed.tensor import DTensor

from vlmrl.algos import LossInputs, LossOutputs
from vlmrl.config import Algo, Config, Lora, Model, Optim, Teacher, Train
from vlmrl.model.loading import load_model
from vlmrl.train.controller import Commands, RunTrainer, join_process_group, run_commands
from vlmrl.train.rank import Rank
from vlmrl.train.ranks import MetricAccumulator, Ranks
from vlmrl.train.trainer import StepOutput, TrainerSpec
from vlmrl.types import ResponseSpan, Sample
from vlmrl.weight_sync import SENDERS
from vlmrl.weight_sync.base import Bucket, WeightUpdate


def samples_of(loaded, images: list[bool]) -> list[Sample]:
    """One row for each of ``images``, in groups of two, of different lengths; True: the row shows one."""
    store = loaded.new_store()
    rows = []
    for number, seen in enumerate(images):
        noise = Image.effect_noise((64, 96), 50 + number).convert("RGB") if seen else None
        media = [store.load(noise)] if noise is not None else []
        prompt = [5, 6, *[loaded.policy.image_token_id] * sum(item.num_tokens for item in media), 7 + number]
        response = [20 + (number + place) % 9 for place in range(4 + 3 * number)]
        size = len(response)
        row = Sample(
            prompt,
            response,
            [1] * size,
            [-6.0] * size,
            [0] * size,
            f"g{number // 2}",
            f"t{number}",
            True,
            "stop",
        )
        rows.append(replace(row, media=media, advantage=1.0 - 0.7 * number))
    return rows


def teach(batches: list[list[Sample]], shown: Sample) -> None:
    """The teacher sees two more rows, one of them with an image, where the policy sees text, and nothing of the third row."""
    for batch in batches:
        for number, row in enumerate(batch):
            half, size = len(row.response_ids) // 2, len(row.response_ids)
            row.responses = [ResponseSpan(0, 0, half), ResponseSpan(1, half, size)]
            parts = [row.response_ids[:half], row.response_ids[half:]]
            seen = [
                replace(
                    shown if number == 0 else replace(shown, prompt_token_ids=[9, 8, number], media=[]),
                    response_ids=part,
                    loss_mask=[1] * len(part),
                    rollout_logprobs=None,
                    policy_versions=[0] * len(part),
                    group_id=row.group_id,
                )
                for part in parts
            ]
            row.teacher_rows = [None, None] if number == 2 else [*seen]


def learn_from_good(inputs: LossInputs) -> LossOutputs:
    """A loss without a gradient where no row has a positive advantage, as those on one rank here."""
    if not bool((inputs.advantages > 0).any()):
        return LossOutputs(torch.zeros_like(inputs.logprobs))
    return LossOutputs(-inputs.advantages.clamp(min=0) * inputs.logprobs)


@dataclass(frozen=True)
class Case:
    """``steps``: the samples of each optimizer step, in turn; a letter is a sample, and p one that shows an image."""

    steps: tuple[str, ...]
    model: dict[str, Any] = field(default_factory=dict)
    kl: float = 0.0
    teacher: bool = False
    weight_decay: float = 0.0
    compiled: bool = False
    """Two ranks compile the layers, and one process does not."""
    loss: Any = "sft"


LORA = Lora(rank=4)
CASES = {
    "images on one rank only": Case(("pttt",)),
    "no images": Case(("tttt",), weight_decay=0.1),
    "images in some steps": Case(("pppp", "tttt", "tttt", "pttt"), weight_decay=0.1),
    "adapters of all parts, images in some steps": Case(
        ("tttt", "pttt", "tttt"), {"lora": replace(LORA, vision=True)}, weight_decay=0.1
    ),
    "a frozen vision tower, images in some steps": Case(("pttt", "tttt"), {"freeze": ("vision_tower",)}),
    "LoRA, an image, and a KL penalty towards the model without adapters": Case(("tptt",), {"lora": LORA}, kl=0.1),
    "a KL penalty towards a sharded copy": Case(("pttt",), kl=0.1),
    "compiled layers, an image on one rank only": Case(("pttt",), compiled=True),
    "three micro-batches on two ranks": Case(("ptt",)),
    "a loss without a gradient on one rank": Case(("tttt",), loss=learn_from_good),
    "a teacher that is the average and sees images on one rank only": Case(("tptt", "tttt"), teacher=True),
}


def train(folder: str, out: Path, ranks: Ranks, commands: Commands | None, name: str) -> dict[str, Any]:
    """The results of five steps, and of the sixth before and after a checkpoint; nothing on ranks other than 0."""
    case = CASES[name]
    several = ranks.size > 1
    recomputed = Train(gradient_checkpointing=several, compile_layers=several and case.compiled)
    config = Config(model=Model(path=folder, **case.model), train=recomputed, output_dir=str(out))
    loaded = load_model(config.model, out, 0)
    rank = Rank(config, ranks, loaded if ranks.size == 1 else None)
    if ranks.rank:
        assert commands is not None
        run_commands(rank, commands)
        return {}
    batches = [samples_of(loaded, [letter == "p" for letter in images]) for images in case.steps]
    if case.teacher:
        teach(batches, samples_of(loaded, [True])[0])
    batches = [batches[step % len(batches)] for step in range(6)]
    algo = Algo(loss="ppo", kl_coef=case.kl, corrections=("token_truncation",)) if case.kl else Algo(loss=case.loss)
    optim = Optim(lr=1e-3, weight_decay=case.weight_decay)
    spec = TrainerSpec(algo, optim, total_steps=20, tokens_per_micro_batch=40, groups_per_step=2)
    if case.teacher:
        spec = replace(spec, teacher=Teacher(model="average", decay=0.5))
    trainer = RunTrainer(rank, commands).start(spec)
    outputs = [trainer.step(batch) for batch in batches[:5]]
    weights = {name: float(weight.double().square().sum()) for name, weight in trainer.named_weights()}
    penalties = [float(value) for values in trainer.token_kl(batches[4]) for value in values] if case.kl else []
    logprobs = [row.tolist() for row in outputs[-1].logprobs]
    checkpoint = checkpoint_of(out, name, ranks.size)
    checkpoint.mkdir(parents=True)
    trainer.save(checkpoint)
    following = [_numbers(trainer.step(batches[5]))]
    trainer.close()
    for size in sorted({ranks.size, 2}):  # one process also goes on from what two ranks have saved
        restored = trainer.start(spec)
        restored.restore(checkpoint_of(out, name, size))
        following.append(_numbers(restored.step(batches[5])))
        restored.close()
    if commands is not None:
        commands.stop()
    steps = [_numbers(output) for output in outputs]
    return {"steps": steps, "weights": weights, "logprobs": logprobs, "kl": penalties, "following": following}


def _numbers(output: StepOutput) -> dict[str, float]:
    """The metrics that do not depend on the number of ranks, among which micro-batches are cut otherwise."""
    return {name: value for name, value in output.metrics.items() if name != "shared_tokens"}


def checkpoint_of(out: Path, case: str, ranks: int) -> Path:
    """The checkpoint of a case after its fifth step."""
    return out / case / str(ranks)


def score_in_bfloat16(folder: str, out: Path, ranks: Ranks, commands: Commands | None) -> dict[str, Any]:
    """Scores of the initial weights, and the weights' dtypes and numbers before and after scoring; a checkpoint after a step."""
    config = Config(model=Model(path=folder, dtype="bfloat16"), output_dir=str(out))
    loaded = load_model(config.model, out, 0)
    rank = Rank(config, ranks, loaded if ranks.size == 1 else None)
    if ranks.rank:
        assert commands is not None
        run_commands(rank, commands)
        return {}
    rows = samples_of(loaded, [True, False, True, False])
    spec = TrainerSpec(Algo(loss="ppo", kl_coef=0.1), Optim(lr=1e-3), total_steps=9, tokens_per_micro_batch=1)
    trainer = RunTrainer(rank, commands).start(spec)
    scores = [row.tolist() for row in trainer.score(rows)]
    trainer.step(rows)
    before = {name: weight.clone() for name, weight in trainer.named_weights()}
    trainer.score(rows)
    after = dict(trainer.named_weights())
    trainer.token_kl(rows)
    server, gathered, whole = TwoRanks(), set(), DTensor.full_tensor
    DTensor.full_tensor = lambda weight: gathered.add(str(weight.dtype)) or whole(weight)
    if ranks.size == 2:
        update = WeightUpdate((server,), SENDERS["tensor"], "v1", 2**16, dtype=torch.bfloat16)
        assert not trainer.send(update, {server.url: (0, 1)}).failed
    DTensor.full_tensor = whole
    checkpoint = checkpoint_of(out, "bfloat16", ranks.size)
    checkpoint.mkdir(parents=True)
    trainer.save(checkpoint)
    trainer.close()
    if commands is not None:
        commands.stop()
    changed = [name for name, weight in before.items() if not torch.equal(weight, after[name])]
    for parts in server.received:
        assert [rank for rank, _ in parts] == [0, 1]  # rank i of a server gets what rank i beside it has
        for _, weights in parts:
            assert all(torch.equal(value, after[name].bfloat16()) for name, value in weights)
    sent = [name for parts in server.received for name, _ in parts[0][1]]
    dtypes = sorted({str(weight.dtype) for weight in after.values()})
    return {"scores": scores, "dtypes": dtypes, "changed": changed, "sent": sent, "gathered": sorted(gathered)}


@dataclass
class TwoRanks:
    """A server of two ranks; its calls are made by rank 0."""

    url: str = "http://127.0.0.1:1"
    ranks: int = 2
    device: str = "cpu"
    dtype: torch.dtype | None = None
    timeout: float = 60.0
    received: list[Any] = field(default_factory=list)

    def begin(self) -> None: ...
    def receive(self, bucket: Bucket, version: str | None) -> None: ...
    def end(self) -> None: ...
    def abort(self) -> None: ...

    def part(self, bucket: Bucket) -> Any:
        return torch.distributed.get_rank(), bucket.tensors()

    def receive_parts(self, parts: Any, version: str | None) -> None:
        self.received.append(parts)


def metrics_of_some_ranks(ranks: Ranks) -> dict[str, float]:
    """As of a loss that reports a metric only where its rows have one. Rank 0 has one token and rank 1 three."""
    accumulator, mask = MetricAccumulator(), torch.ones(1, 3 if ranks.rank else 1)
    added = {"both": 4.0, "second": 8.0} if ranks.rank else {"first": 2.0, "both": 8.0, "first_max": 3.0}
    for name, value in added.items():
        accumulator.add(name, torch.tensor(value), mask)
    return accumulator.result(4.0, ranks, torch.device("cpu"))


def main(folder: str, out: str) -> None:
    ranks = join_process_group("gloo")
    commands = Commands() if ranks.size > 1 else None
    results = {name: train(folder, Path(out), ranks, commands, name) for name in CASES}
    results["metrics"] = metrics_of_some_ranks(ranks)
    results["bfloat16"] = score_in_bfloat16(folder, Path(out), ranks, commands)
    if ranks.rank == 0:
        Path(out, f"of{ranks.size}.json").write_text(json.dumps(results))
    if commands is not None:
        commands.close()
