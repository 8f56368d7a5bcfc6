"""Wan 2.1, and the checkpoints of 2.2 of the same architecture: diffusers' WanTransformer3DModel as data."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from .spec import ModelSpec, Part, StageSpec, TensorInfo, WeightRule
from .wan_adapter import PATCH, WanAdapter
from .weight_rules import count_blocks, linear

HEAD_DIM = 128
"""No tensor's shape tells the head dim: norms run over all heads. Every published Wan has this one."""
PATCH_SIZE = (1, PATCH, PATCH)

_TOP = {
    "patch_embedding": "patch_embedding",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "proj_out": "head.head",
}
_IMAGE = {
    "condition_embedder.image_embedder.norm1": "img_emb.proj.0",
    "condition_embedder.image_embedder.ff.net.0.proj": "img_emb.proj.1",
    "condition_embedder.image_embedder.ff.net.2": "img_emb.proj.3",
    "condition_embedder.image_embedder.norm2": "img_emb.proj.4",
}
_BOTH_IMAGES = WeightRule("condition_embedder.image_embedder.pos_embed", "img_emb.emb_pos")
_ATTENTION = {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o"}
_ATTENTION_NORMS = {"norm_q": "norm_q", "norm_k": "norm_k"}
_IMAGE_ATTENTION = {"add_k_proj": "k_img", "add_v_proj": "v_img"}
# The original counts norms by their use (norm3 is the cross-attention's), diffusers by their order.
_BLOCK = {"norm2": "norm3", "ffn.net.0.proj": "ffn.0", "ffn.net.2": "ffn.2"}

_ORIGINAL_KEYS = re.compile(
    r"(patch_embedding|text_embedding|time_embedding|time_projection|head|img_emb)\."
    r"|blocks\.\d+\.(self_attn|cross_attn)\.(q|k|v|o|norm_q|norm_k|k_img|v_img|norm_k_img)\."
    r"|blocks\.\d+\.(norm3|ffn|modulation)(\.|$)"
    r"|scaled_fp8$"
)
_DIFFUSERS_KEYS = re.compile(
    r"(patch_embedding|condition_embedder|proj_out)\.|scale_shift_table$"
    r"|blocks\.\d+\.(attn1|attn2)\.(to_q|to_k|to_v|to_out|norm_q|norm_k|add_k_proj|add_v_proj|norm_added_[kq])\."
    r"|blocks\.\d+\.(norm2|ffn|scale_shift_table)(\.|$)"
)
"""Relatives (VACE, Animate, S2V, camera control, ...) add modules to the same names, so no other key may be there."""


def weight_rules(config: Mapping[str, Any]) -> Iterator[WeightRule]:
    """Every parameter of the diffusers transformer out of Wan's own names."""
    image = config.get("image_dim") is not None
    for target, source in {**_TOP, **(_IMAGE if image else {})}.items():
        yield from linear(target, source)
    if config.get("pos_embed_seq_len") is not None:
        yield _BOTH_IMAGES
    yield WeightRule("scale_shift_table", "head.modulation")
    for index in range(config["num_layers"]):
        block = f"blocks.{index}."
        yield WeightRule(block + "scale_shift_table", block + "modulation")
        for target, source in _BLOCK.items():
            yield from linear(block + target, block + source)
        yield from _attention_rules(block + "attn1.", block + "self_attn.", image=False)
        yield from _attention_rules(block + "attn2.", block + "cross_attn.", image)


def _attention_rules(new: str, old: str, image: bool) -> Iterator[WeightRule]:
    for target, source in {**_ATTENTION, **(_IMAGE_ATTENTION if image else {})}.items():
        yield from linear(new + target, old + source)
    for target, source in {**_ATTENTION_NORMS, **({"norm_added_k": "norm_k_img"} if image else {})}.items():
        yield WeightRule(f"{new}{target}.weight", f"{old}{source}.weight")


def _config(header: Mapping[str, TensorInfo], sources: Mapping[str, str]) -> dict[str, Any] | None:
    """The diffusers config from shapes; `sources` are the names that this layout gives to what is asked for."""
    shapes = {name: header[key].shape if key in header else () for name, key in sources.items()}
    image, both = shapes.pop("image"), shapes.pop("both")
    if len(shapes["patch"]) != 5 or shapes["patch"][2:] != PATCH_SIZE or len(shapes["modulation"]) != 3:
        return None
    if any(len(shapes[name]) != 2 for name in ("output", "text", "time", "ffn")):
        return None
    width = shapes["patch"][0]
    if width < HEAD_DIM or width % HEAD_DIM:
        return None
    return {
        "patch_size": PATCH_SIZE,
        "num_attention_heads": width // HEAD_DIM,
        "attention_head_dim": HEAD_DIM,
        "in_channels": shapes["patch"][1],
        "out_channels": shapes["output"][0] // (PATCH * PATCH),
        "text_dim": shapes["text"][1],
        "freq_dim": shapes["time"][1],
        "ffn_dim": shapes["ffn"][0],
        "num_layers": count_blocks(header, "blocks."),
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "eps": 1e-6,
        "image_dim": image[0] if image else None,
        "added_kv_proj_dim": width if image else None,
        "pos_embed_seq_len": both[1] if len(both) == 3 else None,
    }


def detect(header: Mapping[str, TensorInfo]) -> dict[str, Any] | None:
    """Config of a file with Wan's own names; None for VACE, Animate and other relatives with more modules."""
    if not all(_ORIGINAL_KEYS.match(key) for key in header):
        return None
    sources = {
        "patch": "patch_embedding.weight",
        "output": "head.head.weight",
        "text": "text_embedding.0.weight",
        "time": "time_embedding.0.weight",
        "ffn": "blocks.0.ffn.0.weight",
        "modulation": "blocks.0.modulation",
        "image": "img_emb.proj.0.weight",
        "both": "img_emb.emb_pos",
    }
    return _config(header, sources)


def detect_diffusers(header: Mapping[str, TensorInfo], written: Mapping[str, Any]) -> dict[str, Any] | None:
    """Config of a file with diffusers' WanTransformer3DModel names; `written` wins where it says something."""
    if not all(_DIFFUSERS_KEYS.match(key) for key in header):
        return None
    embedder = "condition_embedder."
    sources = {
        "patch": "patch_embedding.weight",
        "output": "proj_out.weight",
        "text": embedder + "text_embedder.linear_1.weight",
        "time": embedder + "time_embedder.linear_1.weight",
        "ffn": "blocks.0.ffn.net.0.proj.weight",
        "modulation": "blocks.0.scale_shift_table",
        "image": embedder + "image_embedder.norm1.weight",
        "both": embedder + "image_embedder.pos_embed",
    }
    found = _config(header, sources)
    return found and {**found, **written}


def _flatten_tokens(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    """(B, width, F, H, W) -> (B, width, tokens), which diffusers would do next; here it makes a dim to split."""
    return output.flatten(2)


def _rope_per_item(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, ...]):
    """(1, tokens, 1, head dim) -> (B, tokens, 1, head dim), a view: the first output that is split tells the batch."""
    return tuple(part.expand(inputs[0].shape[0], -1, -1, -1) for part in output)


def prepare(transformer: torch.nn.Module) -> None:
    """Give the embeddings outputs whose tokens can be split at the modules' borders; values do not change."""
    transformer.get_submodule("patch_embedding").register_forward_hook(_flatten_tokens)
    transformer.get_submodule("rope").register_forward_hook(_rope_per_item)


WAN = ModelSpec(
    name="wan",
    title="Wan",
    transformer_class="WanTransformer3DModel",
    block_lists=("blocks",),
    self_attention=("blocks.*.attn1",),
    sequence_inputs={},
    # Where the rotary embedding is split the tokens are counted, because it comes first.
    sequence_splits={"rope": 1, "patch_embedding": 2},
    attended=("rope",),
    sequence_outputs={"proj_out": 1},
    timestep_embedder="condition_embedder",
    timestep_scale=1.0,
    detect=detect,
    detect_diffusers=detect_diffusers,
    weight_rules=weight_rules,
    heads=lambda config: config["num_attention_heads"],
    adapter=WanAdapter(),
    stages=StageSpec(("hidden_states",)),
    prepare=prepare,
    widths={"encoder_hidden_states": "text_dim", "encoder_hidden_states_image": "image_dim"},
    needs={"clip_fea": Part("image embedder", "image_dim")},
)
