"""What the values of Parallel Config mean for the model that it is connected to. No ComfyUI needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parallel_runtime.config import AXES, SHOWN_AXES
from parallel_runtime.requests.plan_details import PlanDetails


def find_config(prompt: Mapping[str, Any] | None, loader: str | None) -> str | None:
    """The node whose config a loader takes; None where there is none.

    Args:
        prompt: the graph in ComfyUI's API form.
    """
    node = (prompt or {}).get(loader or "", {})
    link = node.get("inputs", {}).get("parallel_config")
    return str(link[0]) if isinstance(link, (list, tuple)) and link else None


def explain_limits(details: PlanDetails) -> str:
    """How far each value can go with this model, and what these values come to for one picture of 1024 × 1024."""
    sentences = []
    if details.splits_sequence:
        sentences.append(f"With {details.model}, ulysses can be up to {details.heads}, its attention heads.")
    else:
        sentences.append(
            f"With {details.model}, only cfg and data can be above 1: ranks cannot share out the tokens of a picture."
        )
    if details.splits_sequence and details.has_stages:
        sentences.append(f"Stages can be up to {details.blocks}, its blocks.")
    elif details.splits_sequence:
        sentences.append("It cannot be cut into stages.")
    taken = [f"{SHOWN_AXES.get(axis, axis)} {details.degrees[axis]}" for axis in AXES if details.degrees[axis] > 1]
    plan = " × ".join(taken) or "one rank"
    sentences.append(f"One picture of 1024 × 1024 without CFG: {plan}.")
    return " ".join(sentences)
