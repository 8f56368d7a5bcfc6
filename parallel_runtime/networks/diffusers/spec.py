"""What a model file declares. A model is data (a `ModelSpec`) plus one adapter; no forward is copied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import RequestError
from ..tables.blocks import Blocks, Network
from .adapter import Adapter

TEXT_AND_IMAGE = Blocks(
    "transformer_blocks",
    {"encoder_hidden_states": 1, "hidden_states": 1},
    ("encoder_hidden_states", "hidden_states"),
    joint={"image_rotary_emb": 0},
    alike=("temb", "joint_attention_kwargs"),
    modulations={"temb": ("norm1.linear", "norm1_context.linear")},
    latent="hidden_states",
)
"""Blocks in which the text's tokens are a stream beside the picture's."""
IMAGE = Blocks(
    "blocks",
    {"hidden_states": 1},
    ("hidden_states",),
    texts=("attn2",),
    alike=("encoder_hidden_states", "temb"),
    longer={"encoder_hidden_states": 1},
    latent="hidden_states",
)
"""Blocks that take the text by cross-attention."""


@dataclass(frozen=True)
class ModelSpec:
    """A transformer family as data.

    Args:
        cut: how ranks share out the tokens of the blocks, in the words of ComfyUI's networks; () where they share out
            the batch alone, as in U-Nets.
        whole: glob patterns of the lists of blocks that every rank computes whole, in forward order.
        self_attention: glob patterns of the modules whose attention runs over the split sequence; () where none is.
        timestep_embedder: module whose first positional argument is the scaled timestep.
        timestep_scale: what the transformer's forward multiplies the timestep by before that module.
        token: latent positions along one side of a token.
        former_class: what a config.json may call the class that was written before diffusers gave the family its own.
        ignores: keys of a config.json that the class does not take.
        belongs: a config.json of the class -> whether it is of this family, where others have the same class.
        prepare: called once on a freshly loaded transformer, for what ComfyUI's forward does and diffusers' does not.
    """

    transformer_class: str
    self_attention: tuple[str, ...]
    timestep_embedder: str
    adapter: Adapter
    cut: tuple[Blocks, ...] = ()
    whole: tuple[str, ...] = ()
    timestep_scale: float = 1.0
    token: int = 2
    prepare: Callable[[torch.nn.Module], None] | None = None
    former_class: str = ""
    ignores: tuple[str, ...] = ()
    belongs: Callable[[Mapping[str, Any]], bool] = lambda config: True
    widths: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """How artists call it ("FLUX.1")."""
        return self.adapter.title

    @property
    def block_lists(self) -> tuple[str, ...]:
        """Attribute paths, or glob patterns of such, of the block lists in forward order."""
        return self.whole or tuple(blocks.path for blocks in self.cut)

    @property
    def network(self) -> Network | None:
        """The class as data, as ComfyUI's are; None where ranks share out the batch alone."""
        if not self.cut:
            return None
        heads, head_dim = "config.num_attention_heads", "config.attention_head_dim"
        references = "ref_latents" in self.adapter.extras
        return Network(self.title, self.cut, heads=heads, head_dim=head_dim, stages=True, behind=references)

    def check_widths(self, arguments: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Refuse inputs of another model, such as the conditioning of another family's text encoder."""
        for name, key in self.widths.items():
            value = arguments.get(name)
            if isinstance(value, torch.Tensor) and value.shape[-1] != config[key]:
                what = "{title} takes {name} of width {config} in this checkpoint, but got {shape}."
                fix = "Connect the text encoder and the latent that belong to this model."
                raise RequestError(what, fix, title=self.title, name=name, config=config[key], shape=value.shape[-1])
