"""What the values of Parallel Config mean for the model that it is connected to. No ComfyUI needed."""

from __future__ import annotations

from parallel_runtime.config import AXES, SHOWN_AXES
from parallel_runtime.requests.plan_details import PlanDetails
from parallel_runtime.said import Said, said, together

from .prompt_graph import USUAL


def explain_limits(details: PlanDetails, size: tuple[int, int] = USUAL) -> Said:
    """How far each value can go with this model, and what these values come to for one picture of this size."""
    sentences: list[Said] = []
    if details.splits_sequence:
        sentences.append(
            said(
                "With {model}, ulysses can be up to {heads}, its attention heads.",
                model=details.model,
                heads=details.heads,
            )
        )
    else:
        sentences.append(
            said(
                "With {model}, only cfg and data can be above 1: devices cannot share out the tokens of a picture.",
                model=details.model,
            )
        )
        sentences.append(said("Its weights can only be whole, on each GPU."))
    if details.splits_sequence and details.has_stages:
        sentences.append(said("Stages can be up to {blocks}, its blocks.", blocks=details.blocks))
    elif details.splits_sequence:
        sentences.append(said("It cannot be cut into stages."))
    taken = [f"{SHOWN_AXES.get(axis, axis)} {details.degrees[axis]}" for axis in AXES if details.degrees[axis] > 1]
    plan = " × ".join(taken) or said("one device")
    sentences.append(
        said("One picture of {width} × {height} without CFG: {plan}.", width=size[0], height=size[1], plan=plan)
    )
    return together(sentences)
