"""What every rival computes: the same FLUX.1, with the same random weights, on the same inputs."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from parallel_runtime.networks.diffusers.flux import FLUX

from ..flux_facts import FLUX_CONFIG
from .case import Case

TINY = {
    **FLUX_CONFIG,
    "num_layers": 2,
    "num_single_layers": 2,
    "num_attention_heads": 2,
    "joint_attention_dim": 64,
    "pooled_projection_dim": 32,
}
GUIDANCE = 4.0
"""Not 3.5: diffusers takes 1000 x guidance in bfloat16, and 3500 is none."""

Velocity = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(x (1, 16, H, W) float32, sigma (1,) float32) -> the model's output in the shape of x."""
Sampling = Callable[[torch.Tensor, torch.Tensor, Callable[[], None]], torch.Tensor]
"""(x, sigmas (steps + 1,), what to call after each step) -> the latent after all steps."""


@dataclass(frozen=True)
class Task:
    """A case, and the rank that works on it."""

    case: Case
    rank: int
    device: torch.device

    @property
    def config(self) -> dict[str, Any]:
        """Arguments of diffusers' FluxTransformer2DModel."""
        return TINY if self.case.tiny else FLUX_CONFIG

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and of what the transformer gets."""
        return torch.float32 if self.case.tiny else torch.bfloat16

    def latent(self) -> torch.Tensor:
        """Start latent (1, 16, size / 8, size / 8) float32."""
        return self._random("latent", 16, self.case.size // 8, self.case.size // 8)

    def conditioning(self) -> dict[str, torch.Tensor]:
        """Text and guidance under ComfyUI's names."""
        return {
            "context": self._random("context", 8 if self.case.tiny else 512, self.config["joint_attention_dim"]).to(
                self.dtype
            ),
            "y": self._random("y", self.config["pooled_projection_dim"]).to(self.dtype),
            "guidance": torch.tensor([GUIDANCE], device=self.device),
        }

    def weight(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The parameter that diffusers calls `name`: the same on every rank and in every rival, made on the device.

        Every matrix keeps its input's scale, norms are near one, nothing is zero.
        """
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
        noise = torch.randn(shape, generator=generator, device=self.device)
        if len(shape) > 1:
            noise /= math.sqrt(math.prod(shape[1:]))
        else:
            noise = 1 + 0.1 * noise if "norm" in name and name.endswith("weight") else 0.02 * noise
        return noise.to(self.dtype)

    def build(self, transformer_class: Any) -> Any:
        """A transformer of diffusers' class or of one derived from it, with its weights on the device."""
        with torch.device("meta"):
            transformer = transformer_class(**self.config)
        transformer = transformer.to(self.dtype).to_empty(device=self.device).requires_grad_(False).eval()
        for name, parameter in transformer.state_dict().items():
            parameter.copy_(self.weight(name, parameter.shape))
        return transformer

    def _random(self, name: str, *shape: int) -> torch.Tensor:
        # On the CPU, whose numbers are the same on every machine.
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return torch.randn(1, *shape, generator=generator).to(self.device)


def euler(velocity: Velocity) -> Sampling:
    """ComfyUI's euler of a flow model, for rivals that bring a network but no loop."""

    def sample(x: torch.Tensor, sigmas: torch.Tensor, tick: Callable[[], None]) -> torch.Tensor:
        for sigma, following in itertools.pairwise(sigmas):
            x = x + velocity(x, sigma[None]).float() * (following - sigma)
            tick()
        return x

    return sample


def diffusers_velocity(transformer: Any, task: Task) -> Velocity:
    """Call a transformer in diffusers' convention."""
    given = task.conditioning()

    def velocity(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        arguments = FLUX.to_transformer(
            x.to(task.dtype), sigma, given["context"], task.config, y=given["y"], guidance=given["guidance"]
        )
        return FLUX.from_transformer(transformer(**arguments, return_dict=False)[0], x)

    return velocity
