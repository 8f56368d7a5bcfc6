"""Builds the diffusers transformer of a checkpoint, and knows where in the folder each of its parameters lies."""

from __future__ import annotations

import logging

import torch
from torch import nn

from ..errors import CheckpointError, UnsupportedModelError
from ..networks.comfyui.without_weights import WithoutWeights
from ..networks.diffusers.lean_imports import import_diffusers
from .checkpoint import Checkpoint
from .open_file import OpenFile, Reader
from .reading import STORED, OnBytes, Place
from .weight_parts import put

_log = logging.getLogger(__name__)


class CheckpointReader(Reader):
    """Builds the diffusers class of a checkpoint, with weights of one type; see `Reader`."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, owned: tuple[int, int] | None = None):
        super().__init__(checkpoint.path, checkpoint.identity, checkpoint.spec.cut, owned)
        self._checkpoint = checkpoint
        self._dtype = dtype

    def begin(self, on_bytes: OnBytes) -> OpenFile:
        """Build diffusers' class, its weights without memory."""
        checkpoint = self._checkpoint
        network = build_transformer(checkpoint)
        check_weights(network, checkpoint)
        self.let_others_go(network)
        for name, weight in network.state_dict(keep_vars=True).items():
            shape = torch.empty(weight.shape, dtype=self._dtype, device="meta")
            put(network, name, nn.Parameter(shape) if isinstance(weight, nn.Parameter) else shape)
        network.requires_grad_(False).eval()
        buffers = dict(network.named_buffers())

        def find(name: str, part: int) -> Place | torch.Tensor:
            info = checkpoint.header.get(name)
            if info is None:
                return buffers[name]  # its constructor computes it
            return Place(info.file, info.start, STORED[info.dtype])

        return OpenFile(network, find)


def check_weights(transformer: torch.nn.Module, checkpoint: Checkpoint) -> None:
    """Compare the parameters with the file's tensors. Reads headers only.

    Raises:
        CheckpointError: tensors are missing or have another shape than the config says.
    """
    path, title = checkpoint.path, checkpoint.spec.title
    wanted = {name: tuple(tensor.shape) for name, tensor in transformer.state_dict().items()}
    missing = sorted(wanted.keys() - checkpoint.header.keys())
    if missing:
        what = f"{len(missing)} of {len(wanted)} tensors of {title}, first {missing[0]}"
        lacks = "{path} lacks {what}."
        raise CheckpointError(lacks, "Download the file again, or choose a complete one.", path=path, what=what)
    misfits = [name for name, shape in wanted.items() if checkpoint.header[name].shape != shape]
    if misfits:
        first = misfits[0]
        what = f"first {first}: {checkpoint.header[first].shape} where {title} of this size has {wanted[first]}"
        unlike = "{path} has {count} tensors of a wrong shape, {what}."
        fix = "Download the file again, or choose another one."
        raise CheckpointError(unlike, fix, path=path, count=len(misfits), what=what)
    extra = sorted(checkpoint.header.keys() - wanted.keys())
    if extra:
        _log.warning("%s: ignored %d tensors without a place, such as %s", path, len(extra), extra[0])


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
        what = f"diffusers {diffusers.__version__} does not build {checkpoint.spec.transformer_class}"
        of = "{what} from the configuration of {path} ({error})."
        fix = "Check config.json, or update diffusers."
        raise UnsupportedModelError(of, fix, what=what, path=checkpoint.path, error=error) from error
