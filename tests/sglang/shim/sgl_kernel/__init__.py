"""For tests: replaces SGLang's library of GPU kernels, which cannot be loaded without a GPU driver.

Every kernel exists and fails when it is called: a server on a CPU calls none. It also makes torch ignore requests for pinned memory,
which SGLang's LoRA layers and its buffer of experts make on any device.
"""

import functools

import torch

__version__ = "0.4.10"  # SGLang checks it against the version that it requires

_IMPORTED_OPS = (  # looked up while model files are imported
    "fused_moe_router_cpu",
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)


def _missing(name):
    def kernel(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU, and this is the tests' replacement")

    return kernel


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _missing(name)


def _unpinned(function):
    @functools.wraps(function)
    def call(*args, pin_memory=False, **kwargs):
        return function(*args, **kwargs)

    return call


class _NoDriver:
    """The part of CUDA's runtime that pins memory."""

    @staticmethod
    def cudaHostRegister(*memory):  # noqa: N802
        return 0

    @staticmethod
    def cudaHostUnregister(*memory):  # noqa: N802
        return 0


_namespace = torch.library.Library("sgl_kernel", "FRAGMENT")
for _name in _IMPORTED_OPS:
    setattr(torch.ops.sgl_kernel, _name, _missing(_name))
if not torch.cuda.is_available():
    for _name in ("tensor", "empty", "zeros", "ones", "full"):
        setattr(torch, _name, _unpinned(getattr(torch, _name)))
    torch.Tensor.pin_memory = lambda tensor, *device: tensor
    torch.cuda.cudart = _NoDriver
    torch.cuda.synchronize = lambda *device: None  # called after memory was released
