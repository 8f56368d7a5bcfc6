"""xDiT (the package xfuser, 0.7): its FLUX pipeline with PipeFusion, eager, which is the only way that it offers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from parallel_runtime.networks.diffusers.flux import FLUX

from .measure import Engine, main
from .task import GUIDANCE, Task
from .xdit_runtime import configure

WARMUP = 1


def build(task: Task) -> Engine:
    """As many patches as stages, and one exact step: its defaults. Its pipeline brings the loop over the patches."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from xfuser import xFuserFluxPipeline
    from xfuser.core.distributed import get_runtime_state

    stages = task.case.ranks
    engine_config = configure(task, pipefusion_parallel_degree=stages, num_pipeline_patch=stages, warmup_steps=WARMUP)
    # Neither text encoders nor a VAE: the text is given, and the latent is what is asked for.
    pipeline: Any = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),  # without a shift: sigmas from 1 to 0 in equal steps
        vae=None,
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=task.build(FluxTransformer2DModel),
    )
    pipeline.set_progress_bar_config(disable=True)
    pipeline = xFuserFluxPipeline(pipeline, engine_config)  # drops the other stages' blocks
    given = task.conditioning()

    def pack_latent(x: torch.Tensor) -> torch.Tensor:
        arguments = FLUX.to_transformer(
            x.to(task.dtype), torch.ones(1, device=x.device), given["context"], task.config, guidance=given["guidance"]
        )
        tokens: torch.Tensor = arguments["hidden_states"]
        return tokens

    def sample(x: torch.Tensor, sigmas: torch.Tensor, tick: Callable[[], None]) -> torch.Tensor:
        steps, tokens = len(sigmas) - 1, pack_latent(x)
        made = pipeline(
            height=task.case.size,
            width=task.case.size,
            num_inference_steps=steps,
            guidance_scale=GUIDANCE,
            latents=tokens,
            prompt_embeds=given["context"],
            pooled_prompt_embeds=given["y"],
            max_sequence_length=given["context"].shape[1],
            output_type="latent",
            return_dict=False,
        )
        # Only the last stage has it, and only the first is listened to.
        latent = torch.empty_like(tokens) if made is None else made[0].contiguous()
        dist.broadcast(latent, src=stages - 1)
        for _ in range(steps):
            tick()
        return FLUX.from_transformer(latent, x).float()

    settings = f"{get_runtime_state().attention_backend.name} attention, {stages} stages, {stages} patches"
    return Engine(sample, settings)


if __name__ == "__main__":
    main(build)
