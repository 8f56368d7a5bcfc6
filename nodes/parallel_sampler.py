"""Parallel Sampler: KSampler with the loop in the pool."""

from __future__ import annotations

import logging
import sys
from typing import Any

import comfy.samplers
from comfy_api.latest import io

from parallel_runtime.said import together

from .node_text import failing_shown, found_by, show_text
from .run_notices import describe_loop

log = logging.getLogger("parallel_dit")

_MAX_SEED = 0xFFFFFFFFFFFFFFFF


class ParallelSampler(io.ComfyNode):
    """Inputs and result of KSampler. What the pool's loop does not know runs per step, and the node says so."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs, outputs and texts of the node."""
        return io.Schema(
            node_id="ParallelSampler",
            display_name="Parallel Sampler",
            category="parallel",
            description="KSampler, and says where the loop ran. Takes a MODEL of Parallel Loader.",
            **found_by("ksampler", "multi gpu", "parallel"),
            inputs=[
                io.Model.Input("model", tooltip="A MODEL of Parallel Loader."),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=_MAX_SEED,
                    control_after_generate=True,
                    optional=True,
                    tooltip="Number that the noise is made from. The same seed gives KSampler's picture.",
                ),
                io.Int.Input("steps", default=20, min=1, max=10000, optional=True, tooltip="Denoising steps."),
                io.Float.Input(
                    "cfg",
                    default=1.0,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    round=0.01,
                    optional=True,
                    tooltip="How strongly the positive prompt is preferred over the negative one. FLUX.1 dev is made "
                    "for 1, which leaves the negative prompt out.",
                ),
                io.Combo.Input(
                    "sampler_name",
                    options=comfy.samplers.KSampler.SAMPLERS,
                    default="euler",
                    optional=True,
                    tooltip="Denoising method; all of ComfyUI's run on all GPUs. With stages euler and dpmpp_2m do, "
                    "the others step by step.",
                ),
                io.Combo.Input(
                    "scheduler",
                    options=comfy.samplers.KSampler.SCHEDULERS,
                    default="simple",
                    optional=True,
                    tooltip="How the noise level falls from step to step.",
                ),
                io.Conditioning.Input("positive", tooltip="What should be in the picture."),
                io.Conditioning.Input("negative", tooltip="What should not be in it; counts only with CFG above 1."),
                io.Latent.Input("latent_image", tooltip="The latent to denoise; its noise mask is respected."),
                io.Float.Input(
                    "denoise",
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    optional=True,
                    tooltip="Part of the noise that is put in and taken out again; below 1 the input shows through.",
                ),
            ],
            outputs=[io.Latent.Output(tooltip="The denoised latent.")],
            hidden=[io.Hidden.unique_id],
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
        """Sample and say where it was done.

        Raises:
            RequestError: a MODEL of another loader, or one with what is not transportable.
            ParallelError: see PoolClient.sample.
        """
        # Imported here and not at the top: ComfyUI's start shall not pay for it.
        from .remote_model import remote_of

        remote = remote_of(model)
        # ComfyUI's own module of that name, and not this package.
        (latent,) = sys.modules["nodes"].common_ksampler(
            model, seed, steps, cfg, sampler_name, scheduler, positive, negative, latent_image, denoise=denoise
        )
        text = together((describe_loop(remote.notices.obstacles, remote.stages), remote.notices.summary()))
        log.info("Parallel Sampler: %s", text)
        return io.NodeOutput(latent, ui=show_text(cls.hidden.unique_id, text))
