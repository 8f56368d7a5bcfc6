"""What is known and checked of a transformer before anything of it is changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...acceleration.peer_memory import PeerSharing
from ...attention.choice import check_ring, measurements, resolve_kernel, untouched_kernel
from ...errors import ConfigurationError, UnsupportedModelError
from ...mesh.mesh import Layout
from ...said import said
from ..marked_blocks import find_modules
from .spec import ModelSpec


@dataclass(frozen=True)
class NetworkParts:
    """A transformer, and what its family's data names of it.

    Args:
        device, dtype, heads, head_dim: of its attention.
        kernel: what attends, a key of KERNELS.
        attention: modules whose attention goes over the split tokens, by path; none in a U-Net.
        blocks: what `spec.block_lists` hold, in forward order.
    """

    transformer: nn.Module
    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    heads: int
    head_dim: int
    kernel: str
    attention: dict[str, nn.Module]
    blocks: tuple[nn.Module, ...]

    @classmethod
    def find(cls, transformer: nn.Module, spec: ModelSpec, attention: str) -> NetworkParts:
        """Look at a transformer with its weights.

        Args:
            attention: one of config.ATTENTION_BACKENDS.

        Raises:
            UnsupportedModelError: the transformer is not what the spec describes.
            ConfigurationError: the attention backend cannot be used here.
        """
        if type(transformer).__name__ != spec.transformer_class:
            raise UnsupportedModelError(
                said(
                    "A {name} cannot run as {title}, which is a {transformer_class}.",
                    name=type(transformer).__name__,
                    title=spec.title,
                    transformer_class=spec.transformer_class,
                ),
                "Choose a model file of a supported family.",
            )
        spec.check_modules(dict(transformer.named_modules()))
        config: Any = transformer.config
        weight = next(transformer.parameters())
        head_dim = getattr(config, "attention_head_dim", 64)
        if spec.splits_sequence:
            kernel = resolve_kernel(attention, weight.device, weight.dtype, head_dim, measurements())
        else:
            kernel = untouched_kernel(attention, spec.title)
        return cls(
            transformer=transformer,
            spec=spec,
            device=weight.device,
            dtype=weight.dtype,
            heads=spec.heads(config),
            head_dim=head_dim,
            kernel=kernel,
            attention=_attention(transformer, spec),
            blocks=_blocks(transformer, spec),
        )

    def peer_sharing(self) -> PeerSharing:
        """Peer memory in the shapes of this attention."""
        return PeerSharing(self.heads, self.head_dim, self.dtype, self.device, self.kernel)


class MeshCheck:
    """Refuses meshes that a wrapped transformer does not run over. No collective."""

    def __init__(self, parts: NetworkParts):
        self._parts = parts
        self._runs_in_a_ring = False  # found by running the kernel: once is enough

    def check(self, layout: Layout) -> None:
        """Refuse, and change nothing.

        Raises:
            ConfigurationError: tokens that cannot be split, stages of a U-Net, or see `check_ring`.
        """
        plan, spec = layout.plan, self._parts.spec
        if plan.sequence > 1 and not spec.splits_sequence:
            raise ConfigurationError(
                said(
                    "The plan asks for {plan}, and the tokens of {title} cannot be split.", plan=plan, title=spec.title
                ),
                "Set ulysses and ring to 1; cfg and data share out CFG branches and pictures.",
            )
        if plan.pipe > 1 and not spec.splits_sequence:
            raise ConfigurationError(said("{title} cannot be cut into stages.", title=spec.title), "Set stages to 1.")
        self.check_ring(layout)

    def check_ring(self, layout: Layout) -> None:
        """Refuse a layout with a ring for which the attention backend is not made.

        Raises:
            ConfigurationError: with the backends that are.
        """
        if layout.plan.ring > 1 and layout.plan.pipe == 1 and not self._runs_in_a_ring:
            parts = self._parts
            check_ring(parts.kernel, parts.device, parts.dtype, parts.head_dim)
            self._runs_in_a_ring = True


def _attention(transformer: nn.Module, spec: ModelSpec) -> dict[str, nn.Module]:
    if not spec.splits_sequence:
        return {}
    found = find_modules(transformer, spec.self_attention)
    if not found:
        raise UnsupportedModelError(
            said(
                "No attention module of {transformer_class} has a name like {self_attention}.",
                transformer_class=spec.transformer_class,
                self_attention=", ".join(spec.self_attention),
            ),
            "Install the diffusers version that this pack asks for.",
        )
    return found


def _blocks(transformer: nn.Module, spec: ModelSpec) -> tuple[nn.Module, ...]:
    lists = [found for pattern in spec.block_lists for found in find_modules(transformer, (pattern,)).values()]
    return tuple(block for blocks in lists for block in blocks.children())
