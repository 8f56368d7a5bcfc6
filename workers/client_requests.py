"""What the nodes ask a pool for, in their own terms: models, branches, loops. `client.py` puts it on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from parallel_runtime.config import ParallelConfig


@dataclass(frozen=True)
class ModelRequest:
    """A model as the artist asked for it.

    Args:
        path: single file or diffusers folder.
        dtype: "bfloat16", "float16" or "float32".
        config: degrees, attention and compile belong to the request; its devices choose the pool.
    """

    path: str
    dtype: str
    config: ParallelConfig

    @property
    def key(self) -> str:
        """Name of this request in the pool."""
        return repr(self)


@dataclass(frozen=True)
class Branch:
    """One CFG branch: arguments of the transformer's call without x and timestep. Index 0 positive, 1 negative."""

    conditioning: Mapping[str, Any]
    index: int


@dataclass(frozen=True)
class Inpaint:
    """Noise mask of an inpainting loop; all shaped like x, float32."""

    mask: torch.Tensor
    latent_image: torch.Tensor
    noise: torch.Tensor


@dataclass(frozen=True)
class SampleRequest:
    """A denoising loop. `x` (B, C, ...) float32 is the noised start latent.

    Args:
        sigmas: (steps + 1,) float32.
        timesteps: what the transformer is told at each of them; None says the sigmas themselves, as FLUX wants.
        prediction: see parallel_runtime.sampling.prediction.
        concat: for each branch, channels (B, C', ...) appended to its x; empty where there are none.
    """

    sampler: str
    sigmas: torch.Tensor
    x: torch.Tensor
    branches: tuple[Branch, ...]
    cfg: float
    seed: int
    noise_device: str = "cpu"
    inpaint: Inpaint | None = None
    preview: bool = False
    prediction: str = "flow"
    concat: tuple[torch.Tensor, ...] = ()
    timesteps: torch.Tensor | None = None
