"""Model files with random weights in the layout that artists have, written as fast as the disk takes them.

python -m benchmarks.in_comfyui.files --folder FOLDER --comfyui ~/ComfyUI flux klein klein-b own-flux-fp8
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.authors_names import NAMES, authors_names

from .families import ENDING, REAL, Family, family_of, tiny
from .gguf_files import write_gguf
from .host_families import GGUF, HOST_REAL, HostFamily, file_name, host_tiny
from .host_files import Part, header_of, list_parts

_WRITERS = 8
_CODES = {
    torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8", torch.uint8: "U8",
}  # fmt: skip


ALL: dict[str, Family] = {**REAL, **HOST_REAL}


def all_tiny() -> dict[str, Family]:
    """The same families for CPUs."""
    return {**tiny(), **host_tiny()}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: its key, shape, and whether it scales a norm."""

    key: str
    shape: tuple[int, ...]
    norm: bool


def list_entries(family: Family) -> list[Entry]:
    """Tensors of the file: shapes of the diffusers class on the meta device, under their authors' names."""
    import diffusers

    with torch.device("meta"):
        transformer: Any = getattr(diffusers, family.spec.transformer_class)(**family.config)
    tensors, entries = transformer.state_dict(), []
    for name, made in authors_names(NAMES[family.spec.transformer_class], tensors).items():
        norm = "norm" in made.parts[0] and made.parts[0].endswith("weight")
        entries.append(Entry(family.prefix + name, tuple(made.join(tensors.__getitem__).shape), norm))
    return entries


def list_vae_entries(config: Mapping[str, Any]) -> list[Entry]:
    """Tensors of a VAE's file in diffusers' layout, which ComfyUI reads as well."""
    import diffusers

    with torch.device("meta"):
        vae: Any = diffusers.AutoencoderKL(**config)
    shapes = vae.state_dict()
    return [Entry(key, tuple(value.shape), "norm" in key and key.endswith("weight")) for key, value in shapes.items()]


def random_values(entry: Entry, seed: int, device: str) -> torch.Tensor:
    """Values that keep the scale of what passes through them, and depend on key and seed alone.

    Returns:
        float32 of `entry.shape` on `device`.
    """
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed}/{entry.key}".encode()))
    noise = torch.randn(entry.shape, generator=generator, device=device)
    if len(entry.shape) > 1:
        return noise.div_(math.sqrt(math.prod(entry.shape[1:])))
    return noise.mul_(0.1).add_(1) if entry.norm else noise.mul_(0.02)


def write_file(path: Path, family: Family, seed: int, device: str, comfyui: Path | None = None) -> None:
    """Write a family's transformer; see `write_parts`.

    Args:
        comfyui: its folder, for a HostFamily.
    """
    if isinstance(family, HostFamily):
        assert comfyui is not None
        parts = list_parts(family, comfyui, seed)
        if family.gguf:
            write_gguf(path, "flux", parts, device)
        else:
            write_parts(path, parts, device, header_of(family))
    else:
        write_tensors(path, list_entries(family), family.dtype, seed, device)


def write_tensors(path: Path, entries: list[Entry], dtype: torch.dtype, seed: int, device: str) -> None:
    """Write a safetensors file of one type; see `write_parts`."""
    write_parts(
        path,
        [Part(each.key, each.shape, dtype, partial(random_values, each, seed)) for each in entries],
        device,
    )


def write_parts(path: Path, parts: Sequence[Part], device: str, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file; it appears under its name when it is whole."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + math.prod(part.shape) * part.dtype.itemsize)
        header[part.key] = {"dtype": _CODES[part.dtype], "shape": part.shape, "data_offsets": ends[-2:]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.flush()

        def write(number: int) -> None:
            values = parts[number].make(device).to(parts[number].dtype).cpu().contiguous()
            rest = memoryview(values.reshape(-1).view(torch.uint8).numpy().data)
            place = 8 + len(text) + ends[number]
            while rest:
                written = os.pwrite(file.fileno(), rest, place)
                rest, place = rest[written:], place + written

        with ThreadPoolExecutor(_WRITERS) as writers:
            list(writers.map(write, range(len(parts))))
    unfinished.replace(path)


class FileStore:
    """The models folder: makes what is needed, deletes what nothing needs any more.

    Args:
        folder: ComfyUI's models/diffusion_models.
        families: at real size, or tiny.
        small: the families are the tiny ones.
        comfyui: its folder, for files of its own networks.
        spare: gigabytes of the disk that stay free for other files.
    """

    def __init__(
        self,
        folder: Path,
        families: Mapping[str, Family],
        small: bool,
        comfyui: Path | None = None,
        spare: float = 2.0,
    ):
        self._comfyui = comfyui
        self._spare = spare
        self._folder = folder
        self._families = families
        self._small = small
        self._lock = threading.Lock()

    def make(self, files: Iterable[str], wanted_later: Iterable[str], seconds: float) -> float:
        """Have these files, in one process of its own, whose GPU memory is free again at its end.

        Args:
            wanted_later: files that are kept although they are not needed now, while the disk has space.
            seconds: time limit.

        Returns:
            Seconds that it took.

        Raises:
            subprocess.SubprocessError: it failed, or took longer.
        """
        began = time.monotonic()
        with self._lock:
            files = list(dict.fromkeys(files))
            missing = [file for file in files if not self._path(file).exists()]
            for left in self._folder.glob("*.unfinished"):
                left.unlink()
            if missing:
                self._free_space(missing, keep={*files, *wanted_later})
                self._free_space(missing, keep=set(files))
                command = [sys.executable, "-m", "benchmarks.in_comfyui.files", "--folder", str(self._folder)]
                command += ["--comfyui", str(self._comfyui)] if self._comfyui is not None else []
                subprocess.run([*command, *["--tiny"] * self._small, *missing], check=True, timeout=seconds)
        return time.monotonic() - began

    def fitting(self, files: Iterable[str]) -> list[str]:
        """The first of these that the disk has space for, all together."""
        space, chosen = self._free() - self._spare, []
        for file in dict.fromkeys(files):
            space -= 0 if self._path(file).exists() else family_of(file, self._families).gigabytes
            if space < 0:
                break
            chosen.append(file)
        return chosen

    def clear(self) -> None:
        """Delete all files."""
        for path in self._all():
            path.unlink()

    def _free_space(self, missing: Iterable[str], keep: set[str]) -> None:
        wanted = self._spare + sum(family_of(file, self._families).gigabytes for file in missing)
        for path in self._all():
            if self._free() < wanted and path.stem not in keep:
                path.unlink()

    def _all(self) -> list[Path]:
        return sorted(path for path in self._folder.iterdir() if path.suffix in (ENDING, GGUF))

    def _free(self) -> float:
        status = os.statvfs(self._folder)
        return status.f_bavail * status.f_frsize / 1e9

    def _path(self, file: str) -> Path:
        return self._folder / file_name(file)


def main() -> None:
    """Write the files that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--comfyui", type=Path, help="its folder, for files of its own networks")
    parser.add_argument("--tiny", action="store_true", help="at the size for CPUs")
    parser.add_argument("files", nargs="+", metavar="NAME", help=f"{', '.join(ALL)}, or such a name with -b")
    options = parser.parse_args()
    families = all_tiny() if options.tiny else ALL
    device = "cuda" if torch.cuda.is_available() and not options.tiny else "cpu"
    for file in options.files:
        path = options.folder / file_name(file)
        family = family_of(file, families)
        write_file(path, family, zlib.crc32(file.encode()), device, options.comfyui)
        if family.vae is not None:
            vae = options.folder.parent / "vae" / f"{family.name}{ENDING}"
            vae.parent.mkdir(exist_ok=True)
            write_tensors(vae, list_vae_entries(family.vae), family.dtype, 5, device)
        print(f"{path.name}: {path.stat().st_size / 1e9:.1f} GB", flush=True)


if __name__ == "__main__":
    main()
