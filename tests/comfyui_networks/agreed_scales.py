"""What layers in nvfp4 without an `input_scale` round, of a rank's tokens, of which one rank has an outlier."""

from __future__ import annotations

from typing import Any

import torch

from parallel_runtime.config import ParallelPlan
from parallel_runtime.mesh.mesh import build_mesh
from parallel_runtime.networks.comfyui.comfy_code import use_comfyui
from parallel_runtime.networks.comfyui.prepared_network import agreeing_on_scales, find_scales
from parallel_runtime.networks.token_split import Streams, TokenSplit

TOKENS, WIDTH = 64, 64


def compare(rank: int, world_size: int, comfyui: str) -> dict[str, Any]:
    """{case: whether a rank's tokens are what they are among all}; "alone" is where ranks may run other layers,
    and "chosen" whether a network with experts is taken for one whose ranks run the same."""
    use_comfyui(comfyui, {"cpu": True})
    from comfy.quant_ops import QuantizedTensor

    torch.set_grad_enabled(False)
    torch.manual_seed(0)

    def rounded(rows: torch.Tensor) -> torch.Tensor:
        """As ComfyUI's layers have what they are given."""
        given: torch.Tensor = QuantizedTensor.from_float(rows, "TensorCoreNVFP4Layout", scale=None)
        return given.dequantize()

    weight = QuantizedTensor.from_float(torch.randn(WIDTH, WIDTH), "TensorCoreNVFP4Layout", scale="recalculate")
    layer = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    x = torch.randn(TOKENS, WIDTH).to(torch.bfloat16)
    x[-1, 3] = 80.0
    whole = rounded(x)

    split = TokenSplit(build_mesh(ParallelPlan(ulysses=world_size), rank, world_size))
    find_scales(layer, split)
    assert split.scales_by_input
    streams = Streams.share_out((TOKENS,), split.mesh)
    ((start, stop),) = streams.intervals()
    found = {"outside of blocks": torch.equal(rounded(x), whole)}
    for case, alike in (("agreed", True), ("alone", False)):
        split.layers_alike = alike
        with agreeing_on_scales(), split.running(streams, 1, x.device):
            found[case] = torch.equal(rounded(x[start:stop]), whole[start:stop])
    with split.running(streams, 1, x.device):
        found["behind"] = torch.equal(rounded(x[start:stop]), whole[start:stop])
    find_scales(torch.nn.ModuleDict({"experts": layer}), split)
    found["chosen"] = split.layers_alike
    return found
