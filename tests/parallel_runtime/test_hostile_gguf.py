"""Whatever a GGUF file's header promises, it is refused in one sentence, or what the package `gguf` reads is in it."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallel_runtime.errors import CheckpointError, UnsupportedModelError
from parallel_runtime.loading.gguf_pack import check_gguf_header
from parallel_runtime.loading.host_file import HostFile

from .test_hostile_files import bounded  # noqa: F401 - a fixture: every test here is one of time and of memory as well

SIZES = {0: (1, 4), 1: (1, 2), 2: (32, 18), 8: (32, 34), 30: (1, 2)}
STRING, ARRAY, UINT8, UINT32, INT32 = 8, 9, 0, 4, 5
HUGE = 1 << 60


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, length: int, values: bytes) -> bytes:
    return struct.pack("<IQ", kind, length) + values


def tensor(name: str, shape: list[int], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


PAIRS = [
    pair("general.architecture", STRING, text("flux")),
    pair("general.alignment", UINT32, struct.pack("<I", 64)),
    pair("general.tags", ARRAY, array(STRING, 2, text("one") + text("two"))),
    pair("comfy.gguf.orig_shape.x.weight", ARRAY, array(INT32, 2, struct.pack("<2i", 8, 16))),
]
TENSORS = [
    tensor("x.weight", [64, 2], 8, 0), tensor("x.bias", [8], 0, 192), tensor("y.weight", [4, 3, 2], 1, 256)
]  # fmt: skip


def header(pairs: list[bytes] = PAIRS, tensors: list[bytes] = TENSORS, start: bytes = b"GGUF\x03\0\0\0") -> bytes:
    return start + struct.pack("<2Q", len(tensors), len(pairs)) + b"".join([*pairs, *tensors])


def whole(text: bytes) -> bytes:
    return text + bytes(-len(text) % 64 + 304)


def write(path: Path, content: bytes) -> Path:
    path = path / "m.gguf"
    path.write_bytes(content)
    return path


def test_a_sound_file_passes(tmp_path):
    check_gguf_header(write(tmp_path, whole(header())), SIZES)
    with pytest.raises(CheckpointError, match="place of tensor 'y.weight' does not fit"):
        check_gguf_header(write(tmp_path, whole(header())[:-1]), SIZES)


SHAPE = "comfy.gguf.orig_shape.x.bias"
WRONG: dict[str, tuple[bytes, str]] = {
    "another format": (header(start=b"version "), "it starts with b'vers'"),
    "another version": (header(start=b"GGUF\x09\0\0\0"), "its version is 9"),
    "the other byte order": (header(start=b"GGUF\0\0\0\x03"), "its version is 50331648"),
    "a billion tensors": (b"GGUF\x03\0\0\0" + struct.pack("<2Q", HUGE, 0), "lists 1152921504606846976 tensors"),
    "a billion values": (b"GGUF\x03\0\0\0" + struct.pack("<2Q", 0, HUGE), "and 1152921504606846976 values"),
    "more tensors than are there": (b"GGUF\x03\0\0\0" + struct.pack("<2Q", 9, 0), "the file ends in it"),
    "a long name": (header([struct.pack("<Q", HUGE)]), "a name has 1152921504606846976 bytes"),
    "a name that is no text": (header([text(b"\xff") + struct.pack("<IB", 0, 0)]), "can't decode byte 0xff"),
    "a long text": (header([pair("x", STRING, struct.pack("<Q", HUGE))]), "the file ends in it"),
    "a long array": (header([pair("x", ARRAY, array(UINT8, HUGE, b""))]), "more than 262144 values"),
    "arrays in arrays": (header([pair("x", ARRAY, array(ARRAY, 1, b"") * 2000)]), "too deep"),
    "an unknown type": (header([pair("x", 99, b"")]), "a value has the type 99"),
    "an alignment of zero": (header([pair("general.alignment", UINT32, bytes(4))]), "its alignment is 0"),
    "no shape": (header([pair(SHAPE, STRING, text("8"))]), "is no shape"),
    "a shape of other numbers": (
        header([pair(SHAPE, ARRAY, array(INT32, 2, struct.pack("<2i", 1 << 20, 1 << 20)))]), "and was .1048576, 1048576"
    ),
    "a shape below zero": (
        header([pair(SHAPE, ARRAY, array(INT32, 2, struct.pack("<2i", -2, -4)))]), "and was .-2, -4"
    ),
    "an unknown quantisation": (header(tensors=[tensor("x", [8], 99, 0)]), "of an unknown type, 99"),
    "a part of a block": (header(tensors=[tensor("x", [8, 4], 8, 0)]), "the shape of tensor 'x' is .8, 4"),
    "no numbers": (header(tensors=[tensor("x", [0, HUGE], 0, 0)]), "the shape of tensor 'x' is .0"),
    "dimensions": (header(tensors=[text("x") + struct.pack("<I", 1 << 31)]), "tensor 'x' has 2147483648 dimensions"),
    "a product that wraps": (header(tensors=[tensor("x", [1 << 32, 1 << 32], 0, 0)]), "place of tensor 'x'"),
    "an offset outside": (header(tensors=[tensor("x", [8], 0, HUGE)]), "place of tensor 'x' does not fit"),
    "one place for two": (header(tensors=[tensor("x", [8], 0, 0), tensor("y", [8], 0, 0)]), "place of tensor 'y'"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_no_model_has_is_refused_in_one_sentence(tmp_path, name):
    content, says = WRONG[name]
    path = write(tmp_path, whole(content) if "the file ends" not in says else content)
    with pytest.raises(CheckpointError, match=says) as caught:
        check_gguf_header(path, SIZES)
    assert len(str(caught.value)) < 300 + len(str(path))
    assert "\n" not in str(caught.value)


def test_a_file_of_nothing_and_none_at_all_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="the file ends in it"):
        check_gguf_header(write(tmp_path, b""), SIZES)
    with pytest.raises(CheckpointError, match="cannot be read"):
        check_gguf_header(tmp_path / "none.gguf", SIZES)


def test_a_weight_of_another_size_than_the_networks_is_refused_before_a_rank_runs_it():
    network, config = torch.nn.Linear(4, 3), SimpleNamespace(process_unet_state_dict=dict)
    stamp: Any = None

    def file(weight: torch.Tensor, pack: Any) -> HostFile:
        return HostFile(Path("m.gguf"), stamp, config, {"weight": weight}, 0, None, pack=pack)

    assert file(torch.zeros(12, 1), object()).missing(network) == ["bias"]
    with pytest.raises(
        UnsupportedModelError, match=r"cannot read m.gguf: .*weight is \[2, 4\], and \[3, 4\] is wanted"
    ):
        file(torch.zeros(2, 4), object()).missing(network)


def changed(content: bytes, draw: random.Random) -> bytes:
    """The file with a few bytes of its header others, or cut off."""
    made, within = bytearray(content), len(header())
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(within)
        number = draw.choice([0, 1, 2, 255, 1 << 31, (1 << 32) - 1, HUGE, (1 << 64) - 1])
        part = struct.pack("<Q", number)[: draw.choice([1, 4, 8])]
        made[at : at + len(part)] = part
    return bytes(made[: draw.randrange(within)] if draw.random() < 0.1 else made)


def test_what_passes_is_what_the_package_reads(tmp_path):
    gguf = pytest.importorskip("gguf")
    draw, passed = random.Random(12), 0
    for _ in range(700):
        path = write(tmp_path, changed(whole(header()), draw))
        try:
            check_gguf_header(path, gguf.GGML_QUANT_SIZES)
        except CheckpointError:
            continue
        passed += 1
        try:
            reader = gguf.GGUFReader(path)
        except (KeyError, ValueError):  # names that are there twice
            continue
        assert sum(each.n_bytes for each in reader.tensors) <= path.stat().st_size
    assert passed > 50
