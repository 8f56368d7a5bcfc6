"""Writes a model file again as GGUF files, by the package that ComfyUI-GGUF needs.

python gguf_files.py ARCHITECTURE SOURCE FOLDER TYPE...: FOLDER/TYPE.gguf for each type.
"""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
from safetensors.torch import load_file


def write(source: Path, path: Path, architecture: str, kind: str) -> None:
    """Matrices whose rows are whole blocks have the type, and all else is float32."""
    writer = gguf.GGUFWriter(path, architecture)
    wanted = gguf.GGMLQuantizationType[kind]
    for name, tensor in load_file(source).items():
        numbers = tensor.float().numpy()
        block = gguf.GGML_QUANT_SIZES[wanted][0]
        given = wanted if numbers.ndim == 2 and not numbers.shape[1] % block else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(numbers, given), raw_dtype=given)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    source, folder = map(Path, sys.argv[2:4])
    for each in sys.argv[4:]:
        write(source, folder / f"{each}.gguf", sys.argv[1], each)
