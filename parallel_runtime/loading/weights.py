"""Builds the diffusers transformer of a checkpoint and gives it the file's weights, without a copy where it can.

On the CPU, in the file's dtype, parameters are views of the memory-mapped file: N ranks share its pages. On a GPU they
lie in one region (arena.py), into which the file is read piece by piece: the host never holds the model.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from importlib.metadata import version

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..errors import CheckpointError, UnsupportedModelError
from ..networks.diffusers.lean_imports import import_diffusers
from ..networks.diffusers.spec import WeightRule
from ..said import said
from .arena import make_arena
from .checkpoint import Checkpoint
from .held_weights import ArenaWeights, HeldWeights, MakeArena, MappedWeights

_log = logging.getLogger(__name__)


def hold_weights(
    transformer: torch.nn.Module,
    checkpoint: Checkpoint,
    rules: list[WeightRule],
    dtype: torch.dtype,
    device: torch.device,
    arena: MakeArena | None = None,
) -> HeldWeights:
    """What will hold the weights of the parameters that the transformer has; nothing is read yet.

    Args:
        transformer: from `build_transformer`; blocks that were taken out of it are not held.
        rules: from `check_weights`, called with the whole transformer.
        arena: makes the region that they lie in; None: on the CPU there is none, as they are the mapped file.

    Raises:
        torch.OutOfMemoryError: no memory on the device.
    """
    if arena is None and device.type == "cpu":
        return MappedWeights(transformer, checkpoint, rules, dtype, device)
    return ArenaWeights(transformer, checkpoint, rules, dtype, device, arena or make_arena)


def give_weights(transformer: torch.nn.Module, checkpoint: Checkpoint, weights: HeldWeights) -> None:
    """Make the weights those of a transformer out of `build_transformer`, which is ready then."""
    weights.attach(transformer)
    if checkpoint.spec.prepare is not None:
        checkpoint.spec.prepare(transformer)


def check_weights(transformer: torch.nn.Module, checkpoint: Checkpoint) -> list[WeightRule]:
    """Return what makes each parameter out of the file's tensors. Reads headers only.

    Raises:
        CheckpointError: tensors are missing or have another shape than the config says.
    """
    return _rules(checkpoint, {name: tuple(tensor.shape) for name, tensor in transformer.state_dict().items()})


def build_transformer(checkpoint: Checkpoint) -> torch.nn.Module:
    """Return the transformer with its parameters on the meta device, and its buffers real.

    Raises:
        UnsupportedModelError: the installed diffusers does not build this model, or there is none.
    """
    diffusers = import_diffusers()
    transformer_class = getattr(diffusers, checkpoint.spec.transformer_class)
    try:
        with _meta_parameters():
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


@contextlib.contextmanager
def _meta_parameters() -> Iterator[None]:
    """Modules built inside get parameters without memory; buffers that a constructor computes stay real.

    Holds for the whole process while it lasts: build models in one thread at a time.
    """

    def to_meta(module, name, parameter):
        return None if parameter is None else torch.nn.Parameter(parameter.to("meta"), requires_grad=False)

    hook = register_module_parameter_registration_hook(to_meta)
    try:
        yield
    finally:
        hook.remove()


def _rules(checkpoint: Checkpoint, wanted: Mapping[str, tuple[int, ...]]) -> list[WeightRule]:
    """One rule per parameter, checked against the header.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
    """
    if checkpoint.layout == "diffusers":
        rules = [WeightRule(name, name) for name in wanted]
    else:
        rules = list(checkpoint.spec.keys.weight_rules(wanted))
        unserved = set(wanted).symmetric_difference(rule.target for rule in rules)
        if unserved:
            raise UnsupportedModelError(
                said(
                    "{title} of diffusers {version} has parameters that this version of Parallel DiT does not know, "
                    "such as {unserved}.",
                    title=checkpoint.spec.title,
                    version=version("diffusers"),
                    unserved=min(unserved),
                ),
                "Update Parallel DiT.",
            )
    _refuse_missing(checkpoint, {rule.source for rule in rules})
    _refuse_misfits(checkpoint, rules, wanted)
    extra = sorted(set(checkpoint.header) - {rule.source for rule in rules})
    if extra:
        _log.warning("%s: ignored %d tensors without a place, such as %s", checkpoint.path, len(extra), extra[0])
    return rules


def _refuse_missing(checkpoint: Checkpoint, sources: set[str]) -> None:
    missing = sorted(sources.difference(checkpoint.header))
    if missing:
        raise CheckpointError(
            said(
                "{path} lacks {missing} of {sources} tensors of {title}, first {missing2}.",
                path=checkpoint.path,
                missing=len(missing),
                sources=len(sources),
                title=checkpoint.spec.title,
                missing2=missing[0],
            ),
            "Download the file again, or choose a complete one.",
        )


def _refuse_misfits(checkpoint: Checkpoint, rules: list[WeightRule], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Compare each source with what its targets need together: all its rows, no more."""
    needed: dict[str, tuple[int, ...]] = {}
    for rule in rules:
        shape = wanted[rule.target]
        rows = needed.get(rule.source, (0,))[0]
        needed[rule.source] = (rows + shape[0], *shape[1:]) if rule.rows else shape
    misfits = [source for source, shape in needed.items() if checkpoint.header[source].shape != shape]
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
                needed=needed[first],
            ),
            "Download the file again, or choose another one.",
        )
