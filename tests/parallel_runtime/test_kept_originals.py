"""Weights of ComfyUI's network as they were before a LoRA: the host keeps none that their file has as they are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file

from parallel_runtime.errors import NotLoadedError, OutOfMemoryError
from parallel_runtime.loading import patchable_network
from parallel_runtime.loading.files import identity
from parallel_runtime.loading.patchable_network import FileNumbers, PatchableNetwork
from parallel_runtime.networks.comfyui.comfy_code import use_comfyui
from tests.comfyui_checkout import HOW, find_comfyui

COMFYUI = find_comfyui()
pytestmark = pytest.mark.skipif(COMFYUI is None, reason=HOW)
NAME, PREFIX = "layer.weight", "model.diffusion_model."


@pytest.fixture(scope="module", autouse=True)
def _comfy() -> None:
    use_comfyui(str(COMFYUI), {"cpu": True})


class Network(PatchableNetwork):
    """One layer of a file, whose weight is written as on a GPU that has no memory for its original."""

    def __init__(self, weight: torch.Tensor, path: Path, prefix: str):
        super().__init__(torch.device("cpu"), FileNumbers(path, identity(path), prefix))
        self._in_place = True
        self.layers = torch.nn.ModuleDict({"layer": torch.nn.Linear(1, 1)})
        self.layers["layer"].weight = torch.nn.Parameter(weight, requires_grad=False)

    @property
    def network(self) -> torch.nn.Module:
        return self.layers


@pytest.fixture(autouse=True)
def _no_room(monkeypatch) -> None:
    monkeypatch.setattr(patchable_network, "has_room", lambda tensors, device: False)
    free_on_host(monkeypatch, 1 << 40)


def free_on_host(monkeypatch, size: int) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=size, total=1 << 40))


def written(folder: Path, kind: str) -> tuple[Path, list[Any]]:
    """A file with a weight, and that weight and another one as ComfyUI's loader makes them of a file."""
    import comfy.quant_ops as quant

    torch.manual_seed(0)
    values = [torch.randn(64, 128).bfloat16() * scale for scale in (1.0, 30.0)]
    path, made = folder / "model.safetensors", {NAME: values[0]}
    weights: list[Any] = values
    if kind == "cast":
        weights = [value.half() for value in values]
    elif kind != "plain":
        layout = quant.QUANT_ALGOS[kind]["comfy_tensor_layout"]
        options: dict[str, Any] = {} if kind == "mxfp8" else {"scale": "recalculate"}
        weights = [quant.QuantizedTensor.from_float(value, layout, **options) for value in values]
        made = weights[0].state_dict(NAME)
    save_file({f"{PREFIX}{name}": tensor.contiguous() for name, tensor in made.items()}, path)
    return path, weights


@pytest.mark.parametrize("kind", ["plain", "cast", "float8_e4m3fn", "mxfp8", "nvfp4", "int8_tensorwise"])
def test_a_weight_that_its_file_has_is_read_again_and_takes_nothing_of_the_host(kind, tmp_path):
    path, weights = written(tmp_path, kind)
    read = lambda weight: weight.dequantize() if hasattr(weight, "_qdata") else weight  # noqa: E731
    network = Network(weights[0].clone(), path, PREFIX)
    plain = read(weights[0]).clone()
    place = network.layers["layer"].weight
    place = getattr(place, "_qdata", place).data_ptr()
    for patched in ([], [NAME]):  # the second time it is something else
        original = network.originals([NAME], patched)[NAME]
        assert torch.equal(read(original), plain)
        network.write(NAME, weights[1])
        assert not torch.equal(read(network.layers["layer"].weight), plain)
    assert network._originals.host_bytes == 0
    network.put_back(NAME, network.originals([NAME], [NAME])[NAME])
    weight = network.layers["layer"].weight
    assert torch.equal(read(weight), plain)
    assert getattr(weight, "_qdata", weight).data_ptr() == place
    assert not network.moved


@pytest.mark.parametrize("why", ["another name", "other numbers"])
def test_what_the_loader_made_itself_is_kept_on_the_host_if_that_has_room(why, tmp_path, monkeypatch):
    path, (weight, other) = written(tmp_path, "plain")
    network = Network(
        (weight if why == "another name" else -weight).clone(), path, "" if why == "another name" else PREFIX
    )
    before = network.layers["layer"].weight.detach().clone()
    free_on_host(monkeypatch, 1 << 30)
    with pytest.raises(OutOfMemoryError, match=NAME):
        network.originals([NAME], [])
    free_on_host(monkeypatch, 1 << 40)
    network.originals([NAME], [])
    assert network._originals.host_bytes == weight.nbytes
    network.write(NAME, other)
    network.put_back(NAME, network.originals([NAME], [NAME])[NAME])
    assert torch.equal(network.layers["layer"].weight, before)
    assert network._originals.host_bytes == 0


def test_another_file_in_its_place_is_no_original(tmp_path):
    path, (weight, other) = written(tmp_path, "plain")
    network = Network(weight.clone(), path, PREFIX)
    network.originals([NAME], [])
    network.write(NAME, other)
    save_file({f"{PREFIX}{NAME}": other.clone()}, tmp_path / "new.safetensors")
    (tmp_path / "new.safetensors").replace(path)
    with pytest.raises(NotLoadedError, match="replaced"):
        network.originals([NAME], [NAME])
