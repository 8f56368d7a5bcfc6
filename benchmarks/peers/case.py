"""What is measured: the peers by name, and one measurement of one of them."""

from __future__ import annotations

from dataclasses import dataclass

ALL_RANKS_UP_TO = 1024
"""Above this size only the fewest and the most GPUs are measured, as a row takes long there."""


@dataclass(frozen=True)
class Peer:
    """An engine with its settings.

    Args:
        title: in the table.
        module: of this package, run as `python -m benchmarks.peers.<module> FOLDER` on every rank.
        compile: "" launches kernel by kernel, "blocks" compiles the repeated blocks, "whole" the transformer.
        least, most: numbers of GPUs that it can use, or that say anything about it.
    """

    title: str
    module: str
    compile: str = ""
    least: int = 1
    most: int = 8


PEERS = {
    "ours": Peer("Parallel DiT, compiled", "ours", "blocks"),
    "ours-eager": Peer("Parallel DiT, eager", "ours"),
    "comfyui": Peer("ComfyUI's network, blocks compiled", "comfyui", "blocks", most=1),
    "comfyui-eager": Peer("ComfyUI's network, as it comes", "comfyui", most=1),
    "diffusers": Peer("diffusers, blocks compiled, Ulysses", "diffusers_parallel", "blocks"),
    "diffusers-eager": Peer("diffusers, eager, Ulysses", "diffusers_parallel"),
    "xdit": Peer("xDiT, eager, Ulysses", "xdit", least=2),
    "xdit-compiled": Peer("xDiT, blocks compiled, Ulysses", "xdit", "blocks", least=2),
    "xdit-whole": Peer("xDiT, compiled as its runner does, Ulysses", "xdit", "whole", least=2),
}
DEFAULT_PEERS = ("ours", "comfyui", "diffusers", "xdit")
EXTRA_PEERS = ("xdit-compiled", "comfyui-eager")
"""Measured as well, after all others: what time is left for."""


@dataclass(frozen=True)
class Case:
    """One measurement; its processes read it from case.json in their folder.

    Args:
        size: pixels along a side of the picture.
        steps: timed ones. 1000 x sigma should be whole in bfloat16, to which some peers round it: 10 or 5 steps.
        warm: steps before them, which compile, and record graphs.
        compile: see `Peer`.
        tiny: a tiny model in float32 on CPUs.
        comfyui: ComfyUI's folder, "" where none was given.
        limit: seconds for all of it.
    """

    peer: str
    ranks: int
    size: int
    steps: int
    warm: int
    compile: str
    tiny: bool
    comfyui: str
    limit: float


def plan_cases(
    names: list[str], ranks: list[int], sizes: list[int], tiny: bool, comfyui: str, limit: float
) -> list[Case]:
    """All measurements in the order in which they are run: what the issue is about first, `EXTRA_PEERS` last."""
    cases = []
    for extra in (False, True):
        for size in sizes:
            counts = ranks if size <= ALL_RANKS_UP_TO else sorted({min(ranks), max(ranks)})
            for name in names:
                if (name in EXTRA_PEERS) != extra:
                    continue
                peer = PEERS.get(name, Peer(name, ""))
                cases += [
                    _case(name, peer, count, size, tiny, comfyui, limit)
                    for count in counts
                    if peer.least <= count <= peer.most
                ]
    return cases


def _case(name: str, peer: Peer, ranks: int, size: int, tiny: bool, comfyui: str, limit: float) -> Case:
    steps = 2 if tiny else 10 if size <= ALL_RANKS_UP_TO else 5
    # Ours records its graph at the third step of a kind.
    return Case(name, ranks, size, steps, 1 if tiny else 5, "" if tiny else peer.compile, tiny, comfyui, limit)
