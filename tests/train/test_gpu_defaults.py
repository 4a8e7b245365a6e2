"""The settings that differ between a GPU and a CPU: gradient checkpointing and the fused optimizer."""

import pytest
import torch

from vlmrl.config import Config, Model, Optim, Train
from vlmrl.model.loading import load_model, pick_checkpointing
from vlmrl.train.master_weights import make_optimizer, move_state
from vlmrl.train.rank import Rank
from vlmrl.utils.host_memory import HostMemory

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("setting", "device", "wanted"),
    [
        (None, GPU, True),
        (None, CPU, False),
        (None, torch.device("meta"), False),
        (True, CPU, True),
        (False, GPU, False),
    ],
)
def test_activations_are_recomputed_on_a_gpu_unless_it_is_set(setting, device, wanted):
    assert pick_checkpointing(setting, device) is wanted


@pytest.mark.parametrize(("setting", "wanted"), [(None, False), (True, True)])
def test_a_run_on_a_cpu_recomputes_nothing_unless_it_is_set(setting, wanted, qwen3_vl, tmp_path):
    train = Train(gradient_checkpointing=setting)
    config = Config(model=Model(path=str(qwen3_vl), device="cpu"), train=train, output_dir=str(tmp_path))
    assert Rank(config).policy.model.is_gradient_checkpointing is wanted
    assert not load_model(config.model, tmp_path, 0).policy.model.is_gradient_checkpointing


def adam(device):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(5, 3))
    optimizer = make_optimizer([weight], Optim(lr=0.1, weight_decay=0.1), device)
    for number in range(3):
        weight.grad = torch.randn(5, 3, generator=torch.Generator().manual_seed(number))
        optimizer.step()
    return weight, optimizer


def test_the_fused_optimizer_is_for_gpus_and_takes_the_same_steps():
    plain, fused = adam(CPU), adam(GPU)
    assert plain[1].defaults["fused"] is None and fused[1].defaults["fused"] is True
    assert torch.allclose(plain[0], fused[0], atol=1e-6) and not torch.equal(plain[0], torch.zeros(5, 3))


@pytest.mark.parametrize(
    ("device", "moved"), [(CPU, {"exp_avg", "exp_avg_sq"}), (GPU, {"exp_avg", "exp_avg_sq", "step"})]
)
def test_step_counts_move_with_the_state_only_if_the_kernel_reads_them(device, moved):
    weight, optimizer = adam(device)
    move_state(optimizer, torch.device("meta"), HostMemory())
    assert {name for name, value in optimizer.state[weight].items() if value.device.type == "meta"} == moved
