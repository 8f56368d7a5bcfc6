"""HunyuanDiT (1.0, 1.1, 1.2): diffusers' HunyuanDiT2DModel as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from .hunyuan_dit_adapter import HunyuanDiTAdapter
from .learned_sigma_adapter import PATCH
from .spec import ModelSpec, StageSpec, TensorInfo, WeightRule
from .weight_rules import count_blocks, fused, linear

_SIZE_CHANNELS = 6 * 256
"""Width of the embedded picture sizes."""
_LOOKALIKES = ("controlnet_", "after_proj_list.", "input_block.")

_TOP = {
    "pos_embed.proj": "x_embedder.proj",
    "text_embedder.linear_1": "mlp_t5.0",
    "text_embedder.linear_2": "mlp_t5.2",
    "time_extra_emb.timestep_embedder.linear_1": "t_embedder.mlp.0",
    "time_extra_emb.timestep_embedder.linear_2": "t_embedder.mlp.2",
    "time_extra_emb.extra_embedder.linear_1": "extra_embedder.0",
    "time_extra_emb.extra_embedder.linear_2": "extra_embedder.2",
    "time_extra_emb.pooler.q_proj": "pooler.q_proj",
    "time_extra_emb.pooler.k_proj": "pooler.k_proj",
    "time_extra_emb.pooler.v_proj": "pooler.v_proj",
    "time_extra_emb.pooler.c_proj": "pooler.c_proj",
    "proj_out": "final_layer.linear",
}
_PARAMETERS = {
    "text_embedding_padding": "text_embedding_padding",
    "time_extra_emb.pooler.positional_embedding": "pooler.positional_embedding",
}
_STYLE = {"time_extra_emb.style_embedder.weight": "style_embedder.weight"}
_BLOCK = {
    "norm1.norm": "norm1",
    "norm1.linear": "default_modulation.1",
    "attn1.norm_q": "attn1.q_norm",
    "attn1.norm_k": "attn1.k_norm",
    "attn1.to_out.0": "attn1.out_proj",
    # The original numbers its norms by when they were written, diffusers by when they are used.
    "norm2": "norm3",
    "attn2.norm_q": "attn2.q_norm",
    "attn2.norm_k": "attn2.k_norm",
    "attn2.to_q": "attn2.q_proj",
    "attn2.to_out.0": "attn2.out_proj",
    "norm3": "norm2",
    "ff.net.0.proj": "mlp.fc1",
    "ff.net.2": "mlp.fc2",
}
_BLOCK_FUSED = {
    "attn1.Wqkv": ("attn1.to_q", "attn1.to_k", "attn1.to_v"),
    "attn2.kv_proj": ("attn2.to_k", "attn2.to_v"),
}
_SKIP = {"skip_norm": "skip_norm", "skip_linear": "skip_linear"}
_ORIGINAL_KEYS = (
    "x_embedder.proj.weight",
    "mlp_t5.2.weight",
    "final_layer.linear.weight",
    "text_embedding_padding",
    "pooler.positional_embedding",
    "pooler.c_proj.weight",
    "extra_embedder.0.weight",
    "blocks.0.attn1.q_norm.weight",
    "blocks.0.mlp.fc1.weight",
)
_DIFFUSERS_KEYS = (
    "pos_embed.proj.weight",
    "text_embedder.linear_2.weight",
    "proj_out.weight",
    "text_embedding_padding",
    "time_extra_emb.pooler.positional_embedding",
    "time_extra_emb.pooler.c_proj.weight",
    "time_extra_emb.extra_embedder.linear_1.weight",
    "blocks.0.attn1.norm_q.weight",
    "blocks.0.ff.net.0.proj.weight",
)


def weight_rules(config: Mapping[str, Any]) -> Iterator[WeightRule]:
    """Every parameter of the diffusers transformer out of Tencent's names."""
    width, layers = config["hidden_size"], config["num_layers"]
    for target, source in _TOP.items():
        yield from linear(target, source)
    # The original keeps (shift, scale) in the final modulation, diffusers (scale, shift).
    yield from linear("norm_out.linear", "final_layer.adaLN_modulation.1", swap_halves=True)
    style = _STYLE if config["use_style_cond_and_image_meta_size"] else {}
    for target, source in {**_PARAMETERS, **style}.items():
        yield WeightRule(target, source)
    for index in range(layers):
        block = f"blocks.{index}."
        for target, source in {**_BLOCK, **(_SKIP if index > layers // 2 else {})}.items():
            yield from linear(block + target, block + source)
        for source, targets in _BLOCK_FUSED.items():
            yield from fused({block + target: width for target in targets}, block + source)


def _config(header: Mapping[str, TensorInfo], keys: tuple[str, ...]) -> dict[str, Any] | None:
    """The diffusers config from the shapes of `_ORIGINAL_KEYS` or `_DIFFUSERS_KEYS`; None where they do not fit."""
    shapes = [header[key].shape if key in header else () for key in keys]
    dims = [4, 2, 2, 2, 2, 2, 2, 1, 2]
    if [len(shape) for shape in shapes] != dims or any(key.startswith(_LOOKALIKES) for key in header):
        return None
    embedding, text, output, padding, positions, pooled, extra, head, inner = shapes
    width, channels = embedding[:2]
    style = extra[1] == pooled[0] + _SIZE_CHANNELS + width
    layers = count_blocks(header, "blocks.")
    # The second half of the blocks takes what the first half gave, so there is no middle one.
    fits = embedding[2:] == (PATCH, PATCH) and not width % head[0] and not layers % 2
    if not fits or output[0] != 2 * channels * PATCH**2 or not (style or extra[1] == pooled[0]):
        return None
    return {
        "num_attention_heads": width // head[0],
        "attention_head_dim": head[0],
        "in_channels": channels,
        "patch_size": PATCH,
        "hidden_size": width,
        "num_layers": layers,
        "mlp_ratio": (inner[0] + 0.5) / width,  # half a neuron more, as diffusers rounds the product down
        "cross_attention_dim": text[0],
        "cross_attention_dim_t5": positions[1],
        "pooled_projection_dim": pooled[0],
        "text_len": padding[0] - (positions[0] - 1),
        "text_len_t5": positions[0] - 1,
        "use_style_cond_and_image_meta_size": style,
    }


def detect(header: Mapping[str, TensorInfo]) -> dict[str, Any] | None:
    """Config of a file with Tencent's names; None for its ControlNets and for other families."""
    return _config(header, _ORIGINAL_KEYS) if "blocks.0.attn1.Wqkv.weight" in header else None


def detect_diffusers(header: Mapping[str, TensorInfo], written: Mapping[str, Any]) -> dict[str, Any] | None:
    """Config of a file with diffusers' HunyuanDiT2DModel names; `written` wins where it says something."""
    found = _config(header, _DIFFUSERS_KEYS)
    return found and {**found, **written}


def prepare(transformer: torch.nn.Module) -> None:
    """Let the transformer take an exact timestep, and, as ComfyUI's forward does, texts longer than it learned."""
    padding: torch.nn.Parameter = transformer.get_parameter("text_embedding_padding")
    embedder: Any = transformer.get_submodule("time_extra_emb")
    pooled_tokens = embedder.pooler.positional_embedding.shape[0] - 1

    def fit_padding(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Rows of padding for tokens in front of the last `text_len`, which the masks never choose."""
        lengths = [kwargs[name].shape[1] for name in ("encoder_hidden_states", "encoder_hidden_states_t5")]
        trained = (len(padding) - pooled_tokens, pooled_tokens)
        if sum(lengths) == len(padding):
            module.text_embedding_padding = padding
            return
        rows = [
            torch.nn.functional.pad(part, (0, 0, length - len(part), 0))
            for part, length in zip(padding.split(trained), lengths, strict=True)
        ]
        # Made anew in every forward: a CUDA graph would not know of one that was replaced meanwhile.
        module.text_embedding_padding = torch.nn.Parameter(torch.cat(rows), requires_grad=False)

    def pool_first(module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (inputs[0][:, :pooled_tokens],)

    def compute_in_model_dtype(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """diffusers computes the embedding in the timestep's dtype, and ours is an exact float32."""
        return args, {**kwargs, "hidden_dtype": padding.dtype}

    transformer.register_forward_pre_hook(fit_padding, with_kwargs=True)
    embedder.pooler.register_forward_pre_hook(pool_first)
    embedder.register_forward_pre_hook(compute_in_model_dtype, with_kwargs=True)


HUNYUAN_DIT = ModelSpec(
    name="hunyuan_dit",
    title="HunyuanDiT",
    transformer_class="HunyuanDiT2DModel",
    block_lists=("blocks",),
    self_attention=("blocks.*.attn1",),
    sequence_inputs={"": {"image_rotary_emb": 0}},
    sequence_splits={"pos_embed": 1},
    attended=("pos_embed",),
    sequence_outputs={"proj_out": 1},
    timestep_embedder="time_extra_emb",
    timestep_scale=1.0,
    detect=detect,
    detect_diffusers=detect_diffusers,
    weight_rules=weight_rules,
    heads=lambda config: config["num_attention_heads"],
    adapter=HunyuanDiTAdapter(),
    stages=StageSpec(("hidden_states",), skips=True),
    prepare=prepare,
    widths={"encoder_hidden_states": "cross_attention_dim", "encoder_hidden_states_t5": "cross_attention_dim_t5"},
)
