"""HunyuanDiT's two conventions: ComfyUI's `diffusion_model(...)` call and diffusers' HunyuanDiT2DModel.forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import RequestError
from .call_checks import per_item
from .learned_sigma_adapter import PATCH, LearnedSigmaAdapter, tokens

_BASE = 32
"""Tokens along one side of the 512² pictures that positions are measured by."""
_THETA = 10000.0
_SIZES = 6


def _region(rows: int, columns: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """First and last position of the rows, and of the columns: the picture fitted into the base square, centred."""
    longest = max(rows, columns)
    sides = [round(_BASE / longest * side) for side in (rows, columns)]
    starts = [round((_BASE - side) / 2.0) for side in sides]
    (top, height), (left, width) = zip(starts, sides, strict=True)
    return (top, top + height), (left, left + width)


def _angles(region: tuple[int, int], count: int, dim: int, device: torch.device) -> torch.Tensor:
    """(count, dim): angles of evenly spaced positions, each twice (float32; positions are exact to float64)."""
    start, stop = region
    places = torch.arange(count, device=device, dtype=torch.float64) * ((stop - start) / count) + start
    frequencies = _THETA ** -(torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
    return torch.outer(places.float(), frequencies).repeat_interleave(2, dim=1)


def rotary_embedding(rows: int, columns: int, head_dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine, (rows * columns, head_dim) float32: columns in the first half of the dims, rows in the second.

    Source: HunyuanDiT (arXiv 2405.08748), section 2.2, "centralized interpolative positional encoding".
    """
    down, across = _region(rows, columns)
    by_column = _angles(across, columns, head_dim // 2, device).expand(rows, -1, -1)
    by_row = _angles(down, rows, head_dim // 2, device)[:, None].expand(-1, columns, -1)
    angles = torch.cat([by_column, by_row], dim=-1).flatten(0, 1)
    return angles.cos(), angles.sin()


class HunyuanDiTAdapter(LearnedSigmaAdapter):
    """See `Adapter`. The timestep is 0..999, and the prediction is the velocity (v-prediction, not a flow).

    Sides that PATCH does not divide continue circularly, as in ComfyUI.
    """

    title = "HunyuanDiT"
    extras = frozenset({"text_embedding_mask", "encoder_hidden_states_t5", "text_embedding_mask_t5", "image_meta_size"})

    def to_transformer(
        self, x: torch.Tensor, timestep: torch.Tensor, context: torch.Tensor, config: Mapping[str, Any], **extras: Any
    ) -> dict[str, Any]:
        """Arguments of HunyuanDiT2DModel.forward.

        Args:
            x: (B, 4, H, W) in the model's dtype.
            timestep: (B,) float32, 0..999.
            context: (1 or B, T, cross_attention_dim) of the first text encoder, T at least `text_len`.
            config: the diffusers config; `use_style_cond_and_image_meta_size` tells versions 1.0 and 1.1 from 1.2.
            extras: text_embedding_mask (1 or B, T); encoder_hidden_states_t5 (1 or B, U, cross_attention_dim_t5) and
                text_embedding_mask_t5 (1 or B, U) of the second, U at least `text_len_t5`; image_meta_size
                (1 or B, 6), height, width, wanted height, wanted width in pixels, top, left.

        Raises:
            RequestError: shapes that do not fit the model, an extra that is missing or not carried.
        """
        self.check(x, context, config, extras)
        batch, _, height, width = x.shape
        rows, columns = tokens(height), tokens(width)
        text, mask = self._text(context, extras.get("text_embedding_mask"), batch, config["text_len"])
        text_t5, mask_t5 = self._text(
            extras.get("encoder_hidden_states_t5"),
            extras.get("text_embedding_mask_t5"),
            batch,
            config["text_len_t5"],
        )
        arguments = {
            "hidden_states": torch.nn.functional.pad(
                x, (0, columns * PATCH - width, 0, rows * PATCH - height), mode="circular"
            ),
            "timestep": per_item(self.title, "timestep", timestep, batch),
            "encoder_hidden_states": text,
            "text_embedding_mask": mask,
            "encoder_hidden_states_t5": text_t5,
            "text_embedding_mask_t5": mask_t5,
            "image_rotary_emb": rotary_embedding(rows, columns, config["attention_head_dim"], x.device),
        }
        if config["use_style_cond_and_image_meta_size"]:
            arguments["image_meta_size"] = self._sizes(extras.get("image_meta_size"), batch)
            arguments["style"] = torch.zeros(batch, dtype=torch.long, device=x.device)
        return arguments

    def _text(
        self, text: torch.Tensor | None, mask: torch.Tensor | None, batch: int, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A text and its mask (B, tokens), True where the text stays and False where the learned padding goes.

        Of a longer text only the last `length` tokens are masked, as in ComfyUI: it encodes a long prompt in several
        windows, and all but the last are full.
        """
        if text is None or mask is None or text.ndim != 3 or mask.shape[1:] != text.shape[1:2]:
            shapes = [None if value is None else tuple(value.shape) for value in (text, mask)]
            raise RequestError(
                f"HunyuanDiT takes the texts of two encoders with their masks, and got {shapes[0]} and {shapes[1]}.",
                "Encode the prompt with HunyuanDiT's text encoders (CLIP Text Encode, or the one for HunyuanDiT).",
            )
        if text.shape[1] < length:
            raise RequestError(
                f"HunyuanDiT takes texts of at least {length} tokens, and got {text.shape[1]}.",
                "Encode the prompt with HunyuanDiT's text encoders, which fill it up.",
            )
        in_front = torch.arange(text.shape[1], device=mask.device) < text.shape[1] - length
        return self.rows("text", text, batch), self.rows("text mask", mask, batch).bool() | in_front

    def _sizes(self, sizes: torch.Tensor | None, batch: int) -> torch.Tensor:
        if sizes is None or sizes.shape[1:] != (_SIZES,):
            raise RequestError(
                f"HunyuanDiT takes image_meta_size of shape ({batch}, {_SIZES}), and got "
                f"{None if sizes is None else tuple(sizes.shape)}.",
                "Check the nodes that change the conditioning.",
            )
        return self.rows("image_meta_size", sizes, batch)
