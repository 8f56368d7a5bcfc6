"""xDiT (the package xfuser, 0.7): its FLUX transformer with Ulysses, set up as its own runner does."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from .measure import Engine, main
from .task import Task, diffusers_velocity, euler
from .xdit_runtime import configure


def build(task: Task) -> Engine:
    """Its choice of attention; compiled block by block, or as its runner does, which takes minutes."""
    from xfuser.core.distributed import get_runtime_state, initialize_runtime_state
    from xfuser.model_executor.models.transformers.transformer_flux import xFuserFlux1Transformer2DWrapper

    ranks = task.case.ranks
    engine_config = configure(task, ulysses_degree=ranks)
    # What it reads of a pipeline; a token covers 16 pixels along a side.
    pipeline = SimpleNamespace(transformer=SimpleNamespace(config=SimpleNamespace(**task.config)), vae_scale_factor=16)
    initialize_runtime_state(pipeline, engine_config)
    get_runtime_state().set_input_parameters(
        height=task.case.size,
        width=task.case.size,
        batch_size=1,
        num_inference_steps=task.case.steps,
        max_condition_sequence_length=task.conditioning()["context"].shape[1],
        split_text_embed_in_sp=True,
    )
    transformer = task.build(xFuserFlux1Transformer2DWrapper)
    call = transformer
    if task.case.compile == "blocks":
        transformer.compile_repeated_blocks()
    elif task.case.compile == "whole":
        call = torch.compile(transformer, mode="reduce-overhead")
    settings = f"{get_runtime_state().attention_backend.name} attention, ulysses {ranks}"
    return Engine(euler(diffusers_velocity(call, task)), settings)


if __name__ == "__main__":
    main(build)
