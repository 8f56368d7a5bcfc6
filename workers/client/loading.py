"""Has models loaded by the ranks of a pool, which is started for it, and knows which of them they have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import msgspec
import torch

from parallel_runtime.requests.requests import Load, Loaded, Survey, Surveyed

from ..launch import resolve_devices
from ..machine_facts import find_machine, remember
from .keeper import Keeper
from .node_requests import ModelRequest, Reply, Submission, Submit

MakeRoom = Callable[[int], None] | None  # gets the bytes that a GPU is about to take


@dataclass
class LoadedModels:
    """The one truth about a pool's memory on this side of the wire; every answer of the pool brings it up to date. A
    model that the ranks know may have left their devices, for another one or for ComfyUI; it comes back when used."""

    known: dict[str, tuple[ModelRequest, Loaded]] = field(default_factory=dict)
    """Those that the ranks know, as far as was heard, in the order of their loads: they forget what was not used for
    long. One that is taken out has to be loaded before it is used again."""
    held: Mapping[str, int] | None = None
    """Bytes on one rank's device by names of models and VAEs, as an answer told (`Finished`); None: not told yet."""


def load_model(model: ModelRequest, keeper: Keeper, submit: Submit, make_room: MakeRoom) -> Loaded:
    """Have the ranks load a model; see `PoolClient.load`."""
    ranks = resolve_devices(model.config, torch.cuda.device_count).world_size
    pool = keeper.start()
    machine = find_machine(pool.spec)
    config = model.config.to_mapping()
    request = Load(model.key, model.path, model.dtype, config, ranks, machine, model.comfyui, model.size)
    if machine.memory_bytes:
        request = surveyed(request, lambda asked: submit(Submission(request=asked)), make_room)
    answer = submit(Submission(request=request)).answer
    assert isinstance(answer, Loaded)
    if answer.machine is not None and answer.machine != machine:
        remember(pool.spec, answer.machine)
    return answer


def surveyed(load: Load, submit: Callable[[Survey], Reply], make_room: MakeRoom) -> Load:
    """A load that knows what is free on the ranks' devices, after ComfyUI's own models may have made room."""

    def ask() -> Surveyed:
        answer = submit(Survey(load)).answer
        assert isinstance(answer, Surveyed)
        return answer

    seen = ask()
    if make_room is not None and seen.needs_bytes:
        make_room(seen.needs_bytes)
        seen = ask()
    assert load.machine is not None
    return msgspec.structs.replace(load, machine=replace(load.machine, free_each=seen.free_each))
