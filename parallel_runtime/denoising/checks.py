"""Checks of the parts of a sampling loop around its model: what asks for each, and what it reads.

A parameter of the request asks for a part, never what happens to have come along: what is asked for is used or
refused. Shapes decide that, so every rank decides it for itself in PREPARE, before anything is exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..errors import RequestError
from ..requests.requests import Sample
from ..said import said

Shape = tuple[int, ...]


@dataclass(frozen=True)
class InputCheck:
    """One part, and whether what it reads goes together.

    Args:
        name: as errors call it.
        reads: tensors of the request.
        fits: (shapes of what it reads, shape of the latent) -> whether they go together.
        trigger: field of `Sample` that asks for it; "" for what every loop has.
        per_branch: it works on every CFG branch by itself, on tensors named as `requests.concat_name` does it.
    """

    name: str
    reads: tuple[str, ...]
    fits: Callable[[Sequence[Shape], Shape], bool]
    trigger: str = ""
    per_branch: bool = False

    def read(self, request: Sample, tensors: Mapping[str, torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
        """What it works on: one entry, or one for each CFG branch; none where the request does not ask for it.

        Raises:
            RequestError: a tensor did not come with the request.
        """
        if self.trigger and not getattr(request, self.trigger):
            return []
        own = [tuple(f"{name}.{branch.index}" for name in self.reads) for branch in request.branches]
        try:
            return [tuple(tensors[name] for name in names) for names in (own if self.per_branch else [self.reads])]
        except KeyError as missing:
            raise RequestError(
                said(
                    "The request asks for {name}, and the tensor {missing} did not come with it.",
                    name=self.name,
                    missing=missing,
                ),
                "Report this.",
            ) from missing


SCHEDULE = InputCheck(
    "steps", ("sigmas", "timesteps"), lambda shapes, x: shapes[0] == shapes[1] and len(shapes[0]) == 1 < shapes[0][0]
)
INPAINT = InputCheck(
    "a noise mask",
    ("mask", "latent_image", "noise"),
    lambda shapes, x: all(shape == x for shape in shapes),
    trigger="inpaint",
)
FIXED_CHANNELS = InputCheck(
    "fixed channels",
    ("concat",),
    lambda shapes, x: (*shapes[0][:1], *shapes[0][2:]) == (*x[:1], *x[2:]),
    trigger="concat",
    per_branch=True,
)
CHECKS = (SCHEDULE, INPAINT, FIXED_CHANNELS)


def check_inputs(request: Sample, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse a loop whose parts do not have what they need, or not in shapes that go together. Runs on meta tensors.

    Raises:
        RequestError: with the part, and the tensor or the shapes.
    """
    latent = tuple(tensors["x"].shape)
    for part in CHECKS:
        for given in part.read(request, tensors):
            shapes = [tuple(tensor.shape) for tensor in given]
            if not part.fits(shapes, latent):
                raise RequestError(
                    said(
                        "The request asks for {name} of shape {map} on a latent of {latent}.",
                        name=part.name,
                        map=", ".join(map(str, shapes)),
                        latent=latent,
                    ),
                    "Make all of them from one latent and one list of sigmas.",
                )
