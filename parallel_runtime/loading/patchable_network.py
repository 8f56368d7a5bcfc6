"""The weights of ComfyUI's own network, quantised ones among them, that patches are made for (patching/), and what they
were before: on the device, in their file, or on the host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ..errors import CheckpointError, NotLoadedError, OutOfMemoryError
from ..patching.comfyui_patches import beside
from ..said import said
from .files import Identity, identity
from .host_copies import left_free
from .patchable import has_room


class PatchableNetwork(ABC):
    """See `Patchable` for the methods."""

    wraps_layers = True

    def __init__(self, device: torch.device, file: FileNumbers | None = None):
        self.device = device
        self.moved = False
        # Compiled blocks and recordings read these addresses; on the CPU there are none, and weights may be the file.
        self._in_place = device.type != "cpu"
        self._originals = KeptOriginals(device, file)
        self._bypasses: list[tuple[nn.Module, Any]] = []

    @property
    @abstractmethod
    def network(self) -> nn.Module:
        """On the device."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See `Patchable`."""
        layer, _, attribute = name.rpartition(".")
        try:
            weight = getattr(self.network.get_submodule(layer), attribute)
        except AttributeError:
            return None
        return tuple(weight.shape) if isinstance(weight, torch.Tensor) else None

    def owner(self, name: str) -> nn.Module:
        """See `Patchable`."""
        return self.network.get_submodule(name.rpartition(".")[0])

    def originals(self, names: Sequence[str], patched: Sequence[str]) -> dict[str, torch.Tensor]:
        """See `Patchable`."""
        new = {name: self._read(name) for name in names if name not in patched}
        if self._in_place and not has_room(new.values(), self.device):
            self._originals.put_away(new)
            return {name: new[name] if name in new else self._originals.get(name) for name in names}
        self._originals.keep({name: weight.detach().clone() for name, weight in new.items()} if self._in_place else new)
        return {name: self._originals.get(name) for name in names}

    def write(self, name: str, weight: torch.Tensor) -> None:
        """See `Patchable`. A weight may have another shape then."""
        now, weight = self._read(name), weight.to(self.device)
        if self._in_place and _alike(now, weight):
            with torch.no_grad():
                now.copy_(weight)  # not its `data`, which for a quantised weight has scales of its own
            return
        setattr(self.owner(name), name.rpartition(".")[2], nn.Parameter(weight, requires_grad=False))
        self.moved = True

    def put_back(self, name: str, original: torch.Tensor) -> None:
        """See `Patchable`."""
        if self._in_place:
            self.write(name, original)
        else:
            setattr(self.owner(name), name.rpartition(".")[2], original)
        self._originals.drop(name)

    def wrap(self, layers: Mapping[str, tuple[Any, float]]) -> None:
        """See `Patchable`: ComfyUI's own bypass, over each layer's forward."""
        import comfy.weight_adapter.bypass as bypass

        for layer, hook in reversed(self._bypasses):
            own = getattr(hook.original_forward, "__func__", None) is type(layer).forward
            hook.eject()
            if own:  # and not as an attribute: the block may be compiled for that already
                layer.__dict__.pop("forward", None)
        self._bypasses = []
        self.moved = True
        for name, (adapter, strength) in layers.items():
            layer = self.network.get_submodule(name)
            if isinstance(layer, nn.Linear):  # tried: a fault of ComfyUI's shall not cost the pool
                nothing = torch.zeros(1, 2, layer.out_features, device=self.device)
                x = torch.zeros(1, 2, layer.in_features, device=self.device)
                beside(name, adapter, strength, x, lambda x, given=nothing: given)  # type: ignore[misc]
            hook = bypass.BypassForwardHook(layer, adapter, multiplier=strength)
            hook.inject()
            self._bypasses.append((layer, hook))

    def forget_originals(self) -> None:
        """See `Patchable`."""
        self._originals.clear()

    def spare(self) -> None:
        """See `Patchable`."""
        if self.device.type != "cpu":
            self._originals.spare()

    def can_keep(self, weight: torch.Tensor) -> bool:
        """See `Patchable`."""
        return has_room([weight], self.device)

    def _read(self, name: str) -> torch.Tensor:
        weight: torch.Tensor = getattr(self.owner(name), name.rpartition(".")[2])
        return weight


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a copy of one to the other needs no other memory, quantised or not."""
    return _layout(one) == _layout(other)


def _layout(weight: Any) -> list[Any]:
    """Shapes and types; and numbers beside them, which a recording would have as they were."""
    scales = vars(getattr(weight, "_params", None) or _Plain())
    parts = [
        weight,
        getattr(weight, "_qdata", None),
        *(scales[name] for name in sorted(scales.keys() - {"orig_dtype"})),
    ]
    return [(part.shape, part.dtype) if isinstance(part, torch.Tensor) else part for part in parts]


class _Plain:
    """What a weight that is not quantised has in the place of scales."""


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
