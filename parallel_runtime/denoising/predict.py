"""The transformer as the loop sees it: calls in ComfyUI's convention, spread over the batch axes of the mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..mesh.agreement import agreed_dtype
from ..mesh.mesh import Layout, Mesh
from ..networks.batch import gather_batch, share_of_batch, some_have_no_rows
from ..networks.network import Network
from ..requests.conditioning import Conditioning

_NESTED = (list, tuple, dict)


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

    transformer: Network
    mesh: Mesh

    def __call__(self, calls: Sequence[Call]) -> list[torch.Tensor]:
        """Predictions, one per call, in the shape of the latent part of its x and in the type that the network gives.

        All items of all calls form one list, which is cut into contiguous shares along the batch axes: so the two
        CFG branches land on different ranks even where their texts differ in length.
        """
        self.transformer.set_mesh(self.mesh)
        if self.transformer.rows_together or any(call.conditioning.together for call in calls):
            return [self._forward(call) for call in calls]
        total, at_once = sum(call.batch for call in calls), _rows_at_once(calls)
        outputs = [self._forward(call) for call in own_calls(calls, self.mesh)]
        local = torch.cat(outputs) if outputs else None
        # A rank whose share is empty computes nothing, but joins the gather: every rank must.
        if some_have_no_rows(total, self.mesh, at_once):
            dtype = agreed_dtype(None if local is None else local.dtype, self.mesh.batch, calls[0].x.device)
            local = self._no_rows(calls[0], dtype) if local is None else local
        assert local is not None
        gathered = gather_batch(local, total, self.mesh, at_once)
        return list(gathered.split([call.batch for call in calls]))

    def _forward(self, call: Call) -> torch.Tensor:
        return self.transformer.predict(call.x, call.timestep, call.conditioning.arguments)

    def _no_rows(self, call: Call, dtype: torch.dtype) -> torch.Tensor:
        shape = self.transformer.output_shape(tuple(call.x.shape))
        return call.x.new_empty((0, *shape[1:]), dtype=dtype)


def own_calls(calls: Sequence[Call], mesh: Layout) -> list[Call]:
    """This rank's share of the items of all calls, merged where it can be; nothing where there are too few items."""
    start, stop = share_of_batch(sum(call.batch for call in calls), mesh, _rows_at_once(calls))
    own, first = [], 0
    for call in merge(calls):
        low, high = max(start - first, 0), min(stop - first, call.batch)
        if low < high:
            own.append(select(call, low, high))
        first += call.batch
    return own


def _rows_at_once(calls: Sequence[Call]) -> int:
    """Of all calls: those of one latent have videos of as many frames."""
    return calls[0].conditioning.rows_at_once(calls[0].batch)


def merge(calls: Sequence[Call]) -> list[Call]:
    """Join neighbouring calls whose conditionings have equal shapes: one larger forward instead of two small ones."""
    merged: list[Call] = []
    for call in calls:
        if merged and _alike(merged[-1].conditioning, call.conditioning):
            previous = merged.pop()
            call = Call(
                torch.cat([previous.x, call.x]),
                torch.cat([previous.timestep, call.timestep]),
                Conditioning(
                    {
                        name: value
                        if name in call.conditioning.shared
                        else _join(value, call.conditioning.arguments[name], previous.batch, call.batch)
                        for name, value in previous.conditioning.arguments.items()
                    },
                    call.conditioning.shared,
                ),
            )
        merged.append(call)
    return merged


def select(call: Call, low: int, high: int) -> Call:
    """Items low to high of a call."""
    if (low, high) == (0, call.batch):
        return call
    rows = call.conditioning.rows(low, high, call.batch)
    return replace(call, x=call.x[low:high], timestep=call.timestep[low:high], conditioning=rows)


def _alike(one: Conditioning, other: Conditioning) -> bool:
    """Whether their rows may go through one forward."""
    if one.arguments.keys() != other.arguments.keys() or one.shared != other.shared:
        return False
    for name, value in one.arguments.items():
        counterpart = other.arguments[name]
        if isinstance(value, torch.Tensor) and isinstance(counterpart, torch.Tensor):
            if name in one.shared:
                if value.shape != counterpart.shape or not torch.equal(value, counterpart):
                    return False
            elif value.shape[1:] != counterpart.shape[1:] or value.ndim == 0:
                return False
        elif isinstance(value, _NESTED) or isinstance(counterpart, _NESTED) or value != counterpart:
            return False
    return True


def _join(one: Any, other: Any, batch: int, other_batch: int) -> Any:
    if not isinstance(one, torch.Tensor):
        return one
    return torch.cat([one.expand(batch, *one.shape[1:]), other.expand(other_batch, *other.shape[1:])])
