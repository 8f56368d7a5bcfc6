"""Has a model loaded by the ranks of a pool, which is started for it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from parallel_runtime.requests.requests import Load, Loaded

from ..gpus import find_machine, remember
from ..launch import resolve_devices
from .keeper import Keeper
from .loaded_models import LoadedModels
from .read_ahead import begin_reading
from .requests import ModelRequest
from .submission import Callbacks, Reply, ShouldCancel, Submission
from .survey import surveyed


def begin(path: str, keeper: Keeper, should_cancel: ShouldCancel) -> None:
    """See `PoolClient.begin`."""
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
