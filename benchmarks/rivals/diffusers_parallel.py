"""diffusers' own transformer; on several ranks with its context parallel (Ulysses or ring)."""

from __future__ import annotations

from unittest.mock import patch

import torch

from .measure import Engine, main
from .task import Task, diffusers_velocity, euler


def build(task: Task) -> Engine:
    """cuDNN attention, which was its fastest that needs nothing to be installed."""
    from diffusers import ContextParallelConfig, FluxTransformer2DModel

    transformer = task.build(FluxTransformer2DModel)
    backend = "native" if task.case.tiny else "_native_cudnn"
    transformer.set_attention_backend(backend)
    if task.case.ranks > 1:
        config = ContextParallelConfig(**{f"{task.case.split}_degree": task.case.ranks})
        if task.case.tiny:
            # It counts accelerators to number this rank's device, and divides by their number: 0 without a GPU.
            with patch.object(torch.accelerator, "device_count", lambda: 1):
                transformer.enable_parallelism(config=config)
        else:
            transformer.enable_parallelism(config=config)
    if task.case.compile:
        transformer.compile_repeated_blocks()
    settings = f"{backend} attention" + f", {task.case.split} {task.case.ranks}" * (task.case.ranks > 1)
    return Engine(euler(diffusers_velocity(transformer, task)), settings)


if __name__ == "__main__":
    main(build)
