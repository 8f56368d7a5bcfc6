"""What a configuration may ask of a model and of so many ranks; what may not be is refused with what may."""

from __future__ import annotations

from collections.abc import Iterator

from ..config import AXES, STREAMED, ParallelPlan
from ..errors import ConfigurationError
from ..requests.facts import RequestFacts
from ..said import said
from .wish import Wish


def check_limits(wish: Wish) -> None:
    """Refuse what no plan can serve.

    Raises:
        ConfigurationError: degrees that need more ranks than there are, more Ulysses ranks than heads, split
            tokens of a U-Net, stages of a model that cannot be cut, more stages than blocks, or a picture or patches
            with fewer tokens than ranks that share them; with the valid choices. Also weights that stream into a model
            whose blocks are not known.
    """
    config, model = wish.config, wish.model
    if config.weights in STREAMED and not model.splits_sequence:
        raise ConfigurationError(
            said(
                "Weights are {weights}, and those of {title} do not come block by block: each GPU has all of them.",
                weights=config.weights,
                title=model.title,
            ),
            "Set weights to whole.",
        )
    found = next(_violations(wish), None)
    if found is not None:
        raise ConfigurationError(*found)


def check_steps(plan: ParallelPlan, steps: int) -> None:
    """Refuse a warm-up that is longer than the run.

    Raises:
        ConfigurationError: more warm-up steps than steps, with the valid numbers.
    """
    if plan.pipe > 1 and plan.warmup_steps > steps:
        valid = said("a number from 1 to {steps}", steps=steps) if steps > 1 else "1"
        raise ConfigurationError(
            said(
                "PipeFusion is to warm up for {warmup_steps} steps, and the run has {steps}.",
                warmup_steps=plan.warmup_steps,
                steps=steps,
            ),
            said("Set warmup_steps to {valid}, or sample more steps.", valid=valid),
        )


def _violations(wish: Wish) -> Iterator[tuple[str, str]]:
    """Cause and valid choices of everything that cannot be."""
    config, ranks, model, request = wish.config, wish.ranks, wish.model, wish.request
    pipe, ulysses = config.pipe or 1, config.ulysses or 1
    plan = ParallelPlan(**{axis: getattr(config, axis) or 1 for axis in AXES})
    split = next((axis for axis in ("ring", "ulysses") if (getattr(config, axis) or 1) > 1), None)
    if split is not None and not model.splits_sequence:
        cause = said(
            "Degree {split} is {getattr}, and {title} is a U-Net, whose tokens cannot be split.",
            split=split,
            getattr=getattr(config, split),
            title=model.title,
        )
        yield cause, "Set ulysses and ring to auto or 1; cfg and data share out CFG branches and pictures."
    if ulysses > model.heads:
        cause = said(
            "Degree ulysses is {ulysses}, and {title} has {heads} attention heads.",
            ulysses=ulysses,
            title=model.title,
            heads=model.heads,
        )
        yield cause, said("Set ulysses to auto, or to a number from 1 to {heads}.", heads=min(model.heads, ranks))
    if pipe > 1 and not model.has_stages:
        yield said("{title} cannot be cut into stages.", title=model.title), "Set stages to auto or 1."
    elif pipe > model.blocks:
        cause = said(
            "{title} has {blocks} blocks, too few for {pipe} stages.", title=model.title, blocks=model.blocks, pipe=pipe
        )
        yield cause, said("Set stages to auto, or to a number from 1 to {blocks}.", blocks=min(model.blocks, ranks))
    if pipe > 1:
        yield from _patch_violations(config.patches or 1, request, wish.stage_ranks or plan.sequence)
    elif plan.sequence > request.tokens:
        tokens = said("one token") if request.tokens == 1 else said("{tokens} tokens", tokens=request.tokens)
        cause = said(
            "A picture of {tokens} cannot be shared out over {sequence} devices: each needs one.",
            tokens=tokens,
            sequence=plan.sequence,
        )
        yield cause, "Set ulysses and ring to auto or to smaller numbers, or make a larger picture."
    if plan.world_size > ranks:
        # A pool has refused it before it was started (workers/launch.py); a script with an engine of its own has not.
        cause = said(
            "The plan ({plan}) needs {needed} workers, and {ranks} are running.",
            plan=plan.words,
            needed=plan.world_size,
            ranks=ranks,
        )
        yield cause, "Lower a degree, set it to auto, or add devices."


def _patch_violations(patches: int, request: RequestFacts, group: int) -> Iterator[tuple[str, str]]:
    """The same of the patches, each of which has a token for every rank of a stage."""
    rows, most = request.rows or request.tokens, request.most_patches(group)
    if most == 0:
        cause = said(
            "A latent of {tokens} tokens cannot be shared out over the {group} devices of a stage.",
            tokens=request.tokens,
            group=group,
        )
        yield cause, "Make a larger picture, or set ulysses and ring to smaller numbers."
    elif patches > most:
        lines = said("{rows} token rows", rows=rows)
        if rows == 1:
            lines = said("one token row, or a video of odd latent height,")
        cause = said("A latent of {lines} cannot be cut into {patches} patches.", lines=lines, patches=patches)
        if patches <= rows:
            cause = said(
                "A latent of {lines} cannot be cut into {patches} patches in which each of the {group} devices of a "
                "stage has a token.",
                lines=lines,
                patches=patches,
                group=group,
            )
        choices = said("from 1 to {most}", most=most) if most > 1 else "1"
        yield (
            cause,
            said("Set patches to auto, or to a number {choices}, or make a larger picture.", choices=choices),
        )
