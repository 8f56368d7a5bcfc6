"""A ComfyUI network with its weights as a rank holds it: loaded by ComfyUI, let go, loaded again."""

from __future__ import annotations

import contextlib
import gc
import inspect
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..acceleration.pulse import Pulse
from ..errors import NotLoadedError, UnsupportedModelError
from ..mesh.mesh import single_rank_mesh
from ..networks.comfyui.own_cache import OwnCache
from ..networks.comfyui.prepared_network import prepare_network
from ..networks.comfyui.without_weights import WithoutWeights, with_parameters
from ..networks.marked_blocks import mark_blocks
from ..networks.stages import StageBlocks, all_blocks, let_go, run_as
from ..networks.tables.blocks import Network
from ..networks.token_split import TokenSplit
from ..said import said
from ..streaming.block_stream import BlockStream
from ..streaming.shared_blocks import SharedBlocks
from .files import identity
from .host_file import HostFile
from .left_in_file import LeftInFile, MappedFile
from .patchable_network import FileNumbers, PatchableNetwork
from .reading import OnBytes
from .transfer import read_through


class HeldNetwork(PatchableNetwork):
    """A network's weights; see `HeldWeights` for the methods.

    Args:
        data: None where the ranks do not share out its tokens.
        dtype: of plain weights; None where the file is quantised and says it itself.
        fast_float8: see ComfyuiCode.
        owned: (start, stop) of the blocks that this rank has, of a network in stages; None for all.
        size: bytes of its weights here.
    """

    keeps_addresses = False
    stream: BlockStream | None = None
    shared: SharedBlocks | None = None

    def __init__(
        self,
        file: HostFile,
        data: Network | None,
        dtype: torch.dtype | None,
        device: torch.device,
        fast_float8: bool,
        owned: tuple[int, int] | None = None,
        size: int | None = None,
    ):
        # Of a GGUF file its pack makes tensors of its own class, which stay where they are.
        super().__init__(device, FileNumbers(file.path, file.identity, file.prefix) if file.pack is None else None)
        self.size = file.size if size is None else size
        self.owned = owned
        self.stage: StageBlocks | None = None
        """As which the network runs; None: with all its blocks."""
        self.here = False
        self.split = TokenSplit(single_rank_mesh())
        self.own_cache = OwnCache(data)
        self._settled: object = None
        self._file = file
        self._data = data
        self._dtype = dtype
        self._fast_float8 = fast_float8
        self.pulse: Pulse | None = None
        self._network: nn.Module | None = None
        # Tensors of its pack's class copy nothing, and quantised ones take their patches along.
        self._in_place = self._in_place and file.pack is None

    @property
    def network(self) -> nn.Module:
        """The network, on the device."""
        assert self._network is not None
        return self._network

    def mark(self, pulse: Pulse) -> None:
        """Have forwards mark their way through the blocks, from the next fill on or from now."""
        if self.pulse is None and self.here and self._data is not None:
            mark_blocks(self.network, [blocks.path for blocks in self._data.blocks], pulse)
        self.pulse = pulse

    def attach(self, module: nn.Module) -> None:
        """Nothing: the network comes with its weights."""

    def fill(self, on_bytes: OnBytes) -> None:
        """Have ComfyUI load the network; see `HeldWeights.fill`."""
        if self.here:
            return
        path = self._file.path
        if identity(path) != self._file.identity:
            raise NotLoadedError(said("{path} was replaced since it was loaded.", path=path), "Queue the prompt again.")
        network = self._load(on_bytes)
        if self._data is not None:
            prepare_network(network, self._data, self.split)
            if self.pulse is not None:
                mark_blocks(network, [blocks.path for blocks in self._data.blocks], self.pulse)
        self._network = network
        self.here = True
        self._loaded()

    def _load(self, on_bytes: OnBytes) -> nn.Module:
        """The network with its weights where it computes."""
        how = self._file, self._dtype, self._fast_float8
        if self._file.pack is not None:
            read_through(self._file.path, on_bytes)
            network = load_with_pack(*how)
            self._let_others_go(network)
            return network.to(self.device)
        network, left = load_network(*how, on_bytes)
        self._let_others_go(network)
        left.fetch(network, self.device, on_bytes)
        return network

    def _let_others_go(self, network: nn.Module) -> None:
        """Of a network in stages, blocks of others."""
        if self.owned is not None and self._data is not None:
            found = all_blocks(network, self._data.blocks)
            let_go([*found[: self.owned[0]], *found[self.owned[1] :]])

    def run_as(self, owned: tuple[int, int] | None) -> None:
        """Have the network run as the stage with these blocks; None: with all."""
        if self._network is not None:
            self.stage = run_as(self.stage, owned, self._network, self._data, self.split)

    def _loaded(self) -> None:
        """It is here, and its blocks are cut."""

    def settle(self, patches: object) -> None:
        """Take note of the patches in place: what the network keeps was made with those of before."""
        if patches != self._settled:
            self.own_cache.clear(self.network)
            self._settled = patches

    def give_back(self) -> None:
        """See `HeldWeights.give_back`."""
        self.here = False
        self._network = None
        self._bypasses = []
        self._settled = None
        self.stage = None
        self.split.leave()
        gc.collect()  # a cut block holds the forward that it stands for, in a circle


def load_network(
    file: HostFile, dtype: torch.dtype | None, fast_float8: bool, on_bytes: OnBytes
) -> tuple[nn.Module, LeftInFile]:
    """ComfyUI's own loader on a safetensors file, which the weights are left in; see `LeftInFile`.

    Args:
        on_bytes: see `HeldWeights.fill`; nothing is read yet, but it may raise.

    Raises:
        UnsupportedModelError: ComfyUI cannot read it, with its reason.
    """
    mapped = MappedFile(file.path)
    left = LeftInFile(mapped, lambda: on_bytes(0, file.size))
    with left, _made_without_weights(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*copying from a non-meta parameter")  # it is taken note of
        network = _load(file, dtype, fast_float8, dict(mapped.tensors), mapped.metadata)
    if lacking := left.lacking(network):  # what the loader leaves there may be what a layer begins with
        whole = _load(file, dtype, fast_float8, dict(mapped.tensors), mapped.metadata)
        for path, name in lacking:
            setattr(network.get_submodule(path), name, getattr(whole.get_submodule(path), name))
    return network, left


@contextlib.contextmanager
def _made_without_weights() -> Iterator[None]:
    """Inside, ComfyUI makes networks, and nothing else, without memory for their weights."""
    from comfy.model_base import BaseModel

    own = BaseModel.__init__

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        with with_parameters(), WithoutWeights():
            own(self, *args, **kwargs)
        # Older ComfyUIs move it to the CPU before its weights are loaded; until then they are nowhere.
        self.to = lambda *args, **kwargs: self

    BaseModel.__init__ = make
    try:
        yield
    finally:
        BaseModel.__init__ = own


def load_with_pack(file: HostFile, dtype: torch.dtype | None, fast_float8: bool) -> nn.Module:
    """ComfyUI's own loader on a GGUF file, with its pack's layers; the network is on the CPU.

    Raises:
        UnsupportedModelError: ComfyUI cannot read it, with its reason.
    """
    assert file.pack is not None
    operations = {"custom_operations": file.pack.operations()}
    return _load(file, dtype, fast_float8, file.pack.read_file(file.path), {}, operations)


def _load(
    file: HostFile,
    dtype: torch.dtype | None,
    fast_float8: bool,
    state_dict: Any,
    metadata: dict[str, str],
    options: Mapping[str, Any] = {},
) -> nn.Module:
    import comfy.sd
    import comfy.utils

    load = comfy.sd.load_diffusion_model_state_dict
    known = inspect.signature(load).parameters
    more: dict[str, Any] = {"disable_dynamic": True} if "disable_dynamic" in known else {}
    cpu = torch.device("cpu")
    options = {"dtype": dtype, "offload_device": cpu, "fp8_optimizations": fast_float8, **options}
    beside = file.beside & file.outside.keys()
    if beside:  # ComfyUI would leave out what has not the prefix
        kept = {name: state_dict[name] for name in beside}
        state_dict = comfy.utils.state_dict_prefix_replace(state_dict, {file.prefix: ""}, filter_keys=True) | kept
    if "metadata" in known:
        more["metadata"] = metadata
    try:
        patcher = load(state_dict, model_options=options, **more)
    except (RuntimeError, ValueError, KeyError, TypeError, NotImplementedError) as error:
        raise UnsupportedModelError(
            said("ComfyUI cannot load {path}: {error}", path=file.path, error=error), "Choose another file."
        ) from error
    if patcher is None:
        raise UnsupportedModelError(said("ComfyUI does not recognise {path}.", path=file.path), "Choose another file.")
    network: nn.Module = patcher.model.diffusion_model
    return network
