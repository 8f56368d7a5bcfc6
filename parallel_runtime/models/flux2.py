"""FLUX.2 (dev, klein): diffusers' Flux2Transformer2DModel as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .flux2_adapter import Flux2Adapter
from .flux_layout import KEY_SUFFIXES, double_attention, single_norms
from .spec import ModelSpec, StageSpec, TensorInfo, WeightRule
from .weight_rules import count_blocks, linear

HEAD_DIM = 128
AXES_DIMS_ROPE = (32, 32, 32, 32)
"""How the rotary dims of a head divide over (index, row, column, place in the text). No tensor's shape tells, so only
the published head dim of 128 is taken; ComfyUI does the same."""
_ROPE_THETA = 2000
_EPS = 1e-6

_LOOKALIKES = ("distilled_guidance_layer.", "vector_in.", "txt_norm.", "controlnet_", "emb_in.")
"""Keys that relatives in the same key style have and FLUX.2 has not."""

_TOP = {
    "x_embedder": "img_in",
    "context_embedder": "txt_in",
    "time_guidance_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_guidance_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "double_stream_modulation_img.linear": "double_stream_modulation_img.lin",
    "double_stream_modulation_txt.linear": "double_stream_modulation_txt.lin",
    "single_stream_modulation.linear": "single_stream_modulation.lin",
    "proj_out": "final_layer.linear",
}
_GUIDANCE = {
    "time_guidance_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
    "time_guidance_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
}
_DOUBLE = {
    "attn.to_out.0": "img_attn.proj",
    "attn.to_add_out": "txt_attn.proj",
    "ff.linear_in": "img_mlp.0",
    "ff.linear_out": "img_mlp.2",
    "ff_context.linear_in": "txt_mlp.0",
    "ff_context.linear_out": "txt_mlp.2",
}
_SINGLE = {"attn.to_qkv_mlp_proj": "linear1", "attn.to_out": "linear2"}


def weight_rules(config: Mapping[str, Any]) -> Iterator[WeightRule]:
    """Every parameter of the diffusers transformer out of Black Forest Labs' names. No layer has a bias."""
    width = config["num_attention_heads"] * config["attention_head_dim"]
    for target, source in {**_TOP, **(_GUIDANCE if config["guidance_embeds"] else {})}.items():
        yield from linear(target, source, bias=False)
    # The original keeps (shift, scale) in the final modulation, diffusers (scale, shift).
    yield from linear("norm_out.linear", "final_layer.adaLN_modulation.1", swap_halves=True, bias=False)
    for index in range(config["num_layers"]):
        new, old = f"transformer_blocks.{index}.", f"double_blocks.{index}."
        for target, source in _DOUBLE.items():
            yield from linear(new + target, old + source, bias=False)
        yield from double_attention(new, old, width, bias=False)
    for index in range(config["num_single_layers"]):
        new, old = f"single_transformer_blocks.{index}.", f"single_blocks.{index}."
        for target, source in _SINGLE.items():
            yield from linear(new + target, old + source, bias=False)
        yield from single_norms(new, old)


def _config(
    header: Mapping[str, TensorInfo], names: Mapping[str, str], head_dim: int = HEAD_DIM
) -> dict[str, Any] | None:
    """The diffusers config, from the shapes of tensors that are named in either layout; None where they do not fit."""
    if any(key.startswith(_LOOKALIKES) for key in header):
        return None
    shapes = {part: header[key].shape if key in header else () for part, key in names.items()}
    if shapes.pop("norm") != (head_dim,) or any(len(shape) != 2 for shape in shapes.values()):
        return None
    width = shapes["image"][0]
    if width < head_dim or width % head_dim or shapes["modulation"] != (6 * width, width):
        return None
    return {
        "patch_size": 1,
        "in_channels": shapes["image"][1],
        "out_channels": shapes["output"][0],
        "attention_head_dim": head_dim,
        "num_attention_heads": width // head_dim,
        "joint_attention_dim": shapes["text"][1],
        "timestep_guidance_channels": shapes["timestep"][1],
        "mlp_ratio": shapes["mlp"][1] / width,
        "axes_dims_rope": AXES_DIMS_ROPE,
        "rope_theta": _ROPE_THETA,
        "eps": _EPS,
    }


def detect(header: Mapping[str, TensorInfo]) -> dict[str, Any] | None:
    """Config of a file with Black Forest Labs' names; None for FLUX.1, Chroma and other families.

    FLUX.2 is told from its relatives by modulations that all blocks share.
    """
    names = {
        "image": "img_in.weight",
        "text": "txt_in.weight",
        "output": "final_layer.linear.weight",
        "timestep": "time_in.in_layer.weight",
        "modulation": "double_stream_modulation_img.lin.weight",
        "mlp": "double_blocks.0.img_mlp.2.weight",
        "norm": "double_blocks.0.img_attn.norm.query_norm.scale",
    }
    found = _config(header, names)
    return found and {
        **found,
        "num_layers": count_blocks(header, "double_blocks."),
        "num_single_layers": count_blocks(header, "single_blocks."),
        "guidance_embeds": "guidance_in.in_layer.weight" in header,
    }


def detect_diffusers(header: Mapping[str, TensorInfo], written: Mapping[str, Any]) -> dict[str, Any] | None:
    """Config of a file with diffusers' Flux2Transformer2DModel names; `written` wins where it says something."""
    embedder = "time_guidance_embed."
    names = {
        "image": "x_embedder.weight",
        "text": "context_embedder.weight",
        "output": "proj_out.weight",
        "timestep": embedder + "timestep_embedder.linear_1.weight",
        "modulation": "double_stream_modulation_img.linear.weight",
        "mlp": "transformer_blocks.0.ff.linear_out.weight",
        "norm": "transformer_blocks.0.attn.norm_q.weight",
    }
    found = _config(header, names, written.get("attention_head_dim", HEAD_DIM))
    return found and {
        **found,
        "num_layers": count_blocks(header, "transformer_blocks."),
        "num_single_layers": count_blocks(header, "single_transformer_blocks."),
        "guidance_embeds": embedder + "guidance_embedder.linear_1.weight" in header,
        **written,
    }


FLUX2 = ModelSpec(
    name="flux2",
    title="FLUX.2",
    transformer_class="Flux2Transformer2DModel",
    block_lists=("transformer_blocks", "single_transformer_blocks"),
    self_attention=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
    sequence_inputs={"": {"hidden_states": 1, "encoder_hidden_states": 1, "img_ids": 0, "txt_ids": 0}},
    sequence_outputs={"proj_out": 1},
    # The bare sinusoid: the embedder around it casts what it gets to the timestep's dtype, which must be the model's.
    timestep_embedder="time_guidance_embed.time_proj",
    timestep_scale=1000.0,
    detect=detect,
    detect_diffusers=detect_diffusers,
    weight_rules=weight_rules,
    heads=lambda config: config["num_attention_heads"],
    adapter=Flux2Adapter(),
    stages=StageSpec(
        ("encoder_hidden_states", "hidden_states"),
        text=("encoder_hidden_states", "txt_ids"),
        patch_size=1,
        joined=("single_transformer_blocks",),
    ),
    key_suffixes=KEY_SUFFIXES,
    widths={"hidden_states": "in_channels", "encoder_hidden_states": "joint_attention_dim"},
)
