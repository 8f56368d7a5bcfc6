"""The kernels between the convolutions of VAEs and U-Nets, against what they compute by PyTorch's functions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.comfyui_vaes import plain_kernels

pytestmark = pytest.mark.gpu
SHAPES = [(2, 96, 5, 7), (1, 512, 33, 40), (1, 96, 3, 17, 9), (2, 24, 1, 1, 1), (1, 1024, 2, 70, 3), (2, 2560, 4, 5)]


def make(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(1)
    last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    x = 3 * torch.randn(shape, generator=generator, device="cuda") + 1
    return x.to(dtype).contiguous(memory_format=last)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gpu_kernels_compute_what_pytorch_does(shape, dtype):
    from parallel_runtime.acceleration import channels_last_kernels

    x = make(shape, dtype)
    sums, wanted = channels_last_kernels.channel_sums(x), plain_kernels.channel_sums(x)
    assert torch.allclose(sums, wanted, rtol=1e-5, atol=1e-5 * x[0, 0].numel())

    if len(shape) == 4:
        twice = x.new_empty((shape[0], 2 * shape[2], 2 * shape[3], shape[1])).movedim(-1, 1)
        channels_last_kernels.double(x, twice)
        assert torch.equal(twice, F.interpolate(x, scale_factor=2.0))

    groups, weight, bias = 8, *torch.randn((2, shape[1]), device="cuda").to(dtype)
    of_groups = wanted.unflatten(2, (groups, -1)).sum(3)
    count = x[0].numel() // groups
    scale, shift = channels_last_kernels.finish(of_groups, count, weight, bias, 1e-6, shape[1])
    plain = torch.stack(plain_kernels.finish(of_groups, count, weight, bias, 1e-6, shape[1]))
    assert torch.allclose(torch.stack((scale, shift)), plain, rtol=1e-5)
    biased, plain = x.clone(), x.clone()
    channels_last_kernels.add_to_channels(biased, bias)
    plain_kernels.add_to_channels(plain, bias)
    assert torch.equal(biased, plain)

    for silu in (False, True):
        for name, numbers in (("scale_and_shift", (scale, shift)), ("divide_by_length", (scale[0].to(dtype), 9.5))):
            made, plain = torch.empty_like(x), torch.empty_like(x, dtype=torch.float32)
            getattr(channels_last_kernels, name)(x, made, *numbers, silu=silu)
            getattr(plain_kernels, name)(x, plain, *numbers, silu=silu)
            allowed = torch.finfo(dtype).eps * plain.abs() + 1e-5  # rounded once
            assert ((made.float() - plain).abs() <= allowed).all(), (name, silu)
