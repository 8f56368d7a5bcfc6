"""What the engine asks of a ComfyUI network before it runs a request."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ...errors import RequestError
from ...requests.conditioning import Conditioning
from ...requests.facts import RequestFacts


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

    def check(self, conditioning: Conditioning, x: torch.Tensor) -> tuple[int, ...]:
        """The network checks its arguments itself, as in ComfyUI: what is seen here is the batch alone.

        Raises:
            RequestError: a text of another batch.
        """
        context = conditioning.arguments.get("context")
        if not isinstance(context, torch.Tensor) or context.ndim < 2:
            return (x.shape[0], 0, 0)
        if context.shape[0] not in (1, x.shape[0]):
            raise RequestError(
                f"The conditioning holds {context.shape[0]} items, but the latent batch holds {x.shape[0]}.",
                "Use one prompt, or as many as latents.",
            )
        return (context.shape[0], context.shape[1], context.shape[-1])

    def describe(self, x_shape: tuple[int, ...], text: tuple[int, ...], *, batch: int, steps: int = 0) -> RequestFacts:
        """A request's facts. Of a latent that is several (video and audio) the sum of its numbers is what is known."""
        sizes = x_shape[2:]
        patch = (1,) * max(0, len(sizes) - len(self.patch)) + self.patch[-len(sizes) :] if sizes else ()
        tokens = math.prod(-(-size // by) for size, by in zip(sizes, patch, strict=True))
        batch = 1 if self.rows_together else batch
        request = RequestFacts(tokens, text[1], batch, 1, in_pool=steps > 0)
        return request if not steps else RequestFacts(tokens, text[1], batch, 1, steps)


def patch_of(network: torch.nn.Module, dims: int) -> tuple[int, ...]:
    """Latent positions that a token takes along each of the last `dims` dims, by what the network says."""
    said = getattr(network, "patch_size", None)
    if isinstance(said, int):
        return (1,) * (dims - 2) + (said,) * min(2, dims)
    if isinstance(said, (list, tuple)) and said and all(isinstance(each, int) for each in said):
        return (*((1,) * (dims - len(said))), *said[-dims:])
    return (1,) * dims
