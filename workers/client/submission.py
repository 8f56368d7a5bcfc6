"""One request on its way to a running pool: what is sent, who hears of it until it ends, and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from parallel_runtime.requests.requests import Answer, Request

OnProgress = Callable[[int, int, "torch.Tensor | None"], None]
"""Gets the step that has ended, how many there are, and the denoised latent where a preview was wished."""
OnCompile = Callable[[], None]
"""Called about once a second by each rank that compiles, while it does."""
ShouldCancel = Callable[[], bool]


def ignore_progress(step: int, total: int, denoised: torch.Tensor | None) -> None:
    """For requests without steps."""


def ignore_compiling() -> None:
    """For requests that show nothing of it."""


def never() -> bool:
    """For callers that never cancel."""
    return False


@dataclass(frozen=True, kw_only=True)
class Callbacks:
    """Who hears of a request while it runs, and may cancel it."""

    on_progress: OnProgress = ignore_progress
    on_compile: OnCompile = ignore_compiling
    should_cancel: ShouldCancel = never


_CPU = torch.device("cpu")
_UNHEARD = Callbacks()


@dataclass(frozen=True, kw_only=True)
class Submission:
    """All that is sent with a request.

    Args:
        device: where the answer's tensors are wanted.
        answer_bytes: that they will have, where it may be more than the request's; a guess.
    """

    request: Request
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    callbacks: Callbacks = _UNHEARD
    device: torch.device = _CPU
    answer_bytes: int = 0


@dataclass(frozen=True)
class Reply:
    """What came back of a request that succeeded.

    Args:
        finite: there is no NaN and nothing infinite in the tensors.
    """

    answer: Answer
    tensors: Mapping[str, torch.Tensor]
    finite: bool = True
