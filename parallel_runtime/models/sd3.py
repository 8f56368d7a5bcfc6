"""SD3 and SD3.5 (medium, large, turbo): diffusers' SD3Transformer2DModel as data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from .sd3_adapter import PATCH, SD3Adapter
from .spec import ModelSpec, StageSpec, TensorInfo, WeightRule
from .weight_rules import count_blocks, fused, linear

HEAD_DIM = 64
_SAMPLE_SIZE = 128
"""Side of the training latents. Only a table of positions that a file without one would need comes from it."""

_LOOKALIKES = (
    "controlnet_",  # ControlNets in the same key style
    "pos_embed_input.",
    "context_processor.",  # variants of ComfyUI's MMDiT that diffusers' class has no place for
    "register",
    "double_blocks.",
    "single_transformer_blocks.",  # FLUX, AuraFlow
    "joint_transformer_blocks.",
    "image_proj.",  # IP-Adapter
)

_TOP = {
    "pos_embed.proj": "x_embedder.proj",
    "context_embedder": "context_embedder",
    "time_text_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
    "time_text_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
    "time_text_embed.text_embedder.linear_1": "y_embedder.mlp.0",
    "time_text_embed.text_embedder.linear_2": "y_embedder.mlp.2",
    "proj_out": "final_layer.linear",
}
_BLOCK = {
    "norm1.linear": "x_block.adaLN_modulation.1",
    "attn.to_out.0": "x_block.attn.proj",
    "ff.net.0.proj": "x_block.mlp.fc1",
    "ff.net.2": "x_block.mlp.fc2",
}
_TEXT_OUT = {
    "norm1_context.linear": "context_block.adaLN_modulation.1",
    "attn.to_add_out": "context_block.attn.proj",
    "ff_context.net.0.proj": "context_block.mlp.fc1",
    "ff_context.net.2": "context_block.mlp.fc2",
}
"""What a block needs to hand text on; the last one does not."""
_FUSED = {
    "x_block.attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "context_block.attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
}
_NORMS = {
    "attn.norm_q": "x_block.attn.ln_q",
    "attn.norm_k": "x_block.attn.ln_k",
    "attn.norm_added_q": "context_block.attn.ln_q",
    "attn.norm_added_k": "context_block.attn.ln_k",
}
_DUAL_FUSED = ("attn2.to_q", "attn2.to_k", "attn2.to_v")
_DUAL_NORMS = {"attn2.norm_q": "x_block.attn2.ln_q", "attn2.norm_k": "x_block.attn2.ln_k"}


def weight_rules(config: Mapping[str, Any]) -> Iterator[WeightRule]:
    """Every parameter of the diffusers transformer, and its table of positions, out of Stability AI's names."""
    width = config["num_attention_heads"] * config["attention_head_dim"]
    last = config["num_layers"] - 1
    yield WeightRule("pos_embed.pos_embed", "pos_embed")
    for target, source in _TOP.items():
        yield from linear(target, source)
    # The original keeps (shift, scale) in modulations without a gate, diffusers (scale, shift).
    yield from linear("norm_out.linear", "final_layer.adaLN_modulation.1", swap_halves=True)
    for index in range(config["num_layers"]):
        new, old = f"transformer_blocks.{index}.", f"joint_blocks.{index}."
        for target, source in {**_BLOCK, **(_TEXT_OUT if index < last else {})}.items():
            yield from linear(new + target, old + source)
        for source, targets in _FUSED.items():
            yield from fused({new + target: width for target in targets}, old + source)
        if config.get("qk_norm"):
            yield from _norms(_NORMS, new, old)
        if index in config.get("dual_attention_layers", ()):
            yield from _dual_attention(config, new, old, width)
    text, source = "norm1_context.linear", _TEXT_OUT["norm1_context.linear"]
    yield from linear(f"transformer_blocks.{last}.{text}", f"joint_blocks.{last}.{source}", swap_halves=True)


def _dual_attention(config: Mapping[str, Any], new: str, old: str, width: int) -> Iterator[WeightRule]:
    """The second attention that the first blocks of SD3.5 medium have, of image tokens to image tokens."""
    yield from linear(new + "attn2.to_out.0", old + "x_block.attn2.proj")
    yield from fused({new + target: width for target in _DUAL_FUSED}, old + "x_block.attn2.qkv")
    if config.get("qk_norm"):
        yield from _norms(_DUAL_NORMS, new, old)


def _norms(names: Mapping[str, str], new: str, old: str) -> Iterator[WeightRule]:
    for target, source in names.items():
        yield WeightRule(f"{new}{target}.weight", f"{old}{source}.weight")


def _config(
    header: Mapping[str, TensorInfo], names: Mapping[str, str], head_dim: int = HEAD_DIM
) -> dict[str, Any] | None:
    """The part of the diffusers config that tensors tell which both layouts have; None where they do not fit."""
    if any(key.startswith(_LOOKALIKES) for key in header):
        return None
    shapes = {part: header[key].shape if key in header else () for part, key in names.items()}
    image, positions, norm = shapes.pop("image"), shapes.pop("positions"), shapes.pop("norm")
    if len(image) != 4 or len(positions) != 3 or any(len(shape) != 2 for shape in shapes.values()):
        return None
    width, side = image[0], math.isqrt(positions[1])
    fits = image[2:] == (PATCH, PATCH) and shapes["text"][0] == width and positions == (1, side**2, width)
    if not fits or width < head_dim or width % head_dim or norm not in ((), (head_dim,)):
        return None
    return {
        "sample_size": _SAMPLE_SIZE,
        "patch_size": PATCH,
        "in_channels": image[1],
        "out_channels": shapes["output"][0] // PATCH**2,
        "attention_head_dim": head_dim,
        "num_attention_heads": width // head_dim,
        "joint_attention_dim": shapes["text"][1],
        "caption_projection_dim": width,
        "pooled_projection_dim": shapes["pooled"][1],
        "pos_embed_max_size": side,
        "qk_norm": "rms_norm" if norm else None,
    }


def detect(header: Mapping[str, TensorInfo]) -> dict[str, Any] | None:
    """Config of a file with Stability AI's names; None for ControlNets and for other families."""
    names = {
        "image": "x_embedder.proj.weight",
        "positions": "pos_embed",
        "text": "context_embedder.weight",
        "pooled": "y_embedder.mlp.0.weight",
        "output": "final_layer.linear.weight",
        "joint": "joint_blocks.0.context_block.attn.qkv.weight",
        "norm": "joint_blocks.0.x_block.attn.ln_q.weight",
    }
    found = _config(header, names)
    if found is None:
        return None
    layers = count_blocks(header, "joint_blocks.")
    return {**found, "num_layers": layers, **_dual_layers(header, layers, "joint_blocks.{}.x_block.attn2.qkv.weight")}


def detect_diffusers(header: Mapping[str, TensorInfo], written: Mapping[str, Any]) -> dict[str, Any] | None:
    """Config of a file with diffusers' SD3Transformer2DModel names; `written` wins where it says something."""
    names = {
        "image": "pos_embed.proj.weight",
        "positions": "pos_embed.pos_embed",
        "text": "context_embedder.weight",
        "pooled": "time_text_embed.text_embedder.linear_1.weight",
        "output": "proj_out.weight",
        "joint": "transformer_blocks.0.attn.add_q_proj.weight",
        "norm": "transformer_blocks.0.attn.norm_q.weight",
    }
    found = _config(header, names, written.get("attention_head_dim", HEAD_DIM))
    if found is None:
        return None
    layers = count_blocks(header, "transformer_blocks.")
    dual = _dual_layers(header, layers, "transformer_blocks.{}.attn2.to_q.weight")
    return {**found, "num_layers": layers, **dual, **written}


def _dual_layers(header: Mapping[str, TensorInfo], layers: int, key: str) -> dict[str, tuple[int, ...]]:
    return {"dual_attention_layers": tuple(index for index in range(layers) if key.format(index) in header)}


SD3 = ModelSpec(
    name="sd3",
    title="SD3/3.5",
    transformer_class="SD3Transformer2DModel",
    block_lists=("transformer_blocks",),
    self_attention=("transformer_blocks.*.attn", "transformer_blocks.*.attn2"),
    sequence_inputs={"": {"encoder_hidden_states": 1}},
    # Position embeddings are cut out of a table by the height and width of the whole latent.
    sequence_splits={"pos_embed": 1},
    sequence_outputs={"proj_out": 1},
    modulations={"time_text_embed": ("transformer_blocks.*.norm1.linear", "transformer_blocks.*.norm1_context.linear")},
    attended=("pos_embed", "encoder_hidden_states"),
    attended_by={"transformer_blocks.*.attn2": ("pos_embed",)},
    timestep_embedder="time_text_embed",
    timestep_scale=1.0,
    detect=detect,
    detect_diffusers=detect_diffusers,
    weight_rules=weight_rules,
    heads=lambda config: config["num_attention_heads"],
    adapter=SD3Adapter(),
    stages=StageSpec(("encoder_hidden_states", "hidden_states"), text=("encoder_hidden_states",), text_first=False),
    widths={"encoder_hidden_states": "joint_attention_dim", "pooled_projections": "pooled_projection_dim"},
)
