"""What a configuration may ask of a model and of so many ranks; what may not be is refused with what may."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..config import AXES, SHOWN_AXES, ParallelConfig, ParallelPlan
from ..errors import ConfigurationError
from ..requests.facts import ModelFacts, RequestFacts


def check_limits(
    config: ParallelConfig, ranks: int, model: ModelFacts, request: RequestFacts, sequence: int = 0
) -> None:
    """Refuse what no plan can serve.

    Args:
        sequence: ranks of a stage, where the weights were loaded for so many; else 0.

    Raises:
        ConfigurationError: degrees that need more ranks than there are, more Ulysses ranks than heads, split
            tokens of a U-Net, stages of a model that cannot be cut, more stages than blocks, an odd number of stages
            where halves mirror one another, or a picture or patches with fewer tokens than ranks that share them; with
            the valid choices and a valid configuration.
    """
    if ranks < 1 or model.heads < 1 or request.batch < 1 or request.tokens < 1:
        raise ConfigurationError(
            f"A plan for {ranks} ranks, {model.heads} heads, a batch of {request.batch} and {request.tokens} tokens "
            "cannot be made.",
            "Each is at least 1.",
        )
    found = next(_violations(config, ranks, model, request, sequence), None)
    if found is not None:
        cause, choices = found
        nearest = _nearest(config, ranks, model, request, sequence)
        raise ConfigurationError(cause, f"{choices} Valid is, for example: {nearest}.")


def check_steps(plan: ParallelPlan, steps: int) -> None:
    """Refuse a warm-up that is longer than the run.

    Raises:
        ConfigurationError: more warm-up steps than steps, with the valid numbers.
    """
    if plan.pipe > 1 and plan.warmup_steps > steps:
        valid = f"a number from 1 to {steps}" if steps > 1 else "1"
        raise ConfigurationError(
            f"PipeFusion is to warm up for {plan.warmup_steps} steps, and the run has {steps}.",
            f"Set warmup_steps to {valid}, or sample more steps.",
        )


def _violations(
    config: ParallelConfig, ranks: int, model: ModelFacts, request: RequestFacts, sequence: int
) -> Iterator[tuple[str, str]]:
    """Cause and valid choices of everything that cannot be."""
    pipe, ulysses = config.pipe or 1, config.ulysses or 1
    wish = ParallelPlan(**{axis: getattr(config, axis) or 1 for axis in AXES})
    split = next((axis for axis in ("ring", "ulysses") if (getattr(config, axis) or 1) > 1), None)
    if split is not None and not model.splits_sequence:
        cause = (
            f"Degree {split} is {getattr(config, split)}, and {model.title} is a U-Net, whose tokens cannot be split."
        )
        yield cause, "Set ulysses and ring to auto or 1; cfg and data share out CFG branches and pictures."
    if ulysses > model.heads:
        cause = f"Degree ulysses is {ulysses}, and {model.title} has {model.heads} attention heads."
        yield cause, f"Set ulysses to auto, or to a number from 1 to {min(model.heads, ranks)}."
    if pipe > 1 and not model.has_stages:
        yield f"{model.title} cannot be cut into stages.", "Set stages to auto or 1."
    elif pipe > model.blocks:
        cause = f"{model.title} has {model.blocks} blocks, too few for {pipe} stages."
        yield cause, f"Set stages to auto, or to a number from 1 to {min(model.blocks, ranks)}."
    elif pipe > 1 and pipe % 2 and model.mirrored:
        cause = f"{model.title} is cut into an even number of stages only, not {pipe}."
        yield cause, "Set stages to auto, 1, 2 or another even number."
    if pipe > 1:
        yield from _patch_violations(config.patches or 1, request, sequence or wish.sequence)
    elif wish.sequence > request.tokens:
        tokens = "one token" if request.tokens == 1 else f"{request.tokens} tokens"
        cause = f"A picture of {tokens} cannot be shared out over {wish.sequence} ranks: each needs one."
        yield cause, "Set ulysses and ring to auto or to smaller numbers, or make a larger picture."
    if wish.world_size > ranks:
        degrees = zip(AXES, wish.shape, strict=True)
        named = " × ".join(f"{SHOWN_AXES.get(axis, axis)} {degree}" for axis, degree in degrees if degree > 1)
        there = "rank is" if ranks == 1 else "ranks are"
        cause = f"The degrees {named} need {wish.world_size} ranks, and {ranks} {there} there."
        yield cause, "Set a degree to auto or a smaller number, or add devices."


def _patch_violations(patches: int, request: RequestFacts, group: int) -> Iterator[tuple[str, str]]:
    """The same of the patches, each of which has a token for every rank of a stage."""
    rows, most = request.rows or request.tokens, request.most_patches(group)
    if most == 0:
        cause = f"A latent of {request.tokens} tokens cannot be shared out over the {group} ranks of a stage."
        yield cause, "Make a larger picture, or set ulysses and ring to smaller numbers."
    elif patches > most:
        lines = "one token row, or a video of odd latent height," if rows == 1 else f"{rows} token rows"
        cause = f"A latent of {lines} cannot be cut into {patches} patches"
        if patches <= rows:
            cause += f" in which each of the {group} ranks of a stage has a token"
        choices = f"from 1 to {most}" if most > 1 else "1"
        yield f"{cause}.", f"Set patches to auto, or to a number {choices}, or make a larger picture."


def _nearest(config: ParallelConfig, ranks: int, model: ModelFacts, request: RequestFacts, sequence: int) -> str:
    """A configuration that is not refused and keeps as much of what is set as can be, as names and numbers."""
    degrees = {axis: getattr(config, axis) or 1 for axis in AXES}
    named = {axis for axis in AXES if getattr(config, axis) is not None}
    if request.most_patches(sequence or 1) == 0:  # loaded for more ranks than there are tokens: to be loaded anew
        degrees |= {"ring": 1, "ulysses": min(sequence, request.tokens)}
        named |= {"ring", "ulysses"}
    degrees["ulysses"] = min(degrees["ulysses"], model.heads, request.tokens)
    degrees["ring"] = min(degrees["ring"], request.tokens // degrees["ulysses"])
    if not model.splits_sequence:
        degrees["ring"] = 1
    degrees["pipe"] = min(degrees["pipe"], model.blocks) if model.has_stages else 1
    while ParallelPlan(**degrees).world_size > ranks:
        largest = max(AXES, key=lambda axis: degrees[axis])
        degrees[largest] -= 1
    if model.mirrored and degrees["pipe"] > 1:
        degrees["pipe"] -= degrees["pipe"] % 2
    while degrees["pipe"] > 1 and request.most_patches(degrees["ring"] * degrees["ulysses"]) == 0:
        degrees["ring" if degrees["ring"] > degrees["ulysses"] else "ulysses"] -= 1
    parts = [f"{SHOWN_AXES.get(axis, axis)} {degrees[axis]}" for axis in AXES if axis in named]
    if config.patches and config.patches > 1 and degrees["pipe"] > 1:
        patches = min(config.patches, request.most_patches(degrees["ring"] * degrees["ulysses"]))
        parts.append(f"patches {patches}")
    return ", ".join(parts)


def with_stages(config: ParallelConfig, loaded: ParallelPlan | None) -> ParallelConfig:
    """Keep to the stages whose weights the ranks hold; None: nothing is loaded yet, or every rank holds all."""
    return config if loaded is None or loaded.pipe == 1 else replace(config, pipe=loaded.pipe)
