"""Opens the file of a load request for the network that runs it."""

from __future__ import annotations

import torch

from ..requests.requests import Load
from .opened import Opened
from .opened_host import OpenedHost


def open_model(request: Load, device: torch.device) -> Opened | OpenedHost:
    """Examine a file.

    Args:
        device: where this rank computes.

    Raises:
        CheckpointError, UnsupportedModelError: what it is not.
        ConfigurationError: this rank has no ComfyUI for it.
    """
    return Opened.open(request) if request.comfyui is None else OpenedHost.open(request, device)
