"""Reads and checks the header of a safetensors file, says what one that is no model holds, and bounds what it or a
written config may ask for, before anything is built or counted by it; no tensor is touched.

Format: 8 bytes little-endian header length, the header as JSON, then the tensors' bytes
(https://huggingface.co/docs/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import torch

from ..errors import CheckpointError, UnsupportedModelError
from ..said import Said, said
from .files import reading

_LENGTH = struct.Struct("<Q")
LARGEST_HEADER = 16 << 20
MOST_TENSORS = 32_768
LONGEST_KEY = 512
"""ComfyUI's own process reads headers, whoever made them: these bound its time and memory. A full SDXL checkpoint has
2,500 tensors, keys of 120 characters and a header of 300 KB."""
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U64": torch.uint64, "U32": torch.uint32,
    "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
"""Types of safetensors files -> torch's."""
if hasattr(torch, "float8_e8m0fnu"):  # since torch 2.7
    DTYPES["F8_E8M0"] = torch.float8_e8m0fnu
AGAIN = "Download or copy the file again."
_GGUF = (
    said("a GGUF file"),
    said("Choose it in Parallel Loader, with .gguf at the end of its name, or a safetensors file."),
)
_PICKLE = said("a PyTorch pickle, which could run code"), said("Convert it to safetensors, or download that version.")
_FOREIGN = {b"GGUF": _GGUF, b"PK\x03\x04": _PICKLE, b"\x80\x02": _PICKLE}
_FOREIGN_SUFFIXES = {".gguf": _GGUF, **dict.fromkeys((".ckpt", ".pt", ".pt2", ".pth", ".bin", ".pkl"), _PICKLE)}
_TELLTALES: tuple[tuple[Said, str], ...] = (
    (said("a LoRA"), r"lora_(A|B|up|down)|\.lora\.|lokr_w|hada_w|dora_scale|\.oft_blocks"),
    (said("a ControlNet"), r"^(control_model|controlnet)|controlnet_(blocks|x_embedder|cond_embedding|mode_embed)"),
    (said("a Sana transformer"), r"^(blocks\.0\.mlp\.inverted_conv|transformer_blocks\.0\.ff\.conv_inverted)\."),
    (said("a Latte transformer"), r"^temporal_transformer_blocks\."),
    (said("a Kolors U-Net"), r"^encoder_hid_proj\."),
    (said("a VAE"), r"^(first_stage_model\.|vae\.)?(encoder|decoder)\.(conv_in|conv1|conv_out|downsamples)\."),
    (said("a CLIP text encoder"), r"(text_model\.encoder|transformer\.resblocks)"),
    (said("a CLIP vision encoder"), r"vision_model\.encoder"),
    (said("a T5 text encoder"), r"encoder\.block\.0\.layer\.0\.SelfAttention\."),
    (said("a language model"), r"model\.layers\.0\.self_attn\."),
)
"""What ComfyUI's networks do not run, and an expression that finds it in a key (prefix taken off): the first counts."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: shape, type as safetensors spells it ("BF16", "F32", ...), and at which byte of its file it lies."""

    shape: tuple[int, ...]
    dtype: str
    file: Path
    start: int


Header = tuple[dict[str, TensorInfo], dict[str, str]]
"""Of one file: its tensors by their key there, and the free-form text beside them."""


def read_header(path: Path) -> Header:
    """Read the header of a safetensors file, and check that the file holds what the header promises. CheckpointError:
    missing, unreadable, empty, truncated or damaged. UnsupportedModelError: another format, such as a pickle."""
    with reading(path), path.open("rb") as file:
        start = file.read(_LENGTH.size)
        size = path.stat().st_size
        length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else 0
        text = file.read(length) if 2 <= length <= LARGEST_HEADER else b""
    if not size:
        raise CheckpointError("{path} is empty (0 bytes).", AGAIN, path=path)
    if not text.startswith(b"{"):
        _refuse_foreign(path, start, size)
    if len(text) < length:
        cut = "{path} is truncated: its header has {length} bytes, the file {size} in all."
        raise CheckpointError(cut, AGAIN, path=path, length=length, size=size)
    header, promised = _parse(path, text)
    if promised != size:
        unlike = "{path} is {state}: its header promises {promised} bytes, the file has {size}."
        state = said("truncated") if size < promised else said("damaged")
        raise CheckpointError(unlike, AGAIN, path=path, state=state, promised=promised, size=size)
    return header


def _refuse_foreign(path: Path, start: bytes, size: int) -> NoReturn:
    by_start = (foreign for magic, foreign in _FOREIGN.items() if start.startswith(magic))
    if foreign := next(by_start, _FOREIGN_SUFFIXES.get(path.suffix.lower())):
        what, fix = foreign
        raise UnsupportedModelError("{path} is {what}, not safetensors.", fix, path=path, what=what)
    if start.startswith(b"version "):
        raise CheckpointError("{path} is a Git LFS pointer, not the model itself.", "Run git lfs pull.", path=path)
    if start.startswith(b"<"):
        cause = "{path} is a web page, not a model."
        raise CheckpointError(cause, "Download the file itself; it may need a login.", path=path)
    # None of its bytes are shown: a link may lead to anything.
    raise CheckpointError("{path} is no safetensors file ({size} bytes).", AGAIN, path=path, size=size)


_Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class _Entry(msgspec.Struct):
    """What a header says of a tensor."""

    dtype: Annotated[str, msgspec.Meta(max_length=40)]
    shape: Annotated[tuple[_Number, ...], msgspec.Meta(max_length=16)]
    data_offsets: tuple[_Number, _Number]


def _parse(path: Path, text: bytes) -> tuple[Header, int]:
    """Return the header and the bytes of the file, which its tensors fill without holes to the end."""
    data = _LENGTH.size + len(text)
    try:
        parts = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(parts.pop("__metadata__", b"null"), type=dict[str, str] | None)
        if len(parts) > MOST_TENSORS:
            raise ValueError(f"it lists {len(parts)} tensors, and at most {MOST_TENSORS} are read")
        if (longest := max(map(len, parts), default=0)) > LONGEST_KEY:
            raise ValueError(f"the name of a tensor has {longest} characters, and at most {LONGEST_KEY} are read")
        entries = {key: msgspec.json.decode(part, type=_Entry) for key, part in parts.items()}
    except (ValueError, msgspec.DecodeError, RecursionError) as error:
        what = f"{type(error).__name__}: {error}"[:200]
        raise CheckpointError("{path} has a damaged header ({what}).", AGAIN, path=path, what=what) from error
    tensors, position = {}, 0
    for key, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = entry.data_offsets
        # Types that we do not know (packed ones) are refused by name later; only their place is checked here.
        wanted = math.prod(entry.shape) * DTYPES[entry.dtype].itemsize if entry.dtype in DTYPES else end - begin
        if begin != position or end < begin or end - begin != wanted:
            what = "{path} has a damaged header: the place of tensor {key} does not fit."
            raise CheckpointError(what, AGAIN, path=path, key=key)
        tensors[key] = TensorInfo(entry.shape, entry.dtype, path, data + begin)
        position = end
    return ({key: tensors[key] for key in entries}, metadata or {}), data + position


def name_contents(keys: Iterable[str]) -> Said:
    """Describe a file by its keys, such as "a VAE", else by the first few keys."""
    keys = sorted(keys)
    for what, telltale in _TELLTALES:
        if any(re.search(telltale, key) for key in keys):
            return what
    if not keys:
        return said("a file without tensors")
    names = ", ".join(keys[:4])
    return said("something unknown, with {count} tensors such as {names}", count=len(keys), names=names)


_MOST_BLOCKS = 256  # in one list; the largest models that are told of have about 60
_LARGEST = 1_000_000
_LARGEST_SIZE = 4096  # of a picture or a table of positions, whose side it is: memory goes by its square
_MOST_VALUES = 1000
_LARGEST_INDEX = 1023  # in the name of a tensor: of a block, or of one of its experts
_DIGITS = 9  # a longer number is no index to anybody who counts from zero
_COUNTED = ("layers", "blocks", "depth")
_FIX = "Download the folder again."


def check_config(path: Path, config: Mapping[str, Any], tensors: int) -> None:
    """CheckpointError, with the value, for numbers that no model has: every layer has one of the tensors at least."""
    values = list(_values("", config))
    if len(values) > _MOST_VALUES:
        what = "{path} holds {values} values, which is no model's config."
        raise CheckpointError(what, _FIX, path=path, values=len(values))
    for name, value in values:
        most = _LARGEST_SIZE if "size" in name else _LARGEST
        if "layers" in name:
            most = min(_MOST_BLOCKS, max(tensors, 1))
        _refuse_large(path, name, value, most, _FIX)


def check_host_header(path: Path, names: Iterable[str], metadata: Mapping[str, str]) -> None:
    """CheckpointError, with the name or the value, for what would have ComfyUI's own recognition count, or build, what
    no model has: it looks through the names of all tensors for each block, and believes the header's `config`."""
    for name in names:
        number = max((int(part) for part in name.split(".") if part.isdecimal() and len(part) < _DIGITS), default=0)
        if number > _LARGEST_INDEX:
            what = "{path} has a tensor {name}, and no model counts further than {largest_index}."
            raise CheckpointError(what, AGAIN, path=path, name=name[:80], largest_index=_LARGEST_INDEX)
    for name, value in _values("", _written_transformer(metadata)):
        most = _MOST_BLOCKS if any(word in name for word in _COUNTED) else _LARGEST
        _refuse_large(path, name, value, most, AGAIN)


def _refuse_large(path: Path, name: str, value: Any, most: int, fix: str) -> None:
    if isinstance(value, int | float) and not -most <= value <= most:
        what = "{path} says {name} {value}, and at most {most} can be."
        raise CheckpointError(what, fix, path=path, name=name[:80], value=str(value)[:40], most=most)


def _written_transformer(metadata: Mapping[str, str]) -> Mapping[str, Any]:
    """What a header's config says of the network; nothing where it is something else, which most families ignore."""
    try:
        config = json.loads(metadata.get("config", "{}"))
    except (ValueError, TypeError, RecursionError):
        return {}
    written = config.get("transformer") if isinstance(config, dict) else None
    return written if isinstance(written, dict) else {}


def _values(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _values(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _values(name, inner)
    else:
        yield name, value
