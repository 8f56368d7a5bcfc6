"""ComfyUI's own networks: their files as its loader reads them, and their weights on a rank."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..errors import UnsupportedModelError
from ..mesh.mesh import single_rank_mesh
from ..networks.comfyui.comfy_network import OwnCache
from ..networks.comfyui.prepared_network import prepare_network
from ..networks.comfyui.without_weights import WithoutWeights, with_parameters
from ..networks.stages import Stages
from ..networks.tables.blocks import Network
from ..networks.token_split import TokenSplit
from ..replaced import replaced
from ..said import said
from ..streaming.dealer import Dealer
from .host_file import HostFile, comfyuis_reason
from .left_in_file import LeftInFile, MappedFile
from .loaded_weights import LoadedWeights
from .open_file import OpenFile, Reader
from .reading import OnBytes, Place, read_through
from .weight_parts import parts, weights_of


def open_network(network: nn.Module, left: LeftInFile | None) -> OpenFile:
    """A network that ComfyUI has made; `left` is what was left in the file, None where its pack makes all tensors."""
    weights = dict(weights_of(network))  # the network itself gets others

    def find(name: str, part: int) -> Place | torch.Tensor:
        if left is None:
            return parts(weights[name])[part]
        source = left.parts(weights[name])[part]
        return left.file.place(source) or source

    return OpenFile(network, find)


class NetworkReader(Reader):
    """Has ComfyUI load a file; see `Reader`.

    Args:
        data: None where the ranks do not share out the network's tokens.
        dtype: of plain weights; None where the file is quantised and says it itself.
        fast_float8: see ComfyuiCode.
    """

    def __init__(
        self,
        file: HostFile,
        data: Network | None,
        dtype: torch.dtype | None,
        fast_float8: bool = False,
        owned: tuple[int, int] | None = None,
    ):
        super().__init__(file.path, file.identity, data.blocks if data is not None else (), owned)
        self.data = data
        self._file = file
        self._how = file, dtype, fast_float8

    def begin(self, on_bytes: OnBytes) -> OpenFile:
        """Have ComfyUI build the network."""
        left = None
        if (pack := self._file.pack) is not None:
            read_through(self._file.path, on_bytes)
            weights, operations = pack.read_file(self._file.path), pack.operations()
            network = _load(*self._how, weights, {}, custom_operations=operations)
        else:
            network, left = load_network(*self._how, on_bytes)
        self.let_others_go(network)
        return open_network(network, left)


class NetworkWeights(LoadedWeights):
    """A network of ComfyUI's, which runs over any mesh, or as a stage; all that use the same weights run this one."""

    def __init__(self, reader: NetworkReader, device: torch.device, dealer: Dealer | None = None):
        super().__init__(reader, device, dealer)
        self._stages: Stages | None = None
        self.split = TokenSplit(single_rank_mesh())
        self.own_cache = OwnCache(reader.data)
        self._data = reader.data
        self._settled: object = None

    def prepare(self, network: nn.Module) -> None:
        """Have the ranks share out its tokens, once."""
        if self._stages is not None:
            return
        if self._data is not None:
            prepare_network(network, self._data, self.split)
        if self.stream is not None:
            self.stream.wrap([network.get_submodule(path) for path in self._reader.blocks(network)])
        self._stages = Stages(network, self._data, self.split, self._reader.owned)

    @property
    def stages(self) -> Stages:
        """As which the network runs, once it has had its weights."""
        assert self._stages is not None
        return self._stages

    def settle(self, patches: object) -> None:
        """The weights have these patches; what the network keeps of runs was made with those of before, and goes."""
        super().settle(patches)
        if patches != self._settled:
            self.own_cache.clear(self.network)
            self._settled = patches

    def give_back(self) -> None:
        """Return the memory to the system, and let go of what the network keeps of runs."""
        if self._stages is not None:
            self._stages.run_as(None)
        if self._network is not None:
            self.own_cache.clear(self.network)
        self.split.end()
        self.split.forget()
        super().give_back()


def load_network(
    file: HostFile, dtype: torch.dtype | None, fast_float8: bool, on_bytes: OnBytes
) -> tuple[nn.Module, LeftInFile]:
    """ComfyUI's own loader on a safetensors file, which the weights are left in; see `LeftInFile`. Nothing is read yet,
    but `on_bytes` may raise.

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

    with replaced(BaseModel, "__init__", make):
        yield


def _load(
    file: HostFile, dtype: torch.dtype | None, fast_float8: bool, state_dict: Any, metadata: dict[str, str], **more: Any
) -> nn.Module:
    import comfy.sd
    import comfy.utils

    load = comfy.sd.load_diffusion_model_state_dict
    static: dict[str, Any] = (
        {"disable_dynamic": True} if "disable_dynamic" in inspect.signature(load).parameters else {}
    )
    cpu = torch.device("cpu")
    options = {"dtype": dtype, "offload_device": cpu, "fp8_optimizations": fast_float8, **more}
    if beside := file.beside & file.outside.keys():  # ComfyUI would leave out what has not the prefix
        kept = {name: state_dict[name] for name in beside}
        state_dict = comfy.utils.state_dict_prefix_replace(state_dict, {file.prefix: ""}, filter_keys=True) | kept
    with comfyuis_reason(said("ComfyUI cannot load {path}", path=file.path)):
        patcher = load(state_dict, model_options=options, metadata=metadata, **static)
    if patcher is None:
        raise UnsupportedModelError("ComfyUI does not recognise {path}.", "Choose another file.", path=file.path)
    network: nn.Module = patcher.model.diffusion_model
    return network
