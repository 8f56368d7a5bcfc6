"""What a file of a family declares: a `ModelSpec`, which is data, and how diffusers' arguments are made of ComfyUI's
call. No forward is copied. Shapes only, so that it runs on meta too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import RequestError
from ..tables.blocks import Blocks, Network

TEXT_AND_IMAGE = Blocks(
    "transformer_blocks", {"encoder_hidden_states": 1, "hidden_states": 1}, ("encoder_hidden_states", "hidden_states"),
    joint={"image_rotary_emb": 0}, alike=("temb", "joint_attention_kwargs"),
    modulations={"temb": ("norm1.linear", "norm1_context.linear")}, latent="hidden_states",
)  # fmt: skip
"""Blocks in which the text's tokens are a stream beside the picture's."""
IMAGE = Blocks(
    "blocks", {"hidden_states": 1}, ("hidden_states",), texts=("attn2",), alike=("encoder_hidden_states", "temb"),
    longer={"encoder_hidden_states": 1}, latent="hidden_states",
)  # fmt: skip
"""Blocks that take the text by cross-attention."""


@dataclass(frozen=True)
class Call:
    """One call of `diffusion_model(x, timestep, context, **extras)`, of a family that artists call by its title: x is
    (B, C, [frames,] H, W) in the model's dtype, context (1 or B, tokens, width); extras of None count as left out."""

    title: str
    x: torch.Tensor
    context: torch.Tensor
    config: Mapping[str, Any]
    extras: Mapping[str, Any]

    @property
    def batch(self) -> int:
        """Batch items."""
        return self.x.shape[0]

    def check(self, known: Iterable[str], dims: int = 4) -> None:
        """Refuse wrong dimensions, unequal batches, and arguments that are not `known`."""
        if self.x.ndim != dims or self.context.ndim != 3 or self.context.shape[0] not in (1, self.batch):
            what = "{title} takes a latent (batch, channels, {frames}height, width) and text (batch, tokens, "
            what += "width), and got {shape} and {shape2}."
            fix = "Use a latent and a prompt made for {title}."
            frames, shapes = "frames, " if dims == 5 else "", [tuple(each.shape) for each in (self.x, self.context)]
            raise RequestError(what, fix, title=self.title, frames=frames, shape=shapes[0], shape2=shapes[1])
        given = {name for name, value in self.extras.items() if value is not None}
        if unknown := sorted(given.difference(known)):
            what = "The diffusers network of {title} does not take {unknown}."
            raise RequestError(what, "Leave it out.", title=self.title, unknown=", ".join(unknown))

    def rows(self, name: str, value: Any, dims: int = 0) -> torch.Tensor:
        """One row for every batch item, (1 or B, ...) -> (B, ...), contiguous; `dims` are checked unless 0."""
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else (type(value).__name__,)
        if shape[:1] not in ((1,), (self.batch,)) or (dims and len(shape) != dims):
            what = "{title} got {name} of shape {shape} for a batch of {batch}."
            fix = "Check the nodes that change the conditioning."
            raise RequestError(what, fix, title=self.title, name=name, shape=shape, batch=self.batch)
        return value.expand(self.batch, *shape[1:]).contiguous()

    def pooled_text(self) -> torch.Tensor | None:
        """`y` (1 or B, width) for every batch item, in x's dtype; None where there is none."""
        y = self.extras.get("y")
        return None if y is None else self.rows("pooled text", y, dims=2).to(self.x)

    def guidance(self) -> torch.Tensor | None:
        """What FluxGuidance gives, for every batch item; None where there is none, or the checkpoint takes none."""
        given = self.extras.get("guidance") if self.config["guidance_embeds"] else None
        return None if given is None else self.rows("guidance", given.to(self.x.device).reshape(-1))


def tokens_along(size: int, patch: int) -> int:
    """Tokens along one side of `size` latent pixels, of which each token has `patch`; the last may be padding."""
    return -(-size // patch)


def pad_sides(x: torch.Tensor, patch: int) -> torch.Tensor:
    """(..., H, W) with sides that `patch` divides: they continue circularly, as in ComfyUI. Frames stay."""
    below, right = -x.shape[-2] % patch, -x.shape[-1] % patch
    if not below and not right:
        return x
    return torch.nn.functional.pad(x, (0, right, 0, below) + (0, 0) * (x.ndim - 4), mode="circular")


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A family of transformers as data, and ComfyUI's call as diffusers'. Latents are scaled as in ComfyUI's class."""

    title: str  # how artists call it ("FLUX.1")
    transformer_class: str
    self_attention: tuple[str, ...]  # glob patterns of modules whose attention is over the split sequence; () for none
    timestep_embedder: str  # module whose first positional argument is the scaled timestep
    extras: frozenset[str]  # names of the keyword arguments beside x, timestep and context
    arguments: Mapping[str, Callable[[Call], Any]]  # diffusers' argument -> what makes it of a call; None: left out
    # How ranks share out the blocks' tokens, in the words of ComfyUI's networks; () where only the batch, as of U-Nets.
    cut: tuple[Blocks, ...] = ()
    whole: tuple[str, ...] = ()  # glob patterns of the lists of blocks that every rank computes whole, in forward order
    timestep_scale: float = 1.0  # what the transformer's forward multiplies the timestep by before that module
    token: int = 2  # latent positions along one side of a token
    check: Callable[[Call], None] = lambda call: None  # refuses, before anything is made, what else it does not take
    latent: str = "hidden_states"  # diffusers' argument that x is
    patch: int = 2  # x is padded to a multiple of it along both sides, and cut back
    frames: bool = False  # latents are videos
    # Behind the prediction come as many channels about its variance (Nichol and Dhariwal, arXiv 2102.09672), which
    # ComfyUI leaves unused.
    learned_sigma: bool = False
    # Called once on a freshly loaded transformer, for what ComfyUI's forward does and diffusers' does not.
    prepare: Callable[[torch.nn.Module], None] | None = None
    former_class: str = ""  # what a config.json names that was written before diffusers gave the family its own class
    ignores: tuple[str, ...] = ()  # keys of a config.json that the class does not take
    # A config.json of the class -> whether it is of this family, where others have the same class.
    belongs: Callable[[Mapping[str, Any]], bool] = lambda config: True
    widths: Mapping[str, str] = field(default_factory=dict)  # diffusers' argument -> the config's key of its width

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
        references = "ref_latents" in self.extras
        return Network(self.title, self.cut, heads=heads, head_dim=head_dim, stages=True, behind=references)

    def check_widths(self, arguments: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Refuse inputs of another model, such as the conditioning of another family's text encoder."""
        for name, key in self.widths.items():
            value = arguments.get(name)
            if isinstance(value, torch.Tensor) and value.shape[-1] != config[key]:
                what = "{title} takes {name} of width {config} in this checkpoint, but got {shape}."
                fix = "Connect the text encoder and the latent that belong to this model."
                raise RequestError(what, fix, title=self.title, name=name, config=config[key], shape=value.shape[-1])

    def to_transformer(
        self, x: torch.Tensor, timestep: torch.Tensor, context: torch.Tensor, config: Mapping[str, Any], **extras: Any
    ) -> dict[str, Any]:
        """Arguments of the transformer's forward; RequestError for other shapes, and missing or unknown extras."""
        call = Call(self.title, x, context, config, extras)
        latent = self.of_latent(call)
        made = {name: make(call) for name, make in self.arguments.items()}
        return {
            **latent,
            "timestep": call.rows("timestep", timestep.reshape(-1)),
            "encoder_hidden_states": context.expand(x.shape[0], -1, -1),
            **{name: value for name, value in made.items() if value is not None},
        }

    def of_latent(self, call: Call) -> dict[str, Any]:
        """What the latent becomes, padded to whole tokens; refuses first what the family does not take."""
        call.check(self.extras, dims=5 if self.frames else 4)
        wanted, got = call.config["in_channels"], call.x.shape[1]
        if got != wanted:  # where `check_widths` does not see it
            what = "This {title} checkpoint takes {wanted} latent channels, and got {got} channels: {shape}."
            fix = "Use the latent, the VAE and the conditioning nodes that belong to this checkpoint."
            raise RequestError(what, fix, title=self.title, wanted=wanted, got=got, shape=tuple(call.x.shape))
        self.check(call)
        return {self.latent: pad_sides(call.x, self.patch)}

    def from_transformer(self, output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The prediction in ComfyUI's layout, of the height and width of x."""
        channels = x.shape[1] if self.learned_sigma else output.shape[1]
        return output[:, :channels, ..., : x.shape[-2], : x.shape[-1]]

    def output_shape(self, x_shape: tuple[int, ...], config: Mapping[str, Any]) -> tuple[int, ...]:
        """Shape that `from_transformer` gives: that of x, without the channels that a start image or a mask append."""
        return x_shape if self.learned_sigma else (x_shape[0], config["out_channels"], *x_shape[2:])
