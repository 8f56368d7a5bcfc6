"""A ComfyUI network of which a rank keeps a share of the blocks' weights, and has each block when it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..networks.tables.blocks import Network
from ..patching.patch_data import UNPATCHED
from ..streaming.block_stream import SLOTS, BlockStream
from ..streaming.dealer import Dealer
from ..streaming.streamed_calls import stream_forwards
from .arena import lay_out
from .held_network import HeldNetwork, load_network
from .host_file import HostFile
from .left_in_file import LeftInFile, numbers, with_numbers
from .reading import OnBytes, Piece, read_anywhere
from .streamed_weights import own_part, rotating


class StreamedNetwork(HeldNetwork):
    """See the module; for the arguments and methods `HeldNetwork`.

    What comes and goes are the matrices of blocks, whatever numbers they have; of quantised ones the numbers, while
    their scales stay.

    Args:
        dealer: of the blocks.
    """

    stream: BlockStream

    def __init__(
        self,
        file: HostFile,
        data: Network | None,
        dtype: torch.dtype | None,
        device: torch.device,
        fast_float8: bool,
        dealer: Dealer,
    ):
        super().__init__(file, data, dtype, device, fast_float8)
        self.size = 0
        self._dealer = dealer
        self._places: dict[str, tuple[int, int]] = {}
        self._source: tuple[nn.Module, LeftInFile] | None = None
        # The network's blocks tell a stream that outlives their weights, as `ComfyNetwork` does.
        self.stream = BlockStream(dealer.resident)
        self._slots: list[torch.Tensor] = []

    def _load(self, on_bytes: OnBytes) -> nn.Module:
        network, left = load_network(self._file, self._dtype, self._fast_float8, on_bytes)
        blocks = [list(_coming(block)) for block in self._blocks(network)]
        layouts = [lay_out({name: numbers(weight).nbytes for name, _, weight in each}) for each in blocks]
        if self.shared is None:
            self.shared = self._dealer.deal([layout.size for layout in layouts])
        shared = self.shared
        shared.take()
        slots = torch.empty(SLOTS, max(layout.size for layout in layouts), dtype=torch.uint8, device=self.device)
        self._slots = list(slots.unbind())
        self.stream.set_up(shared, self._slots)
        pieces: list[Piece] = []
        views: list[tuple[nn.Module, str, Any, torch.Tensor]] = []
        paths = {block: path for path, block in network.named_modules()}
        for index, (block, found, layout) in enumerate(zip(self._blocks(network), blocks, layouts, strict=True)):
            first, last, memory = shared.own_piece(index)
            for name, owner, weight in found:
                own, start = numbers(weight), layout.starts[name]
                whole = left.pieces(weight)
                pieces += [part for piece in whole for part in own_part(piece, start, first, last, memory)]
                if not whole:
                    shared.write(index, start, as_bytes(numbers(left.on_host(weight))))
                view = self._slots[index % SLOTS][start : start + own.nbytes].view(own.dtype).view(own.shape)
                attribute = name.rpartition(".")[2]
                views.append((owner, attribute, weight, view))
                put(owner, attribute, torch.empty(0))  # nothing is to move
                self._places[f"{paths[block]}.{name}"] = (index, start)
        read_anywhere(sorted(pieces, key=lambda piece: piece.start), on_bytes)
        left.fetch(network, self.device, on_bytes)
        for owner, attribute, weight, view in views:
            put(owner, attribute, with_numbers(weight, view))
        kept = sum(each.nbytes for name, each in network.named_parameters() if name not in self._places)
        self.size = kept + slots.nbytes + shared.device_bytes
        return network

    def _blocks(self, network: nn.Module) -> list[nn.Module]:
        """Those that come."""
        assert self._data is not None
        lists = (network.get_submodule(blocks.path).children() for blocks in self._data.blocks)
        return self.stream.coming([block for blocks in lists for block in blocks])

    def _loaded(self) -> None:
        stream_forwards(self._blocks(self.network), self.stream)
        self.settle(UNPATCHED.names)

    def fill(self, on_bytes: OnBytes) -> None:
        """See `HeldWeights`."""
        try:
            super().fill(on_bytes)
        except BaseException:
            self.give_back()
            raise

    def settle(self, patches: object) -> None:
        """See `HeldWeights`."""
        self._source = None
        assert self.shared is not None
        self.shared.filled(repr(patches))

    def give_back(self) -> None:
        """See `HeldWeights`."""
        if self.shared is not None:
            self.shared.give_back()
        self._slots = []
        self.stream.set_up(None, [])
        super().give_back()

    def originals(self, names: Sequence[str], patched: Sequence[str]) -> dict[str, torch.Tensor]:
        """See `Patchable`: what comes and goes is read from the file again."""
        coming = [name for name in names if name in self._places]
        found = super().originals([name for name in names if name not in self._places], patched)
        if coming and self._source is None:
            self._source = load_network(self._file, self._dtype, self._fast_float8, lambda done, total: None)
        for name in coming:
            assert self._source is not None
            network, left = self._source
            found[name] = left.on_host(network.get_parameter(name)).detach()
        return found

    def write(self, name: str, weight: torch.Tensor) -> None:
        """See `Patchable`."""
        assert self.shared is not None
        self.shared.begin_change()
        if name not in self._places:
            super().write(name, weight)
            return
        block, start = self._places[name]
        self.shared.write(block, start, as_bytes(numbers(weight)))
        if hasattr(weight, "_params"):  # its scales stay with the layer
            now = self._read(name)
            put(self.owner(name), name.rpartition(".")[2], with_numbers(weight, numbers(now)))
            self.moved = True

    def put_back(self, name: str, original: torch.Tensor) -> None:
        """See `Patchable`."""
        if name in self._places:
            self.write(name, original)
        else:
            super().put_back(name, original)


def _coming(block: nn.Module) -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
    """(name in the block, the layer that has it, the weight) of what comes and goes."""
    for path, layer in block.named_modules():
        for name, weight in layer.named_parameters(recurse=False):
            if rotating(numbers(weight).shape):
                yield (f"{path}.{name}" if path else name), layer, weight


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """(bytes,) uint8."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def put(owner: nn.Module, name: str, weight: torch.Tensor) -> None:
    """Make it the layer's."""
    setattr(owner, name, nn.Parameter(weight, requires_grad=False))
