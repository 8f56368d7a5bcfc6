"""A model file that was opened and not read: its facts, and what will have its weights. Two sources of networks; what
follows (weights, stages, requests) knows nothing of the file's library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Any

import torch

from .. import memory
from ..errors import UnsupportedModelError
from ..loading.checkpoint import CheckpointReader, build_transformer, open_checkpoint
from ..loading.comfyui_network import NetworkReader, NetworkWeights
from ..loading.host_file import open_host_file
from ..loading.loaded_weights import LoadedWeights
from ..mesh.mesh import single_rank_mesh
from ..networks.comfyui.comfy_code import use_comfyui
from ..networks.comfyui.comfy_network import ComfyNetwork
from ..networks.diffusers.parallel_transformer import parallelize
from ..networks.facts import describe, describe_network
from ..networks.marked_blocks import Pulse, mark_blocks
from ..networks.network import Network
from ..planning.coming_blocks import Coming
from ..requests.comfyui_code import ComfyuiCode
from ..requests.facts import ModelFacts
from ..requests.requests import Load
from ..streaming.dealer import Dealer
from .family import DiffusersFamily, Family

Options = tuple[str, bool]  # (attention, compile): configurations with equal ones share a network


class Opened(ABC):
    """A file before its weights are read."""

    dtype: torch.dtype  # that the network computes in
    facts: ModelFacts  # what plans are made from
    family: Family  # whose checks hold
    identity: Hashable  # what the weights are read from, and into which type
    weight_bytes: int  # of the whole model on a device; quantised ones as in the file
    title: str  # for messages, such as "FLUX.1 in float32"

    @abstractmethod
    def weights(self, owned: tuple[int, int] | None, device: torch.device, dealer: Dealer | None) -> LoadedWeights:
        """What will have the weights of the blocks (start, stop) that this rank owns (None: all), on its device but for
        those that a dealer has come; nothing is read yet, and there is no memory for them. CheckpointError where the
        file does not fill the network, UnsupportedModelError where its weights do not come block by block."""

    @abstractmethod
    def network(self, weights: LoadedWeights, options: Options, owned: tuple[int, int] | None, pulse: Pulse) -> Network:
        """What runs with the weights, which are here, over any mesh."""

    def costs(self, owned: tuple[int, int] | None, dealer: Dealer | None) -> int:
        """Bytes that the weights take from the device, about."""
        facts = self.facts
        if dealer is not None:
            return self.in_file(Coming(dealer.mode, dealer.ranks, dealer.resident).kept_bytes(facts, dealer.held))
        if owned is None:
            return self.weight_bytes
        others = facts.block_parameters - sum(facts.block_sizes[slice(*owned)])
        return self.in_file((facts.parameters - others) * facts.bytes_per_parameter)

    def in_file(self, planned: float) -> int:
        """Bytes of this file for those that plans reckon with, in which all numbers have equally many."""
        return int(planned * self.weight_bytes / (self.facts.parameters * self.facts.bytes_per_parameter))

    def smaller(self, costs: int, device: torch.device) -> list[str]:
        """What would need less than these bytes, as sentences."""
        return []


class OpenedCheckpoint(Opened):
    """For a class of diffusers. Raises as `open_checkpoint` and `build_transformer`."""

    def __init__(self, request: Load):
        self._checkpoint = open_checkpoint(request.path)
        spec = self._checkpoint.spec
        network: Any = build_transformer(self._checkpoint)
        self.dtype = getattr(torch, request.dtype)
        self.facts = describe(network, spec.network, spec.title, self.dtype.itemsize, (spec.token, spec.token))
        self.family = DiffusersFamily(spec, dict(network.config))
        self.identity = self._checkpoint.identity, self.dtype
        self.weight_bytes = self.facts.parameters * self.facts.bytes_per_parameter
        self.title = f"{spec.title} in {str(self.dtype).removeprefix('torch.')}"

    def weights(self, owned: tuple[int, int] | None, device: torch.device, dealer: Dealer | None) -> LoadedWeights:
        return LoadedWeights(CheckpointReader(self._checkpoint, self.dtype, owned), device, dealer)

    def network(self, weights: LoadedWeights, options: Options, owned: tuple[int, int] | None, pulse: Pulse) -> Network:
        module, spec = weights.take_network(), self._checkpoint.spec
        mark_blocks(module, spec.block_lists, pulse)
        if spec.prepare is not None:
            spec.prepare(module)
        attention, compile = options
        return parallelize(
            module, spec, single_rank_mesh(), attention=attention, compile=compile, stream=weights.stream, owned=owned
        )

    def smaller(self, costs: int, device: torch.device) -> list[str]:
        if self.dtype != torch.float32 or costs // 2 >= memory.free_bytes(device):
            return []
        return [f"Choose bf16 as weight_dtype: that needs {costs / 2 / 2**30:.1f} GiB."]


class OpenedNetwork(Opened):
    """For ComfyUI's own class. Raises ConfigurationError where this rank's host has no ComfyUI, or no pack for the GGUF
    file, and as `open_host_file`."""

    def __init__(self, request: Load, code: ComfyuiCode, device: torch.device):
        use_comfyui(code.folder, {**code.options, "cpu": device.type == "cpu"})
        self._file = open_host_file(request.path, code.gguf)
        self._code = code
        self._latent = self._file.config.latent_format
        described = describe_network(self._file.build(), self._file.size, self._latent.latent_dimensions)
        self._described = described
        self._stored = getattr(torch, code.weights) if code.weights else None
        title = described.facts.title
        self.dtype = getattr(torch, request.dtype)
        self.facts = described.facts
        self.family = Family(title, described.patch, described.rows_together)
        self.identity = self._file.identity, self._stored, code.fast_float8
        self.weight_bytes = self._file.size
        self.title = f"{title} of {self._file.path.name}"

    def weights(self, owned: tuple[int, int] | None, device: torch.device, dealer: Dealer | None) -> LoadedWeights:
        if dealer is not None and self._file.pack is not None:
            what = "{name} is a GGUF file, whose weights do not come one block after the other."
            raise UnsupportedModelError(what, "Set weights to whole.", name=self._file.path.name)
        reader = NetworkReader(self._file, self._described.data, self._stored, self._code.fast_float8, owned)
        return NetworkWeights(reader, device, dealer)

    def network(self, weights: LoadedWeights, options: Options, owned: tuple[int, int] | None, pulse: Pulse) -> Network:
        assert isinstance(weights, NetworkWeights)
        if self._described.data is not None:
            mark_blocks(weights.network, [blocks.path for blocks in self._described.data.blocks], pulse)
        return ComfyNetwork(weights, self._described, self._latent, options[0], self.dtype, options[1])


def open_model(request: Load, device: torch.device) -> Opened:
    """Examine a file; for errors see the two classes."""
    return OpenedCheckpoint(request) if request.comfyui is None else OpenedNetwork(request, request.comfyui, device)
