"""Which measurements make up a table."""

from __future__ import annotations

from dataclasses import dataclass

from .case import PICTURE_STEPS, RIVALS, Case, Rival

ALL_RANKS_UP_TO = 1024
"""Above this size only the fewest and the most GPUs are measured, as a row takes long there."""
DEFAULT_RIVALS = ("ours", "comfyui", "diffusers", "xdit")
EXTRA_RIVALS = ("xdit-compiled", "comfyui-eager")
"""Measured as well, after all others: what time is left for."""


@dataclass(frozen=True)
class Wish:
    """Every rival on every number of GPUs at every size."""

    rivals: tuple[str, ...]
    ranks: tuple[int, ...]
    sizes: tuple[int, ...]


SETS = {
    "rivals": (
        Wish(("ours",), (1, 2, 4), (512, 1024)),
        Wish(("diffusers",), (1, 2, 4), (1024,)),
        Wish(("ours", "diffusers"), (1, 4), (2048,)),
        Wish(("comfyui", "comfyui-eager"), (1,), (1024, 2048)),
        Wish(("xdit", "xdit-compiled"), (2, 4), (1024,)),
        Wish(("xdit", "xdit-compiled"), (4,), (2048,)),
    ),
    "pipefusion": (
        Wish(("ours", "ours-picture"), (1,), (1024, 2048)),
        Wish(("ours", "ours-pipefusion", "xdit-pipefusion", "ours-ring", "diffusers"), (2, 4), (1024, 2048)),
        Wish(("ours-pipefusion-ulysses",), (4,), (1024, 2048)),
    ),
}
"""The tables of issues 4 and 5."""


@dataclass(frozen=True)
class Setting:
    """What all measurements of a run have in common; see `Case`."""

    tiny: bool
    comfyui: str
    limit: float
    p2p: bool = True


def plan_set(
    name: str, setting: Setting, rivals: list[str] | None, ranks: list[int] | None, sizes: list[int] | None
) -> list[Case]:
    """The measurements of a table, or those among them that are asked for; references stay, others need them."""
    wanted = [
        (rival, count, size)
        for wish in SETS[name]
        for size in wish.sizes
        for count in wish.ranks
        for rival in wish.rivals
        if sizes is None or size in sizes
    ]
    cases = [_case(rival, count, size, setting) for rival, count, size in wanted]
    kept = [
        case for case in cases if (rivals is None or case.rival in rivals) and (ranks is None or case.ranks in ranks)
    ]
    compared = {(case.size, case.steps) for case in kept}
    return [case for case in cases if case in kept or (case.is_reference and (case.size, case.steps) in compared)]


def plan_cases(names: list[str], ranks: list[int], sizes: list[int], setting: Setting) -> list[Case]:
    """All measurements of some rivals, in the order of the table: `EXTRA_RIVALS` last."""
    cases = []
    for extra in (False, True):
        for size in sizes:
            counts = ranks if size <= ALL_RANKS_UP_TO else sorted({min(ranks), max(ranks)})
            for name in names:
                if (name in EXTRA_RIVALS) != extra:
                    continue
                rival = RIVALS.get(name, Rival(name, ""))
                cases += [_case(name, count, size, setting) for count in counts if rival.least <= count <= rival.most]
    return cases


def _case(name: str, ranks: int, size: int, setting: Setting) -> Case:
    rival, tiny = RIVALS.get(name, Rival(name, "")), setting.tiny
    steps = 4 if tiny else PICTURE_STEPS if rival.picture else 10 if size <= ALL_RANKS_UP_TO else 5
    return Case(
        rival=name,
        ranks=ranks,
        size=size,
        steps=steps,
        # Ours records its graph at the third step of a kind, and a pipeline's first step is of another kind.
        warm=2 if tiny else 5,
        compile="" if tiny else rival.compile,
        tiny=tiny,
        comfyui=setting.comfyui,
        limit=setting.limit,
        split=rival.split,
        p2p=setting.p2p,
        extra=name in EXTRA_RIVALS,
    )
