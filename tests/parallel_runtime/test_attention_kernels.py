"""Attention kernels against attention written out, and the refusal of those that cannot run."""

from __future__ import annotations

import math

import pytest
import torch

from parallel_runtime.attention.kernels import KERNELS, resolve_kernel
from parallel_runtime.config import ATTENTION_BACKENDS
from parallel_runtime.errors import ConfigurationError

CPU = torch.device("cpu")


def attention(query, key, value, mask=None, scale=None):
    """Softmax attention in float64, tensors (batch, tokens, heads, head dim)."""
    query, key, value = (tensor.double().transpose(1, 2) for tensor in (query, key, value))
    logits = query @ key.transpose(-1, -2) * (scale or 1 / math.sqrt(query.shape[-1]))
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    return (logits.softmax(dim=-1) @ value).transpose(1, 2)


def make_inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 13, 3, 32, generator=generator)
    key, value = torch.randn(2, 2, 17, 3, 32, generator=generator).unbind(0)
    return query.to(dtype), key.to(dtype), value.to(dtype)


@pytest.mark.parametrize("name", ["sdpa", "math", "flash"])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("compiled", [False, True])
def test_kernels_compute_attention_and_trace_without_a_graph_break(name, scale, compiled):
    kernel = KERNELS[name]
    if compiled:
        torch.compiler.reset()
        kernel = torch.compile(kernel, fullgraph=True, backend="aot_eager")
    query, key, value = make_inputs()
    output = kernel(query, key, value, scale=scale)
    assert output.shape == query.shape
    assert (output - attention(query, key, value, scale=scale)).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["sdpa", "math"])
def test_a_mask_hides_keys(name):
    query, key, value = make_inputs()
    mask = torch.rand(2, 1, 13, 17, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[..., 0] = True
    output = KERNELS[name](query, key, value, mask)
    assert (output - attention(query, key, value, mask)).abs().max() < 1e-5


def test_every_configurable_backend_has_a_kernel():
    assert set(ATTENTION_BACKENDS) == {"auto", *KERNELS}


def test_auto_on_the_cpu_is_pytorchs_choice():
    assert resolve_kernel("auto", CPU, torch.float32, 64) == "sdpa"


@pytest.mark.parametrize("name", ["cudnn", "efficient"])
def test_a_kernel_that_cannot_run_here_is_refused_by_name(name):
    with pytest.raises(ConfigurationError, match=rf"'{name}' cannot run on cpu in float32 with head size 64.*auto"):
        resolve_kernel(name, CPU, torch.float32, 64)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_auto_on_a_gpu_names_a_kernel_that_runs(dtype):
    device = torch.device("cuda")
    name = resolve_kernel("auto", device, dtype, 128)
    modern = torch.cuda.get_device_capability() >= (9, 0) and dtype == torch.bfloat16
    assert name == ("cudnn" if modern else "sdpa")
    query, key, value = (tensor.to(device) for tensor in make_inputs(dtype))
    error = (KERNELS[name](query, key, value).double().cpu() - attention(*make_inputs(dtype))).abs().max()
    assert error < (0.05 if dtype == torch.bfloat16 else 1e-3)
