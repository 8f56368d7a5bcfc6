"""ComfyUI's call of a network, and diffusers' arguments made of it. Shapes only, so that it runs on meta too."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import RequestError


@dataclass(frozen=True)
class Call:
    """One call of `diffusion_model(x, timestep, context, **extras)`, of a family that artists call by its title.

    Args:
        x: (B, C, H, W) or (B, C, frames, H, W) in the model's dtype.
        context: (1 or B, tokens, width).
        extras: the other arguments; those that are None count as left out.
    """

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


@dataclass(frozen=True)
class Adapter(ABC):
    """Pure pair between ComfyUI's call and diffusers' forward; the title is how artists call the family.

    Args:
        extras: names of the keyword arguments beside x, timestep and context.
        arguments: diffusers' argument -> how it is made of the call; None leaves it out.
    """

    title: str
    extras: frozenset[str]
    arguments: Mapping[str, Callable[[Call], Any]]

    def to_transformer(
        self, x: torch.Tensor, timestep: torch.Tensor, context: torch.Tensor, config: Mapping[str, Any], **extras: Any
    ) -> dict[str, Any]:
        """Arguments of the transformer's forward, which scales the timestep; see `Call` for what comes in.

        Raises:
            RequestError: shapes that do not fit the model, an extra that is missing or not known.
        """
        call = Call(self.title, x, context, config, extras)
        latent = self.of_latent(call)
        made = {name: make(call) for name, make in self.arguments.items()}
        return {
            **latent,
            "timestep": call.rows("timestep", timestep.reshape(-1)),
            "encoder_hidden_states": context.expand(x.shape[0], -1, -1),
            **{name: value for name, value in made.items() if value is not None},
        }

    @abstractmethod
    def of_latent(self, call: Call) -> dict[str, Any]:
        """The arguments that the latent becomes; refuses first what the family does not take."""

    @abstractmethod
    def from_transformer(self, output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The prediction in ComfyUI's layout, the shape of the latent part of `x`."""

    @abstractmethod
    def output_shape(self, x_shape: tuple[int, ...], config: Mapping[str, Any]) -> tuple[int, ...]:
        """Shape that `from_transformer` gives for an x of that shape."""


def tokens_along(size: int, patch: int) -> int:
    """Tokens along one side of `size` latent pixels, of which each token has `patch`; the last may be padding."""
    return -(-size // patch)


def pad_sides(x: torch.Tensor, patch: int) -> torch.Tensor:
    """(..., H, W) with sides that `patch` divides: they continue circularly, as in ComfyUI. Frames stay."""
    below, right = -x.shape[-2] % patch, -x.shape[-1] % patch
    if not below and not right:
        return x
    return torch.nn.functional.pad(x, (0, right, 0, below) + (0, 0) * (x.ndim - 4), mode="circular")


@dataclass(frozen=True)
class WholeLatentAdapter(Adapter):
    """Latents are (B, C, [frames,] H, W) in the latent scale that ComfyUI's class of the model has.

    Args:
        check: refuses, before anything is made, what else this family does not take.
        latent: diffusers' argument that x is.
        patch: latent pixels along one side of a token; x is padded to it and cut back.
        frames: latents are videos.
        learned_sigma: behind the prediction come as many channels about its variance (Nichol and Dhariwal, arXiv
            2102.09672), which ComfyUI leaves unused.
    """

    check: Callable[[Call], None] = lambda call: None
    latent: str = "hidden_states"
    patch: int = 2
    frames: bool = False
    learned_sigma: bool = False

    def of_latent(self, call: Call) -> dict[str, Any]:
        """The latent, padded to whole tokens."""
        call.check(self.extras, dims=5 if self.frames else 4)
        wanted, got = call.config["in_channels"], call.x.shape[1]
        if got != wanted:  # where `ModelSpec.check_widths` does not see it
            what = "This {title} checkpoint takes {wanted} latent channels, and got {got} channels: {shape}."
            fix = "Use the latent, the VAE and the conditioning nodes that belong to this checkpoint."
            raise RequestError(what, fix, title=self.title, wanted=wanted, got=got, shape=tuple(call.x.shape))
        self.check(call)
        return {self.latent: pad_sides(call.x, self.patch)}

    def from_transformer(self, output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The padded latent -> the height and width of x, and the prediction alone."""
        channels = x.shape[1] if self.learned_sigma else output.shape[1]
        return output[:, :channels, ..., : x.shape[-2], : x.shape[-1]]

    def output_shape(self, x_shape: tuple[int, ...], config: Mapping[str, Any]) -> tuple[int, ...]:
        """That of x, without the channels that a start image or a mask append."""
        return x_shape if self.learned_sigma else (x_shape[0], config["out_channels"], *x_shape[2:])
