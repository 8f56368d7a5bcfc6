"""Writes text encoders with random weights at real size, in the layout of the files that artists have.

python -m benchmarks.in_comfyui.encoder_files --comfyui ~/ComfyUI --folder models/text_encoders t5 clip-l
"""

from __future__ import annotations

import argparse
import importlib
import zlib
from pathlib import Path

import torch

from parallel_runtime.networks.comfyui.comfy_code import use_comfyui
from parallel_runtime.networks.comfyui.without_weights import WithoutWeights

from .encoders import ENCODERS, Encoder
from .files import write_parts
from .host_files import Part, make_parts

_LAYERS = ("model.layers.", "encoder.block.")
_QUANTISED_FROM = 256
"""Rows and columns of a product that a quantised file has in eight bits."""
_PIECES = "text_encoders/t5_pile_tokenizer/tokenizer.model"


def list_encoder_parts(encoder: Encoder, comfyui: Path) -> list[Part]:
    """Tensors of the file; ComfyUI must be importable (`use_comfyui`).

    Args:
        comfyui: its folder.
    """
    module, maker = encoder.made_by
    importlib.import_module("comfy.text_encoders.llama")  # that lt.py takes for imported
    made = getattr(importlib.import_module(f"comfy.text_encoders.{module}"), maker)
    with WithoutWeights():
        network = made()(device="cpu", dtype=torch.float32, model_options={})
    parts: list[Part] = []
    for name, value in network.state_dict().items():
        if not name.startswith(encoder.inside + encoder.only):
            continue
        key, shape = name.removeprefix(encoder.inside), tuple(value.shape)
        product = key.startswith(_LAYERS) and len(shape) == 2 and min(shape) >= _QUANTISED_FROM
        kind = encoder.format if product else ""
        parts += make_parts(key, shape, zlib.crc32(encoder.file.encode()), kind, torch.bfloat16)
    if encoder.pieces:
        pieces = torch.frombuffer(bytearray((comfyui / "comfy" / _PIECES).read_bytes()), dtype=torch.uint8)
        parts.append(Part("spiece_model", tuple(pieces.shape), torch.uint8, lambda _: pieces))
    return parts


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("names", nargs="+", choices=list(ENCODERS))
    options = parser.parse_args()
    use_comfyui(str(options.comfyui), {"cpu": True})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name in options.names:
        path = options.folder / ENCODERS[name].file
        write_parts(path, list_encoder_parts(ENCODERS[name], options.comfyui), device)
        print(f"{path.name}: {path.stat().st_size / 1e9:.1f} GB", flush=True)


if __name__ == "__main__":
    main()
