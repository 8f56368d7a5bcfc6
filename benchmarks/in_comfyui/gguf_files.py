"""GGUF files with random weights, as ComfyUI-GGUF reads them: matrices in Q4_K, and all else in float32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from .host_files import Part


def write_gguf(path: Path, architecture: str, parts: Sequence[Part], device: str) -> None:
    """Write a file; it appears under its name when it is whole.

    Args:
        parts: of which those in uint8 are matrices in Q4_K.
    """
    import gguf

    unfinished = path.with_suffix(".unfinished")
    writer = gguf.GGUFWriter(unfinished, architecture)
    for part in parts:
        values = part.make(device).to(part.dtype).cpu().numpy()
        kind = gguf.GGMLQuantizationType.Q4_K if part.dtype == torch.uint8 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(part.key, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.replace(path)
