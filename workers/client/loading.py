"""Has a model loaded by the ranks of a pool, which is started for it; its file comes to memory meanwhile."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import replace

import msgspec
import psutil
import torch

from parallel_runtime.errors import ParallelError
from parallel_runtime.loading.files import find_files
from parallel_runtime.requests.requests import Load, Loaded, Survey, Surveyed

from ..gpus import find_machine, remember
from ..launch import resolve_devices
from .keeper import Keeper
from .loaded_models import LoadedModels
from .requests import ModelRequest
from .submission import Callbacks, Reply, ShouldCancel, Submission

_STEP = 128 << 10
"""Bytes that are asked for at a time. The kernel brings no more than a device reads ahead, and forgets the rest."""


def begin(path: str, keeper: Keeper, should_cancel: ShouldCancel) -> None:
    """Start the pool for a load of this file, which the system reads meanwhile; nothing is waited for."""
    if keeper.running is None:
        begin_reading(path)  # while the ranks start
    keeper.begin(should_cancel)


def load_model(
    model: ModelRequest,
    keeper: Keeper,
    models: LoadedModels,
    submit: Callable[[Submission], Reply],
    should_cancel: ShouldCancel,
    make_room: Callable[[int], None] | None,
) -> Loaded:
    """See `PoolClient.load`.

    Args:
        models: that the ranks know, and this one with them.
        submit: runs a request in the pool that `keeper` has.
    """
    model.check_files()
    ranks = resolve_devices(model.config, torch.cuda.device_count).world_size
    begin(model.path, keeper, should_cancel)
    pool = keeper.start(should_cancel)
    machine = find_machine(pool.spec)
    config = model.config.to_mapping()
    request = Load(
        model.key, model.path, model.dtype, config, ranks, machine, model.comfyui, model.patching, model.size
    )
    models.discard(model.key)
    callbacks = Callbacks(should_cancel=should_cancel)
    if machine.memory_bytes:
        request = surveyed(request, lambda asked: submit(Submission(request=asked, callbacks=callbacks)), make_room)
    answer = submit(Submission(request=request, callbacks=callbacks)).answer
    assert isinstance(answer, Loaded)
    if answer.machine is not None and answer.machine != machine:
        remember(pool.spec, answer.machine)
    models.add(model, answer)
    return answer


def surveyed(load: Load, submit: Callable[[Survey], Reply], make_room: Callable[[int], None] | None) -> Load:
    """A load that knows what is free on the ranks' devices, after ComfyUI's own models may have made room.

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


def begin_reading(path: str) -> threading.Thread:
    """Have the system read a model's files, at most half of the memory that is available, in a thread that ends by
    itself. What is cached already costs nothing; what is wrong with a file, the ranks will say."""
    thread = threading.Thread(target=_ask_for, args=(path,), name="parallel-dit-read-ahead", daemon=True)
    thread.start()
    return thread


def _ask_for(path: str) -> None:
    left = psutil.virtual_memory().available // 2
    with contextlib.suppress(ParallelError, OSError):
        for file in find_files(path).weights:
            with file.open("rb") as opened:
                size = min(left, os.fstat(opened.fileno()).st_size)
                for start in range(0, size, _STEP):
                    os.posix_fadvise(opened.fileno(), start, _STEP, os.POSIX_FADV_WILLNEED)
            left -= size
