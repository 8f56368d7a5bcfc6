"""What a sampling loop reads beside its latent and conditionings, and whether it came and goes together.

A parameter of the request asks for it, never what happens to have come along: what is asked for is used or refused.
Shapes decide that, so every rank decides it for itself in PREPARE, before anything is exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..errors import RequestError
from ..requests.requests import Sample, concat_name
from ..said import said

Tensors = Mapping[str, torch.Tensor]
INPAINT = ("mask", "latent_image", "noise")
"""Tensors of a noise mask."""


def read_inpaint(request: Sample, tensors: Tensors) -> list[torch.Tensor]:
    """Mask, what it keeps, and its noise; empty without one.

    Raises:
        RequestError: a tensor did not come with the request.
    """
    return _read("a noise mask", INPAINT, tensors) if request.inpaint else []


def read_fixed_channels(request: Sample, tensors: Tensors) -> list[torch.Tensor]:
    """Channels behind the latent's, for each CFG branch; empty without any. Raises as `read_inpaint`."""
    names = [concat_name(branch.index) for branch in request.branches]
    return _read("fixed channels", names, tensors) if request.concat else []


def check_inputs(request: Sample, tensors: Tensors) -> None:
    """Refuse a loop whose parts do not have what they need, or not in shapes that go together. Runs on meta tensors.

    Raises:
        RequestError: with the part, and the tensor or the shapes.
    """
    x = tuple(tensors["x"].shape)
    schedule = _shapes(_read("steps", ("sigmas", "timesteps"), tensors))
    if schedule[0] != schedule[1] or len(schedule[0]) != 1 or schedule[0][0] < 2:
        raise _unfit("steps", schedule, x)
    inpaint = _shapes(read_inpaint(request, tensors))
    if any(shape != x for shape in inpaint):
        raise _unfit("a noise mask", inpaint, x)
    for shape in _shapes(read_fixed_channels(request, tensors)):
        if (*shape[:1], *shape[2:]) != (*x[:1], *x[2:]):
            raise _unfit("fixed channels", [shape], x)


def _read(what: str, names: Sequence[str], tensors: Tensors) -> list[torch.Tensor]:
    try:
        return [tensors[name] for name in names]
    except KeyError as missing:
        raise RequestError(
            said(
                "The request asks for {name}, and the tensor {missing} did not come with it.",
                name=what,
                missing=missing,
            ),
            "Report this.",
        ) from missing


def _shapes(tensors: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in tensors]


def _unfit(what: str, shapes: Sequence[tuple[int, ...]], latent: tuple[int, ...]) -> RequestError:
    return RequestError(
        said(
            "The request asks for {name} of shape {map} on a latent of {latent}.",
            name=what,
            map=", ".join(map(str, shapes)),
            latent=latent,
        ),
        "Make all of them from one latent and one list of sigmas.",
    )
