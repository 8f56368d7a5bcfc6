"""The weights of one model as a rank holds them: filled from files, given back, filled again under the same modules.

A module that was given them (`attach`) keeps its parameters for ever, and so does what torch.compile made of it; only
what lies behind the parameters comes and goes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from safetensors import safe_open

from ..errors import CheckpointError, NotLoadedError
from ..networks.diffusers.spec import WeightRule
from ..patching.patched_weights import Patchable
from ..said import said
from ..streaming.block_stream import BlockStream
from ..streaming.shared_blocks import SharedBlocks
from .arena import Arena, lay_out, place_tensor
from .checkpoint import Checkpoint
from .files import identity
from .patchable import OriginalWeights, PatchableParameters, apply_rule, has_room, original_rules
from .reading import OnBytes, cut, read
from .transfer import to_device, to_host

MakeArena = Callable[[int, torch.device], Arena]


class HeldWeights(Patchable, Protocol):
    """Weights of one model, on a device or not.

    Args:
        size: bytes that they take there.
        here: they are there, and the modules that have them can run.
        keeps_addresses: they come back at the same addresses, so that recordings stay valid.
    """

    size: int
    here: bool
    keeps_addresses: bool

    @property
    def stream(self) -> BlockStream | None:
        """Brings blocks when they run; None where all are on the device."""
        ...

    @property
    def shared(self) -> SharedBlocks | None:
        """What other ranks read of them; None where they read nothing."""
        ...

    def attach(self, module: torch.nn.Module) -> None:
        """Make them the parameters and stored buffers of a module, which may be on the meta device. Any number may
        share them."""
        ...

    def fill(self, on_bytes: OnBytes) -> None:
        """Bring them to the device. Nothing is done where they are there.

        Args:
            on_bytes: hears how far it is; may raise to give up, and nothing is on the device then.

        Raises:
            NotLoadedError: the files were replaced since.
            CheckpointError: they cannot be read.
            torch.OutOfMemoryError: no memory.
        """
        ...

    def settle(self, patches: object) -> None:
        """They have these patches now, as all ranks name them: others may read what they read of them."""
        ...

    def give_back(self) -> None:
        """Return their memory to the system, whoever holds the modules."""
        ...


class WeightsOfModule(PatchableParameters):
    """What kinds of them have in common: tensors that modules share, by name."""

    stream: BlockStream | None = None
    shared: SharedBlocks | None = None

    def __init__(
        self,
        module: torch.nn.Module,
        checkpoint: Checkpoint,
        rules: Sequence[WeightRule],
        dtype: torch.dtype,
        device: torch.device,
    ):
        state = module.state_dict()
        parameters = dict(module.named_parameters(remove_duplicate=False))
        mapped = [rule for rule in original_rules(checkpoint, rules) if rule.target in state]
        super().__init__(OriginalWeights(mapped), device)
        self.here = False
        self.size = sum(tensor.numel() for tensor in state.values()) * dtype.itemsize
        self._checkpoint = checkpoint
        self._rules = [rule for rule in rules if rule.target in state]
        self._dtype = dtype
        self._shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        self._parameters = set(parameters)

    def attach(self, module: torch.nn.Module) -> None:
        module.load_state_dict(self._tensors, assign=True)
        module.requires_grad_(False).eval().to(self._device)  # moves the buffers that no file holds

    def settle(self, patches: object) -> None:
        """Nobody else reads them."""

    def _wrap(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            name: torch.nn.Parameter(tensor, requires_grad=False) if name in self._parameters else tensor
            for name, tensor in tensors.items()
        }

    def _check_files(self) -> None:
        if identity(self._checkpoint.path) != self._checkpoint.identity:
            raise NotLoadedError(
                said("{path} was replaced since it was loaded.", path=self._checkpoint.path), "Queue the prompt again."
            )


class ArenaWeights(WeightsOfModule):
    """Weights in one region of a device's memory.

    Args:
        module: whose parameters and stored buffers they are; on the meta device, as are blocks that are not held.
        rules: from `check_weights`.

    Raises:
        torch.OutOfMemoryError: no memory.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        checkpoint: Checkpoint,
        rules: Sequence[WeightRule],
        dtype: torch.dtype,
        device: torch.device,
        make_arena: MakeArena,
    ):
        super().__init__(module, checkpoint, rules, dtype, device)
        sizes = {name: torch.Size(shape).numel() * dtype.itemsize for name, shape in self._shapes.items()}
        layout = lay_out(sizes)
        self.size = layout.size
        self._arena = make_arena(layout.size, device)
        self.keeps_addresses = self._arena.keeps_addresses
        self._tensors = self._wrap(
            {name: place_tensor(self._arena, layout.starts[name], shape, dtype) for name, shape in self._shapes.items()}
        )

    def fill(self, on_bytes: OnBytes) -> None:
        if self.here:
            return
        try:
            self._check_files()
            self._arena.take()
            targets = {name: tensor.data for name, tensor in self._tensors.items()}
            read(cut(self._rules, self._checkpoint.places, self._checkpoint.header, targets), self._device, on_bytes)
        except BaseException:
            self._arena.give_back()
            raise
        self.here = True

    def save(self, host: torch.Tensor, on_bytes: OnBytes) -> None:
        """Copy them to the host, (size,) uint8, as they lie in the region."""
        to_host(host, self._arena.memory[: self.size], on_bytes)

    def restore(self, host: torch.Tensor, on_bytes: OnBytes) -> None:
        """Bring them back from where `save` has put them.

        Raises:
            torch.OutOfMemoryError: no memory.
        """
        try:
            self._arena.take()
            to_device(self._arena.memory[: self.size], host, on_bytes)
        except BaseException:
            self._arena.give_back()
            raise
        self.here = True

    def give_back(self) -> None:
        self.here = False
        self._arena.give_back()

    def _keep(self, targets: Sequence[str]) -> None:
        if has_room([self._tensors[name] for name in targets], self._device):
            self._originals |= {name: self._tensors[name].data.clone() for name in targets}

    def _read_again(self, targets: Sequence[str]) -> dict[str, torch.Tensor]:
        if not targets:
            return {}
        self._check_files()
        found = {name: torch.empty_like(self._tensors[name].data) for name in targets}
        read(cut(self._rules, self._checkpoint.places, self._checkpoint.header, found), self._device, _unheard)
        return found

    def _put(self, target: str, value: torch.Tensor) -> None:
        self._tensors[target].data.copy_(value)  # in place: compiled blocks and recordings read these addresses


class MappedWeights(WeightsOfModule):
    """Weights on the CPU: views of the memory-mapped file where it has their type, so that N ranks share its pages."""

    keeps_addresses = False

    def __init__(
        self,
        module: torch.nn.Module,
        checkpoint: Checkpoint,
        rules: Sequence[WeightRule],
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__(module, checkpoint, rules, dtype, device)
        self._tensors = self._wrap({name: self._absent(shape) for name, shape in self._shapes.items()})

    def fill(self, on_bytes: OnBytes) -> None:
        if self.here:
            return
        self._check_files()
        weights: dict[str, torch.Tensor] = {}
        with contextlib.ExitStack() as stack:
            files = {file: stack.enter_context(_open(file)) for file in self._checkpoint.files}
            for done, rule in enumerate(self._rules):
                on_bytes(done * self.size // len(self._rules), self.size)
                place = self._checkpoint.places[rule.source]
                weights[rule.target] = apply_rule(rule, files[place.file].get_tensor(place.key)).to(self._dtype)
        for name, tensor in weights.items():
            self._tensors[name].data = tensor
        self.here = True

    def give_back(self) -> None:
        self.here = False
        for name, tensor in self._tensors.items():
            tensor.data = self._absent(self._shapes[name])

    def _keep(self, targets: Sequence[str]) -> None:
        self._originals |= {name: self._tensors[name].data for name in targets}

    def _read_again(self, targets: Sequence[str]) -> dict[str, torch.Tensor]:
        return {name: self._originals[name] for name in targets}

    def _put(self, target: str, value: torch.Tensor) -> None:
        self._tensors[target].data = value.contiguous()  # the file is mapped, and not to be written to

    def spare(self) -> None:
        """See `Patchable`: nothing, as they are the mapped file."""
        return

    def put_back(self, name: str, original: torch.Tensor) -> None:
        """See `Patchable`."""
        for target in self._original.parameters(name):
            self._tensors[target].data = self._originals.pop(target)

    def _absent(self, shape: Sequence[int]) -> torch.Tensor:
        """One number seen in the shape of all: whoever computes with it by mistake gets NaN."""
        return torch.full((), torch.nan, dtype=self._dtype).expand(shape)


def _open(file: Any) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except OSError as error:
        raise CheckpointError(
            said("{file} cannot be opened: {error}.", file=file, error=error), "Check the file and its rights."
        ) from error


def _unheard(done: int, total: int) -> None:
    """For reads of a part."""
