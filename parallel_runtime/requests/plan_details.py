"""What a plan is made of, and what it was predicted to take: for who draws it. Plain typed data."""

from __future__ import annotations

import msgspec


class PlanDetails(msgspec.Struct, frozen=True):
    """A plan for one request of one model.

    Args:
        model: the family, as artists call it.
        degrees: by the names of `ParallelConfig`'s axes, outermost first; their product is the ranks that compute.
        patches: parts that stages cut the picture into; 1 where they work in turn, or there is one.
        stage_blocks: blocks of every stage.
        heads: attention heads of the model.
        blocks: of the model.
        tokens, batch: of the request; CFG branches times pictures.
        step_seconds: predicted for a step of this plan; 0 where nothing can be predicted (on a CPU, for a U-Net).
        one_gpu_seconds: predicted for a step on one GPU; 0 likewise.
        memory_bytes: predicted for the GPU that needs the most; 0 likewise.
    """

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
