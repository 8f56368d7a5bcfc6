"""The text encoders of whole prompts, at real size: which class of ComfyUI's each is, and the format of its file."""

from __future__ import annotations

from typing import NamedTuple


class Encoder(NamedTuple):
    """One text encoder.

    Args:
        file: its name.
        made_by: module of comfy.text_encoders and function that gives ComfyUI's class.
        inside: what precedes the file's keys in the class' own.
        format: of the products in its layers: "" as they are, or "scaled fp8".
        pieces: its file holds a tokenizer, for which ComfyUI's smaller one stands.
        only: what the file's keys begin with, after `inside`.
    """

    file: str
    made_by: tuple[str, str]
    inside: str
    format: str = ""
    pieces: bool = False
    only: str = ""


ENCODERS = {
    "clip-l": Encoder("benchmark-clip-l.safetensors", ("flux", "flux_clip"), "clip_l.transformer."),
    "t5": Encoder("benchmark-t5.safetensors", ("flux", "flux_clip"), "t5xxl.transformer."),
    "umt5": Encoder("benchmark-umt5.safetensors", ("wan", "te"), "umt5xxl.transformer.", "scaled fp8", True),
    "qwen-2.5": Encoder("benchmark-qwen-2.5.safetensors", ("qwen_image", "te"), "qwen25_7b.transformer.", "scaled fp8"),
    "qwen-3": Encoder("benchmark-qwen-3.safetensors", ("z_image", "te"), "qwen3_4b.transformer."),
    "gemma": Encoder("benchmark-gemma.safetensors", ("lt", "ltxav_te"), "gemma3_12b.transformer.", "scaled fp8", True),
    "ltx-projection": Encoder(
        "benchmark-ltx-projection.safetensors", ("lt", "ltxav_te"), "", only="text_embedding_projection."
    ),
    "qwen-3-vl": Encoder(
        "benchmark-qwen-3-vl.safetensors", ("minimax", "te"), "qwen3vl_32b.transformer.", "scaled fp8"
    ),
}
