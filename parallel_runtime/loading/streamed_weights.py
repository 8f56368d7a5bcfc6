"""Weights of a diffusers network of which a rank keeps a share, and has each block when it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from ..networks.diffusers.spec import WeightRule
from ..patching.patch_data import UNPATCHED
from ..streaming.block_stream import SLOTS, BlockStream
from ..streaming.deal import ALIGNMENT
from ..streaming.dealer import Dealer
from ..streaming.shared_blocks import SharedBlocks
from .arena import Arena, Layout, lay_out, make_arena, place_tensor
from .checkpoint import Checkpoint
from .held_weights import MakeArena, WeightsOfModule
from .reading import OnBytes, Piece, cut, read, read_anywhere


def rotating(shape: Sequence[int]) -> bool:
    """Whether a parameter of a block comes and goes. Biases and norms are next to nothing, and stay."""
    return len(shape) > 1


class StreamedWeights(WeightsOfModule):
    """See the module; for the arguments and the methods `ArenaWeights`.

    What is outside of the blocks, and the slots, lie in one region; the share has memory of its own.

    Args:
        blocks: paths of all, in forward order.
    """

    stream: BlockStream
    shared: SharedBlocks

    def __init__(
        self,
        module: nn.Module,
        checkpoint: Checkpoint,
        rules: Sequence[WeightRule],
        dtype: torch.dtype,
        device: torch.device,
        arena: MakeArena | None,
        blocks: Sequence[str],
        dealer: Dealer,
    ):
        super().__init__(module, checkpoint, rules, dtype, device)
        self.stream = BlockStream(dealer.resident)
        blocks = self.stream.coming(blocks)
        sizes = {name: torch.Size(shape).numel() * dtype.itemsize for name, shape in self._shapes.items()}
        self._layouts = [lay_out(_of_block(path, sizes, self._shapes)) for path in blocks]
        self._places = {
            name: (block, start) for block, each in enumerate(self._layouts) for name, start in each.starts.items()
        }
        rest = lay_out({name: size for name, size in sizes.items() if name not in self._places})
        self.shared = dealer.deal([each.size for each in self._layouts])
        slot = max(each.size for each in self._layouts)
        starts = [_aligned(rest.size) + number * _aligned(slot) for number in range(SLOTS)]
        self._arena: Arena = (arena or make_arena)(starts[-1] + slot, device)
        self.keeps_addresses = False  # a share is made anew when the weights come back, and recordings copy from shares
        slots = [self._arena.memory[start : start + slot] for start in starts]
        self.stream.set_up(self.shared, slots)
        self.size = starts[-1] + slot + self.shared.device_bytes
        self._tensors = self._wrap(
            {name: self._place(name, rest, starts) for name in self._shapes},
        )

    def _place(self, name: str, rest: Layout, slots: Sequence[int]) -> torch.Tensor:
        if name in self._places:
            block, start = self._places[name]
            start += slots[block % SLOTS]
        else:
            start = rest.starts[name]
        return place_tensor(self._arena, start, self._shapes[name], self._dtype)

    def fill(self, on_bytes: OnBytes) -> None:
        """See `HeldWeights`. A rank reads what it keeps, and what is in no block."""
        if self.here:
            return
        try:
            self._check_files()
            self._arena.take()
            self.shared.take()
            stays = self._tensors.keys() - self._places.keys()
            self._read({name: self._tensors[name].data for name in stays}, on_bytes)
            read_anywhere(self._share_pieces(), on_bytes)
            self.settle(UNPATCHED.names)
        except BaseException:
            self.give_back()
            raise
        self.here = True

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See `Patchable`: each rank patches what it keeps a part of."""
        places = [(self._places.get(target), self._tensors[target]) for target in self._original.parameters(name)]
        if all(at is not None and not self.shared.keeps(*at, at[1] + each.nbytes) for at, each in places):
            return None
        return super().shape(name)

    def settle(self, patches: object) -> None:
        """The share has these patches: others may read it."""
        self.shared.filled(repr(patches))

    def give_back(self) -> None:
        """See `HeldWeights`."""
        self.here = False
        self.shared.give_back()
        self._arena.give_back()

    def _share_pieces(self) -> list[Piece]:
        """What of the file this rank keeps, and where."""
        by_target = {rule.target: rule for rule in self._rules}
        pieces: list[Piece] = []
        for name, (block, start) in self._places.items():
            target = torch.empty(self._shapes[name], dtype=self._dtype, device="meta")
            if self.shared.keeps(block, start, start + target.nbytes):
                first, last, memory = self.shared.own_piece(block)
                found = cut([by_target[name]], self._checkpoint.places, self._checkpoint.header, {name: target})
                pieces += [part for piece in found for part in own_part(piece, start, first, last, memory)]
        return sorted(pieces, key=lambda piece: (piece.file, piece.start))

    def _read(self, targets: Mapping[str, torch.Tensor], on_bytes: OnBytes) -> None:
        read(cut(self._rules, self._checkpoint.places, self._checkpoint.header, targets), self._device, on_bytes)

    def originals(self, names: Sequence[str], patched: Sequence[str]) -> dict[str, torch.Tensor]:
        """See `Patchable`: from the file, as a slot has what the last forward left there."""
        targets = sorted({target for name in names for target in self._original.parameters(name)})
        return {name: self._original.join(name, found) for found in [self._read_again(targets)] for name in names}

    def _keep(self, targets: Sequence[str]) -> None:
        """Nothing is kept."""

    def _read_again(self, targets: Sequence[str]) -> dict[str, torch.Tensor]:
        self._check_files()
        found = {name: torch.empty(self._shapes[name], dtype=self._dtype, device=self._device) for name in targets}
        self._read(found, lambda done, total: None)
        return found

    def _put(self, target: str, value: torch.Tensor) -> None:
        self.shared.begin_change()
        if target not in self._places:
            self._tensors[target].data.copy_(value)
            return
        block, start = self._places[target]
        data = value.to(self._dtype).contiguous().view(-1).view(torch.uint8)
        self.shared.write(block, start, data)


def streamed_costs(module: nn.Module, dtype: torch.dtype, blocks: Sequence[str], dealer: Dealer) -> tuple[int, int]:
    """(bytes that a rank needs beside its share, bytes of the share on its device), about."""
    blocks = BlockStream(dealer.resident).coming(blocks)
    sizes = {name: tensor.numel() * dtype.itemsize for name, tensor in module.state_dict().items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    coming = [sum(_of_block(path, sizes, shapes).values()) for path in blocks]
    return sum(sizes.values()) - sum(coming) + SLOTS * max(coming), dealer.device_bytes(coming)


def _of_block(path: str, sizes: Mapping[str, int], shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Bytes of what comes and goes of a block."""
    return {name: size for name, size in sizes.items() if name.startswith(f"{path}.") and rotating(shapes[name])}


def own_part(piece: Piece, start: int, first: int, last: int, memory: torch.Tensor) -> list[Piece]:
    """What of a piece lies between two bytes of its block, going to the memory of these.

    Args:
        piece: of a tensor without memory.
        start: byte of the block at which the tensor begins.
    """
    width = piece.target.dtype.itemsize
    begin = start + piece.target.storage_offset() * width
    low, high = max(begin, first), min(begin + piece.target.numel() * width, last)
    if low >= high:
        return []
    skipped = (low - begin) // width * piece.stored.itemsize
    target = memory[low - first : high - first].view(piece.target.dtype)
    return [replace(piece, start=piece.start + skipped, target=target)]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
