"""What layers of float8 are given is rounded as ComfyUI's own library does it."""

from __future__ import annotations

import pytest
import torch

from parallel_runtime.networks.quantised_layers import to_float8

from .test_compiled_networks import with_comfyui


@with_comfyui
@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float32),
        *(pytest.param("cuda", each, marks=pytest.mark.gpu) for each in (torch.bfloat16, torch.float16)),
    ],
)
@pytest.mark.parametrize("scale", [0.0089, 0.02, 0.5, None])
def test_bits_are_those_of_comfyuis_kernel(device, dtype, scale):
    from comfy_kitchen import quantize_per_tensor_fp8

    generator = torch.Generator(device).manual_seed(0)
    x = (torch.randn(64, 3072, device=device, generator=generator) * 3).to(dtype)
    told = torch.tensor(1.0 if scale is None else scale, device=device)
    expected = quantize_per_tensor_fp8(x, told, torch.float8_e4m3fn)
    found = to_float8(x, None if scale is None else told)
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
