"""A transformer of diffusers with the weights of its file, in one call; engines load step by step."""

from __future__ import annotations

from collections.abc import Callable

import torch

from parallel_runtime.loading.checkpoint import Checkpoint, CheckpointReader
from parallel_runtime.loading.loaded_weights import LoadedWeights


def load_transformer(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    check_cancel: Callable[[], None] | None = None,
) -> torch.nn.Module:
    """Build the transformer, in eval mode and without gradients. Works offline: no hub is ever asked.

    Args:
        dtype: of every parameter.
        device: of every parameter and buffer.
        check_cancel: called between tensors; raises to give up.

    Raises:
        CheckpointError: tensors are missing or have another shape than the config says; nothing is read then.
        UnsupportedModelError: the installed diffusers does not build this model.
    """
    weights = LoadedWeights(CheckpointReader(checkpoint, dtype), device)
    weights.fill(lambda done, total: check_cancel() if check_cancel is not None else None)
    transformer = weights.take_network()
    if checkpoint.spec.prepare is not None:
        checkpoint.spec.prepare(transformer)
    return transformer
