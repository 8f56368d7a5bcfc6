"""Builds the diffusers transformer of a checkpoint, and knows where in the folder each of its parameters lies."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from ..errors import CheckpointError, NotLoadedError, UnsupportedModelError
from ..networks.comfyui.without_weights import WithoutWeights
from ..networks.diffusers.key_rules import OriginalWeights
from ..networks.diffusers.lean_imports import import_diffusers
from ..networks.stages import all_blocks, let_go
from ..networks.tables.diffusers import cut_of
from ..patching.weight_names import Names
from ..said import said
from .checkpoint import Checkpoint
from .files import identity
from .reading import STORED, OnBytes, Piece, split
from .weight_parts import put, weights_of

_log = logging.getLogger(__name__)


class OpenCheckpoint:
    """The files of a diffusers folder, about to be read."""

    def __init__(self, network: nn.Module, checkpoint: Checkpoint):
        self.network = network
        self._checkpoint = checkpoint
        self._buffers = dict(network.named_buffers())
        here = {name for name, _ in weights_of(network)}
        rules = checkpoint.spec.keys.weight_rules({name: info.shape for name, info in checkpoint.header.items()})
        self.names: Names = OriginalWeights(each for each in rules if each.target in here)

    def pieces(self, name: str, part: int, target: torch.Tensor) -> list[Piece] | None:
        """See `OpenFile`."""
        place = self._checkpoint.places.get(name)
        if place is None:
            return None
        stored = STORED[self._checkpoint.header[name].dtype]
        return list(split(place.file, place.start, stored, target.view(-1)))

    def numbers(self, name: str, part: int) -> torch.Tensor:
        """See `OpenFile`: a buffer that its constructor computes."""
        return self._buffers[name]


class CheckpointReader:
    """Builds the diffusers class of a checkpoint; see `Reader`.

    Args:
        dtype: that weights are to have.
        owned: (start, stop) of the blocks that this rank has; None for all.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, owned: tuple[int, int] | None = None):
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._owned = owned

    def open(self, on_bytes: OnBytes) -> OpenCheckpoint:
        """See `Reader`."""
        checkpoint = self._checkpoint
        if identity(checkpoint.path) != checkpoint.identity:
            raise NotLoadedError(
                said("{path} was replaced since it was loaded.", path=checkpoint.path), "Queue the prompt again."
            )
        network = build_transformer(checkpoint)
        check_weights(network, checkpoint)
        if self._owned is not None:
            found = all_blocks(network, cut_of(checkpoint.spec.transformer_class))
            let_go([*found[: self._owned[0]], *found[self._owned[1] :]])
        for name, weight in network.state_dict(keep_vars=True).items():
            shape = torch.empty(weight.shape, dtype=self._dtype, device="meta")
            put(network, name, nn.Parameter(shape) if isinstance(weight, nn.Parameter) else shape)
        network.requires_grad_(False).eval()
        return OpenCheckpoint(network, checkpoint)

    def blocks(self, network: nn.Module) -> Sequence[str]:
        """See `Reader`."""
        paths = self._checkpoint.spec.block_lists
        return [f"{path}.{name}" for path in paths for name, _ in network.get_submodule(path).named_children()]


def check_weights(transformer: torch.nn.Module, checkpoint: Checkpoint) -> None:
    """Compare the parameters with the file's tensors. Reads headers only.

    Raises:
        CheckpointError: tensors are missing or have another shape than the config says.
    """
    wanted = {name: tuple(tensor.shape) for name, tensor in transformer.state_dict().items()}
    _refuse_missing(checkpoint, wanted)
    _refuse_misfits(checkpoint, wanted)
    extra = sorted(set(checkpoint.header) - set(wanted))
    if extra:
        _log.warning("%s: ignored %d tensors without a place, such as %s", checkpoint.path, len(extra), extra[0])


def build_transformer(checkpoint: Checkpoint) -> torch.nn.Module:
    """Return the transformer with its matrices on the meta device, and its buffers real.

    Raises:
        UnsupportedModelError: the installed diffusers does not build this model, or there is none.
    """
    diffusers = import_diffusers()
    transformer_class = getattr(diffusers, checkpoint.spec.transformer_class)
    try:
        with WithoutWeights():
            return transformer_class(**checkpoint.config)
    except (TypeError, ValueError) as error:
        raise UnsupportedModelError(
            said(
                "diffusers {version} does not build {transformer_class} from the configuration of {path} ({error}).",
                version=diffusers.__version__,
                transformer_class=checkpoint.spec.transformer_class,
                path=checkpoint.path,
                error=error,
            ),
            "Check config.json, or update diffusers.",
        ) from error


def _refuse_missing(checkpoint: Checkpoint, names: Collection[str]) -> None:
    missing = sorted(set(names).difference(checkpoint.header))
    if missing:
        raise CheckpointError(
            said(
                "{path} lacks {missing} of {sources} tensors of {title}, first {missing2}.",
                path=checkpoint.path,
                missing=len(missing),
                sources=len(names),
                title=checkpoint.spec.title,
                missing2=missing[0],
            ),
            "Download the file again, or choose a complete one.",
        )


def _refuse_misfits(checkpoint: Checkpoint, wanted: Mapping[str, tuple[int, ...]]) -> None:
    misfits = [name for name, shape in wanted.items() if checkpoint.header[name].shape != shape]
    if misfits:
        first = misfits[0]
        raise CheckpointError(
            said(
                "{path} has {misfits} tensors of a wrong shape, first {first}: {shape} where {title} of this "
                "size has {needed}.",
                path=checkpoint.path,
                misfits=len(misfits),
                first=first,
                shape=checkpoint.header[first].shape,
                title=checkpoint.spec.title,
                needed=wanted[first],
            ),
            "Download the file again, or choose another one.",
        )
