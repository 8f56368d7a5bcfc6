"""The transformer as the loop sees it: calls in ComfyUI's convention, spread over the batch axes of the mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..mesh.mesh import Layout, Mesh
from ..networks.batch import gather_batch, share_of_batch
from ..networks.diffusers.spec import ModelSpec
from ..networks.parallel_transformer import ParallelTransformer
from ..requests.conditioning import Conditioning


@dataclass(frozen=True)
class Call:
    """One call of the transformer: x (B, C, ...), timestep (B,) float32 in ComfyUI's convention, conditioning."""

    x: torch.Tensor
    timestep: torch.Tensor
    conditioning: Conditioning

    @property
    def batch(self) -> int:
        """Items in this call."""
        return self.x.shape[0]


@dataclass(frozen=True)
class Predictor:
    """Runs calls on the ranks of one mesh. Every rank of the mesh holds the full inputs and gets the full outputs."""

    transformer: ParallelTransformer
    spec: ModelSpec
    mesh: Mesh

    def __call__(self, calls: Sequence[Call]) -> list[torch.Tensor]:
        """Predictions, one per call, in the shape of the latent part of its x and in the model's dtype.

        All items of all calls form one list, which is cut into contiguous shares along the batch axes: so the two
        CFG branches land on different ranks even where their texts differ in length.
        """
        self.transformer.set_mesh(self.mesh)
        total = sum(call.batch for call in calls)
        outputs = [self._forward(call) for call in own_calls(calls, self.mesh)]
        # A rank whose share is empty computes nothing, but joins the gather: every rank must.
        local = torch.cat(outputs) if outputs else self._no_rows(calls[0])
        gathered = gather_batch(local, total, self.mesh)
        return list(gathered.split([call.batch for call in calls]))

    def _forward(self, call: Call) -> torch.Tensor:
        return self.transformer.predict(call.x, call.timestep, call.conditioning.arguments)

    def _no_rows(self, call: Call) -> torch.Tensor:
        shape = self.spec.adapter.output_shape(tuple(call.x.shape), self.transformer.config)
        return call.x.new_empty((0, *shape[1:]))


def own_calls(calls: Sequence[Call], mesh: Layout) -> list[Call]:
    """This rank's share of the items of all calls, merged where it can be; nothing where there are too few items."""
    start, stop = share_of_batch(sum(call.batch for call in calls), mesh)
    own, first = [], 0
    for call in merge(calls):
        low, high = max(start - first, 0), min(stop - first, call.batch)
        if low < high:
            own.append(select(call, low, high))
        first += call.batch
    return own


def merge(calls: Sequence[Call]) -> list[Call]:
    """Join neighbouring calls whose conditionings have equal shapes: one larger forward instead of two small ones."""
    merged: list[Call] = []
    for call in calls:
        if merged and _alike(merged[-1].conditioning.arguments, call.conditioning.arguments):
            previous = merged.pop()
            call = Call(
                torch.cat([previous.x, call.x]),
                torch.cat([previous.timestep, call.timestep]),
                Conditioning(
                    {
                        name: _join(value, call.conditioning.arguments[name], previous.batch, call.batch)
                        for name, value in previous.conditioning.arguments.items()
                    }
                ),
            )
        merged.append(call)
    return merged


def select(call: Call, low: int, high: int) -> Call:
    """Items low to high of a call."""
    if (low, high) == (0, call.batch):
        return call
    arguments = {name: _slice(value, low, high, call.batch) for name, value in call.conditioning.arguments.items()}
    return replace(call, x=call.x[low:high], timestep=call.timestep[low:high], conditioning=Conditioning(arguments))


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    if one.keys() != other.keys():
        return False
    for name, value in one.items():
        counterpart = other[name]
        if isinstance(value, torch.Tensor) and isinstance(counterpart, torch.Tensor):
            if value.shape[1:] != counterpart.shape[1:] or value.ndim == 0:
                return False
        elif isinstance(value, list) or isinstance(counterpart, list) or value != counterpart:
            return False
    return True


def _join(one: Any, other: Any, batch: int, other_batch: int) -> Any:
    if not isinstance(one, torch.Tensor):
        return one
    return torch.cat([one.expand(batch, *one.shape[1:]), other.expand(other_batch, *other.shape[1:])])


def _slice(value: Any, low: int, high: int, batch: int) -> Any:
    if isinstance(value, list):
        return [_slice(item, low, high, batch) for item in value]
    if isinstance(value, torch.Tensor) and value.ndim and value.shape[0] == batch:
        return value[low:high]
    return value
