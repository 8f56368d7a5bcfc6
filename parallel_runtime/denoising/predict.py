"""The transformer as the loop sees it: calls in ComfyUI's convention, spread over the batch axes of the mesh."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..mesh.agreement import agreed_dtype, failing_at_the_next_vote
from ..mesh.mesh import Layout, Mesh
from ..networks.network import Network
from ..networks.shares import gather_batch, share_of_batch, some_have_no_rows
from ..requests.conditioning import BRANCHES, OPTIONS, Conditioning
from ..requests.patches import Attached, Patch


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


@dataclass
class Predictor:
    """Runs calls on the ranks of one mesh. Every rank of the mesh holds the full inputs and gets the full outputs."""

    transformer: Network
    mesh: Mesh
    joined: bool = True  # calls go through one forward where they can, see `merge`. It takes the memory of both
    # Such calls have gone well. In the first one the ranks agree on that, as a model finds what is wrong with a branch
    # by computing it, which another rank may have.
    tried: bool = False

    def __call__(self, calls: Sequence[Call]) -> list[torch.Tensor]:
        """Predictions, one per call, in the shape of the latent part of its x and in the type that the network gives.
        All items of all calls form one list, which is cut into contiguous shares along the batch axes: so the two CFG
        branches land on different ranks even where their texts differ in length. Calls that are joined come in
        ComfyUI's order, the last one first: in a product's last bits a row's place counts."""
        return self._in_order(calls[::-1])[::-1] if self.joined else self._in_order(calls)

    def _in_order(self, calls: Sequence[Call]) -> list[torch.Tensor]:
        self.transformer.set_mesh(self.mesh)
        if self.transformer.rows_together or any(call.conditioning.together for call in calls):
            whole = [self._forward(call) for call in (merge(calls) if self.joined else calls)]
            return list(torch.cat(whole).split([call.batch for call in calls]))
        total, at_once = sum(call.batch for call in calls), _rows_at_once(calls)
        with nullcontext() if self.tried else failing_at_the_next_vote(self.mesh.batch):
            outputs = [self._forward(call) for call in self._own_calls(calls, at_once)]
        self.tried = True
        local = torch.cat(outputs) if outputs else None
        # A rank whose share is empty computes nothing, but joins the gather: every rank must.
        if some_have_no_rows(total, self.mesh, at_once):
            x = calls[0].x
            dtype = agreed_dtype(None if local is None else local.dtype, self.mesh.batch, x.device)
            if local is None:
                local = x.new_empty((0, *self.transformer.output_shape(tuple(x.shape))[1:]), dtype=dtype)
        assert local is not None
        gathered = gather_batch(local, total, self.mesh, at_once)
        return list(gathered.split([call.batch for call in calls]))

    def _own_calls(self, calls: Sequence[Call], at_once: int) -> list[Call]:
        """This rank's share, row by row where the network has no graph of several rows yet and one of one row."""
        own = own_calls(calls, self.mesh, self.joined)
        rows = max((call.batch for call in own), default=0) // at_once
        if own and self.transformer.rows_go_apart(rows, begins=not self.tried):
            return [select(call, row, row + at_once) for call in own for row in range(0, call.batch, at_once)]
        return own

    def _forward(self, call: Call) -> torch.Tensor:
        return self.transformer.predict(call.x, call.timestep, call.conditioning.arguments)


def own_calls(calls: Sequence[Call], mesh: Layout, joined: bool = True) -> list[Call]:
    """This rank's share of the items of all calls, merged where it can be; nothing where there are too few items."""
    start, stop = share_of_batch(sum(call.batch for call in calls), mesh, _rows_at_once(calls))
    own, first = [], 0
    for call in merge(calls) if joined else calls:
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
        merged.append(_joined(merged.pop(), call) if merged and _alike(merged[-1], call) else call)
    return merged


def _joined(one: Call, other: Call) -> Call:
    """The rows of both, which are alike."""
    shared, counterparts = one.conditioning.shared, other.conditioning.arguments
    arguments = {
        name: value if name in shared else _join(value, counterparts[name], one.batch, other.batch)
        for name, value in one.conditioning.arguments.items()
    }
    if branches := arguments.get(OPTIONS, {}).get(BRANCHES):
        both = [*branches, *counterparts[OPTIONS][BRANCHES]]
        arguments[OPTIONS] = {**arguments[OPTIONS], BRANCHES: both}
    return Call(torch.cat([one.x, other.x]), torch.cat([one.timestep, other.timestep]), Conditioning(arguments, shared))


def select(call: Call, low: int, high: int) -> Call:
    """Items low to high of a call."""
    if (low, high) == (0, call.batch):
        return call
    rows = call.conditioning.rows(low, high, call.batch)
    return replace(call, x=call.x[low:high], timestep=call.timestep[low:high], conditioning=rows)


def _alike(one: Call, other: Call) -> bool:
    """Whether their rows may go through one forward: ComfyUI's rule; and options differ by nothing but the branch."""
    given, counterparts = one.conditioning.arguments, other.conditioning.arguments
    shared = one.conditioning.shared
    if given.keys() != counterparts.keys() or shared != other.conditioning.shared:
        return False
    if (BRANCHES in given.get(OPTIONS, {})) != (BRANCHES in counterparts.get(OPTIONS, {})):
        return False
    return all(
        _same(_of_any_branch(name, value), _of_any_branch(name, counterparts[name]))
        if name in shared
        else _have_like_rows(value, counterparts[name], (one.batch, other.batch))
        for name, value in given.items()
    )


def _of_any_branch(name: str, value: Any) -> Any:
    return {key: entry for key, entry in value.items() if key != BRANCHES} if name == OPTIONS else value


def _same(one: Any, other: Any) -> bool:
    """Whether two arguments for all rows are one; of what is no plain data it is not known."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one is other or (one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, Patch):
        return replace(one, values={}) == replace(other, values={}) and _same(dict(one.values), dict(other.values))
    return one is other or (isinstance(one, bool | int | float | str | Attached) and bool(one == other))


def _have_like_rows(one: Any, other: Any, batches: tuple[int, int]) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.ndim > 0 and one.shape[1:] == other.shape[1:]
    if isinstance(one, list) and isinstance(other, list):  # reference latents, with a row for each of the batch
        shapes = [[each.shape for each in several if isinstance(each, torch.Tensor)] for several in (one, other)]
        rows = [[(batch, *shape[1:]) for shape in shapes[0]] for batch in batches]
        return shapes == rows and len(shapes[0]) == len(one) and len(shapes[1]) == len(other)
    return not any(isinstance(each, list | tuple | dict) for each in (one, other)) and bool(one == other)


def _join(one: Any, other: Any, batch: int, other_batch: int) -> Any:
    if isinstance(one, list):
        return [_join(*pair, batch, other_batch) for pair in zip(one, other, strict=True)]
    if not isinstance(one, torch.Tensor):
        return one
    return torch.cat([one.expand(batch, *one.shape[1:]), other.expand(other_batch, *other.shape[1:])])
