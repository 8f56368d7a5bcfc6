"""A file for ComfyUI's own network, opened and not read: the other source of networks; see opened.py."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from ..acceleration.pulse import Pulse
from ..config import ParallelConfig
from ..errors import UnsupportedModelError
from ..loading.held_network import HeldNetwork
from ..loading.held_weights import HeldWeights, MakeArena
from ..loading.host_file import HostFile, open_host_file
from ..loading.streamed_network import StreamedNetwork
from ..networks.comfyui.comfy_code import use_comfyui
from ..networks.comfyui.comfy_network import ComfyNetwork
from ..networks.comfyui.description import Described, HostFamily, describe_network
from ..requests.facts import ModelFacts
from ..requests.requests import ComfyuiCode, Load
from ..said import said
from ..streaming.block_stream import SLOTS, BlockStream
from ..streaming.dealer import Dealer
from .opened import NewWeights
from .structure import Structure


@dataclass(frozen=True)
class OpenedHost:
    """A file that ComfyUI recognises, before its weights are read. Methods as those of `Opened`.

    Args:
        dtype: that the network computes in.
        weights: that plain weights are to have; None for a quantised file.
        code: ComfyUI's, and how it is to compute.
    """

    file: HostFile
    described: Described
    dtype: torch.dtype
    weights: torch.dtype | None
    code: ComfyuiCode
    family: HostFamily

    @classmethod
    def open(cls, request: Load, device: torch.device) -> OpenedHost:
        """Have ComfyUI look at a file.

        Raises:
            ConfigurationError: there is no ComfyUI on this rank's host, or no pack for its GGUF file.
            CheckpointError, UnsupportedModelError: see `open_host_file`.
        """
        code = request.comfyui
        assert code is not None
        use_comfyui(code.folder, {**code.options, "cpu": device.type == "cpu"})
        file = open_host_file(request.path, code.gguf)
        described = describe_network(file.build(), file.size, file.config.latent_format.latent_dimensions)
        title = described.facts.title
        family = HostFamily(f"ComfyUI {title}", title, described.patch, described.rows_together)
        weights = getattr(torch, code.weights) if code.weights else None
        return cls(file, described, getattr(torch, request.dtype), weights, code, family)

    @property
    def fast_float8(self) -> bool:
        """See ComfyuiCode."""
        return self.code.fast_float8

    @property
    def facts(self) -> ModelFacts:
        """What plans are made from."""
        return self.described.facts

    @property
    def identity(self) -> Hashable:
        """What the weights are read from, and into which type."""
        return self.file.identity, self.weights, self.fast_float8

    @property
    def weight_bytes(self) -> int:
        """See Opened; quantised ones as in the file."""
        return self.file.size

    @property
    def notes(self) -> str:
        """What the artist should know of it; a sentence, or ""."""
        return self.described.why_whole

    def allocate(
        self,
        owned: tuple[int, int] | None,
        device: torch.device,
        arena: MakeArena | None = None,
        dealer: Dealer | None = None,
    ) -> NewWeights:
        """The weights, nowhere yet; ComfyUI decides where each lies.

        Args:
            owned, dealer: see `Opened.allocate`.
        """
        title = f"{self.facts.title} of {self.file.path.name}"
        wanted = self.file, self.described.data, self.weights, device, self.fast_float8
        if dealer is None:
            size = self._bytes_of(owned)
            costs = size if device.type == "cuda" else 0
            return NewWeights(title, costs, lambda: HeldNetwork(*wanted, owned, size), list)
        if self.file.pack is not None:
            raise UnsupportedModelError(
                said(
                    "{name} is a GGUF file, whose weights do not come one block after the other.",
                    name=self.file.path.name,
                ),
                "Set weights to whole.",
            )
        sizes = BlockStream(dealer.resident).coming(
            [size * self.facts.bytes_per_parameter for size in self.facts.block_sizes]
        )
        coming = min(sum(sizes), self.file.size)
        share = dealer.device_bytes(sizes) * coming // sum(sizes)
        costs = self.file.size - coming + SLOTS * max(sizes) + share
        title = f"{title} ({dealer.streaming.mode})"
        return NewWeights(title, costs, lambda: StreamedNetwork(*wanted, dealer=dealer), list)

    def _bytes_of(self, owned: tuple[int, int] | None) -> int:
        """Of the file's weights, those without the blocks of other stages."""
        if owned is None:
            return self.file.size
        sizes = self.facts.block_sizes
        others = sum(sizes) - sum(sizes[slice(*owned)])
        return int(self.file.size * (1 - others / max(1, self.facts.parameters)))

    def structure(
        self,
        weights: HeldWeights,
        new: NewWeights | None,
        options: tuple[str, bool],
        owned: tuple[int, int] | None,
        pulse: Pulse,
    ) -> Structure:
        """The network, to be run over any mesh."""
        assert isinstance(weights, HeldNetwork)
        weights.mark(pulse)
        latent = self.file.config.latent_format
        return Structure(ComfyNetwork(weights, self.described, latent, options[0], self.dtype, options[1]))

    def options(self, config: ParallelConfig, device: torch.device) -> tuple[str, bool]:
        """Two configurations with equal options share a structure: (attention, compile)."""
        return config.attention, self.described.data is not None and config.compiles(device.type == "cuda")
