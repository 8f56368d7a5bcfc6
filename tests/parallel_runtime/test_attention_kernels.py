"""Attention kernels against attention written out, the choice between them, and the refusal of those that cannot."""

from __future__ import annotations

import importlib.machinery
import json
import math
import sys
import types
from types import SimpleNamespace

import pytest
import torch

from parallel_runtime.attention import choice, kernels
from parallel_runtime.attention.choice import check_ring, choose, resolve_kernel
from parallel_runtime.attention.kernels import KERNELS
from parallel_runtime.config import ATTENTION_BACKENDS, COMFYUIS
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
    attend, attend_with_lse = kernel.attend, kernel.attend_with_lse
    if compiled:
        torch.compiler.reset()
        attend, attend_with_lse = (
            torch.compile(call, fullgraph=True, backend="aot_eager") for call in (attend, attend_with_lse)
        )
    query, key, value = make_inputs()
    expected = attention(query, key, value, scale=scale)
    output = attend(query, key, value, None, scale)
    assert output.shape == query.shape
    assert (output - expected).abs().max() < 1e-5
    output, lse = attend_with_lse(query, key, value, None, scale)
    assert output.shape == query.shape
    assert (output - expected).abs().max() < 1e-5
    assert_log_sum_exp(lse, query, key, None, scale)


@pytest.mark.parametrize("name", ["cudnn", "efficient"])
def test_a_backend_of_pytorch_that_does_not_take_a_mask_leaves_it_to_another(name):
    query, key, value = make_inputs()
    mask = torch.ones(2, 1, 1, 17, dtype=torch.bool)
    mask[..., 9:] = False
    torch.compiler.reset()
    for call in (KERNELS[name].attend, torch.compile(KERNELS[name].attend, fullgraph=True, backend="aot_eager")):
        assert (call(query, key, value, mask, None) - attention(query, key, value, mask)).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["sdpa", "math", "flash"])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("shape", [(2, 1, 13, 17), (1, 3, 1, 17), (2, 1, 1, 17), (1, 1, 1, 17)])
def test_a_mask_hides_keys(name, added, shape):
    query, key, value = make_inputs()
    seen = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.5
    seen[..., 0] = True
    mask = torch.zeros(shape).masked_fill(~seen, -torch.inf) if added else seen
    expected = attention(query, key, value, seen)
    assert (KERNELS[name].attend(query, key, value, mask, None) - expected).abs().max() < 1e-5
    output, lse = KERNELS[name].attend_with_lse(query, key, value, mask, None)
    assert (output - expected).abs().max() < 1e-5
    assert_log_sum_exp(lse, query, key, seen, None)


def assert_log_sum_exp(lse, query, key, mask, scale):
    logits = torch.einsum("bqhd,bkhd->bhqk", query.double(), key.double()) * (scale or 1 / math.sqrt(query.shape[-1]))
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    assert lse.dtype == torch.float32
    assert (lse - logits.logsumexp(-1)).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["sdpa", "math", "flash"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_dtype_has_a_log_sum_exp(name, dtype):
    if name == "flash" and dtype == torch.float16:
        pytest.skip("depends on the CPU")
    query, key, value = make_inputs(dtype)
    output, lse = KERNELS[name].attend_with_lse(query, key, value, None, None)
    assert output.dtype == dtype
    assert (output - attention(query, key, value)).abs().max() < 0.05
    assert_log_sum_exp_near(lse, query, key)


def assert_log_sum_exp_near(lse, query, key):
    logits = torch.einsum("bqhd,bkhd->bhqk", query.double(), key.double()) / math.sqrt(query.shape[-1])
    assert (lse - logits.logsumexp(-1)).abs().max() < 0.02


def test_every_configurable_backend_has_a_kernel():
    assert set(ATTENTION_BACKENDS) == {"auto", COMFYUIS, *KERNELS}


def test_comfyuis_own_function_is_refused_where_its_network_does_not_run():
    with pytest.raises(
        ConfigurationError,
        match="Attention ComfyUI is a function of ComfyUI's own networks.*backend to auto",
    ):
        resolve_kernel(COMFYUIS, CPU, torch.float32, 64)


def test_auto_on_the_cpu_is_pytorchs_choice():
    assert resolve_kernel("auto", CPU, torch.float32, 64) == "sdpa"


@pytest.mark.parametrize("name", ["cudnn", "efficient"])
def test_a_kernel_that_cannot_run_here_is_refused_by_name(name):
    with pytest.raises(ConfigurationError, match=rf"'{name}' cannot run on cpu in float32 with head size 64.*auto"):
        resolve_kernel(name, CPU, torch.float32, 64)


@pytest.fixture
def packages(monkeypatch):
    """Stand-ins for FlashAttention 3 and SageAttention, which record how they were called."""
    calls = []
    kernels._flash3_must_be_asked.cache_clear()

    def install(name, **functions):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)

    def flash_attn_func(q, k, v, softmax_scale=None, causal=False, return_attn_probs=False):
        calls.append((causal, return_attn_probs))
        output, lse = KERNELS["math"].attend_with_lse(q, k, v, None, softmax_scale)
        return (output, lse) if return_attn_probs else output

    def sageattn(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, return_lse=False):
        calls.append((tensor_layout, is_causal, return_lse))
        output, lse = KERNELS["math"].attend_with_lse(q, k, v, None, sm_scale)
        return (output, lse) if return_lse else output

    install("flash_attn_interface", flash_attn_func=flash_attn_func)
    install("sageattention", sageattn=sageattn)
    yield calls
    kernels._flash3_must_be_asked.cache_clear()


@pytest.mark.parametrize("name", ["flash3", "sage"])
def test_kernels_of_packages_are_called_with_our_layout_and_scale(name, packages):
    assert resolve_kernel(name, CPU, torch.float32, 32) == name
    check_ring(name, CPU, torch.float32, 32)
    kernel = KERNELS[name]
    query, key, value = make_inputs()
    query, key, value = query[:, :13], key[:, :13], value[:, :13]
    expected = attention(query, key, value, scale=0.3)
    assert (kernel.attend(query, key, value, None, 0.3) - expected).abs().max() < 1e-5
    output, lse = kernel.attend_with_lse(query, key, value, None, 0.3)
    assert (output - expected).abs().max() < 1e-5
    assert_log_sum_exp(lse, query, key, None, 0.3)
    assert packages
    packages.clear()
    mask = torch.ones(1, 1, 1, 13, dtype=torch.bool)
    mask[..., 5:] = False
    expected = attention(query, key, value, mask)
    assert (kernel.attend(query, key, value, mask, None) - expected).abs().max() < 1e-5
    assert (kernel.attend_with_lse(query, key, value, mask, None)[0] - expected).abs().max() < 1e-5
    assert not packages  # they take no mask, so PyTorch's kernel did it


def test_the_first_versions_of_flash_attention_3_always_tell_the_log_sum_exp(packages, monkeypatch):
    def flash_attn_func(q, k, v, softmax_scale=None, causal=False):
        return KERNELS["math"].attend_with_lse(q, k, v, None, softmax_scale)

    monkeypatch.setattr(sys.modules["flash_attn_interface"], "flash_attn_func", flash_attn_func)
    query, key, value = make_inputs()
    assert (KERNELS["flash3"].attend(query, key, value, None, None) - attention(query, key, value)).abs().max() < 1e-5


@pytest.mark.parametrize(("name", "what"), [("flash3", "FlashAttention 3"), ("sage", "SageAttention")])
def test_a_package_that_is_not_installed_is_named(name, what, monkeypatch):
    monkeypatch.setattr(choice, "is_missing", lambda kernel: True)
    with pytest.raises(ConfigurationError, match=f"'{name}' needs the Python package .*Install {what}"):
        resolve_kernel(name, CPU, torch.float32, 64)


def test_a_kernel_that_cannot_run_in_a_ring_is_refused_with_those_that_can():
    with pytest.raises(ConfigurationError, match=r"'cudnn' cannot run in a ring on cpu.*one of sdpa, flash, math\."):
        check_ring("cudnn", CPU, torch.float32, 64)


def test_auto_never_takes_sage_which_is_lossy():
    assert set(choice._CANDIDATES) <= set(KERNELS) - {"sage"}


def test_the_fastest_kernel_is_chosen_and_of_nearly_equal_ones_the_first():
    assert choose({"flash": 1.0, "cudnn": 2.0}) == "flash"
    assert choose({"flash": 1.0, "cudnn": 1.02}) == "cudnn"
    assert choose({"efficient": 3.0}) == "efficient"
    assert choose({}) == "sdpa"


@pytest.fixture
def gpu(monkeypatch):
    """A GPU on which `cudnn` and `flash` run, in times that are told."""
    measured = []
    times = {"cudnn": 3.0, "flash": 2.0}

    def milliseconds(attend, *_):
        name = next(name for name, kernel in KERNELS.items() if kernel.attend is attend)
        measured.append(name)
        return times[name]

    monkeypatch.setattr(choice, "_ring_refusal", lambda name, *_: None if name in times else "no")
    monkeypatch.setattr(choice, "_refusal", lambda *_: None)
    monkeypatch.setattr(choice, "_milliseconds", milliseconds)
    seen = SimpleNamespace(name="a GPU", uuid="aaaa")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: seen)
    choice._fastest.cache_clear()
    yield times, measured, seen
    choice._fastest.cache_clear()


def test_what_was_measured_is_kept_between_processes_and_measured_again_where_it_does_not_fit(
    gpu, tmp_path, monkeypatch
):
    times, measured, gpu_seen = gpu
    monkeypatch.setenv("PARALLEL_DIT_STATE", str(tmp_path / "state"))
    folder = tmp_path / "state" / "measured"

    def auto(dtype=torch.bfloat16):
        choice._fastest.cache_clear()  # as a new process has it
        return resolve_kernel("auto", torch.device("cuda"), dtype, 128)

    assert auto() == "flash"
    assert measured == ["cudnn", "flash"]
    times["flash"] = 9.0
    assert auto() == "flash"  # from the file
    assert len(measured) == 2
    assert auto(torch.float16) == "cudnn"  # another dtype is another question
    assert auto() == "flash"
    assert len(measured) == 4
    times["flash3"] = 1.0  # a package came
    assert auto() == "flash3"
    for damage in ("{ cut off", "nonsense", json.dumps({"key": "another", "measured": 3})):
        for file in folder.iterdir():
            file.write_text(damage)
        assert auto() == "flash3"
    gpu_seen.uuid = "bbbb"
    times["cudnn"] = 0.5
    assert auto() == "cudnn"  # another GPU of the same name
    assert len(list(folder.iterdir())) == 3


def test_a_folder_that_cannot_be_written_does_not_matter(gpu, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PARALLEL_DIT_STATE", str(tmp_path / "file"))
    assert resolve_kernel("auto", torch.device("cuda"), torch.bfloat16, 128) == "flash"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("masked", [False, True])
def test_every_kernel_that_runs_on_a_gpu_computes_attention_and_its_log_sum_exp(dtype, masked):
    device = torch.device("cuda")
    query, key, value = (tensor.to(device) for tensor in make_inputs(dtype))
    mask = torch.ones(2, 1, 1, 17, dtype=torch.bool, device=device) if masked else None
    if mask is not None:
        mask[0, ..., 11:] = False
    expected = attention(query, key, value, mask)
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-3
    ran = []
    for name, kernel in KERNELS.items():
        if choice._ring_refusal(name, device, dtype, 32) is not None:
            continue
        torch._dynamo.reset()  # the kernels share a code object, of which dynamo compiles few variants
        traced = torch.compile(kernel.attend_with_lse, fullgraph=name not in kernels.PACKAGES)
        for call in (kernel.attend_with_lse, traced):
            output, lse = call(query, key, value, mask, None)
            assert (output - expected).abs().max() < tolerance, name
            logits = torch.einsum("bqhd,bkhd->bhqk", query.double(), key.double()) / math.sqrt(query.shape[-1])
            if mask is not None:
                logits = logits.masked_fill(~mask, -torch.inf)
            assert (lse - logits.logsumexp(-1)).abs().max() < tolerance, name
        assert (kernel.attend(query, key, value, mask, None) - expected).abs().max() < tolerance, name
        ran.append(name)
    assert {"sdpa", "efficient", "math"} <= set(ran)
    assert ("cudnn" in ran) == (dtype == torch.bfloat16)
    assert resolve_kernel("auto", device, dtype, 128) in ran
