"""Builds the diffusers transformer of a checkpoint and gives it the file's weights, without a copy where it can.

On the CPU, in the file's dtype, parameters are views of the memory-mapped file: N ranks share its pages. On a GPU
every parameter is copied from the mapped file on its own, so the host never holds the model.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import diffusers
import torch
from safetensors import safe_open
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..errors import CheckpointError, UnsupportedModelError
from ..models.spec import WeightRule
from .checkpoint import Checkpoint

_log = logging.getLogger(__name__)


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
    transformer = build_transformer(checkpoint)
    load_weights(transformer, checkpoint, check_weights(transformer, checkpoint), dtype, device, check_cancel)
    return transformer


def check_weights(transformer: torch.nn.Module, checkpoint: Checkpoint) -> list[WeightRule]:
    """Return what makes each parameter out of the file's tensors. Reads headers only.

    Raises:
        CheckpointError: tensors are missing or have another shape than the config says.
    """
    return _rules(checkpoint, {name: tuple(tensor.shape) for name, tensor in transformer.state_dict().items()})


def load_weights(
    transformer: torch.nn.Module,
    checkpoint: Checkpoint,
    rules: list[WeightRule],
    dtype: torch.dtype,
    device: torch.device,
    check_cancel: Callable[[], None] | None = None,
) -> None:
    """Fill the parameters that the transformer has; blocks that were taken out of it are not read.

    Args:
        transformer: from `build_transformer`.
        rules: from `check_weights`, called with the whole transformer.
        dtype, device, check_cancel: as for `load_transformer`.
    """
    wanted = transformer.state_dict().keys()
    weights: dict[str, torch.Tensor] = {}
    with contextlib.ExitStack() as stack:
        files = {file: stack.enter_context(_open(file)) for file in checkpoint.files}
        for rule in rules:
            if rule.target not in wanted:
                continue
            if check_cancel is not None:
                check_cancel()
            place = checkpoint.places[rule.source]
            tensor = _apply(rule, files[place.file].get_tensor(place.key))
            weights[rule.target] = tensor.to(device).to(dtype)
    transformer.load_state_dict(weights, assign=True)
    transformer.requires_grad_(False).eval().to(device)  # moves the buffers that no file holds
    if checkpoint.spec.prepare is not None:
        checkpoint.spec.prepare(transformer)


def build_transformer(checkpoint: Checkpoint) -> torch.nn.Module:
    """Return the transformer with its parameters on the meta device, and its buffers real.

    Raises:
        UnsupportedModelError: the installed diffusers does not build this model.
    """
    transformer_class = getattr(diffusers, checkpoint.spec.transformer_class)
    try:
        with _meta_parameters():
            return transformer_class(**checkpoint.config)
    except (TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"diffusers {diffusers.__version__} does not build {checkpoint.spec.transformer_class} from the "
            f"configuration of {checkpoint.path} ({error}).",
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


def _open(file: Path):
    try:
        return safe_open(file, framework="pt", device="cpu")
    except OSError as error:
        raise CheckpointError(f"{file} cannot be opened: {error}.", "Check the file and its rights.") from error


def _rules(checkpoint: Checkpoint, wanted: Mapping[str, tuple[int, ...]]) -> list[WeightRule]:
    """One rule per parameter, checked against the header.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
    """
    if checkpoint.layout == "diffusers":
        rules = [WeightRule(name, name) for name in wanted]
    else:
        rules = list(checkpoint.spec.weight_rules(checkpoint.config))
        unserved = set(wanted).symmetric_difference(rule.target for rule in rules)
        if unserved:
            raise UnsupportedModelError(
                f"{checkpoint.spec.title} of diffusers {diffusers.__version__} has parameters that this version of "
                f"Parallel DiT does not know, such as {min(unserved)}.",
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
            f"{checkpoint.path} lacks {len(missing)} of {len(sources)} tensors of {checkpoint.spec.title}, "
            f"first {missing[0]}.",
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
            f"{checkpoint.path} has {len(misfits)} tensors of a wrong shape, first {first}: "
            f"{checkpoint.header[first].shape} where {checkpoint.spec.title} of this size has {needed[first]}.",
            "Download the file again, or choose another one.",
        )


def _apply(rule: WeightRule, tensor: torch.Tensor) -> torch.Tensor:
    """The parameter out of the file's tensor; a view of it unless halves change places."""
    if rule.rows is not None:
        start, length = rule.rows
        tensor = tensor[start : start + length]
    return torch.cat(tensor.chunk(2)[::-1]) if rule.swap_halves else tensor
