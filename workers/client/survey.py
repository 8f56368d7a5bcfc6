"""Before a load: the ranks tell what a model would take and what is free, and ComfyUI's own models may make room."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec

from parallel_runtime.requests.requests import Load, Survey, Surveyed

from .submission import Reply


def surveyed(load: Load, submit: Callable[[Survey], Reply], make_room: Callable[[int], None] | None) -> Load:
    """A load that knows what is free on the ranks' devices.

    Args:
        submit: asks the ranks.
        make_room: see PoolClient.load. It is asked for what the plan would have were all of a GPU free.

    Raises:
        ParallelError: as the load would.
        Cancelled: the artist stopped it.
    """

    def ask() -> Surveyed:
        answer = submit(Survey(load)).answer
        assert isinstance(answer, Surveyed)
        return answer

    seen = ask()
    if make_room is not None and seen.needs_bytes:
        make_room(seen.needs_bytes)
        seen = ask()
    assert load.machine is not None
    return msgspec.structs.replace(load, machine=replace(load.machine, free_bytes=seen.free_bytes))
