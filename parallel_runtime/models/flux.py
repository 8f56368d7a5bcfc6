"""FLUX.1 (dev, schnell, Kontext, Fill, Canny, Depth): diffusers' FluxTransformer2DModel as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from .flux_adapter import FluxAdapter
from .flux_layout import KEY_SUFFIXES, double_attention, single_norms
from .spec import ModelSpec, StageSpec, TensorInfo, WeightRule
from .weight_rules import count_blocks, fused, linear

HEAD_DIM = 128
AXES_DIMS_ROPE = (16, 56, 56)
"""How the rotary dims of a head divide over (index, row, column). No tensor's shape tells, so only the published
head dim of 128 is taken; ComfyUI does the same."""

_LOOKALIKES = (
    "distilled_guidance_layer.",  # Chroma
    "double_stream_modulation_img.",  # FLUX.2
    "txt_in.individual_token_refiner.",  # HunyuanVideo
    "txt_norm.",  # Ovis
    "double_blocks.0.img_mlp.gate_proj.",  # Ovis
    "controlnet_",  # ControlNets in the same key style
    "pos_embed_input.",
)

_TOP = {
    "x_embedder": "img_in",
    "context_embedder": "txt_in",
    "time_text_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_text_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "time_text_embed.text_embedder.linear_1": "vector_in.in_layer",
    "time_text_embed.text_embedder.linear_2": "vector_in.out_layer",
    "proj_out": "final_layer.linear",
}
_GUIDANCE = {
    "time_text_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
    "time_text_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
}
_DOUBLE = {
    "norm1.linear": "img_mod.lin",
    "norm1_context.linear": "txt_mod.lin",
    "attn.to_out.0": "img_attn.proj",
    "attn.to_add_out": "txt_attn.proj",
    "ff.net.0.proj": "img_mlp.0",
    "ff.net.2": "img_mlp.2",
    "ff_context.net.0.proj": "txt_mlp.0",
    "ff_context.net.2": "txt_mlp.2",
}
_SINGLE = {"norm.linear": "modulation.lin", "proj_out": "linear2"}
_SINGLE_QKV = ("attn.to_q", "attn.to_k", "attn.to_v")
_MLP_RATIO = 4


def weight_rules(config: Mapping[str, Any]) -> Iterator[WeightRule]:
    """Every parameter of the diffusers transformer out of Black Forest Labs' names."""
    width = config["num_attention_heads"] * config["attention_head_dim"]
    for target, source in {**_TOP, **(_GUIDANCE if config["guidance_embeds"] else {})}.items():
        yield from linear(target, source)
    # The original keeps (shift, scale) in the final modulation, diffusers (scale, shift).
    yield from linear("norm_out.linear", "final_layer.adaLN_modulation.1", swap_halves=True)
    for index in range(config["num_layers"]):
        new, old = f"transformer_blocks.{index}.", f"double_blocks.{index}."
        for target, source in _DOUBLE.items():
            yield from linear(new + target, old + source)
        yield from double_attention(new, old, width, bias=True)
    for index in range(config["num_single_layers"]):
        new, old = f"single_transformer_blocks.{index}.", f"single_blocks.{index}."
        for target, source in _SINGLE.items():
            yield from linear(new + target, old + source)
        parts = dict.fromkeys(_SINGLE_QKV, width) | {"proj_mlp": width * _MLP_RATIO}
        yield from fused({new + target: rows for target, rows in parts.items()}, old + "linear1")
        yield from single_norms(new, old)


def _config(
    header: Mapping[str, TensorInfo],
    image: str,
    text: str,
    pooled: str,
    output: str,
    norm: str,
    head_dim: int = HEAD_DIM,
) -> dict[str, Any] | None:
    """The part of the diffusers config that both layouts tell in the same way, from five tensors' shapes."""
    shapes = [header[key].shape if key in header else () for key in (image, text, pooled, output)]
    if any(len(shape) != 2 for shape in shapes) or norm not in header or header[norm].shape != (head_dim,):
        return None
    width = shapes[0][0]
    if width < head_dim or width % head_dim:
        return None
    return {
        "patch_size": 1,
        "in_channels": shapes[0][1],
        "out_channels": shapes[3][0],
        "attention_head_dim": head_dim,
        "num_attention_heads": width // head_dim,
        "joint_attention_dim": shapes[1][1],
        "pooled_projection_dim": shapes[2][1],
        "axes_dims_rope": AXES_DIMS_ROPE,
    }


def detect(header: Mapping[str, TensorInfo]) -> dict[str, Any] | None:
    """Config of a file with Black Forest Labs' names; None for Chroma, FLUX.2, HunyuanVideo and other families.

    FLUX.1 is told from relatives without a pooled text input (LongCat, Ovis) by `vector_in`.
    """
    if any(key.startswith(_LOOKALIKES) for key in header):
        return None
    norm = "double_blocks.0.img_attn.norm.query_norm.scale"
    found = _config(
        header, "img_in.weight", "txt_in.weight", "vector_in.in_layer.weight", "final_layer.linear.weight", norm
    )
    return found and {
        **found,
        "num_layers": count_blocks(header, "double_blocks."),
        "num_single_layers": count_blocks(header, "single_blocks."),
        "guidance_embeds": "guidance_in.in_layer.weight" in header,
    }


def detect_diffusers(header: Mapping[str, TensorInfo], written: Mapping[str, Any]) -> dict[str, Any] | None:
    """Config of a file with diffusers' FluxTransformer2DModel names; `written` wins where it says something."""
    if any(key.startswith(_LOOKALIKES) for key in header):
        return None
    embedder = "time_text_embed."
    norm = "transformer_blocks.0.attn.norm_q.weight"
    pooled = embedder + "text_embedder.linear_1.weight"
    head_dim = written.get("attention_head_dim", HEAD_DIM)
    found = _config(header, "x_embedder.weight", "context_embedder.weight", pooled, "proj_out.weight", norm, head_dim)
    if found is None or "single_transformer_blocks.0.proj_mlp.weight" not in header:
        return None
    return {
        **found,
        "num_layers": count_blocks(header, "transformer_blocks."),
        "num_single_layers": count_blocks(header, "single_transformer_blocks."),
        "guidance_embeds": embedder + "guidance_embedder.linear_1.weight" in header,
        **written,
    }


def _drop_absent_guidance(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor):
    """Zero the guidance embedding of batch items whose guidance is NaN, the adapter's mark for "no guidance"."""
    absent = inputs[0].isnan().any(dim=-1, keepdim=True)
    return torch.where(absent, torch.zeros_like(output), output)


def prepare(transformer: torch.nn.Module) -> None:
    """Let a guidance-distilled transformer run without guidance, as ComfyUI's FluxDisableGuidance node asks."""
    embedder = getattr(transformer.get_submodule("time_text_embed"), "guidance_embedder", None)
    if embedder is not None:
        embedder.register_forward_hook(_drop_absent_guidance)


FLUX = ModelSpec(
    name="flux",
    title="FLUX.1",
    transformer_class="FluxTransformer2DModel",
    block_lists=("transformer_blocks", "single_transformer_blocks"),
    self_attention=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
    sequence_inputs={"": {"hidden_states": 1, "encoder_hidden_states": 1, "img_ids": 0, "txt_ids": 0}},
    sequence_outputs={"proj_out": 1},
    modulations={
        "time_text_embed": (
            "transformer_blocks.*.norm1.linear",
            "transformer_blocks.*.norm1_context.linear",
            "single_transformer_blocks.*.norm.linear",
        )
    },
    timestep_embedder="time_text_embed",
    timestep_scale=1000.0,
    detect=detect,
    detect_diffusers=detect_diffusers,
    weight_rules=weight_rules,
    heads=lambda config: config["num_attention_heads"],
    adapter=FluxAdapter(),
    key_suffixes=KEY_SUFFIXES,
    parallel_blocks=("single_transformer_blocks",),
    stages=StageSpec(("encoder_hidden_states", "hidden_states"), text=("encoder_hidden_states", "txt_ids")),
    prepare=prepare,
    widths={
        "hidden_states": "in_channels",
        "encoder_hidden_states": "joint_attention_dim",
        "pooled_projections": "pooled_projection_dim",
    },
)
