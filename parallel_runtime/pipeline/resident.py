"""The model that a rank holds: loading it, changing its options without loading it again, letting it go."""

from __future__ import annotations

import gc
import math
from dataclasses import dataclass
from typing import Any

import torch

from .. import memory
from ..config import ParallelConfig
from ..errors import RequestError
from ..loading.checkpoint import Checkpoint, open_checkpoint
from ..loading.weights import load_transformer
from ..mesh import single_rank_mesh
from ..models.spec import ModelSpec
from ..wrappers.parallel_transformer import ParallelTransformer, parallelize
from .control import Control
from .requests import Load

_FILE_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass
class Resident:
    """A loaded model.

    Args:
        key: the client's name for it.
        weights: what the weights were read from (files with size and time, dtype).
        transformer: None on a rank that the configuration does not use.
    """

    key: str
    weights: tuple[Any, ...]
    spec: ModelSpec
    model_config: dict[str, Any]
    config: ParallelConfig
    ranks: int
    dtype: torch.dtype
    transformer: ParallelTransformer | None

    @property
    def parameters(self) -> int:
        """Parameters that this rank holds."""
        return sum(p.numel() for p in self.transformer.parameters()) if self.transformer else 0

    @property
    def parameter_bytes(self) -> int:
        """Bytes that this rank holds."""
        return sum(p.nbytes for p in self.transformer.parameters()) if self.transformer else 0


class Residency:
    """At most one model is resident on a rank."""

    def __init__(self, device: torch.device, rank: int):
        self._device = device
        self._rank = rank
        self.current: Resident | None = None

    def get(self, key: str) -> Resident:
        """The resident model of that name.

        Raises:
            RequestError: another one, or none, is resident.
        """
        if self.current is None or self.current.key != key:
            raise RequestError("The model is not loaded in the pool.", "Queue the prompt again.")
        return self.current

    def load(self, request: Load, config: ParallelConfig, control: Control) -> tuple[Resident, bool]:
        """Make a model resident; return it, and whether its weights were here already.

        The file is examined before the resident model is let go, so that a wrong file costs nothing.

        Raises:
            CheckpointError, UnsupportedModelError: see `open_checkpoint`.
        """
        checkpoint = open_checkpoint(request.path)
        dtype = getattr(torch, request.dtype)
        weights = (checkpoint.identity, request.dtype, self._rank < request.ranks)
        transformer = None
        if self.current is not None and self.current.weights == weights:
            reused = True
            if self.current.transformer is not None:
                transformer = self._rewrap(self.current, config)
        else:
            reused = False
            control.check_cancel()
            self.release()
            self._require_memory(checkpoint, dtype, request)
            if self._rank < request.ranks:
                module = load_transformer(checkpoint, dtype, self._device, control.check_cancel)
                transformer = parallelize(
                    module, checkpoint.spec, single_rank_mesh(), attention=config.attention, compile=config.compile
                )
        self.current = Resident(
            request.model,
            weights,
            checkpoint.spec,
            dict(checkpoint.config),
            config,
            request.ranks,
            dtype,
            transformer,
        )
        return self.current, reused

    def _require_memory(self, checkpoint: Checkpoint, dtype: torch.dtype, request: Load) -> None:
        if self._rank >= request.ranks:
            return
        elements = sum(math.prod(info.shape) for info in checkpoint.header.values())
        if self._device.type == "cpu" and all(
            info.dtype == _FILE_DTYPES.get(dtype) for info in checkpoint.header.values()
        ):
            return  # the parameters are the memory-mapped file itself
        smaller = []
        if dtype == torch.float32 and elements * 2 < memory.free_bytes(self._device):
            smaller.append(f"Choose bf16 as weight_dtype: that needs {elements * 2 / 2**30:.1f} GiB.")
        what = f"{checkpoint.spec.title} in {request.dtype}"
        memory.require(elements * dtype.itemsize, self._device, self._rank, what, smaller)

    def _rewrap(self, resident: Resident, config: ParallelConfig) -> ParallelTransformer:
        assert resident.transformer is not None
        if (resident.config.attention, resident.config.compile) == (config.attention, config.compile):
            return resident.transformer
        module = resident.transformer.unwrap()
        return parallelize(
            module, resident.spec, single_rank_mesh(), attention=config.attention, compile=config.compile
        )

    def release(self) -> int:
        """Let the resident model go; return the bytes that this rank held."""
        freed = self.current.parameter_bytes if self.current else 0
        self.current = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return freed
