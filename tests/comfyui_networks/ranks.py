"""What one rank does in the tests of cut networks: each call whole, then with the tokens shared out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from parallel_runtime.attention.kernels import KERNELS
from parallel_runtime.config import ParallelPlan
from parallel_runtime.mesh.mesh import build_mesh
from parallel_runtime.networks import modulation
from parallel_runtime.networks.block_attention import BlockAttention
from parallel_runtime.networks.comfyui.comfy_code import use_comfyui
from parallel_runtime.networks.comfyui.prepared_network import ask_the_split
from parallel_runtime.networks.cut_blocks import cut_blocks
from parallel_runtime.networks.facts import describe_network, unknown_blocks
from parallel_runtime.networks.modulation import ReadyLayer
from parallel_runtime.networks.tables.comfyui import find_network
from parallel_runtime.networks.token_split import TokenSplit
from tests.unwritten_memory import fill_with_nan

MODULATED = {
    "flux", "qwen-image", "qwen-image layered", "mage-flow", "hidream", "lens", "sd3.5 large", "sd3.5 medium",
    "auraflow", "lumina 2", "omnigen 2", "boogu", "hunyuan3d 2", "hunyuan video", "hunyuan video further inputs",
    "hunyuan video 1.5", "hunyuan image", "kandinsky 5", "cogvideox",
}  # fmt: skip
"""Networks whose blocks have modulation layers that are shared out."""


class Watched(BlockAttention):
    """Remembers how wide the heads are whose attention goes over all ranks' tokens."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.widths: set[int] = set()

    def __call__(self, function: Any, q: torch.Tensor, k: Any, v: Any, heads: int, *args: Any, **kwargs: Any) -> Any:
        if self.split.streams is not None:
            self.widths.add(q.shape[2] // heads if q.ndim == 3 else q.shape[3])
        return super().__call__(function, q, k, v, heads, *args, **kwargs)


def compare(rank: int, world_size: int, comfyui: str, names: list[str], plans: list[list[int]]) -> dict[str, Any]:
    """{"differences": {network: {"plan, call": largest over the result's own scale}}, "classes": those compared}.

    Args:
        plans: (ulysses, ring) of each.
    """
    use_comfyui(comfyui, {"cpu": True})
    from tests.comfyui_networks.catalogue import TINY, call

    torch.set_grad_enabled(False)
    fill_with_nan()  # other ranks' rows of a rank's tokens, padding on the wire
    meshes = {
        f"ulysses {ulysses} ring {ring}": build_mesh(ParallelPlan(ulysses=ulysses, ring=ring), rank, world_size)
        for ulysses, ring in plans
    }
    found: dict[str, dict[str, float]] = {}
    classes = set()
    for name in names:
        made = TINY[name]()
        data = find_network(type(made.network))
        assert data is not None, name
        classes.add(f"{type(made.network).__module__}:{type(made.network).__qualname__}")
        assert unknown_blocks(made.network, data.blocks) == "", name
        expected = {each: call(made, each) for each in made.calls}
        described = describe_network(made.network, 1, 2)
        split = TokenSplit(next(iter(meshes.values())))
        assert isinstance(attrgetter(data.heads)(made.network), int), name
        ask_the_split(data.attention_in)
        cut_blocks(made.network, data.blocks, split)
        attention = split.attention = Watched(KERNELS["sdpa"], split)
        modulated = [layer for layer in made.network.modules() if isinstance(layer, ReadyLayer)]
        assert bool(modulated) == (name in MODULATED), name
        found[name] = {}
        for plan, mesh in meshes.items():
            split.set_mesh(mesh)
            for each, whole in expected.items():
                split.modulation.begin(mesh)
                with (
                    mock.patch.object(split, "running", wraps=split.running) as running,
                    mock.patch.object(modulation, "_own", wraps=modulation._own) as computed,
                ):
                    shared = call(made, each, attention)
                _assert_shared_out(modulated, [each.args[0] for each in computed.call_args_list])
                split.end()
                assert running.called != (each in made.whole), (name, each)
                assert not split.pending
                found[name][f"{plan}, {each}"] = _difference(shared, whole)
        assert described.head_dim == max(attention.widths), name
        dist.barrier()
    return {"differences": found, "classes": sorted(classes)}


def _assert_shared_out(layers: Sequence[ReadyLayer], own: Sequence[ReadyLayer]) -> None:
    """Every layer was computed by one rank, and all have them now."""
    assert all(layer.ready is not None for layer in layers)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, [layers.index(each) for each in own])
    assert sorted(chain.from_iterable(gathered)) == list(range(len(layers)))


def _difference(shared: torch.Tensor, whole: torch.Tensor) -> float:
    return float((shared - whole).abs().max() / whole.abs().max())
