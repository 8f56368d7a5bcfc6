"""The denoising loop of one `Sample` request, run alike on every rank of the mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..sampling.samplers import find_sampler
from .conditioning import Conditioning
from .control import Cancelled, Control
from .predict import Call, Predictor
from .requests import Sample


class Denoising:
    """Prepared loop.

    Raises:
        RequestError: a sampler that the pool does not have, by name.
    """

    def __init__(self, request: Sample, dtype: torch.dtype):
        self.request = request
        self.dtype = dtype
        self.sampler = find_sampler(request.sampler)
