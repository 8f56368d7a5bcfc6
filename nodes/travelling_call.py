"""What of a call travels to the pool. No ComfyUI needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from parallel_runtime.errors import RequestError
from parallel_runtime.requests.conditioning import Shared
from parallel_runtime.said import Said, said

from .carried_patches import CarriedPatches, NotCarried, foreign_functions
from .model_nodes import REFUSED
from .transformer_call import TransformerCall
from .transportable import listed, option_obstacles, plain_options


def check_options(options: Mapping[str, Any]) -> None:
    """Look at a MODEL's `transformer_options` before it is sampled.

    Raises:
        RequestError: with what no rank takes, and the node that asks for it.
    """
    if found := [*map(_functions_of, foreign_functions(options)), *option_obstacles(options)]:
        raise refusal(found)


def travelling(call: TransformerCall, functions: CarriedPatches) -> Mapping[str, Any]:
    """All of a call but x and timestep, as far as the network in the pool takes it.

    Raises:
        RequestError: with what it does not take.
    """
    found = option_obstacles(call.options)
    options: dict[str, Any] = {}
    try:
        # Of several latents in one (video and audio), the first is the picture.
        x = call.x if isinstance(call.x, torch.Tensor) else call.x[0]
        options = {**plain_options(call.options), **functions.carry(call.options, x)}
    except NotCarried as error:
        found.insert(0, _functions_of(error.args[0]))
    if found:
        raise refusal(found)
    more = {"control": call.control, "transformer_options": Shared(options)}
    return {**call.conditioning, **{name: value for name, value in more.items() if value is not None}}


def _functions_of(maker: Said) -> Said:
    if (why := REFUSED.get(maker)) is None:
        return said("functions that {maker} sets inside of the model", maker=maker)
    return said("functions that {node} sets inside of the model, as {why}", node=str(maker), why=Said(why))


def refusal(found: list[Said]) -> RequestError:
    """The error of a MODEL that has what no rank could take."""
    return RequestError(
        said("The workers cannot carry {what}.", what=listed(found)),
        "Remove the node that adds it, or load the model with Load Diffusion Model.",
    )
