"""Reads and checks the header of a safetensors file, and says what one that is no model holds; no tensor is touched.

Format: 8 bytes little-endian header length, the header as JSON, then the tensors' bytes
(https://huggingface.co/docs/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ..errors import CheckpointError, UnsupportedModelError
from ..said import Said, said
from .files import reading

_LENGTH = struct.Struct("<Q")
LARGEST_HEADER = 16 << 20
MOST_TENSORS = 32_768
LONGEST_KEY = 512
_MOST_DIMS = 16
_LARGEST_NUMBER = 1 << 53
"""ComfyUI's own process reads headers, whoever made them: these bound its time and memory. A full SDXL checkpoint has
2,500 tensors, keys of 120 characters and a header of 300 KB."""
_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4}
_BYTES |= {"I64": 8, "U64": 8, "F64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
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


@dataclass(frozen=True)
class FileHeader:
    """Header of one file: its tensors by their key there, and the free-form text beside them."""

    tensors: Mapping[str, TensorInfo]
    metadata: dict[str, str]


def read_header(path: Path) -> FileHeader:
    """Read the header of a safetensors file, and check that the file holds what the header promises.

    Raises:
        CheckpointError: missing, unreadable, empty, truncated or damaged.
        UnsupportedModelError: another format, such as GGUF or a pickle.
    """
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


def _numbers(values: Any, most: int) -> tuple[int, ...]:
    """Sizes or offsets, which JSON may have as anything: ValueError or TypeError where they are none."""
    if len(values) > most or not all(type(value) is int and 0 <= value <= _LARGEST_NUMBER for value in values):
        raise ValueError("a shape or an offset is none")
    return tuple(values)


def _parse(path: Path, text: bytes) -> tuple[FileHeader, int]:
    """Return the header and the bytes of the file, which its tensors fill without holes to the end."""
    data = _LENGTH.size + len(text)
    try:
        entries = json.loads(text)
        metadata = entries.pop("__metadata__", None) or {}
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("its __metadata__ is not text by name")
        tensors, spans = {}, []
        if len(entries) > MOST_TENSORS:
            raise ValueError(f"it lists {len(entries)} tensors, and at most {MOST_TENSORS} are read")
        for key, entry in entries.items():
            key.encode()  # halves of characters, which JSON may hold
            shape, (begin, end) = _numbers(entry["shape"], _MOST_DIMS), _numbers(entry["data_offsets"], 2)
            tensors[key] = TensorInfo(shape, str(entry["dtype"])[:40], path, data + begin)
            spans.append((begin, end, key))
            if len(key) > LONGEST_KEY:
                raise ValueError(f"the name of a tensor has {len(key)} characters, and at most {LONGEST_KEY} are read")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        what = f"{type(error).__name__}: {error}"[:200]
        raise CheckpointError("{path} has a damaged header ({what}).", AGAIN, path=path, what=what) from error
    position = 0
    for begin, end, key in sorted(spans):
        info = tensors[key]
        # Types that we do not know (packed ones) are refused by name later; only their place is checked here.
        wanted = math.prod(info.shape) * _BYTES[info.dtype] if info.dtype in _BYTES else end - begin
        if begin != position or end < begin or end - begin != wanted:
            what = "{path} has a damaged header: the place of tensor {key} does not fit."
            raise CheckpointError(what, AGAIN, path=path, key=key)
        position = end
    return FileHeader(tensors, metadata), data + position


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
