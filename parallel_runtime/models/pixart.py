"""PixArt-α and PixArt-Σ: diffusers' PixArtTransformer2DModel as data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from .learned_sigma_adapter import PATCH
from .pixart_adapter import PixArtAdapter
from .spec import ModelSpec, StageSpec, TensorInfo, WeightRule
from .weight_rules import count_blocks, fused, linear

HEAD_DIM = 72
"""No tensor's shape tells it: all published models have it, and ComfyUI knows no other."""
_BASE = 64
"""Side in latent pixels of the 512² pictures that positions are measured by."""

_LOOKALIKES = (
    ".attn.sr.",  # PixArt-Σ with compressed keys and values, which diffusers does not compute
    ".attn.q_norm.",  # normalised queries, likewise
    "temporal_transformer_blocks.",  # Latte
    "controlnet_",
)
_FORMER_ARGUMENTS = ("double_self_attention", "num_vector_embeds", "only_cross_attention", "use_linear_projection")
"""What config.json still says where it was written for the class that PixArt once shared with others."""

_TOP = {
    "pos_embed.proj": "x_embedder.proj",
    "caption_projection.linear_1": "y_embedder.y_proj.fc1",
    "caption_projection.linear_2": "y_embedder.y_proj.fc2",
    "adaln_single.emb.timestep_embedder.linear_1": "t_embedder.mlp.0",
    "adaln_single.emb.timestep_embedder.linear_2": "t_embedder.mlp.2",
    "adaln_single.linear": "t_block.1",
    "proj_out": "final_layer.linear",
}
_MICRO_CONDITIONS = {
    "adaln_single.emb.resolution_embedder.linear_1": "csize_embedder.mlp.0",
    "adaln_single.emb.resolution_embedder.linear_2": "csize_embedder.mlp.2",
    "adaln_single.emb.aspect_ratio_embedder.linear_1": "ar_embedder.mlp.0",
    "adaln_single.emb.aspect_ratio_embedder.linear_2": "ar_embedder.mlp.2",
}
_BLOCK = {
    "attn1.to_out.0": "attn.proj",
    "attn2.to_q": "cross_attn.q_linear",
    "attn2.to_out.0": "cross_attn.proj",
    "ff.net.0.proj": "mlp.fc1",
    "ff.net.2": "mlp.fc2",
}
_BLOCK_FUSED = {
    "attn.qkv": ("attn1.to_q", "attn1.to_k", "attn1.to_v"),
    "cross_attn.kv_linear": ("attn2.to_k", "attn2.to_v"),
}


def weight_rules(config: Mapping[str, Any]) -> Iterator[WeightRule]:
    """Every parameter of the diffusers transformer out of the authors' names."""
    width = config["num_attention_heads"] * config["attention_head_dim"]
    for target, source in {**_TOP, **(_MICRO_CONDITIONS if config["use_additional_conditions"] else {})}.items():
        yield from linear(target, source)
    yield WeightRule("scale_shift_table", "final_layer.scale_shift_table")
    for index in range(config["num_layers"]):
        new, old = f"transformer_blocks.{index}.", f"blocks.{index}."
        for target, source in _BLOCK.items():
            yield from linear(new + target, old + source)
        for source, targets in _BLOCK_FUSED.items():
            yield from fused({new + target: width for target in targets}, old + source)
        yield WeightRule(f"{new}scale_shift_table", f"{old}scale_shift_table")


def _config(
    header: Mapping[str, TensorInfo], embedding: str, caption: str, output: str, table: str, blocks: str, ratio: str
) -> dict[str, Any] | None:
    """The diffusers config from the shapes of the named tensors; None where they are not PixArt's.

    Relatives that share the names (Sana, Allegro) have other block contents, or learned no variance.
    """
    shapes = [header[key].shape if key in header else () for key in (embedding, caption, output, table)]
    if [len(shape) for shape in shapes] != [4, 2, 2, 2] or any(mark in key for key in header for mark in _LOOKALIKES):
        return None
    width, channels = shapes[0][:2]
    fits = shapes[0][2:] == (PATCH, PATCH) and shapes[2] == (2 * channels * PATCH**2, width)
    if not fits or width % HEAD_DIM or shapes[3] != (2, width):
        return None
    return {
        "num_attention_heads": width // HEAD_DIM,
        "attention_head_dim": HEAD_DIM,
        "in_channels": channels,
        "out_channels": 2 * channels,
        "num_layers": count_blocks(header, blocks),
        "cross_attention_dim": width,
        "patch_size": PATCH,
        "sample_size": 2 * _BASE,
        "caption_channels": shapes[1][1],
        "use_additional_conditions": ratio in header,
        "interpolation_scale": None,
    }


def detect(header: Mapping[str, TensorInfo]) -> dict[str, Any] | None:
    """Config of a file with the authors' names; None for Sana, Σ with compressed keys, and other families.

    A file that carries the positions it was trained with (`pos_embed`) fixes `interpolation_scale` by their number;
    in others it is None and follows from the latent (`prepare`). ComfyUI does the same.
    """
    found = _config(
        header,
        "x_embedder.proj.weight",
        "y_embedder.y_proj.fc1.weight",
        "final_layer.linear.weight",
        "final_layer.scale_shift_table",
        "blocks.",
        "ar_embedder.mlp.0.weight",
    )
    if found is None or "t_block.1.weight" not in header or "blocks.0.mlp.fc1.weight" not in header:
        return None
    positions = header["pos_embed"].shape if "pos_embed" in header else ()
    if len(positions) == 3:
        found["sample_size"] = math.isqrt(positions[1]) * PATCH
        found["interpolation_scale"] = max(found["sample_size"] // _BASE, 1)
    return found


def detect_diffusers(header: Mapping[str, TensorInfo], written: Mapping[str, Any]) -> dict[str, Any] | None:
    """Config of a file with diffusers' PixArtTransformer2DModel names; `written` wins where it says something.

    Only `interpolation_scale` follows from the latent (`prepare`) whatever is written: ComfyUI, which reads no
    config.json, does so, and the same weights shall give the same picture in every layout.
    """
    found = _config(
        header,
        "pos_embed.proj.weight",
        "caption_projection.linear_1.weight",
        "proj_out.weight",
        "scale_shift_table",
        "transformer_blocks.",
        "adaln_single.emb.aspect_ratio_embedder.linear_1.weight",
    )
    if found is None or not {"adaln_single.linear.weight", "transformer_blocks.0.attn1.to_q.bias"} <= header.keys():
        return None
    given = {key: value for key, value in written.items() if key not in _FORMER_ARGUMENTS}
    return {**found, **given, "interpolation_scale": None}


def prepare(transformer: torch.nn.Module) -> None:
    """Let positions scale with the latent, as ComfyUI's forward does; diffusers scales by the config alone."""
    embedding: Any = transformer.get_submodule("pos_embed")
    config: Any = transformer.config
    fixed = config.interpolation_scale

    def scale_positions(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        height, width = inputs[0].shape[-2:]
        # Of a picture smaller than the smallest that PixArt was trained on, ComfyUI would divide by zero.
        times = max(round((height + width) // 2 / _BASE), 1)
        module.base_size = times * _BASE // PATCH
        module.interpolation_scale = fixed or times

    embedding.height = embedding.width = None  # the positions that diffusers made beforehand fit no latent
    embedding.register_forward_pre_hook(scale_positions)


PIXART = ModelSpec(
    name="pixart",
    title="PixArt",
    transformer_class="PixArtTransformer2DModel",
    block_lists=("transformer_blocks",),
    self_attention=("transformer_blocks.*.attn1",),
    sequence_inputs={},
    sequence_splits={"pos_embed": 1},
    attended=("pos_embed",),
    sequence_outputs={"proj_out": 1},
    timestep_embedder="adaln_single",
    timestep_scale=1.0,
    detect=detect,
    detect_diffusers=detect_diffusers,
    weight_rules=weight_rules,
    heads=lambda config: config["num_attention_heads"],
    adapter=PixArtAdapter(),
    stages=StageSpec(("hidden_states",)),
    former_classes=("Transformer2DModel",),
    prepare=prepare,
    widths={"encoder_hidden_states": "caption_channels"},
)
