"""A model file that was opened and not read: its facts, and the modules that its weights will go to.

This is where a network comes from. What follows (weights, stages, wrapping) asks it for facts and for modules without
memory, and knows nothing of the file's library but the family's data.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from .. import memory
from ..acceleration.pulse import Pulse
from ..config import ParallelConfig
from ..loading.arena import PlainArena
from ..loading.checkpoint import Checkpoint, open_checkpoint
from ..loading.held_weights import HeldWeights, MakeArena
from ..loading.streamed_weights import StreamedWeights, streamed_costs
from ..loading.weights import build_transformer, check_weights, give_weights, hold_weights
from ..mesh.mesh import single_rank_mesh
from ..networks.diffusers.parallel_transformer import parallelize
from ..networks.diffusers.spec import WeightRule
from ..networks.marked_blocks import mark_blocks
from ..networks.stages import all_blocks, let_go
from ..networks.tables.diffusers import cut_of
from ..planning.describe import describe_model, parameter_shapes
from ..requests.facts import ModelFacts
from ..requests.requests import Load
from ..streaming.dealer import Dealer
from .family import DiffusersFamily
from .structure import Structure

_FILE_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class Skeleton:
    """A model's modules without weights, as far as this rank has them.

    Args:
        rules: what fills them.
    """

    module: torch.nn.Module
    rules: list[WeightRule]


@dataclass(frozen=True)
class NewWeights:
    """Weights that are nowhere yet.

    Args:
        title: for messages, such as "FLUX.1 in float32".
        costs: bytes that they take from the device; 0 for a memory-mapped file.
        hold: allocates what will hold them.
        smaller: what would need less, as parts of a sentence.
        skeleton: modules that were built to know them; None where nothing was built.
    """

    title: str
    costs: int
    hold: Callable[[], HeldWeights]
    smaller: Callable[[], list[str]]
    skeleton: Skeleton | None = None


@dataclass(frozen=True)
class Opened:
    """A checkpoint before its weights are read.

    Args:
        dtype: that the weights are to have.
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

    @property
    def family(self) -> DiffusersFamily:
        """Whose checks and facts hold."""
        return DiffusersFamily(self.checkpoint.spec, dict(self.checkpoint.config))

    @property
    def identity(self) -> Hashable:
        """What the weights are read from, and into which type."""
        return self.checkpoint.identity, self.dtype

    @property
    def weight_bytes(self) -> int:
        """Of the whole model on a device."""
        return self.facts.parameters * self.facts.bytes_per_parameter

    @property
    def notes(self) -> str:
        """Nothing that the artist need know."""
        return ""

    def allocate(
        self,
        owned: tuple[int, int] | None,
        device: torch.device,
        arena: MakeArena | None = None,
        dealer: Dealer | None = None,
    ) -> NewWeights:
        """The weights of the blocks that this rank has, nowhere yet.

        Args:
            arena: see `hold_weights`.
            dealer: of the blocks; None where all that this rank has stay on its device.

        Raises:
            CheckpointError: the file does not fill the modules.
        """
        skeleton = self.build(owned)
        if dealer is not None:
            return self._streamed(skeleton, device, arena, dealer)
        elements = sum(parameter.numel() for parameter in skeleton.module.parameters())
        mapped = arena is None and device.type == "cpu" and self._is_stored_so()

        def smaller() -> list[str]:
            if self.dtype != torch.float32 or elements * 2 >= memory.free_bytes(device):
                return []
            return [f"Choose bf16 as weight_dtype: that needs {elements * 2 / 2**30:.1f} GiB."]

        def hold() -> HeldWeights:
            return hold_weights(skeleton.module, self.checkpoint, skeleton.rules, self.dtype, device, arena)

        return NewWeights(self._title, 0 if mapped else elements * self.dtype.itemsize, hold, smaller, skeleton)

    @property
    def _title(self) -> str:
        return f"{self.checkpoint.spec.title} in {str(self.dtype).removeprefix('torch.')}"

    def _streamed(
        self, skeleton: Skeleton, device: torch.device, arena: MakeArena | None, dealer: Dealer
    ) -> NewWeights:
        module, spec = skeleton.module, self.checkpoint.spec
        blocks = [
            f"{path}.{index}"
            for path in spec.block_lists
            for index in range(len(module.get_submodule(path)))  # type: ignore[arg-type]
        ]
        beside, share = streamed_costs(module, self.dtype, blocks, dealer)

        def hold() -> HeldWeights:
            arena_or_plain = arena or (PlainArena if device.type == "cpu" else None)
            return StreamedWeights(
                module,
                self.checkpoint,
                skeleton.rules,
                self.dtype,
                device,
                arena_or_plain,
                blocks,
                dealer,
            )

        costs = beside + share
        return NewWeights(f"{self._title} ({dealer.streaming.mode})", costs, hold, list, skeleton)

    def options(self, config: ParallelConfig, device: torch.device) -> tuple[str, bool]:
        """Two configurations with equal options share a structure: (attention, compile)."""
        return config.attention, config.compiles(device.type == "cuda")

    def structure(
        self,
        weights: HeldWeights,
        new: NewWeights | None,
        options: tuple[str, bool],
        owned: tuple[int, int] | None,
        pulse: Pulse,
    ) -> Structure:
        """The modules with the weights, wrapped.

        Args:
            options: from `options`.
            new: what the weights were allocated by, where they are new.
            owned: see `build`.
        """
        skeleton = (new.skeleton if new is not None else None) or self.build(owned)
        module, spec = skeleton.module, self.checkpoint.spec
        mark_blocks(module, spec.block_lists, pulse)
        give_weights(module, self.checkpoint, weights)
        attention, compile = options
        transformer = parallelize(
            module, spec, single_rank_mesh(), attention=attention, compile=compile, stream=weights.stream,
            # Shares of these layers would be read before their blocks are there.
            modulate=weights.stream is None, owned=owned,
        )  # fmt: skip
        return Structure(transformer)

    def _is_stored_so(self) -> bool:
        header = self.checkpoint.header.values()
        return all(info.dtype == _FILE_DTYPES.get(self.dtype) for info in header)

    def build(self, owned: tuple[int, int] | None) -> Skeleton:
        """The modules, without memory.

        Args:
            owned: (start, stop) of the blocks that this rank has; None for all.

        Raises:
            CheckpointError: the file does not fill them.
        """
        module = build_transformer(self.checkpoint)
        rules = check_weights(module, self.checkpoint)
        if owned is not None:
            found = all_blocks(module, cut_of(self.checkpoint.spec.transformer_class))
            let_go([*found[: owned[0]], *found[owned[1] :]])
        return Skeleton(module, rules)
