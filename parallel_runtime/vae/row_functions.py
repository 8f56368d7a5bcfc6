"""PyTorch's functions over tensors of which each rank has some rows: what a VAE's forward calls, unchanged.

Convolutions that pad along the rows, and paddings, take the neighbours' rows where the picture goes on, and pad where
it ends. Group norms add up over the ranks. All else is local: it works on channels, frames or single pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from ..acceleration.channels_last import FusedFunctions
from .families import Half
from .rows import Rows

_CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d, torch.cudnn_convolution)
_SOME = 16  # convolutions from one call of `now_and_then` to the next


class RowFunctions(FusedFunctions):
    """Inside, tensors with rows are this rank's share, and `now_and_then` is called by all ranks before the same
    convolutions. Functions of an unknown `half` stay PyTorch's; for `fused` see `run_half`."""

    def __init__(self, half: Half | None, rows: Rows, now_and_then: Callable[[], None], fused: bool):
        super().__init__(fused and half is not None)
        self._rows, self._now_and_then, self._convolutions = rows, now_and_then, 0
        self._noise = half is not None and half.noise
        if rows.shared:
            self._known |= {torch.cudnn_convolution: self._over_border, F.pad: self._pad}
            self._known[torch.group_norm] = self._group_norm

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function in _CONVOLUTIONS:
            self._convolutions += 1
            if self._convolutions % _SOME == 0:
                self._now_and_then()
        if self._noise and function in (torch.randn, torch.randn_like):
            return self._drawn(function, args, dict(kwargs or {}))
        return super().__torch_function__(function, types, args, kwargs)

    def _without_bias(self, function: Any, given: dict[str, Any]) -> Any:
        return self._over_border(function, given) if self._rows.shared else function(**given)

    def _over_border(self, function: Any, given: dict[str, Any]) -> torch.Tensor:
        """A convolution: of all rows as they are, and of those at the borders anew when the neighbours' have come."""
        x, weight = given.pop("input"), given.pop("weight")
        dims = weight.ndim - 2
        padding = _each(given.pop("padding", 0), dims)
        stride, dilation = (_each(given.get(name, 1), dims)[-2] for name in ("stride", "dilation"))
        rows = padding[-2]
        if function is torch.cudnn_convolution:
            given = {"allow_tf32": True, "benchmark": False, "deterministic": False} | given

        def convolve(part: torch.Tensor, rows: int) -> torch.Tensor:
            return function(part, weight, padding=(*padding[:-2], rows, padding[-1]), **given)

        if not rows:
            return convolve(x, 0)
        own, reach = x.shape[-2], dilation * (weight.shape[-2] - 1)
        if own % stride or (own + 2 * rows - reach - 1) // stride + 1 != own // stride:
            kernel = list(weight.shape)
            raise NotImplementedError(f"{own} rows and a kernel of {kernel}, by {rows} padded, {stride} apart")
        if stride != 1 or own < 2 * rows:
            x, ends = self._bordered(x, rows, rows)
            return convolve(F.pad(x, (0, 0, *ends)), 0)
        wait = self._rows.border(x, rows, rows)
        done = convolve(x, rows)
        above, below = wait()
        if above is not None:
            done.narrow(-2, 0, rows).copy_(convolve(torch.cat((above, x.narrow(-2, 0, 2 * rows)), -2), 0))
        if below is not None:
            edge = torch.cat((x.narrow(-2, own - 2 * rows, 2 * rows), below), -2)
            done.narrow(-2, own - rows, rows).copy_(convolve(edge, 0))
        return done

    def _pad(self, function: Any, given: dict[str, Any]) -> torch.Tensor:
        x, pad = given.pop("input"), list(given.pop("pad"))
        if x.ndim < 4 or len(pad) < 4 or not any(pad[2:4]):
            return function(x, pad, **given)
        x, pad[2:4] = self._bordered(x, pad[2], pad[3])
        return function(x, pad, **given)

    def _bordered(self, x: torch.Tensor, above: int, below: int) -> tuple[torch.Tensor, tuple[int, int]]:
        """x with so many rows of the neighbours, and how many are to be padded, as the picture ends there."""
        first, last = self._rows.border(x, above, below)()
        parts = [part for part in (first, x, last) if part is not None]
        return torch.cat(parts, -2), (above if first is None else 0, below if last is None else 0)

    def _group_norm(self, function: Any, given: dict[str, Any]) -> torch.Tensor:
        """Where no kernel takes it by a batch norm with given numbers: a single pass, which rounds once."""
        x, groups = given["input"], given["num_groups"]
        if self._takes(x) or not self._rows.shared:
            return super()._group_norm(function, given)
        batch, channels = x.shape[:2]
        of_group = channels // groups
        grouped = x.reshape(batch, groups, -1)
        sums, lengths = (each(grouped, dim=2, dtype=torch.float64) for each in (torch.sum, torch.linalg.vector_norm))
        counts = torch.full_like(sums, grouped.shape[2])
        total, squares, count = self._rows.add(torch.stack((sums, lengths**2, counts)))
        mean = total / count
        variance = (squares / count - mean * mean).clamp_(min=0)
        mean, variance = (each.float().repeat_interleave(of_group, 1).reshape(-1) for each in (mean, variance))
        affine = given.get("weight"), given.get("bias")
        weight, bias = (None if each is None else each.float().repeat(batch) for each in affine)
        rows = x.reshape(1, batch * channels, *x.shape[2:])
        return F.batch_norm(rows, mean, variance, weight, bias, eps=given.get("eps", 1e-5)).reshape(x.shape)

    def _of_all(self, sums: torch.Tensor, rows: int) -> tuple[torch.Tensor, int]:
        whole = sum(self._rows.shares_of(rows))
        return self._rows.add(sums), whole

    def _drawn(self, function: Any, args: tuple[Any, ...], given: dict[str, Any]) -> torch.Tensor:
        """Noise in the order of a picture, however it lies in memory: every rank draws all, and keeps its rows."""
        first = args[0]
        like = isinstance(first, torch.Tensor)
        size = list(first.shape if like else first if isinstance(first, Iterable) else args)
        size[-2] = sum(self._rows.shares_of(size[-2]))
        return self._rows.cut(function(first.new_empty(size) if like else size, **given))


def _each(value: int | Iterable[int], dims: int) -> tuple[int, ...]:
    """One number for each dimension."""
    return (value,) * dims if isinstance(value, int) else tuple(value)
