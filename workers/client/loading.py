"""Has models loaded by the ranks of a pool, which is started for it, and knows which of them they have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import msgspec
import torch

from parallel_runtime.requests.requests import Load, Loaded, Survey, Surveyed

from ..launch import resolve_devices
from ..machine_facts import find_machine, remember
from .keeper import Keeper
from .requests import ModelRequest, Reply, Submission, Submit

MakeRoom = Callable[[int], None] | None
"""Gets the bytes that a GPU is about to take."""


class LoadedModels:
    """The one truth about a pool's memory on this side of the wire; every answer of the pool brings it up to date. A
    model that the ranks know may have left their devices, for another one or for ComfyUI; it comes back when used."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """The pool is gone."""
        self._loaded: dict[str, tuple[ModelRequest, Loaded]] = {}
        self.held: Mapping[str, int] | None = None
        """Bytes on one rank's device by the names of models and VAEs, as an answer told; None: not told yet."""

    def knows(self, name: str) -> bool:
        """Whether the ranks know the model, as far as was heard: they forget those that were not used for long."""
        return name in self._loaded

    def bytes_of(self, name: str) -> int:
        """Bytes of its weights on one rank's device; models of the same weights have them in common."""
        return (self.held or {}).get(name, 0)

    def has_left(self, name: str) -> bool:
        """Whether its weights are known not to be on the devices."""
        return self.held is not None and name not in self.held

    def all(self) -> list[tuple[ModelRequest, Loaded]]:
        """Those that the ranks know, in the order of their loads. May be asked by any thread."""
        return list(self._loaded.values())

    def load(self, model: ModelRequest, keeper: Keeper, submit: Submit, make_room: MakeRoom) -> Loaded:
        """Have the ranks load a model; see `PoolClient.load`."""
        model.check_files()
        ranks = resolve_devices(model.config, torch.cuda.device_count).world_size
        pool = keeper.start()
        machine = find_machine(pool.spec)
        config = model.config.to_mapping()
        request = Load(model.key, model.path, model.dtype, config, ranks, machine, model.comfyui, model.size)
        self.discard(model.key)
        if machine.memory_bytes:
            request = surveyed(request, lambda asked: submit(Submission(request=asked)), make_room)
        answer = submit(Submission(request=request)).answer
        assert isinstance(answer, Loaded)
        if answer.machine is not None and answer.machine != machine:
            remember(pool.spec, answer.machine)
        self._loaded[model.key] = model, answer
        return answer

    def discard(self, name: str) -> None:
        """The ranks have to be asked to load it before it is used again."""
        self._loaded.pop(name, None)


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
