"""What is found of the servers' Python environment, in folders made here."""

from __future__ import annotations

import sys

import pytest

from vlmrl.config import ServerSettings
from vlmrl.engine import server_backend
from vlmrl.engine.server_environment import cuda_home, environment_of, own_toolkit
from vlmrl.engine.sglang.backend import SGLangBackend

NVCC = "#!/bin/sh\n"


@pytest.fixture
def python(tmp_path):
    """An interpreter whose packages are in a folder of their own: NCCL 2.29.7, and a CUDA toolkit as NVIDIA's packages bring it."""
    packages = tmp_path / "packages"
    nccl = packages / "nvidia_nccl_cu13-2.29.7.dist-info"
    nccl.mkdir(parents=True)
    (nccl / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-nccl-cu13\nVersion: 2.29.7\n")
    for name, text in (("bin/nvcc", NVCC), ("lib/libcudart.so.13", "")):
        file = packages / "nvidia/cu13" / name
        file.parent.mkdir(parents=True)
        file.write_text(text)
        file.chmod(0o755)
    script = tmp_path / "python"
    moved = f"import sys, sysconfig\nsys.path[:] = [{str(packages)!r}, *sys.path]\nsysconfig.get_path = lambda name: {str(packages)!r}"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -S -c "{moved}\n$2"\n')
    script.chmod(0o755)
    return str(script)


@pytest.mark.slow
def test_an_environment_says_its_nccl_and_its_toolkit(python, tmp_path):
    toolkit = tmp_path / "packages/nvidia/cu13"
    found = environment_of(python)
    assert (found.nccl, found.package, found.toolkit) == ("2.29.7", "nvidia-nccl-cu13", str(toolkit))
    assert own_toolkit(python) is None  # kernels cannot be linked yet
    (toolkit / "lib64").symlink_to("lib")
    (toolkit / "lib/libcudart.so").symlink_to("libcudart.so.13")
    assert own_toolkit(python) == str(toolkit)
    assert environment_of(str(tmp_path / "missing")).nccl is None


@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_server_on_a_gpu_gets_the_toolkit_of_its_environment_where_the_machine_has_none(
    tmp_path, monkeypatch, on_gpu
):
    monkeypatch.setattr(server_backend, "own_toolkit", lambda python: f"/toolkit of {python}")
    monkeypatch.setattr(server_backend, "cuda_home", lambda variables: variables.get("HOME_OF_A_TEST"))
    backend = SGLangBackend(ServerSettings(python="p"))
    assert backend.environment(tmp_path, {}, on_gpu).get("CUDA_HOME") == ("/toolkit of p" if on_gpu else None)
    assert "CUDA_HOME" not in backend.environment(tmp_path, {"HOME_OF_A_TEST": "/cuda"}, on_gpu)


def test_a_toolkit_is_found_as_sglang_finds_it(tmp_path):
    for name in ("home", "path"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin/nvcc").write_text(NVCC)
        (tmp_path / name / "bin/nvcc").chmod(0o755)
    home, path = str(tmp_path / "home"), str(tmp_path / "path/bin")
    assert cuda_home({"CUDA_HOME": home, "PATH": path}) == home
    assert cuda_home({"CUDA_HOME": str(tmp_path), "PATH": path}) is None  # it is set, and has no nvcc
    assert cuda_home({"PATH": path}) == str(tmp_path / "path")
