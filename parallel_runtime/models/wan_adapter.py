"""Wan's two conventions: ComfyUI's `diffusion_model(...)` call and diffusers' WanTransformer3DModel.forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import RequestError

PATCH = 2
"""A token is a PATCH x PATCH square of one latent frame."""
LONGEST_SIDE = 1024
"""Tokens along one side that diffusers' rotary embedding holds."""
IMAGE_TEXT_TOKENS = 512
"""Text tokens where an image embedding stands before them: diffusers tells the two apart by this number."""


def _tokens(size: int) -> int:
    """Tokens along one side; a side that PATCH does not divide is padded."""
    return -(-size // PATCH)


def _pad(x: torch.Tensor) -> torch.Tensor:
    """(B, C, F, H, W) with sides that PATCH divides; odd sides continue circularly."""
    below, right = x.shape[-2] % PATCH, x.shape[-1] % PATCH
    if below or right:
        x = torch.nn.functional.pad(x, (0, right, 0, below, 0, 0), mode="circular")
    return x


class WanAdapter:
    """See `Adapter`. Latents are (B, C, F, H, W) in ComfyUI's Wan latent scale, the timestep is 1000 times sigma.

    Source: Wan-Video's Wan2.1 (wan/modules/model.py) and diffusers' WanTransformer3DModel.
    """

    extras = frozenset({"clip_fea"})

    def to_transformer(
        self, x: torch.Tensor, timestep: torch.Tensor, context: torch.Tensor, config: Mapping[str, Any], **extras: Any
    ) -> dict[str, Any]:
        """Arguments of WanTransformer3DModel.forward.

        Args:
            x: (B, in_channels, F, H, W) in the model's dtype; a start image's channels and mask already appended.
            timestep: (B,) float32, 1000 * sigma, kept as it is.
            context: (1 or B, T, text_dim).
            config: the diffusers config; `image_dim` decides whether an image embedding is passed.
            extras: clip_fea (1 or B, tokens, image_dim), the start image as CLIP's vision encoder sees it.

        Raises:
            RequestError: shapes that do not fit the model, or an extra that is not carried.
        """
        self._check(x, timestep, context, config, extras)
        arguments = {
            "hidden_states": _pad(x),
            "timestep": timestep.expand(x.shape[0]),
            "encoder_hidden_states": context.expand(x.shape[0], -1, -1),
        }
        if config.get("image_dim") is not None:
            arguments["encoder_hidden_states_image"] = self._image(extras.get("clip_fea"), x, context, config)
        return arguments

    def from_transformer(self, output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """(B, C, F, H, W) of the padded latent -> the frames, height and width of x."""
        return output[..., : x.shape[-2], : x.shape[-1]]

    def output_shape(self, x_shape: tuple[int, ...], config: Mapping[str, Any]) -> tuple[int, ...]:
        """(B, out_channels, F, H, W): the latent without the channels of a start image."""
        return (x_shape[0], config["out_channels"], *x_shape[2:])

    def sequence_length(self, x_shape: tuple[int, ...], context_shape: tuple[int, ...]) -> int:
        """Video tokens of one forward; self-attention does not see the text."""
        return x_shape[-3] * _tokens(x_shape[-2]) * _tokens(x_shape[-1])

    def _check(
        self,
        x: torch.Tensor,
        timestep: torch.Tensor,
        context: torch.Tensor,
        config: Mapping[str, Any],
        extras: Mapping[str, Any],
    ) -> None:
        """What the widths of the arguments (`ModelSpec.check_widths`) do not show. Shapes only: runs on meta too."""
        if x.ndim != 5 or context.ndim != 3 or context.shape[0] not in (1, x.shape[0]):
            raise RequestError(
                f"Wan takes a latent (batch, channels, frames, height, width) and text (batch, tokens, width), and "
                f"got {tuple(x.shape)} and {tuple(context.shape)}.",
                "Use a video latent and a prompt made for Wan.",
            )
        if x.shape[1] != config["in_channels"]:
            raise RequestError(
                f"This Wan checkpoint takes {config['in_channels']} latent channels, and got {x.shape[1]}.",
                "Use the latent and the VAE that belong to this checkpoint.",
            )
        if max(x.shape[-3], _tokens(x.shape[-2]), _tokens(x.shape[-1])) > LONGEST_SIDE:
            raise RequestError(
                f"A video latent of {tuple(x.shape[-3:])} (frames, height, width) is beyond Wan's positions, of "
                f"which each side has {LONGEST_SIDE}.",
                "Use a shorter or smaller video.",
            )
        if timestep.ndim != 1 or timestep.shape[0] not in (1, x.shape[0]):
            raise RequestError(
                "Wan in the pool takes one timestep per video, and got one per frame (Wan 2.2 5B from an image).",
                "Load the model with Load Diffusion Model.",
            )
        if unknown := sorted(set(extras) - self.extras):
            raise RequestError(f"Wan in the pool does not take {', '.join(unknown)}.", "Remove the node that adds it.")

    @staticmethod
    def _image(
        clip: torch.Tensor | None, x: torch.Tensor, context: torch.Tensor, config: Mapping[str, Any]
    ) -> torch.Tensor:
        """CLIP's view of the start image, and of the end image where the checkpoint has positions for two."""
        if clip is None:
            raise RequestError(
                "This Wan checkpoint takes the start image through CLIP vision too, and got none.",
                "Connect clip_vision_output to the node that makes the conditioning.",
            )
        if context.shape[1] != IMAGE_TEXT_TOKENS:
            raise RequestError(
                f"Wan image-to-video in the pool takes prompts of {IMAGE_TEXT_TOKENS} tokens, and got "
                f"{context.shape[1]}.",
                "Shorten the prompt, or load the model with Load Diffusion Model.",
            )
        both = config.get("pos_embed_seq_len")
        if clip.ndim != 3 or clip.shape[0] not in (1, x.shape[0]) or (both is not None and clip.shape[1] != both):
            wanted = "a start and an end image" if both is not None else "a start image"
            raise RequestError(
                f"This Wan checkpoint takes CLIP vision's view of {wanted}, and got a tensor of {tuple(clip.shape)}.",
                "Connect the CLIP vision outputs that the checkpoint was made for.",
            )
        clip = clip.to(x).expand(x.shape[0], -1, -1)
        # diffusers puts the two images side by side itself, out of a batch twice as large.
        return clip if both is None else clip.reshape(2 * x.shape[0], both // 2, -1)
