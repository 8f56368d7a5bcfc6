"""Weights of ComfyUI's network as they were before patches: on the device, in their file, or on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError, NotLoadedError, OutOfMemoryError
from ..said import said
from .files import Identity, identity
from .host_copies import left_free

Read = Callable[[], torch.Tensor]


class FileNumbers:
    """The numbers that a file has under the names of the network.

    Args:
        stamp: of the file that the network was loaded from.
        prefix: of the names in the file.
    """

    def __init__(self, path: Path, stamp: Identity, prefix: str):
        self._path = path
        self._stamp = stamp
        self._prefix = prefix
        self._open: Any = None

    def read(self, name: str) -> torch.Tensor | None:
        """On the CPU; None where the file has another name for it.

        Raises:
            NotLoadedError, CheckpointError: the file was replaced, or cannot be read.
        """
        if identity(self._path) != self._stamp:
            raise NotLoadedError(
                said("{path} was replaced since it was loaded.", path=self._path), "Queue the prompt again."
            )
        try:
            if self._open is None:
                self._open = safe_open(self._path, framework="pt", device="cpu")
                self._names = set(self._open.keys())
            key = f"{self._prefix}{name}"
            found: torch.Tensor | None = self._open.get_tensor(key) if key in self._names else None
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                said("{file} cannot be opened: {error}.", file=self._path, error=error),
                "Check the file and its rights.",
            ) from error
        return found

    def close(self) -> None:
        """Nothing is read for a while."""
        self._open = None


class KeptOriginals:
    """By name. What leaves the device is read from the file where that has it as it is, so that ranks need no memory
    for it; what the loader made (names of other tools, quantised while loading) is kept on the host by each rank.

    Args:
        file: None where there is none to read.
    """

    def __init__(self, device: torch.device, file: FileNumbers | None = None):
        self._device = device
        self._file = file
        self._here: dict[str, torch.Tensor] = {}
        self._in_file: dict[str, Read] = {}

    def keep(self, weights: Mapping[str, torch.Tensor]) -> None:
        """These tensors, wherever they are."""
        self._here.update(weights)

    def put_away(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Let these leave the device.

        Raises:
            OutOfMemoryError: the host has no memory for what is not in the file.
            NotLoadedError, CheckpointError: see `FileNumbers.read`.
        """
        for name, weight in weights.items():
            if read := self._found_in_file(name, weight):
                self._in_file[name] = read
                self._here.pop(name, None)
            else:
                self._here[name] = _on_host(name, weight)

    def spare(self) -> None:
        """Let all leave the device; see `put_away`."""
        self.put_away({name: weight for name, weight in self._here.items() if weight.device.type != "cpu"})

    def get(self, name: str) -> torch.Tensor:
        """As it was.

        Raises:
            NotLoadedError, CheckpointError: see `FileNumbers.read`.
        """
        return self._in_file[name]() if name in self._in_file else self._here[name]

    def drop(self, name: str) -> None:
        """It is in place again."""
        self._here.pop(name, None)
        self._in_file.pop(name, None)

    def clear(self) -> None:
        """All are."""
        self._here.clear()
        self._in_file.clear()
        if self._file is not None:
            self._file.close()

    @property
    def host_bytes(self) -> int:
        """That they take of the host's memory."""
        return sum(weight.nbytes for weight in self._here.values() if weight.device.type == "cpu")

    def _found_in_file(self, name: str, weight: Any) -> Read | None:
        """What reads it from the file, if that gives the very same."""
        file, device, own = self._file, self._device, getattr(weight, "_qdata", None)
        if file is None:
            return None
        # Not the weight itself, which what reads it shall not keep alive.
        kind, layout = (None, None) if own is None else (type(weight), weight._layout_cls)
        dtype = weight.dtype if own is None else own.dtype
        there = file.read(name)
        if there is None or (own is not None and there.dtype != dtype):
            return None
        if not _equal(there.to(device).to(dtype), weight if own is None else own):
            return None
        aside = None if own is None else weight.detach().clone()._params  # scales, which are written in place

        def read() -> torch.Tensor:
            found = file.read(name)
            assert found is not None
            numbers = found.to(device).to(dtype)
            original: torch.Tensor = numbers if kind is None else kind(numbers, layout, aside)
            return original

        return read


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return bool((one.contiguous().view(torch.uint8) == other.detach().contiguous().view(torch.uint8)).all())


def _on_host(name: str, weight: torch.Tensor) -> torch.Tensor:
    host = psutil.virtual_memory()
    if host.available - weight.nbytes < left_free(host.total):
        raise OutOfMemoryError(
            said(
                "The host has {free} GiB of memory left, too little to keep {name} as it is without the LoRA.",
                free=f"{host.available / 2**30:.1f}",
                name=name,
            ),
            "Use fewer GPUs or a smaller model, or close other programs.",
        )
    return weight.detach().to("cpu", copy=True)
