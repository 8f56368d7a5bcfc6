"""A FLUX transformer of a few hundred thousand parameters, and the arguments of one forward, made from seeds."""

from __future__ import annotations

from typing import Any

import torch

from tests.tiny_flux import make_state_dict, tiny_config


def build_transformer(
    heads: int = 4, layers: int = 1, dtype: torch.dtype = torch.float32, double: int | None = None, **changes: Any
) -> Any:
    """Return a FluxTransformer2DModel of `heads` heads of 32, the same in every process.

    Args:
        layers: of both kinds, but for `double` of the one with two streams.
    """
    from diffusers import FluxTransformer2DModel

    config = tiny_config(
        num_attention_heads=heads,
        attention_head_dim=32,
        num_layers=layers if double is None else double,
        num_single_layers=layers,
        in_channels=16,
        out_channels=16,
        axes_dims_rope=(8, 12, 12),
        **changes,
    )
    transformer: Any = FluxTransformer2DModel(**config)
    transformer.load_state_dict(make_state_dict(config))
    return transformer.requires_grad_(False).eval().to(dtype)


def forward_arguments(
    image: tuple[int, int], text: int, batch: int = 1, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Return keyword arguments of one forward: rows × columns image tokens and `text` text tokens."""
    rows, columns = image
    generator = torch.Generator().manual_seed(1000 * rows + 100 * columns + 10 * text + batch)
    ids = torch.zeros(rows, columns, 3)
    ids[..., 1] = torch.arange(rows)[:, None]
    ids[..., 2] = torch.arange(columns)[None, :]
    return {
        "hidden_states": torch.randn(batch, rows * columns, 16, generator=generator).to(dtype),
        "encoder_hidden_states": torch.randn(batch, text, 64, generator=generator).to(dtype),
        "pooled_projections": torch.randn(batch, 32, generator=generator).to(dtype),
        "timestep": torch.rand(batch, generator=generator),
        "guidance": torch.full((batch,), 3.5),
        "img_ids": ids.reshape(rows * columns, 3),
        "txt_ids": torch.zeros(text, 3),
        "return_dict": False,
    }


@torch.no_grad()
def run(transformer: Any, *given: Any, **more: Any) -> torch.Tensor:
    """Return the output for `forward_arguments(*given, **more)`."""
    return transformer(**forward_arguments(*given, **more))[0]


def relative_error(output: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference over the largest expected value."""
    return float((output.float() - expected.float()).abs().max() / expected.float().abs().max())
