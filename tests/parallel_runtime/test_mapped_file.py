"""Tensors of a mapped file have its numbers, and those that lie in it as they are go from there to a network."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from torch import nn

from parallel_runtime.loading.comfyui_network import LeftInFile
from parallel_runtime.loading.host_file import MappedFile
from parallel_runtime.loading.reading import Place, read, split
from parallel_runtime.requests.control import Cancelled

WEIGHT = torch.arange(12, dtype=torch.float32).view(3, 4)


@pytest.fixture(params=[0, 1, 3], ids=lambda odd: f"{odd} bytes off")
def path(request, tmp_path) -> Path:
    """A file of three tensors, one without numbers, which begin at any byte."""
    tensors = {"weight": WEIGHT, "none": torch.zeros(0, 4), "bias": torch.ones(3, dtype=torch.bfloat16)}
    kinds, entries, data = {torch.float32: "F32", torch.bfloat16: "BF16"}, {}, b""
    for name, tensor in tensors.items():
        own = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        place = [len(data), len(data) + len(own)]
        entries[name] = {"dtype": kinds[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
        data += own
    header = json.dumps({"__metadata__": {"by": "hand"}, **entries}).encode()
    header += b" " * (-len(header) % 8 + request.param)
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return file


def test_it_has_the_files_numbers_and_knows_where_they_lie(path):
    mapped = MappedFile(path)
    assert mapped.metadata == {"by": "hand"}
    assert torch.equal(mapped.tensors["weight"], WEIGHT)
    assert mapped.tensors["none"].shape == (0, 4)
    begin = mapped.place(mapped.tensors["weight"]).start
    assert mapped.place(mapped.tensors["weight"][1:]) == Place(path, begin + 16, torch.float32)
    assert mapped.place(mapped.tensors["bias"]) == Place(path, begin + 48, torch.bfloat16)
    for elsewhere in (mapped.tensors["weight"].T, mapped.tensors["none"], torch.ones(1), torch.ones(1, device="meta")):
        assert mapped.place(elsewhere) is None
    before = path.read_bytes()
    mapped.tensors["weight"].mul_(2)  # as some of ComfyUI's conversions do
    assert path.read_bytes() == before
    assert mapped.place(mapped.tensors["weight"]) is None  # its numbers are not the file's any more
    assert mapped.place(mapped.tensors["bias"]) is not None


def test_a_weight_is_read_in_its_networks_type_and_what_the_loader_made_itself_is_not_read(path):
    left = LeftInFile(MappedFile(path))
    network = nn.Linear(4, 3, device="meta", dtype=torch.bfloat16).requires_grad_(False)
    given = {"weight": left.file.tensors["weight"], "bias": left.file.tensors["bias"] * 2}
    with left, pytest.warns(UserWarning, match="non-meta parameter"):
        network.load_state_dict(given)
    assert left.lacking(network) == []
    target, told = torch.empty(12, dtype=torch.bfloat16), []
    place = left.file.place(left.sources[network.weight])
    assert place is not None
    pieces = list(split(place, target))
    read(pieces, lambda done, total: told.append((done, total)))
    assert torch.equal(target.view(3, 4), WEIGHT.bfloat16())
    assert told[-1] == (48, 48)
    bias = left.sources[network.bias]
    assert left.file.place(bias) is None
    assert torch.equal(bias, torch.full((3,), 2.0, dtype=torch.bfloat16))


def test_weights_that_the_file_has_not_are_named(path):
    left = LeftInFile(MappedFile(path))
    network = nn.Sequential(nn.Linear(4, 3, device="meta"))
    with left, pytest.warns(UserWarning, match="non-meta parameter"):
        network.load_state_dict({"0.weight": left.file.tensors["weight"]}, strict=False)
    assert left.lacking(network) == [("0", "bias")]


def test_a_cancel_is_heard_before_anything_is_read(path, monkeypatch):
    monkeypatch.setattr("parallel_runtime.loading.comfyui_network._TICK_SECONDS", -1.0)

    def give_up() -> None:
        raise Cancelled

    with pytest.raises(Cancelled), LeftInFile(MappedFile(path), give_up):
        torch.ones(1)
