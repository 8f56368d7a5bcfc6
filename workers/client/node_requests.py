"""What the nodes ask a pool for, in their own terms: models, branches, loops; and one request on its way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import CheckpointError, RequestError
from parallel_runtime.loading.files import Identity, identity
from parallel_runtime.requests.comfyui_code import ComfyuiCode, Scalar
from parallel_runtime.requests.requests import Answer, Request, RunVae, Sample, VaeFile

OnProgress = Callable[[int, int, "torch.Tensor | None"], None]
"""Gets the step that has ended, how many there are, and the denoised latent where a preview was wished."""
ShouldCancel = Callable[[], bool]
_CPU = torch.device("cpu")


def never() -> bool:
    """For callers that never cancel."""
    return False


@dataclass(frozen=True, kw_only=True)
class Submission:
    """All that is sent with a request. The answer's tensors are wanted on `device`, and are guessed to have
    `answer_bytes`, if more than the request's; `into` is memory for the only one, of the same shape and any type."""

    request: Request
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    on_progress: OnProgress = lambda *_: None
    device: torch.device = _CPU
    answer_bytes: int = 0
    into: torch.Tensor | None = None


@dataclass(frozen=True)
class Reply:
    """What came back of a request that succeeded; `finite`: no NaN and nothing infinite is in the tensors."""

    answer: Answer
    tensors: Mapping[str, torch.Tensor]
    finite: bool = True


Submit = Callable[[Submission], Reply]


@dataclass(frozen=True)
class ModelRequest:
    """A model as the artist asked for it: a single file or a diffusers folder."""

    path: str
    dtype: str  # "bfloat16", "float16" or "float32"
    config: ParallelConfig  # degrees, attention and compile belong to the request; its devices choose the pool
    identity: Identity = ()  # of the files that the artist's MODEL was made from; empty where any will do
    comfyui: ComfyuiCode | None = None  # whose own network runs it; None for diffusers'
    size: tuple[int, int] = field(default=(1024, 1024), repr=False, compare=False)  # see Load; makes no other request

    @cached_property  # a call asks for it several times
    def key(self) -> str:
        """Name of this request in the pool."""
        return repr(self)

    def check_files(self) -> None:
        """CheckpointError for files that are not those which the MODEL was made from: they may be another model."""
        if self.identity and identity(self.path) != self.identity:
            fix = "Queue the prompt again: Parallel Loader then reads the new file."
            raise CheckpointError("{path} was replaced after Parallel Loader had read it.", fix, path=self.path)


@dataclass(frozen=True)
class VaeRequest:
    """A VAE as the artist's VAE object has it; so many `ranks` share its pictures."""

    file: VaeFile
    ranks: int

    @cached_property
    def key(self) -> str:
        """Name of this VAE in the pool."""
        return repr(self.file)

    def asked(self, half: str, x: torch.Tensor, memory: int, seed: int, options: Mapping[str, Scalar]) -> RunVae:
        """What the ranks are asked; RequestError where there is nothing to encode or decode."""
        check_filled(x)
        return RunVae(self.key, self.file, half, self.ranks, memory, seed, dict(options))


@dataclass(frozen=True)
class LoopRequest:
    """A denoising loop. `job`: what the ranks are told of it, but for the names of model, conditionings and patches;
    `branches`: of each CFG branch, 0 positive and 1 negative, the arguments of the transformer's call without x and
    timestep; `tensors`: its own by their names, but for those of conditionings."""

    job: Sample
    branches: Mapping[int, Mapping[str, Any]]
    tensors: Mapping[str, torch.Tensor]

    @property
    def x(self) -> torch.Tensor:
        """The noised start latent, (B, C, ...) float32."""
        return self.tensors["x"]

    @property
    def steps(self) -> int:
        return len(self.tensors["sigmas"]) - 1

    def check_finite(self) -> None:
        """RequestError for what can only end in a picture of nothing."""
        check_latent(self.x)
        for name, values in (("cfg", torch.tensor(self.job.cfg)), ("the sigmas", self.tensors["sigmas"])):
            if not torch.isfinite(values).all():
                what = "In {name} there is a value that is no number (NaN or infinite)."
                raise RequestError(what, "Set another.", name=name)


def check_filled(x: torch.Tensor) -> None:
    """Refuse a latent without a number in it."""
    if not x.numel():
        what = "The latent that came to the model is empty: its shape is {shape}."
        fix = "Check the size and the batch of the latent, and the nodes before this one."
        raise RequestError(what, fix, shape=tuple(x.shape))


def check_latent(x: torch.Tensor) -> None:
    """Refuse a latent that could only give NaN, or nothing."""
    check_filled(x)
    if not torch.isfinite(x).all():
        text = "The latent that came to the model holds NaN or infinity."
        raise RequestError(text, "Check the input latent and the nodes before this one; with fp16 weights, try bf16.")


def require_finite(reply: Reply, what: str) -> Mapping[str, torch.Tensor]:
    """An answer's tensors; RequestError for NaN or infinity, as nobody looks again at the last step's, the picture."""
    if reply.finite:
        return reply.tensors
    fix = "Choose bf16 or fp32 as weight_dtype if it is fp16; otherwise the model file or a conditioning is damaged."
    raise RequestError("{what} came out with values that are no numbers (NaN or infinite).", fix, what=what)
