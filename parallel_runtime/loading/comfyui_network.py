"""ComfyUI's own networks: their files as its loader reads them, and their weights on a rank."""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..errors import UnsupportedModelError
from ..mesh.mesh import single_rank_mesh
from ..networks.comfyui.comfy_network import OwnCache
from ..networks.comfyui.prepared_network import prepare_network
from ..networks.comfyui.without_weights import WithoutWeights, with_parameters
from ..networks.stages import Stages, let_go
from ..networks.tables.blocks import Network
from ..networks.token_split import TokenSplit
from ..replaced import replaced
from ..said import said
from ..streaming.dealer import Dealer
from .host_file import HostFile, MappedFile, comfyuis_reason
from .loaded_weights import LoadedWeights
from .reading import Find, OnBytes, Owned, Place, Reader, read_through
from .weight_parts import parts, weights_of

_TICK_SECONDS = 0.1


class LeftInFile(TorchFunctionMode):
    """Inside, numbers of the file that are copied to a weight on the meta device stay where they are until they go to
    the device, once, and it is noted whose they are: the loader's own copies lie in memory that is not pinned. What it
    converts, it converts as ever. `tick` is called ten times a second while functions of torch are; it may raise."""

    def __init__(self, file: MappedFile, tick: Callable[[], None] = lambda: None):
        super().__init__()
        self.file = file
        self._tick = tick
        self._ticked = time.monotonic()
        self.sources: dict[torch.Tensor, torch.Tensor] = {}  # a weight, by identity -> its numbers

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if time.monotonic() - self._ticked > _TICK_SECONDS:
            self._tick()
            self._ticked = time.monotonic()
        if func is torch.Tensor.copy_ and args[0].is_meta:
            self.sources[args[0]] = args[1].detach()
            return args[0]
        return func(*args, **(kwargs or {}))

    def lacking(self, network: nn.Module) -> list[tuple[str, str]]:
        """(module, name) of tensors that have numbers nowhere: the file has none for them."""
        return [
            (path, name)
            for path, module in network.named_modules()
            for name, value in (*module._parameters.items(), *module._buffers.items(), *vars(module).items())
            if isinstance(value, torch.Tensor) and value.is_meta and value not in self.sources
        ]


def find_in(network: nn.Module, left: LeftInFile | None) -> Find:
    """Where a network that ComfyUI made has its weights; `left`: what was left in the file, None where nothing was."""
    weights = dict(weights_of(network))  # the network itself gets others

    def find(name: str, part: int) -> Place | torch.Tensor:
        own = parts(weights[name])[part]
        if left is None:
            return own
        source = left.sources.get(weights[name], own)
        return left.file.place(source) or source

    return find


class NetworkReader(Reader):
    """Has ComfyUI load a file; see `Reader`. `data` is None where the ranks do not share out the network's tokens;
    `dtype` is that of plain weights, None where the file is quantised and says it itself."""

    def __init__(
        self, file: HostFile, data: Network | None, dtype: torch.dtype | None, fast_float8: bool = False,
        owned: Owned = None,
    ):  # fmt: skip
        super().__init__(file.path, file.identity, data.blocks if data is not None else (), owned)
        self.data = data
        self._file, self._dtype, self._fast_float8 = file, dtype, fast_float8

    def begin(self, on_bytes: OnBytes) -> tuple[nn.Module, Find]:
        left, file = None, self._file
        if file.pack is not None:
            read_through(file.path, on_bytes)
            network = self._load(file.pack.read_file(file.path), {}, custom_operations=file.pack.operations())
        else:
            network, left = self._leave_in_file(on_bytes)
        let_go(network, self.lists, self.owned)
        return network, find_in(network, left)

    def _leave_in_file(self, on_bytes: OnBytes) -> tuple[nn.Module, LeftInFile]:
        """Load a safetensors file, in which the weights are left; nothing is read yet, but `on_bytes` may raise."""
        mapped = MappedFile(self._file.path)
        left = LeftInFile(mapped, lambda: on_bytes(0, self._file.size))
        with left, _made_without_weights(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*copying from a non-meta parameter")  # it is taken note of
            network = self._load(dict(mapped.tensors), mapped.metadata)
        if lacking := left.lacking(network):  # what the loader leaves there may be what a layer begins with
            whole = self._load(dict(mapped.tensors), mapped.metadata)
            for path, name in lacking:
                setattr(network.get_submodule(path), name, getattr(whole.get_submodule(path), name))
        return network, left

    def _load(self, state_dict: Any, metadata: dict[str, str], **more: Any) -> nn.Module:
        """ComfyUI's own loader."""
        import comfy.sd
        import comfy.utils

        file, load = self._file, comfy.sd.load_diffusion_model_state_dict
        if "disable_dynamic" in inspect.signature(load).parameters:
            load = functools.partial(load, disable_dynamic=True)
        options = {"dtype": self._dtype, "fp8_optimizations": self._fast_float8, "offload_device": torch.device("cpu")}
        if beside := file.beside & file.outside.keys():  # ComfyUI would leave out what has not the prefix
            kept = {name: state_dict[name] for name in beside}
            state_dict = comfy.utils.state_dict_prefix_replace(state_dict, {file.prefix: ""}, filter_keys=True) | kept
        with comfyuis_reason(said("ComfyUI cannot load {path}", path=file.path)):
            patcher = load(state_dict, model_options={**options, **more}, metadata=metadata)
        if patcher is None:
            raise UnsupportedModelError("ComfyUI does not recognise {path}.", "Choose another file.", path=file.path)
        network: nn.Module = patcher.model.diffusion_model
        return network


class NetworkWeights(LoadedWeights):
    """A network of ComfyUI's, which runs over any mesh, or as a stage; all that use the same weights run this one."""

    def __init__(self, reader: NetworkReader, device: torch.device, dealer: Dealer | None = None):
        super().__init__(reader, device, dealer)
        self._stages: Stages | None = None
        self.split = TokenSplit(single_rank_mesh())
        self.own_cache = OwnCache(reader.data)
        self._data = reader.data

    def prepare(self, network: nn.Module) -> None:
        """Have the ranks share out its tokens, once."""
        if self._stages is not None:
            return
        if self._data is not None:
            prepare_network(network, self._data, self.split)
        if self.stream is not None:
            self.stream.wrap([network.get_submodule(path) for path in self._reader.blocks(network)])
        self._stages = Stages(network, self._data, self.split, self.owned)

    @property
    def stages(self) -> Stages:
        """As which the network runs, once it has had its weights."""
        assert self._stages is not None
        return self._stages

    def settle(self, patches: object) -> None:
        """The weights have other patches; what the network keeps of runs was made with those of before, and goes."""
        super().settle(patches)
        self.own_cache.clear(self.network)

    def give_back(self) -> None:
        """Return the memory to the system, and let go of what the network keeps of runs."""
        if self._stages is not None:
            self._stages.run_as(None)
        if self._network is not None:
            self.own_cache.clear(self.network)
        self.split.end()
        self.split.forget()
        super().give_back()


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
