"""What weights that come block by block take of a GPU, and how long their bytes are on the way. Pure arithmetic."""

from __future__ import annotations

from ..requests.facts import PCIE, MachineFacts, ModelFacts

SLOTS = 2
"""As `streaming.block_stream` has it; here without torch."""


def kept_bytes(weights: str, ranks: int, model: ModelFacts) -> int:
    """Bytes of weights on each GPU.

    Args:
        weights: "dealt" or "host".
        ranks: that keep shares.
    """
    beside = model.parameters - model.block_parameters + SLOTS * max(model.block_sizes)
    share = -(-model.block_parameters // ranks) if weights == "dealt" else 0
    return (beside + share) * model.bytes_per_parameter


def coming_bytes(weights: str, ranks: int, model: ModelFacts) -> int:
    """Bytes that a GPU copies over its link in a step; of its own share it has a copy on the device."""
    coming = model.block_parameters * model.bytes_per_parameter
    return coming - coming // ranks if weights == "dealt" else coming


def coming_seconds(weights: str, ranks: int, model: ModelFacts, machine: MachineFacts) -> float:
    """Seconds of a step's copies, that of the link between GPUs as it was measured; blocks compute meanwhile."""
    if not machine.on_gpu:
        return 0.0
    # Each GPU has a link of its own to the host's memory, which is not measured.
    rate = machine.link.peer if weights == "dealt" else PCIE.peer
    return coming_bytes(weights, ranks, model) / (rate * 1e9)
