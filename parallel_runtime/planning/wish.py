"""What a plan is made for: what the artist asks for, of which model, on which ranks, for which request; and what no
plan can serve, which is refused with what may be."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import AXES, STREAMED, ParallelConfig, ParallelPlan
from ..errors import ConfigurationError
from ..requests.facts import MachineFacts, ModelFacts, RequestFacts
from ..said import said

_PIXELS = 16  # of a token's side, in most image models


def typical(width: int, height: int) -> RequestFacts:
    """One picture of that size."""
    return RequestFacts(width // _PIXELS * (height // _PIXELS), 512, rows=height // _PIXELS)


TYPICAL = typical(1024, 1024)  # what a plan is made for when no request is there yet


@dataclass(frozen=True)
class Wish:
    """The same on every rank, or the ranks make different plans and wait for ever; `ranks` are those of the pool that
    the configuration may use, `loaded` what `plan_loading` said."""

    config: ParallelConfig
    ranks: int
    model: ModelFacts
    request: RequestFacts
    machine: MachineFacts
    loaded: ParallelPlan | None = None

    @property
    def stage_ranks(self) -> int:
        """Ranks of a stage, where the weights were loaded for so many; else 0."""
        return self.loaded.sequence if self.loaded is not None and self.loaded.pipe > 1 else 0

    @property
    def compiled(self) -> bool:
        """Whether blocks are compiled."""
        return self.config.compiles(self.machine.on_gpu)


def check_limits(wish: Wish) -> None:
    """Refuse what no plan can serve: ConfigurationError, with the valid choices, for degrees that ranks, heads, blocks
    or tokens do not do for, and weights that stream into a model whose blocks are not known."""
    config, ranks, model, request = wish.config, wish.ranks, wish.model, wish.request
    if config.weights in STREAMED and not model.splits_sequence:
        what = "Weights are {weights}, and those of {title} do not come block by block: each GPU has all of them."
        raise ConfigurationError(what, "Set weights to whole.", weights=config.weights, title=model.title)
    plan = ParallelPlan(**{axis: getattr(config, axis) or 1 for axis in AXES})
    split = next((axis for axis in ("ring", "ulysses") if getattr(plan, axis) > 1), None)
    if split is not None and not model.splits_sequence:
        what = "Degree {split} is {degree}, and the tokens of {title} cannot be split: {why}."
        fix = "Set ulysses and ring to auto or 1; cfg and data share out CFG branches and pictures."
        values = {"split": split, "degree": getattr(plan, split), "title": model.title, "why": model.why_whole}
        raise ConfigurationError(what, fix, **values)
    if plan.ulysses > model.heads:
        what = "Degree ulysses is {ulysses}, and {title} has {heads} attention heads."
        fix = said("Set ulysses to auto, or to a number from 1 to {heads}.", heads=min(model.heads, ranks))
        raise ConfigurationError(what, fix, ulysses=plan.ulysses, title=model.title, heads=model.heads)
    if plan.pipe > 1 and not model.has_stages:
        raise ConfigurationError("{title} cannot be cut into stages.", "Set stages to auto or 1.", title=model.title)
    if plan.pipe > model.blocks:
        what = "{title} has {blocks} blocks, too few for {pipe} stages."
        fix = said("Set stages to auto, or to a number from 1 to {blocks}.", blocks=min(model.blocks, ranks))
        raise ConfigurationError(what, fix, title=model.title, blocks=model.blocks, pipe=plan.pipe)
    if plan.pipe > 1:
        _check_patches(config.patches or 1, request, wish.stage_ranks or plan.sequence)
    elif plan.sequence > request.tokens:
        tokens = said("one token") if request.tokens == 1 else said("{tokens} tokens", tokens=request.tokens)
        what = "A picture of {tokens} cannot be shared out over {sequence} devices: each needs one."
        fix = "Set ulysses and ring to auto or to smaller numbers, or make a larger picture."
        raise ConfigurationError(what, fix, tokens=tokens, sequence=plan.sequence)
    if plan.world_size > ranks:
        # A pool has refused it before it was started (workers/launch.py); a script with an engine of its own has not.
        what = "The plan ({plan}) needs {needed} workers, and {ranks} are running."
        fix = "Lower a degree, set it to auto, or add devices."
        raise ConfigurationError(what, fix, plan=plan.words, needed=plan.world_size, ranks=ranks)


def check_steps(plan: ParallelPlan, steps: int) -> None:
    """ConfigurationError where a warm-up is longer than the run, with the valid numbers."""
    if plan.pipe > 1 and plan.warmup_steps > steps:
        valid = said("a number from 1 to {steps}", steps=steps) if steps > 1 else "1"
        what = "PipeFusion is to warm up for {warmup_steps} steps, and the run has {steps}."
        fix = "Set warmup_steps to {valid}, or sample more steps."
        raise ConfigurationError(what, fix, warmup_steps=plan.warmup_steps, steps=steps, valid=valid)


def _check_patches(patches: int, request: RequestFacts, group: int) -> None:
    """Each patch has a token for every rank of a stage."""
    rows, most = request.rows or request.tokens, request.most_patches(group)
    if most == 0:
        what = "A latent of {tokens} tokens cannot be shared out over the {group} devices of a stage."
        fix = "Make a larger picture, or set ulysses and ring to smaller numbers."
        raise ConfigurationError(what, fix, tokens=request.tokens, group=group)
    if patches <= most:
        return
    lines = said("{rows} token rows", rows=rows)
    if rows == 1:
        lines = said("one token row, or a video of odd latent height,")
    what = "A latent of {lines} cannot be cut into {patches} patches."
    if patches <= rows:
        what = (
            "A latent of {lines} cannot be cut into {patches} patches in which each of the {group} devices of a stage "
            "has a token."
        )
    choices = said("from 1 to {most}", most=most) if most > 1 else "1"
    fix = "Set patches to auto, or to a number {choices}, or make a larger picture."
    raise ConfigurationError(what, fix, lines=lines, patches=patches, group=group, choices=choices)
