"""The compiler of a rank, a process: it runs the rank's calls on one block of each kind, and the cache gets the graphs.

Everything is made as the rank made it, by the same code, but for three things: blocks of one kind share the weights of
the first, which are zeros; the process groups have the ranks' names and sizes, and send nothing; and memory of peers is
memory of its own, which nobody writes to.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..acceleration.compiler_messages import Call, ToCompile, make, read_mesh
from ..acceleration.peer_memory import PeerBuffers
from ..acceleration.peer_sharing import PeerSharing
from ..loading.checkpoint import Checkpoint
from ..loading.weights import build_transformer
from ..mesh.mesh import Mesh, single_rank_mesh
from ..networks.diffusers.lean_imports import leave_out_unused_packages
from ..networks.diffusers.registry import find_by_name
from ..networks.diffusers.spec import ModelSpec
from ..networks.module_paths import first_blocks
from ..networks.parallel_transformer import ParallelTransformer, parallelize
from .compiler_loop import serve


def main() -> None:
    """Process entry, see `serve`."""
    leave_out_unused_packages()
    exchange = torch.library.Library("parallel_dit", "IMPL")
    exchange.impl("peer_attention", _attend_to_nobody, "CUDA")
    serve(ToCompile, build, run)


def build(model: ToCompile, device: torch.device) -> ParallelTransformer:
    """The rank's transformer, with the memory of one block of each kind."""
    spec = find_by_name(model.spec)
    module = build_transformer(_nowhere(spec, model.config))
    firsts = first_blocks(module, spec)
    others = {id(part) for block, first in firsts.items() if block is not first for part in block.modules()}
    for part in module.modules():
        if id(part) not in others:
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    zeros = torch.zeros(parameter.shape, dtype=getattr(torch, model.dtype), device=device)
                    part._parameters[name] = nn.Parameter(zeros, requires_grad=False)
    transformer = parallelize(
        module.eval(),
        spec,
        single_rank_mesh(),
        model.attention,
        compile=True,
        record=False,
        share=False,
        modulate=model.modulate,
    )
    for block, first in firsts.items():
        for mine, its in zip(block.modules(), first.modules(), strict=True):
            mine._parameters.update(its._parameters)
    module.to(device)  # the buffers
    if spec.prepare is not None:
        spec.prepare(module)
    return transformer


def run(transformer: ParallelTransformer, call: Call, device: torch.device) -> None:
    """Make the graphs of a call, by calling."""
    transformer.set_mesh(read_mesh(call.part, {name: _group(*group) for name, group in call.part.groups.items()}))
    transformer.exchange_through(_own_memory(transformer, call.peer_bytes))
    args, kwargs = make(call.arguments, device)
    transformer.call_at_once(*args, **kwargs)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _group(ranks: list[int], name: str) -> Any:
    """A group that sends nothing, of that name."""
    world: Any = dist.distributed_c10d._world
    if len(ranks) == dist.get_world_size() and dist.group.WORLD.group_name == name:  # type: ignore[union-attr]
        return dist.group.WORLD
    for group, known in world.pg_names.items():
        if known == name:
            return group
    world.group_count = int(name)  # groups are named by their number, and the ranks have made others before
    group = dist.new_group(ranks)
    if getattr(group, "group_name", None) != name:
        raise RuntimeError(f"a process group cannot be called {name}")
    return group


@dataclass(frozen=True)
class OwnMemory(PeerSharing):
    """Buffers of the sizes that the ranks have, in memory that nobody else knows.

    Args:
        memory: as large as that of the ranks.
    """

    memory: torch.Tensor

    def buffers(self, mesh: Mesh, lengths: tuple[int, ...], batch: int) -> PeerBuffers | None:
        """See PeerSharing."""
        if mesh.sequence is None:
            return None
        ranks = len(lengths)
        table = torch.zeros(3 * ranks + 1, dtype=torch.int64, device=self.device)
        return PeerBuffers(self.memory, torch.zeros(1 + ranks, dtype=torch.int64), table, mesh.sequence.group_name)


def _own_memory(transformer: ParallelTransformer, size: int | None) -> OwnMemory | None:
    if size is None:
        return None
    shape = transformer.peer_sharing()
    return OwnMemory(
        heads=shape.heads,
        head_dim=shape.head_dim,
        dtype=shape.dtype,
        device=shape.device,
        kernel=shape.kernel,
        memory=torch.empty(size, dtype=torch.uint8, device=shape.device),
    )


def _attend_to_nobody(
    queries: list[torch.Tensor], keys: Any, values: Any, norms: Any, eps: float, beside: Any, *more: Any
) -> torch.Tensor:
    """Takes the place of peer_attention, which would write to addresses of the ranks: memory of the right shape."""
    if beside:
        return beside[0].new_zeros((*beside[0].shape[:-1], beside[3].shape[0]))
    batch, _, heads, head_dim = queries[0].shape
    return queries[0].new_zeros((batch, sum(part.shape[1] for part in queries), heads, head_dim))


def _nowhere(spec: ModelSpec, config: dict[str, Any]) -> Checkpoint:
    """A checkpoint without files: only the transformer is built of it."""
    return Checkpoint(Path("compiler"), "diffusers", spec, config, {}, {}, "", (), {}, ())


if __name__ == "__main__":
    main()
