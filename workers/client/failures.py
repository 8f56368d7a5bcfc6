"""What the failure of a job is to whoever asked for it."""

from __future__ import annotations

import logging

from parallel_runtime.errors import OutOfMemoryError, ParallelError, PoolError, PoolLostError
from parallel_runtime.said import said

from ..launch import PoolSpec
from ..wire.error_info import revive
from ..wire.protocol import Failed

log = logging.getLogger("parallel_dit")


def explain(failed: Failed, spec: PoolSpec) -> ParallelError:
    """The error to raise. Where memory ran out, it names devices of the pool on which it did not."""
    error = revive(failed.error)
    if failed.unbegun and not failed.pool_alive:
        return PoolLostError(error.cause, error.fix)
    if failed.error.traceback and isinstance(error, PoolError):
        log.error("Parallel DiT, rank %d:\n%s", failed.rank, failed.error.traceback)
    if isinstance(error, OutOfMemoryError) and failed.fits:
        devices = ",".join(str(spec.devices[rank]) for rank in failed.fits)
        smaller = devices if spec.device_type == "cuda" else f"cpu:{len(failed.fits)}"
        return OutOfMemoryError(
            error.cause, said("It fits on the others: set devices to {smaller} in Parallel Config.", smaller=smaller)
        )
    return error
