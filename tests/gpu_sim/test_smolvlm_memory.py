"""A step of SmolVLM2-500M on a simulated GPU against the memory plan: every image is 17 tiles of 1,024 patches."""

from __future__ import annotations

import json

import pytest

from vlmrl.plan.gpus import GIB

pytestmark = pytest.mark.slow

STEP = """
import json, tempfile
from pathlib import Path

from PIL import Image

from testing import simulated_step
from vlmrl.config import Config, Model, Rollout, Train
from vlmrl.model.loading import load_reader
from vlmrl.multimodal.placeholders import image_ids
from vlmrl.plan.gpus import KNOWN
from vlmrl.plan.memory_plan import MemoryPlan, sizes_of_model
from vlmrl.plan.phases import micro_batch_size
from vlmrl.types import Sample

TEXT = {"model_type": "llama", "hidden_size": 960, "num_hidden_layers": 32, "num_attention_heads": 15, "num_key_value_heads": 5}
TEXT |= {"intermediate_size": 2560, "vocab_size": 49280, "max_position_embeddings": 8192, "tie_word_embeddings": True}
TOWER = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
TOWER |= {"image_size": 512, "patch_size": 16}


def samples_of(config, reader):
    # One group of the longest trajectories: an image in the prompt, and one after each turn but the last.
    store, rollout, pad = reader.new_store(), config.rollout, reader.family.image_token_id
    shown = [store.load(Image.new("RGB", (100, 100), (number, 0, 0))) for number in range(20)]
    samples = []
    length, rows = config.data.max_prompt_tokens, 2  # rows of a micro-batch
    responses = (config.train.tokens_per_micro_batch - length) // rows
    for member in range(2 * rows):
        first, later = shown[0], shown[1 + member]
        prompt = (image_ids(first, pad) + [7] * length)[:length]
        seen = image_ids(later, pad)
        response = seen + [11 + member] * (responses - len(seen))
        mask = [0] * len(seen) + [1] * (responses - len(seen))
        lists = (prompt, response, mask, [-1.0] * responses, [0] * responses)
        samples.append(Sample(*lists, "0", f"0/{member}", True, "stop", [first, later], 1.0 - 2 * (member % 2)))
    return samples


with tempfile.TemporaryDirectory() as scratch:
    tiny = load_reader(Model(path="tiny:smolvlm"), Path(scratch) / "tiny")
    config = {"model_type": "smolvlm", "text_config": TEXT, "vision_config": TOWER, "scale_factor": 4}
    config |= {"image_token_id": tiny.family.image_token_id, "tie_word_embeddings": True}
    folder = simulated_step.folder_of(config, Path(scratch))
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    settings |= {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    run = Config(
        output_dir=scratch,
        model=Model(path=str(folder)),
        rollout=Rollout(group_size=4, max_turns=2, max_tokens=7168, max_response_tokens=2048),
        train=Train(groups_per_batch=1, tokens_per_micro_batch=12288),
    )
    run = simulated_step.replace(run, data=simulated_step.replace(run.data, max_prompt_tokens=2048))
    sizes = sizes_of_model(run.model, run.models_dir)
    plan = MemoryPlan.of(run, sizes, 1, KNOWN["h100-80gb"]).phases["forward and backward"]
    simulated_step._largest = lambda trainer, samples: {}
    reader = load_reader(run.model, run.models_dir)
    measured = simulated_step.simulate(run, lambda hf: samples_of(run, reader))
    peaks = measured["steps"][1]["peaks"]
    print(json.dumps({"plan": plan, "peaks": peaks, "patches": micro_batch_size(run, sizes.shape).patches}))
"""


def test_the_plan_of_tiles_is_what_a_step_uses(simulated_gpu):
    done = simulated_gpu.run(STEP, memory=400 * GIB, timeout=1800)
    found = json.loads(done.stdout.splitlines()[-1])
    used = max(found["peaks"][phase]["total"] for phase in ("forward", "backward"))
    planned = sum(size for name, size in found["plan"].items() if name != "reserve")
    assert found["patches"] == 3 * 17 * 1024
    assert planned == pytest.approx(used, rel=0.05)
