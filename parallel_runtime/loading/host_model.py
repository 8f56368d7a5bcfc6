"""ComfyUI's model of a file around a network without weights: what it computes with beside the network is real.

Conditioning is made in ComfyUI's process, and some models have weights for that (Stable Audio's lengths, Zero123's
cameras); some nodes read a few out of the network (SeedVR2's prompts).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ..networks.comfyui.without_weights import WithoutWeights, with_parameters
from ..networks.tables.comfyui import find_network


class ReadWhenTaken(dict[str, torch.Tensor]):
    """A state dict on the meta device; a tensor is read when somebody takes it.

    Args:
        path: the safetensors file, in which a tensor has the same name or is not.
        taken: gets the names of tensors that were asked for.
    """

    def __init__(self, path: Path, tensors: Mapping[str, torch.Tensor], taken: set[str]):
        super().__init__(tensors)
        self._path = path
        self._taken = taken

    def __getitem__(self, name: str) -> torch.Tensor:
        self._taken.add(name)
        return read_tensor(self._path, name, super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 - it is what get does

    def pop(self, name: str, *default: Any) -> Any:
        if name not in self:
            return super().pop(name, *default)
        tensor = self[name]
        del self[name]
        return tensor


def read_tensor(path: Path, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, from the file where it is on the meta device and the file has it."""
    if not tensor.is_meta:
        return tensor
    with safe_open(path, framework="pt", device="cpu") as file:
        return file.get_tensor(name) if name in file.keys() else tensor  # noqa: SIM118 - it is no dict


def build_model(config: Any, path: Path, tensors: Mapping[str, torch.Tensor], prefix: str, taken: set[str]) -> Any:
    """ComfyUI's BaseModel.

    Args:
        config: ComfyUI's model configuration, its types chosen.
        tensors: of the network, and those of the file beside it.
        prefix: what the network's names have in the file.
        taken: gets the names of those that it is made with.

    Raises:
        As ComfyUI's classes, which raise anything: RuntimeError, ValueError, KeyError, ...
    """
    with with_parameters(), WithoutWeights(), warnings.catch_warnings():
        # A module says so whose weights WithoutWeights makes real.
        warnings.filterwarnings("ignore", ".*copying from a non-meta parameter")
        model = config.get_model(ReadWhenTaken(path, tensors, taken), "", device=torch.device("cpu"))
    network = model.diffusion_model
    data = find_network(type(network))
    for name in data.read_outside if data is not None else ():
        if name in tensors:
            real = read_tensor(path, prefix + name, tensors[name])
            setattr(network, name, real.to(getattr(network, name).dtype))
    return model
