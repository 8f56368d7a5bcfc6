"""What the engine answers to requests. Plain typed data, as they are."""

from __future__ import annotations

import msgspec

from ..said import Said
from .facts import MachineFacts
from .plan_details import PlanDetails


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
    """Answer to `Survey`.

    Args:
        free_each: see `MachineFacts`.
        needs_bytes: of weights on the rank that has the most, as they would be planned were all of a GPU free; 0 where
            they are there.
        held: see `Finished`.
    """

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
