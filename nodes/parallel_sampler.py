"""Parallel Sampler: KSampler by another name, with the values that FLUX.1 is made for."""

from __future__ import annotations

import sys
from typing import Any

from comfy.samplers import KSampler
from comfy_api.latest import io

from .node_text import failing_shown, make_schema


class ParallelSampler(io.ComfyNode):
    """Inputs and result of KSampler. What ran, the MODEL says on the node, as on any other that samples."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make_schema(
            "ParallelSampler",
            search_aliases=["ksampler", "multi gpu", "parallel"],
            inputs=[
                io.Model.Input("model"),
                io.Int.Input("seed", default=0, min=0, max=2**64 - 1, control_after_generate=True, optional=True),
                io.Int.Input("steps", default=20, min=1, max=10000, optional=True),
                io.Float.Input("cfg", default=1.0, min=0.0, max=100.0, step=0.1, round=0.01, optional=True),
                io.Combo.Input("sampler_name", options=KSampler.SAMPLERS, default="euler", optional=True),
                io.Combo.Input("scheduler", options=KSampler.SCHEDULERS, default="simple", optional=True),
                io.Conditioning.Input("positive"),
                io.Conditioning.Input("negative"),
                io.Latent.Input("latent_image"),
                io.Float.Input("denoise", default=1.0, min=0.0, max=1.0, step=0.01, optional=True),
            ],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    @failing_shown()
    def execute(
        cls,
        model,
        positive,
        negative,
        latent_image: dict[str, Any],
        seed: int = 0,
        steps: int = 20,
        cfg: float = 1.0,
        sampler_name: str = "euler",
        scheduler: str = "simple",
        denoise: float = 1.0,
    ) -> io.NodeOutput:
        """Sample. Raises as PoolClient.sample, and RequestError for what on the MODEL does not travel."""
        # ComfyUI's own module of that name, and not this package.
        (latent,) = sys.modules["nodes"].common_ksampler(
            model, seed, steps, cfg, sampler_name, scheduler, positive, negative, latent_image, denoise=denoise
        )
        return io.NodeOutput(latent)
