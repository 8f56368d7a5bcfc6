"""What the engine answers to requests. Plain typed data, as they are."""

from __future__ import annotations

import msgspec

from ..said import Said
from .facts import MachineFacts


class PlanDetails(msgspec.Struct, frozen=True):
    """A plan for one request of one model, and what it was predicted to take: 0 where nothing can be predicted (on a
    CPU, for a U-Net). degrees: by the names of `ParallelConfig`'s axes, outermost first; their product is the
    ranks that compute. patches: parts that stages cut the picture into; 1 where they work in turn, or there is one.
    stage_blocks: blocks of every stage. heads, blocks: of the model. tokens, batch: of the request; CFG branches times
    pictures. step_seconds, one_gpu_seconds: for a step of this plan, and on one GPU. memory_bytes: for the GPU that
    needs the most."""

    model: str
    degrees: dict[str, int]
    patches: int
    stage_blocks: tuple[int, ...]
    heads: int
    blocks: int
    tokens: int
    batch: int
    step_seconds: float = 0.0
    one_gpu_seconds: float = 0.0
    memory_bytes: int = 0


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """Answer to `Load`.

    Args:
        family: as artists call it.
        bytes_per_rank: parameter bytes that one rank holds.
        reused: it was resident already.
        explanation: the plan for a single picture, in words.
        machine: what plans now reckon with, measured by the ranks where the request did not know.
        stages: that the weights are split into; a `Forward` runs through them one after the other.
        held: see `Finished`.
        details: of that plan.
    """

    family: str
    bytes_per_rank: int
    reused: bool
    explanation: Said
    machine: MachineFacts | None = None
    stages: int = 1
    held: dict[str, int] | None = None
    details: PlanDetails | None = None


class Surveyed(msgspec.Struct, frozen=True, tag=True):
    """Answer to `Survey`. `free_each`: see `MachineFacts`; `needs_bytes`: of weights on the rank that has the most, as
    they would be planned were all of a GPU free, 0 where they are there; `held`: see `Finished`."""

    free_each: tuple[int, ...]
    needs_bytes: int
    held: dict[str, int] | None = None


class Finished(msgspec.Struct, frozen=True, tag=True):
    """Answer to the other requests.

    Args:
        plan: the plan that ran it, one sentence.
        bytes_freed: over one rank, for `Release`.
        held: bytes of weights on this rank's device by model, models of the same weights having them in common; None
            for as before.
        details: of the plan; None for as before, in answers to a `Step`.
    """

    plan: Said = Said("")
    bytes_freed: int = 0
    held: dict[str, int] | None = None
    details: PlanDetails | None = None


Answer = Loaded | Surveyed | Finished
