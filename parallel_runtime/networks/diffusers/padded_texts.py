"""HunyuanDiT's two texts: learned padding goes where their masks say so, and they are as long as ComfyUI has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...errors import RequestError
from ...said import said
from .call import Call


def masked_text(
    text_of: Callable[[Call], torch.Tensor | None], mask_name: str, trained: str
) -> tuple[Callable[[Call], torch.Tensor], Callable[[Call], torch.Tensor]]:
    """How one encoder's text (B, tokens, width) and its mask (B, tokens) are made of a call.

    The mask is True where the text stays and False where the learned padding goes. Of a text longer than the model
    learned (`trained` in its config) only the last tokens are masked, as in ComfyUI: it encodes a long prompt in
    several windows, and all but the last are full.
    """

    def checked(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        text, mask, length = text_of(call), call.extras.get(mask_name), call.config[trained]
        if text is None or mask is None or text.ndim != 3 or mask.shape[1:] != text.shape[1:2]:
            shapes = [None if value is None else tuple(value.shape) for value in (text, mask)]
            raise RequestError(
                said(
                    "{title} takes the texts of two encoders with their masks, and got {shapes} and {shapes2}.",
                    title=call.title,
                    shapes=shapes[0],
                    shapes2=shapes[1],
                ),
                "Encode the prompt with HunyuanDiT's text encoders (CLIP Text Encode, or the one for HunyuanDiT).",
            )
        if text.shape[1] < length:
            raise RequestError(
                said(
                    "{title} takes texts of at least {length} tokens, and got {shape}.",
                    title=call.title,
                    length=length,
                    shape=text.shape[1],
                ),
                "Encode the prompt with HunyuanDiT's text encoders, which fill it up.",
            )
        return call.rows("text", text), call.rows("text mask", mask)

    def masked(call: Call) -> torch.Tensor:
        mask = checked(call)[1]
        in_front = torch.arange(mask.shape[1], device=mask.device) < mask.shape[1] - call.config[trained]
        return mask.bool() | in_front

    return lambda call: checked(call)[0], masked


def fit_padding(transformer: torch.nn.Module) -> None:
    """Let a transformer take texts longer than it learned, as ComfyUI's forward does, and pool no more than it did."""
    padding: torch.nn.Parameter = transformer.get_parameter("text_embedding_padding")
    pooler: Any = transformer.get_submodule("time_extra_emb.pooler")
    pooled_tokens = pooler.positional_embedding.shape[0] - 1

    def fit(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Rows of padding for tokens in front of the last that were learned, which the masks never choose."""
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

    transformer.register_forward_pre_hook(fit, with_kwargs=True)
    pooler.register_forward_pre_hook(lambda module, inputs: (inputs[0][:, :pooled_tokens],))
