"""The model that a rank holds: loading it, changing its options without loading it again, letting it go."""

from __future__ import annotations

import gc
import math
from dataclasses import dataclass
from typing import Any

import torch

from .. import memory
from ..config import ParallelConfig, ParallelPlan
from ..errors import RequestError
from ..loading.checkpoint import Checkpoint, open_checkpoint
from ..loading.weights import build_transformer, check_weights, load_weights
from ..mesh import Mesh, single_rank_mesh
from ..models.spec import ModelSpec
from ..pipefusion.blocks import keep_blocks
from ..pipefusion.cut import deal_blocks, most_parameters
from ..pipefusion.stage import Stage
from ..planning.describe import describe_model, parameter_shapes
from ..planning.facts import ModelFacts
from ..wrappers.parallel_transformer import ParallelTransformer, parallelize
from .control import Control
from .meshes import Place
from .requests import Load

_FILE_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class Opened:
    """A checkpoint before its weights are read.

    Args:
        facts: what plans are made from.
    """

    checkpoint: Checkpoint
    dtype: torch.dtype
    facts: ModelFacts

    @classmethod
    def open(cls, request: Load) -> Opened:
        """Examine a file.

        Raises:
            CheckpointError, UnsupportedModelError: see `open_checkpoint`.
        """
        checkpoint = open_checkpoint(request.path)
        dtype = getattr(torch, request.dtype)
        shapes = parameter_shapes(checkpoint)
        return cls(checkpoint, dtype, describe_model(checkpoint.spec, checkpoint.config, shapes, dtype.itemsize))


@dataclass
class Resident:
    """A loaded model.

    Args:
        key: the client's name for it.
        weights: what the weights were read from (files with size and time, dtype, blocks).
        facts: what plans are made from.
        loaded: the plan whose stages share out the weights; of one stage where every rank holds all.
        transformer: wrapped for the last request; None on a rank that the configuration does not use.
    """

    key: str
    weights: tuple[Any, ...]
    spec: ModelSpec
    model_config: dict[str, Any]
    config: ParallelConfig
    ranks: int
    dtype: torch.dtype
    facts: ModelFacts
    loaded: ParallelPlan
    transformer: ParallelTransformer | Stage | None

    @property
    def parameters(self) -> int:
        """Parameters that this rank holds."""
        return sum(p.numel() for p in self.transformer.parameters()) if self.transformer else 0

    @property
    def parameter_bytes(self) -> int:
        """Bytes that this rank holds."""
        return sum(p.nbytes for p in self.transformer.parameters()) if self.transformer else 0

    def whole(self) -> ParallelTransformer:
        """The transformer with all its blocks, to be run over any mesh without stages."""
        if isinstance(self.transformer, Stage):
            self.transformer = _wrap(self.transformer.unwrap(), self.spec, self.config)
        assert self.transformer is not None
        return self.transformer

    def owned(self, place: Place) -> tuple[int, int]:
        """(start, stop) of this rank's blocks at such a place."""
        if self.loaded.pipe > 1:
            assert isinstance(self.transformer, Stage)
            return self.transformer.owned
        return _owned(self.facts, place)

    def stage(self, place: Place, mesh: Mesh) -> Stage:
        """This rank's stage of it. Blocks of other stages, where the rank holds them, are put aside."""
        owned = self.owned(place)
        if isinstance(self.transformer, Stage) and self.transformer.owned != owned:
            self.whole()  # the last plan had other stages
        if isinstance(self.transformer, ParallelTransformer):
            module = self.transformer.unwrap()
            relay = keep_blocks(module, self.spec, owned)
            compiles = _compiles(module, self.config)
            self.transformer = Stage(module, self.spec, relay, mesh, self.config.attention, compiles)
        assert self.transformer is not None
        self.transformer.set_mesh(mesh)
        return self.transformer

    def kept_bytes(self) -> int:
        """Bytes of keys and values that are here from the last run; the next one uses them or lets them go."""
        return sum(each.nbytes for each in self.transformer.keys.buffers) if isinstance(self.transformer, Stage) else 0


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

    def load(
        self,
        request: Load,
        config: ParallelConfig,
        opened: Opened,
        loaded: ParallelPlan,
        place: Place | None,
        memory_bytes: int,
        control: Control,
    ) -> tuple[Resident, bool]:
        """Make a model resident; return it, and whether its weights were here already.

        Args:
            loaded: see `Resident`.
            place: in `loaded` where it has several stages, None on a rank outside of it.
            memory_bytes: that a rank may use for weights, 0 where that is not known; the same on all ranks.

        Raises:
            CheckpointError, UnsupportedModelError: a file that does not fit its family.
            OutOfMemoryError: it does not fit this rank's device.
        """
        checkpoint = opened.checkpoint
        most = most_parameters(memory_bytes, opened.dtype.itemsize)
        owned = _owned(opened.facts, place, most) if place is not None else None
        used = self._rank < request.ranks and (loaded.pipe == 1 or owned is not None)
        weights = (checkpoint.identity, request.dtype, used, loaded.pipe, owned)
        transformer: ParallelTransformer | Stage | None = None
        if self.current is not None and self.current.weights == weights:
            reused = True
            if self.current.transformer is not None:
                transformer = self._rewrap(self.current, config)
        else:
            reused = False
            control.check_cancel()
            self.release()
            if used:
                transformer = self._read(opened, config, place, owned, control)
        self.current = Resident(
            request.model,
            weights,
            checkpoint.spec,
            dict(checkpoint.config),
            config,
            request.ranks,
            opened.dtype,
            opened.facts,
            loaded,
            transformer,
        )
        return self.current, reused

    def _read(
        self,
        opened: Opened,
        config: ParallelConfig,
        place: Place | None,
        owned: tuple[int, int] | None,
        control: Control,
    ) -> ParallelTransformer | Stage:
        checkpoint = opened.checkpoint
        module = build_transformer(checkpoint)
        rules = check_weights(module, checkpoint)
        relay = None
        if owned is not None:
            relay = keep_blocks(module, checkpoint.spec, owned)
            relay.forget()
        self._require_memory(checkpoint, opened.dtype, sum(p.numel() for p in module.parameters()))
        load_weights(module, checkpoint, rules, opened.dtype, self._device, control.check_cancel)
        if relay is None or place is None:
            return _wrap(module, checkpoint.spec, config)
        compiles = _compiles(module, config)
        stage = Stage(module, checkpoint.spec, relay, single_rank_mesh(), config.attention, compiles)
        stage.check_ring(place.layout)
        return stage

    def _require_memory(self, checkpoint: Checkpoint, dtype: torch.dtype, elements: int) -> None:
        if self._device.type == "cpu" and all(
            info.dtype == _FILE_DTYPES.get(dtype) for info in checkpoint.header.values()
        ):
            return  # the parameters are the memory-mapped file itself
        smaller = []
        if dtype == torch.float32 and elements * 2 < memory.free_bytes(self._device):
            smaller.append(f"Choose bf16 as weight_dtype: that needs {elements * 2 / 2**30:.1f} GiB.")
        what = f"{checkpoint.spec.title} in {str(dtype).removeprefix('torch.')}"
        memory.require(elements * dtype.itemsize, self._device, self._rank, what, smaller)

    def _rewrap(self, resident: Resident, config: ParallelConfig) -> ParallelTransformer | Stage:
        assert resident.transformer is not None
        if (resident.config.attention, resident.config.compile) == (config.attention, config.compile):
            return resident.transformer
        if isinstance(resident.transformer, Stage):
            return resident.transformer.rewrap(config.attention, config.compiles(self._device.type == "cuda"))
        return _wrap(resident.transformer.unwrap(), resident.spec, config)

    def release(self) -> int:
        """Let the resident model go; return the bytes that this rank held."""
        freed = self.current.parameter_bytes if self.current else 0
        self.current = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return freed


def _owned(facts: ModelFacts, place: Place, most: float = math.inf) -> tuple[int, int]:
    """This rank's blocks by the deal that plans reckon with."""
    plan = place.layout.plan
    deal = deal_blocks(facts.block_sizes, plan.pipe, most, facts.mirrored, place.stage_speeds)
    return deal[place.layout.coordinate["pipe"]]


def _wrap(module: torch.nn.Module, spec: ModelSpec, config: ParallelConfig) -> ParallelTransformer:
    return parallelize(module, spec, single_rank_mesh(), attention=config.attention, compile=_compiles(module, config))


def _compiles(module: torch.nn.Module, config: ParallelConfig) -> bool:
    return config.compiles(next(module.parameters()).is_cuda)
