"""The weights of one model as a rank has them: read from their file, given back, had again at the same places.

All of a network's parameters and buffers lie in one region of the device (arena.py), so that it can go to the host and
come back, and compiled code and recordings see the same addresses. Of weights that come block by block a rank keeps a
share; the blocks' matrices are views of slots there, which a stream fills while the network runs (streaming/)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import torch
from torch import nn

from ..gpu_memory.arena import Arena, lay_out, make_arena, place_tensor
from ..patching.comfyui_patches import is_of_gguf
from ..patching.patch_data import UNPATCHED, as_bytes
from ..streaming.block_stream import BlockStream
from ..streaming.dealer import Dealer
from ..streaming.share_memory import HostShare
from ..streaming.shared_blocks import SharedBlocks
from .reading import Find, OnBytes, Piece, Reader, ignore, read, split, to_device, to_host
from .weight_parts import alike, as_parameter, made_of, parts, put, weights_of


class LoadedWeights:
    """A network's weights on a device, at first without memory; `dealer` deals out blocks, None: all stay there."""

    def __init__(self, reader: Reader, device: torch.device, dealer: Dealer | None = None):
        self.device = device
        # Something was changed elsewhere than in place: what was recorded is void. Who reads it sets it back.
        self.moved = False
        self.size = 0  # bytes on the device
        self.here = False  # on the device, and the network can run
        self.keeps_addresses = False  # when they come back, so that recordings stay valid
        self.stream: BlockStream | None = None  # brings blocks when they run, if any do
        self.shared: SharedBlocks | None = None  # what other ranks read of them, if anything
        self._reader, self._dealer, self.owned = reader, dealer, reader.owned
        self._arena: Arena | None = None
        self._network: nn.Module | None = None
        self._tensors: dict[str, torch.Tensor] = {}  # as they were placed
        self._elsewhere: dict[str, torch.Tensor] = {}  # what stands in the place of one, in other memory
        self._places: dict[str, tuple[int, int]] = {}  # of matrices that come: block, and byte there
        self._reopened: Find | None = None
        self._taken = False

    @property
    def network(self) -> nn.Module:
        """The network, with its weights while they are here."""
        assert self._network is not None
        return self._network

    def fill(self, on_bytes: OnBytes, parked: Callable[[int], HostShare | None] = lambda size: None) -> None:
        """Bring them to the device: from what `parked` finds on the host for a region of so many bytes, else from the
        file. Raises as `Reader.open`, torch.OutOfMemoryError and OutOfMemoryError where there is no memory, and what
        `on_bytes` raises to give up; nothing is on the device then."""
        try:
            find = self._make(on_bytes) if self._network is None else None
            assert self._arena is not None
            self._arena.take()
            if self.shared is not None:
                self.shared.take()
            if (copy := parked(self.size) if self.shared is None else None) is not None:
                copy.pin()
                to_device(self._arena.memory[: self.size], copy.memory, on_bytes)
            else:
                self._read(find or self._reader.open(on_bytes)[1], on_bytes)
            self.prepare(self.network)
            self.settle(UNPATCHED.names)
        except BaseException:
            self.give_back()
            raise
        self.here = True

    def prepare(self, network: nn.Module) -> None:
        """Called when the network has its weights."""

    def save(self, host: torch.Tensor, on_bytes: OnBytes) -> None:
        """Copy them to the host, (size,) uint8, as they lie in the region; not where others read of them."""
        assert self._arena is not None
        to_host(host, self._arena.memory[: self.size], on_bytes)

    def give_back(self) -> None:
        """Return their memory to the system; the network stays, and is not to be run or read."""
        self.here = False
        self.moved |= bool(self._elsewhere)
        for name in self._elsewhere:
            put(self.network, name, self._tensors[name])
        self._elsewhere.clear()
        self._reopened = None
        if self.stream is not None:
            self.stream.forget()
        if self.shared is not None:
            self.shared.give_back()
        if self._arena is not None:
            self._arena.give_back()

    def settle(self, patches: object) -> None:
        """They have other patches now, as all ranks name them: others may read what they read of them."""
        self._reopened = None
        if self.shared is not None:
            self.shared.filled(repr(patches))

    def take_network(self) -> nn.Module:
        """A network with these weights for one who changes it, another one at each call."""
        if not self._taken:
            self._taken = True
            return self.network
        network, _ = self._reader.open(ignore)
        for name, weight in self._tensors.items():
            put(network, name, weight)
        return network

    def now(self, name: str) -> torch.Tensor:
        """One of the network's weights as it is."""
        return self._elsewhere.get(name, self._tensors[name])

    def comes(self, name: str) -> bool:
        """It is here while its block runs, and not else."""
        return name in self._places

    def keeps(self, name: str) -> bool:
        """This rank has a part of it at least; scales of a quantised one are on all ranks."""
        if name not in self._places:
            return name in self._tensors
        assert self.shared is not None
        block, start = self._places[name]
        of = parts(self._tensors[name])
        return len(of) > 1 or self.shared.own_part(block, start, start + of[0].nbytes)[1].numel() > 0

    def put(self, name: str, value: torch.Tensor) -> None:
        """Give it other numbers: in place where they have room there, as compiled blocks and recordings read these."""
        if self.shared is not None:
            self.shared.begin_change()
        now = self.now(name)
        if alike(now, value):
            self._copy(name, now, value)
            return
        given = [part.to(self.device) for part in parts(value)]
        if name in self._places:
            assert self.shared is not None
            self.shared.write(*self._places[name], as_bytes(given[0]))
            given[0] = parts(now)[0]  # its slot
        made = value.to(self.device) if is_of_gguf(value) else made_of(value, given)
        self._elsewhere[name] = as_parameter(made)
        put(self.network, name, self._elsewhere[name])
        self.moved = True

    def put_file(self, name: str, original: torch.Tensor) -> None:
        """Give it the numbers of the file, where it was at first."""
        if self.shared is not None:
            self.shared.begin_change()
        if self._elsewhere.pop(name, None) is not None:
            put(self.network, name, self._tensors[name])
            self.moved = True
        if not is_of_gguf(original):  # those were never written to
            self._copy(name, self._tensors[name], original)

    def _copy(self, name: str, weight: torch.Tensor, value: torch.Tensor) -> None:
        for index, (own, given) in enumerate(zip(parts(weight), parts(value), strict=True)):
            if index == 0 and name in self._places:
                assert self.shared is not None
                self.shared.write(*self._places[name], as_bytes(given))
            else:
                own.copy_(given)

    def read_again(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """What the file has of these."""
        found, pieces = dict[str, torch.Tensor](), list[Piece]()
        for name in names:
            found[name] = weight = self._tensors[name]
            if not is_of_gguf(weight):
                self._reopened = find = self._reopened or self._reader.open(ignore)[1]
                copies = [torch.empty_like(part) for part in parts(weight)]
                for index, part in enumerate(copies):
                    pieces += split(find(name, index), part)
                found[name] = made_of(weight, copies)
        if pieces:
            read(pieces, ignore)
        return found

    def _make(self, on_bytes: OnBytes) -> Find:
        """Give the network's tensors their places."""
        network, find = self._reader.open(on_bytes)
        weights = dict(weights_of(network))
        sizes = self._place_coming(network, self._dealer) if self._dealer is not None else []
        own: dict[Hashable, int] = {
            (name, index): part.nbytes
            for name, weight in weights.items()
            for index, part in enumerate(parts(weight))
            if index or name not in self._places
        }
        # Blocks that come lie behind what stays: in slots, all as large as the largest needs, or each in its place.
        turns = self._dealer.turns(len(sizes)) if self._dealer is not None else []
        slot = max((each for each, turn in zip(sizes, turns, strict=True) if turn is not None), default=0)
        spots = [f"block {block}" if turn is None else f"slot {turn}" for block, turn in enumerate(turns)]
        own |= {spot: each if turn is None else slot for spot, each, turn in zip(spots, sizes, turns, strict=True)}
        starts, self.size = lay_out(own)
        arena = make_arena(self.size, self.device)
        if self._dealer is not None:
            self.shared = SharedBlocks(self._dealer, sizes)
            slots = [arena.memory[starts[spot] : starts[spot] + each] for spot, each in zip(spots, sizes, strict=True)]
            self.stream = BlockStream(self.shared, slots)
            self.size += self.shared.size if self._dealer.on_device else 0
        starts |= {(name, 0): starts[spots[block]] + start for name, (block, start) in self._places.items()}
        placed: dict[torch.Tensor, torch.Tensor] = {}  # by identity: that is how tensors hash
        for name, weight in weights.items():
            if weight not in placed:
                of = [place_tensor(arena, starts[name, index], part) for index, part in enumerate(parts(weight))]
                made = made_of(weight, of)
                placed[weight] = as_parameter(made) if isinstance(weight, nn.Parameter) else made
            self._tensors[name] = placed[weight]
            put(network, name, placed[weight])
        self._network, self._arena = network, arena
        # A share is made anew when the weights come back, and recordings copy from shares.
        self.keeps_addresses = arena.keeps_addresses and self.shared is None
        return find

    def _place_coming(self, network: nn.Module, dealer: Dealer) -> list[int]:
        """Find places for matrices that come; bytes of each block. Biases, norms and scales are few, and stay."""
        numbers = {name: parts(weight)[0] for name, weight in network.named_parameters(remove_duplicate=False)}
        matrices = {name: each.nbytes for name, each in numbers.items() if each.ndim > 1}
        sizes = []
        for block, path in enumerate(dealer.coming(self._reader.blocks(network))):
            inside, size = lay_out({name: each for name, each in matrices.items() if name.startswith(f"{path}.")})
            self._places |= {name: (block, start) for name, start in inside.items()}
            sizes.append(size)
        return sizes

    def _read(self, find: Find, on_bytes: OnBytes) -> None:
        pieces: list[Piece] = []
        for name, weight in self._tensors.items():
            for index, part in enumerate(parts(weight)):
                own = index == 0 and name in self._places
                pieces += self._own_pieces(find, name, part) if own else split(find(name, index), part)
        read(sorted(pieces, key=lambda piece: (piece.file, piece.start)), on_bytes)

    def _own_pieces(self, find: Find, name: str, matrix: torch.Tensor) -> list[Piece]:
        """What of a matrix that comes this rank keeps."""
        assert self.shared is not None
        block, start = self._places[name]
        low, memory = self.shared.own_part(block, start, start + matrix.nbytes)
        if not memory.numel():
            return []
        found = find(name, 0)
        if isinstance(found, torch.Tensor):
            self.shared.write(block, start, as_bytes(found.to(matrix.dtype)))
            return []
        skipped = (low - start) // matrix.dtype.itemsize * found.stored.itemsize
        return split(replace(found, start=found.start + skipped), memory.view(matrix.dtype))
