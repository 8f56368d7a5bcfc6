"""A rank that fails within a run of a VAE, where a file says "FAULT RANK CALL": at which convolution, -1 at the end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from parallel_runtime.vae.row_functions import RowFunctions
from parallel_runtime.vae.rows import Rows
from workers.rank import start

_over_border, _gather = RowFunctions._over_border, Rows.gather


def fail_at(call: int, rank: int) -> None:
    """Raise what the file says, if it is for this rank and call: once."""
    file = Path(os.environ["TEST_VAE_FAULT"])
    try:
        fault, *place = file.read_text().split()
    except FileNotFoundError:
        return
    if [str(rank), str(call)] == place:
        file.unlink()
        raise torch.OutOfMemoryError("planted") if fault == "memory" else ValueError("planted fault")


def over_border(self: RowFunctions, function: Any, given: dict[str, Any]) -> torch.Tensor:
    """A convolution; counted from 0."""
    self.calls = getattr(self, "calls", -1) + 1
    fail_at(self.calls, self._rows.rank)
    return _over_border(self, function, given)


def gather(self: Rows, x: torch.Tensor, to: int | None = None) -> torch.Tensor | None:
    """The run's end where all is gathered to one rank."""
    whole = _gather(self, x, to)
    if to is not None:
        fail_at(-1, self.rank)
    return whole


if __name__ == "__main__":
    RowFunctions._over_border = over_border  # type: ignore[method-assign]
    Rows.gather = gather  # type: ignore[method-assign]
    start.main()
