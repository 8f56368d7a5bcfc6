"""What the engine asks of a ComfyUI network before it runs a request."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from ...errors import RequestError
from ...requests.conditioning import Conditioning
from ...requests.facts import RequestFacts, Seen
from ...said import said
from .blocks import LATENT_SHAPES


@dataclass(frozen=True)
class HostFamily:
    """A network as its file describes it; see `Family` in the engine.

    Args:
        name: for the client.
        title: how artists call it.
        patch: latent positions that a token takes, by the last dims of the latent.
        rows_together: every rank computes all rows of a batch, so that there is one to plan for.
    """

    name: str
    title: str
    patch: tuple[int, ...]
    rows_together: bool

    @property
    def token(self) -> int:
        """Latent positions along one side of a token."""
        return self.patch[-1]

    def check(self, conditioning: Conditioning, x: torch.Tensor) -> Seen:
        """The network checks its arguments itself, as in ComfyUI: what is seen here is the batch alone.

        Raises:
            RequestError: a text of another batch.
        """
        context = conditioning.arguments.get("context")
        shapes = conditioning.arguments.get(LATENT_SHAPES)
        latents = (tuple(x.shape),) if shapes is None else tuple(tuple(shape) for shape in shapes)
        if not isinstance(context, torch.Tensor) or context.ndim < 2:
            return Seen((x.shape[0], 0, 0), latents)
        if context.shape[0] not in (1, x.shape[0]):
            raise RequestError(
                said(
                    "The conditioning holds {shape} items, but the latent batch holds {shape2}.",
                    shape=context.shape[0],
                    shape2=x.shape[0],
                ),
                "Use one prompt, or as many as latents.",
            )
        return Seen((context.shape[0], context.shape[1], context.shape[-1]), latents)

    def describe(self, seen: Seen, *, batch: int, steps: int = 0) -> RequestFacts:
        """A request's facts. A latent beside the video is sound, which has at least a token for each moment."""
        first, *others = (shape[2:] for shape in seen.latents)
        patch = (1,) * max(0, len(first) - len(self.patch)) + self.patch[-len(first) :] if first else ()
        tokens = math.prod(-(-size // by) for size, by in zip(first, patch, strict=True))
        tokens += sum(sizes[0] for sizes in others if sizes)
        batch = 1 if self.rows_together else batch
        rows = math.prod(-(-size // by) for size, by in zip(first[:-1], patch[:-1], strict=True))
        request = RequestFacts(tokens, seen.text[1], batch, rows, in_pool=steps > 0)
        return replace(request, steps=steps) if steps else request


def patch_of(network: torch.nn.Module, dims: int) -> tuple[int, ...]:
    """Latent positions that a token takes along each of the last `dims` dims, by what the network says."""
    said = getattr(network, "patch_size", None)
    if isinstance(said, int):
        return (1,) * (dims - 2) + (said,) * min(2, dims)
    if isinstance(said, (list, tuple)) and said and all(isinstance(each, int) for each in said):
        return (*((1,) * (dims - len(said))), *said[-dims:])
    return (1,) * dims
