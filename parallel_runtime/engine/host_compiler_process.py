"""The compiler of a rank for ComfyUI's networks, a process: it calls single blocks, and the cache gets the graphs.

The network is loaded by the rank's code, with as few blocks as are called, and only these are moved to the device. A
graph knows nothing of mesh and exchange (networks/comfyui/attention_operator.py), so attention is none here: numbers of
the right shape.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import nn

from ..acceleration.compiler_messages import Call, HostToCompile
from ..attention.kernels import KERNELS
from ..errors import UnsupportedModelError
from ..loading.held_network import load_network
from ..loading.host_file import open_host_file
from ..mesh.mesh import single_rank_mesh
from ..networks.comfyui.attention import HostAttention
from ..networks.comfyui.attention_operator import attending
from ..networks.comfyui.block_examples import Example, made
from ..networks.comfyui.compiled_cut import CompiledCut
from ..networks.comfyui.cut_blocks import CutBlock
from ..networks.comfyui.host_code import use_comfyui
from ..networks.comfyui.networks import find_network, name_of
from ..networks.comfyui.prepared_network import prepare_network
from ..networks.comfyui.token_split import TokenSplit
from .compiler_loop import serve

_FEWEST = 2
"""Blocks of a list that are read at least: ComfyUI's detection looks at a second one here and there."""


@dataclass
class Loader:
    """Loads as much of a network as is called."""

    model: HostToCompile
    loaded: Loaded | None = None

    def load(self, examples: Sequence[Example]) -> Loaded:
        """The network with the blocks of these calls."""
        if self.loaded is None or not self.loaded.has(examples):
            self.loaded = self._load(examples)
        return self.loaded

    def _load(self, examples: Sequence[Example]) -> Loaded:
        model, file = self.model, open_host_file(self.model.path)
        weights = getattr(torch, model.weights) if model.weights else None
        try:
            network = load_network(file, weights, model.fast_float8, _first_blocks(examples))
        except UnsupportedModelError:  # its detection wants all
            network = load_network(file, weights, model.fast_float8)
        if name_of(type(network)) != model.network:
            network = load_network(file, weights, model.fast_float8)
        data = find_network(type(network))
        assert data is not None
        split = TokenSplit(single_rank_mesh())
        prepare_network(network, data, split)
        attention = HostAttention(KERNELS["sdpa"], split)
        cut = CompiledCut(network, split, attention)
        cut.use(True)
        return Loaded(network, attention, cut)


@dataclass(frozen=True)
class Loaded:
    """A network on the CPU, cut as the rank's is."""

    network: nn.Module
    attention: HostAttention
    cut: CompiledCut

    def has(self, examples: Sequence[Example]) -> bool:
        """Whether the blocks of these calls are read."""
        paths = {path for path, _ in self.network.named_modules()}
        return all(example.path in paths for example in examples)


def main() -> None:
    """Process entry, see `serve`."""
    serve(HostToCompile, build, run)


def build(model: HostToCompile, device: torch.device) -> Loader:
    """What loads the rank's network, when calls are known."""
    use_comfyui(model.folder, {**model.options, "cpu": device.type == "cpu"})
    return Loader(model)


def _first_blocks(examples: Sequence[Example]) -> dict[str, int]:
    found: dict[str, int] = {}
    for example in examples:
        path, _, index = example.path.rpartition(".")
        found[path] = max(found.get(path, _FEWEST), int(index) + 1)
    return found


def run(loader: Loader, call: Call, device: torch.device) -> None:
    """Make the graphs of a call, by calling its blocks.

    Raises:
        RuntimeError: no block can be compiled.
    """
    examples = msgspec.convert(call.arguments, list[Example])
    loaded = loader.load(examples)
    for example in examples:
        block = loaded.network.get_submodule(example.path).to(device)
        cut: Any = block.forward
        assert isinstance(cut, CutBlock)
        args = made(example.args, device, loaded.attention)
        kwargs = made(example.kwargs, device, loaded.attention)
        modulated = cut.modulated_alone(args, kwargs) if example.modulated else contextlib.nullcontext()
        with attending(_attend_to_nothing), loaded.cut.compiling(), modulated:
            cut.compute(loaded.cut.run, args, kwargs)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    refused = loaded.cut.methods.refused
    if refused and len(refused) == len({type(loaded.network.get_submodule(each.path)).forward for each in examples}):
        raise RuntimeError("; ".join(refused.values()))


def _attend_to_nothing(
    function: Any,
    where: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: int,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **more: Any,
) -> torch.Tensor:
    batch, tokens = q.shape[0], q.shape[2 if skip_reshape else 1]
    width = q.shape[3] if skip_reshape else q.flatten(2).shape[2] // heads
    made = q.new_zeros((batch, tokens, heads, width))
    return made.transpose(1, 2) if skip_output_reshape else made.flatten(2)


if __name__ == "__main__":
    main()
