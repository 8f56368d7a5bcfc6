"""The kernel that makes numbers of GGUF's blocks gives the bits of the pack ComfyUI-GGUF."""

from __future__ import annotations

import importlib

import pytest
import torch

from tests.comfyui_checkout import find_comfyui
from tests.host.find_host import find_gguf_pack

pytestmark = pytest.mark.gpu
KINDS = ["Q4_0", "Q5_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]


@pytest.fixture(scope="module")
def dequantize():
    """The pack's function: (bytes, type, shape) -> numbers in float16."""
    pytest.importorskip("gguf")
    comfyui = find_comfyui()
    pack = find_gguf_pack(comfyui) if comfyui is not None else None
    if pack is None:
        pytest.skip("ComfyUI-GGUF is not there: set COMFYUI_GGUF_PATH to it")
    from parallel_runtime.loading.gguf_pack import open_pack
    from parallel_runtime.networks.comfyui.comfy_code import use_comfyui

    use_comfyui(str(comfyui), {})
    package = open_pack(str(pack)).operations().__module__.rpartition(".")[0]
    return importlib.import_module(f"{package}.dequant").dequantize


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_gpu_kernel_gives_the_bits_of_the_packs_code(dequantize, kind, dtype):
    import gguf

    from parallel_runtime.networks.gguf_kernel import LAYOUTS, dequantise

    assert set(LAYOUTS) == set(KINDS)
    of = gguf.GGMLQuantizationType[kind]
    each, size = gguf.GGML_QUANT_SIZES[of]
    assert LAYOUTS[kind] == (each, size)
    rows, columns = 37, 5 * 256
    generator = torch.Generator("cuda").manual_seed(1)
    stored = torch.randint(256, (rows, columns // each, size), dtype=torch.uint8, device="cuda", generator=generator)
    # Halves of every size but NaN: scales of blocks, where each type has them.
    for place in {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(kind, (0,)):
        halves = torch.randn((rows, columns // each, 1), device="cuda", generator=generator).half() / 64
        stored[..., place : place + 2] = halves.view(torch.uint8)
    stored = stored.reshape(rows, -1)
    wanted = dequantize(stored, of, (rows, columns)).to(dtype)
    assert wanted.isfinite().all()
    assert torch.equal(dequantise(stored, kind, rows, columns, dtype), wanted)
