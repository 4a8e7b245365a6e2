"""The trainer on simulated GPUs: what a rank holds while it loads, the optimizer's memory, and the head's kernel."""

import json

import pytest
from transformers import Qwen2VLImageProcessor, Qwen3VLConfig, Qwen3VLMoeConfig

pytestmark = pytest.mark.slow

GIB = 2**30
# The published shapes of Qwen3-VL-32B and Qwen3-VL-30B-A3B, whose weights are 133 and 124 GB in float32.
VISION = {"out_hidden_size": 5120, "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16}
COMMON = {"vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8, "num_attention_heads": 64}
DENSE = {**COMMON, "hidden_size": 5120, "intermediate_size": 25_600, "num_hidden_layers": 64}
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1}
SPARSE = {**COMMON, **EXPERTS, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32}
SPARSE |= {"num_key_value_heads": 4, "intermediate_size": 6144}
CONFIGS = {
    "32B": Qwen3VLConfig(text_config=DENSE, vision_config=VISION, tie_word_embeddings=False),
    "30B-A3B": Qwen3VLMoeConfig(text_config=SPARSE, vision_config=VISION | {"out_hidden_size": 2048}),
}

LOAD = """
import json, sys
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from vlmrl.config import Config, Lora, Model
from vlmrl.train.rank import Rank
from vlmrl.train.ranks import Ranks

folder, rank, lora = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
model = Model(path=f"random:{folder}", lora=Lora(rank=lora, targets=("q_proj",) if lora else ()))
policy = Rank(Config(model=model, output_dir=folder), Ranks(rank, 8)).policy
sizes = [weight.numel() * 4 for weight in policy.parameters()]
print(json.dumps({
    "total": sum(sizes), "largest": max(sizes), "device": str(policy.device),
    "kept": torch.cuda.memory_allocated(), "peak": torch.cuda.max_memory_allocated(),
    "checkpointing": bool(policy.model.is_gradient_checkpointing),
}))
"""


@pytest.mark.parametrize(("name", "lora"), [("32B", 0), ("30B-A3B", 32)])
def test_one_of_eight_ranks_loads_a_model_that_fits_no_gpu(name, lora, simulated_gpu, tmp_path):
    CONFIGS[name].save_pretrained(tmp_path)
    Qwen2VLImageProcessor().save_pretrained(tmp_path)
    done = simulated_gpu.run(LOAD, tmp_path, 1, lora)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["total"] > 115 * GIB and result["device"] == "cuda:0"
    assert result["kept"] < 1.02 * result["total"] / 8
    assert result["peak"] < 1.02 * result["total"] / 8 + result["largest"] / 4
    assert result["checkpointing"]


def test_rank_0_holds_one_whole_weight_beside_its_shards(simulated_gpu, tmp_path):
    small = DENSE | {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
    vision = VISION | {"depth": 2, "out_hidden_size": 512, "deepstack_visual_indexes": [0, 1]}
    Qwen3VLConfig(text_config=small, vision_config=vision, tie_word_embeddings=True).save_pretrained(tmp_path)
    Qwen2VLImageProcessor().save_pretrained(tmp_path)
    result = json.loads(simulated_gpu.run(LOAD, tmp_path, 0, 0).stdout.splitlines()[-1])
    assert result["largest"] > result["total"] / 3  # the embedding, which is also the head
    assert result["peak"] < 1.02 * result["total"] / 8 + 1.15 * result["largest"]


def test_the_optimizer_allocates_nothing_but_its_state(simulated_gpu):
    simulated_gpu.run(f"""
import torch
from vlmrl.config import Optim
from vlmrl.train.master_weights import make_optimizer, move_state, step_in_parts
from vlmrl.utils.host_memory import HostMemory

weights = [torch.nn.Parameter(torch.empty({GIB // 4}, device="cuda")) for _ in range(4)]
optimizer = make_optimizer(weights, Optim(), weights[0].device)
for weight in weights:
    weight.grad = torch.empty_like(weight)
for step in range(2):
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    assert {{state["step"].device.type for state in optimizer.state.values()}} == {{"cuda"}}
    assert abs(torch.cuda.max_memory_allocated() - 16 * {GIB}) < 2**20, torch.cuda.max_memory_allocated()
memory = HostMemory()
move_state(optimizer, torch.device("cpu"), memory)
assert abs(torch.cuda.memory_allocated() - 8 * {GIB}) < 2**20
assert {{value.device.type for state in optimizer.state.values() for value in state.values()}} == {{"cpu"}}
places = [state["exp_avg"].data_ptr() for state in optimizer.state.values()]
move_state(optimizer, torch.device("cuda"), memory)
optimizer.step()
move_state(optimizer, torch.device("cpu"), memory)
assert places == [state["exp_avg"].data_ptr() for state in optimizer.state.values()]  # the same host memory

torch.cuda.reset_peak_memory_stats()
step_in_parts(optimizer, weights[0].device, memory)
assert abs(torch.cuda.max_memory_allocated() - 10 * {GIB}) < 2**20, torch.cuda.max_memory_allocated()  # one weight's state, not 8 GiB
assert {{value.device.type for state in optimizer.state.values() for value in state.values()}} == {{"cpu"}}
""")  # fmt: skip


CHECKPOINT = """
import sys
from pathlib import Path
import torch
from testing.trees import random_rows
from vlmrl.config import Algo, Model, Optim
from vlmrl.model.loading import load_model
from vlmrl.train.trainer import Trainer, TrainerSpec
from vlmrl.utils.host_memory import HostMemory

folder, offload = Path(sys.argv[1]), sys.argv[2] == "True"

def trainer_on(device):
    model = load_model(Model(path="tiny:qwen3_vl", device=device), folder / "models", seed=0)
    spec = TrainerSpec(Algo(loss="sft"), Optim(offload=offload), 9, tokens_per_micro_batch=64)
    return model, Trainer(model.policy, spec)

def devices(trainer, kind):
    return {state[kind].device.type for state in trainer.optimizer.state.values()}

model, first = trainer_on("cpu")
rows = random_rows(model, 0)
first.step(rows)
first.save(folder)
_, second = trainer_on("cuda")
assert second.optimizer.defaults["fused"] and not first.optimizer.defaults["fused"]
second.restore(folder)
assert devices(second, "exp_avg") == ({"cpu"} if offload else {"cuda"})
second.optimizer.zero_grad()
for weight in second._weights.parameters:
    weight.grad = torch.zeros_like(weight)
second._apply_gradient()
assert devices(second, "exp_avg") == devices(second, "step") == ({"cpu"} if offload else {"cuda"})
memory = HostMemory()
second.to(torch.device("cpu"), memory)
assert devices(second, "exp_avg") == devices(second, "step") == {"cpu"}
second.to(torch.device("cuda"), memory)
for weight in second._weights.parameters:
    weight.grad = torch.zeros_like(weight)
second._apply_gradient()
(folder / "gpu").mkdir()
second.save(folder / "gpu")
_, third = trainer_on("cpu")
third.restore(folder / "gpu")
assert devices(third, "step") == {"cpu"}
third.step(rows)
"""


@pytest.mark.parametrize("offload", [False, True])
def test_a_checkpoint_of_a_cpu_resumes_on_a_gpu_and_back(offload, simulated_gpu, tmp_path):
    simulated_gpu.run(CHECKPOINT, tmp_path, offload, contents=True)


def test_the_head_has_float32_logits_of_bfloat16_on_a_gpu(simulated_gpu):
    """1,000 tokens of the true vocabulary: chunks of 883 tokens, forward and backward."""
    simulated_gpu.run("""
import torch
from vlmrl.model.head import logits_of, score_tokens

hidden = torch.empty(1000, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
head = torch.empty(151_936, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
labels = torch.zeros(1000, dtype=torch.long, device="cuda")
bias = torch.empty(151_936, dtype=torch.bfloat16, device="cuda", requires_grad=True)
products = []
mm = torch.mm
torch.mm = lambda *factors, **options: products.append(options.get("out_dtype")) or mm(*factors, **options)
with torch.no_grad():
    assert logits_of(hidden, head, bias, 1.0, [3]).dtype == torch.float32
assert products == [torch.float32]
torch.cuda.reset_peak_memory_stats()
before = torch.cuda.memory_allocated()
logprobs, entropy = score_tokens(hidden, head, bias, labels, 1.0, [3])
assert products == [torch.float32] * 3
(logprobs.sum() + entropy.sum()).backward()
assert hidden.grad.dtype == head.grad.dtype == bias.grad.dtype == torch.bfloat16
assert torch.cuda.max_memory_allocated() - before < 4 * 2**29 + 2**28  # of all logits it would be 3 x 580 MiB, and copies
""")
