"""The rows of a run, and whether the latents of those that computed the same thing agree."""

from __future__ import annotations

from typing import Any

import torch

from .case import REFERENCES, Case
from .schedule import Outcome

AGREE = {"tiny": 1e-4, "full": 0.02}
"""Relative distance of the final latents up to which two rivals computed the same thing: in float32, in bfloat16."""


class Results:
    """Rows as they come in, kept in the order of the cases."""

    def __init__(self, cases: list[Case]) -> None:
        self._cases = cases
        self._rows: dict[int, dict[str, Any]] = {}
        self._latents: dict[int, torch.Tensor] = {}

    def add(self, place: int, outcome: Outcome) -> dict[str, Any]:
        """Take what came of the case at that place, and return its row."""
        case, (measured, latent) = self._cases[place], outcome
        self._rows[place] = {
            "rival": case.rival,
            "ranks": case.ranks,
            "size": case.size,
            "p2p": case.p2p,
            **measured,
        }
        if latent is not None:
            self._rows[place] |= {"steps": case.steps, "warm": case.warm, "pipelined": case.pipelined}
            self._latents[place] = latent
        limit = AGREE["tiny" if case.tiny else "full"]
        compare_latents([(self._rows[at], latent) for at, latent in sorted(self._latents.items())], limit)
        return self._rows[place]

    def rows(self) -> list[dict[str, Any]]:
        """Those that are there."""
        return [self._rows[place] for place in sorted(self._rows)]


def compare_latents(measured: list[tuple[dict[str, Any], torch.Tensor]], limit: float) -> None:
    """Give every row its latent's relative distance to ours on one rank, at the same size after as many steps.

    Where that is not there, to the first that is. A pipeline's latent is another by design, and agrees with anything.
    """
    for row, latent in measured:
        alike = [other for other in measured if _same_sampling(other[0], row)]
        of_ours = [other for other in alike if other[0]["rival"] in REFERENCES and other[0]["ranks"] == 1]
        exact = [other for other in alike if not other[0]["pipelined"]]
        chosen, reference = (of_ours or exact or alike)[0]
        # An infinity or NaN gives a distance that is not within the limit either.
        row["distance"] = ((latent - reference).norm() / reference.norm()).item()
        row["reference"] = [chosen["rival"], chosen["ranks"]]
        row["agrees"] = bool(row["distance"] <= limit) or (row["pipelined"] and row["distance"] < 1)


def _same_sampling(row: dict[str, Any], other: dict[str, Any]) -> bool:
    return (row["size"], row["steps"]) == (other["size"], other["steps"])
