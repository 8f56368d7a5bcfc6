"""FLUX.1 (dev, schnell, Kontext, Fill, Canny, Depth): diffusers' FluxTransformer2DModel as data."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from .adapter import Call
from .spec import TEXT_AND_IMAGE, ModelSpec
from .token_adapter import TokenAdapter


def _pooled(call: Call) -> torch.Tensor:
    """Zeros without a pooled text; wider ones are cut, as ComfyUI does."""
    width, y = call.config["pooled_projection_dim"], call.pooled_text()
    pooled = call.x.new_zeros(call.batch, width) if y is None else y[:, :width]
    guidance = _guidance(call) if call.extras.get("guidance") is not None else None
    if guidance is None:
        return pooled
    # NaN where a guidance is NaN or infinite, as in ComfyUI: its own embedding is taken for none (`prepare`).
    return pooled + (0 * guidance).to(pooled)[:, None]


def _guidance(call: Call) -> torch.Tensor | None:
    """ComfyUI fills in 3.5 itself, so None means that a node took guidance away; NaN tells `prepare` so."""
    if not call.config["guidance_embeds"]:
        return None
    guidance = call.extras.get("guidance")
    if guidance is None:
        return torch.full((call.batch,), math.nan, device=call.x.device, dtype=torch.float32)
    return call.rows("guidance", guidance.to(call.x.device).reshape(-1))


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
    transformer_class="FluxTransformer2DModel",
    cut=(
        TEXT_AND_IMAGE,
        replace(
            TEXT_AND_IMAGE, path="single_transformer_blocks", modulations={"temb": ("norm.linear",)}, parallel=True
        ),
    ),
    self_attention=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
    timestep_embedder="time_text_embed",
    timestep_scale=1000.0,
    adapter=TokenAdapter(
        "FLUX.1",
        extras=frozenset({"y", "guidance", "ref_latents", "ref_latents_method"}),
        patch=2,
        axes=3,
        index_step=1,
        reference_method="offset",
        arguments={"pooled_projections": _pooled, "guidance": _guidance},
    ),
    prepare=prepare,
    widths={
        "hidden_states": "in_channels",
        "encoder_hidden_states": "joint_attention_dim",
        "pooled_projections": "pooled_projection_dim",
    },
)
