"""A model file that was opened and not read: its facts, its family, and what will have its weights. Two sources of
networks; what follows (weights, stages, requests) knows nothing of the file's library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from .. import memory
from ..errors import RequestError, UnsupportedModelError
from ..loading.checkpoint import CheckpointReader, build_transformer, open_checkpoint
from ..loading.comfyui_network import NetworkReader, NetworkWeights
from ..loading.host_file import open_host_file
from ..loading.loaded_weights import LoadedWeights
from ..loading.reading import Owned
from ..mesh.mesh import single_rank_mesh
from ..networks.comfyui.comfy_code import use_comfyui
from ..networks.comfyui.comfy_network import ComfyNetwork
from ..networks.diffusers.parallel_transformer import parallelize
from ..networks.diffusers.spec import ModelSpec
from ..networks.facts import describe, describe_network, describe_request
from ..networks.marked_blocks import Pulse, mark_blocks
from ..networks.network import Network
from ..networks.tables.blocks import LATENT_SHAPES
from ..planning.coming_blocks import Coming
from ..requests.comfyui_code import ComfyuiCode
from ..requests.conditioning import Conditioning, hollow
from ..requests.facts import QUANTISED, ModelFacts, RequestFacts, Seen
from ..requests.requests import Load
from ..requests.trees import map_tensors
from ..streaming.dealer import Dealer

Options = tuple[str, bool]  # (attention, compile): configurations with equal ones share a network


@dataclass
class Family:
    """What is asked of a family before a request runs; ComfyUI's networks check their arguments themselves."""

    title: str  # how artists call it
    patch: tuple[int, ...]  # latent positions that a token takes, by the last dims of the latent
    rows_together: bool = False  # every rank computes all rows of a batch, so that there is one to plan for
    joins_text: bool = True  # the text's tokens run through the blocks, too

    def check(self, conditioning: Conditioning, x: torch.Tensor) -> Seen:
        """Refuse what the network cannot take, from shapes alone, and return these: RequestError for a text of another
        batch. `x` is what it will see, (B, C, ...), on the meta device."""
        context = conditioning.arguments.get("context")
        shapes = conditioning.arguments.get(LATENT_SHAPES)
        latents = (tuple(x.shape),) if shapes is None else tuple(tuple(shape) for shape in shapes)
        if not isinstance(context, torch.Tensor) or context.ndim < 2:
            return Seen((x.shape[0], 0, 0), latents)
        conditioning.check_rows(x.shape[0])
        return Seen((context.shape[0], context.shape[1], context.shape[-1]), latents)

    def describe(self, seen: Seen, *, batch: int, steps: int = 0) -> RequestFacts:
        """A request's facts; see `describe_request` for the arguments."""
        latents, text = [shape[2:] for shape in seen.latents], seen.text[1] if self.joins_text else 0
        return describe_request(latents, self.patch, text, 1 if self.rows_together else batch, steps)


class DiffusersFamily(Family):
    """A family of diffusers' classes, for the diffusers config of a file."""

    def __init__(self, spec: ModelSpec, config: dict[str, Any]):
        # A text that the blocks take by cross-attention is none of their tokens.
        joined = any(len(blocks.tokens) > 1 for blocks in spec.cut)
        super().__init__(spec.title, (spec.token, spec.token), joins_text=joined)
        self._spec = spec
        self._config = config

    def check(self, conditioning: Conditioning, x: torch.Tensor) -> Seen:
        """RequestError for what the spec makes no arguments of, and arguments of other widths than the file's."""
        spec = self._spec
        context = conditioning.arguments.get("context")
        if not isinstance(context, torch.Tensor) or context.ndim != 3:
            what = "{title} needs text conditioning of three dimensions."
            raise RequestError(what, "Connect the text encoder that belongs to the model.", title=spec.title)
        conditioning.check_rows(x.shape[0])
        shapes, timestep = map_tensors(dict(conditioning.arguments), hollow), torch.zeros(x.shape[0])
        spec.check_widths(spec.to_transformer(hollow(x), timestep, config=self._config, **shapes), self._config)
        return Seen(tuple(context.shape), (tuple(x.shape),))


class Opened(ABC):
    """A file before its weights are read."""

    dtype: torch.dtype  # that the network computes in
    facts: ModelFacts  # what plans are made from
    family: Family  # whose checks hold
    identity: Hashable  # what the weights are read from, and into which type
    weight_bytes: int  # of the whole model on a device; quantised ones as in the file
    title: str  # for messages, such as "FLUX.1 in float32"

    @abstractmethod
    def weights(self, owned: Owned, device: torch.device, dealer: Dealer | None) -> LoadedWeights:
        """What will have the weights of the blocks (start, stop) that this rank owns (None: all), on its device but for
        those that a dealer has come; nothing is read yet, and there is no memory for them. CheckpointError where the
        file does not fill the network, UnsupportedModelError where its weights do not come block by block."""

    @abstractmethod
    def network(self, weights: LoadedWeights, options: Options, pulse: Pulse) -> Network:
        """What runs with the weights, which are here, over any mesh."""

    def costs(self, owned: Owned, dealer: Dealer | None) -> int:
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

    def weights(self, owned: Owned, device: torch.device, dealer: Dealer | None) -> LoadedWeights:
        return LoadedWeights(CheckpointReader(self._checkpoint, self.dtype, owned), device, dealer)

    def network(self, weights: LoadedWeights, options: Options, pulse: Pulse) -> Network:
        module, spec = weights.take_network(), self._checkpoint.spec
        mark_blocks(module, spec.block_lists, pulse)
        if spec.prepare is not None:
            spec.prepare(module)
        return parallelize(module, spec, single_rank_mesh(), *options, stream=weights.stream, owned=weights.owned)

    def smaller(self, costs: int, device: torch.device) -> list[str]:
        if self.dtype != torch.float32 or costs // 2 >= memory.free_bytes(device):
            return []
        return [f"Choose bf16 as weight_dtype: that needs {costs / 2 / 2**30:.1f} GiB."]


class OpenedNetwork(Opened):
    """For ComfyUI's own class. Raises ConfigurationError where this host has no ComfyUI, and as `open_host_file`."""

    def __init__(self, request: Load, code: ComfyuiCode, device: torch.device):
        use_comfyui(code.folder, {**code.options, "cpu": device.type == "cpu"})
        self._file, self._code = open_host_file(request.path, code.gguf), code
        self._latent = self._file.config.latent_format
        takes = QUANTISED if code.fast_float8 else self._file.takes
        described = describe_network(self._file.build(), self._file.size, self._latent.latent_dimensions, takes)
        self._described, self.facts = described, described.facts
        self._stored = getattr(torch, code.weights) if code.weights else None
        title = self.facts.title
        self.dtype = getattr(torch, request.dtype)
        self.family = Family(title, described.patch, described.rows_together)
        self.identity = self._file.identity, self._stored, code.fast_float8
        self.weight_bytes = self._file.size
        self.title = f"{title} of {self._file.path.name}"

    def weights(self, owned: Owned, device: torch.device, dealer: Dealer | None) -> LoadedWeights:
        if dealer is not None and self._file.pack is not None:
            what = "{name} is a GGUF file, whose weights do not come one block after the other."
            raise UnsupportedModelError(what, "Set weights to whole.", name=self._file.path.name)
        reader = NetworkReader(self._file, self._described.data, self._stored, self._code.fast_float8, owned)
        return NetworkWeights(reader, device, dealer)

    def network(self, weights: LoadedWeights, options: Options, pulse: Pulse) -> Network:
        assert isinstance(weights, NetworkWeights)
        if self._described.data is not None:
            mark_blocks(weights.network, [blocks.path for blocks in self._described.data.blocks], pulse)
        return ComfyNetwork(weights, self._described, self._latent, options[0], self.dtype, options[1])


def open_model(request: Load, device: torch.device) -> Opened:
    """Examine a file; for errors see the two classes."""
    return OpenedCheckpoint(request) if request.comfyui is None else OpenedNetwork(request, request.comfyui, device)
