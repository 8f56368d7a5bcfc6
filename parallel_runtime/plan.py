"""From the artist's wish to the degrees of one request. Pure: every rank computes the same plan."""

from __future__ import annotations

import math

from .config import ParallelConfig, ParallelPlan
from .errors import ConfigurationError

_GIVEN = ("data", "cfg", "ulysses")
"""Axes that a configuration may set."""


def resolve_plan(config: ParallelConfig, world_size: int, heads: int, batch: int) -> ParallelPlan:
    """Return the degrees for one request; they may need fewer ranks than there are.

    Degrees that are set stay as they are. The automatic ones go to the batch first, which needs no exchange inside
    of the model, then to Ulysses, with the largest degree that divides the heads; no rank is asked for that would not
    make the request faster.

    Args:
        world_size: ranks of the pool.
        heads: attention heads of the model.
        batch: rows of the request, CFG branches times pictures.

    Raises:
        ConfigurationError: the degrees need more ranks than there are, or Ulysses does not divide the heads.
    """
    if world_size < 1 or heads < 1 or batch < 1:
        raise ConfigurationError(
            f"A plan for {world_size} ranks, {heads} heads and a batch of {batch} cannot be made.",
            "Each is at least 1.",
        )
    _check_product(config, world_size)
    _check_heads(config, world_size, heads)
    data, cfg = _batch_degrees(config, world_size // (config.ulysses or 1), batch)
    ulysses = config.ulysses or max(_divisors(heads, world_size // (data * cfg)))
    return ParallelPlan(data=data, cfg=cfg, ulysses=ulysses)


def explain(plan: ParallelPlan, config: ParallelConfig, world_size: int, heads: int, batch: int) -> str:
    """Return what the plan does and why, for the artist; arguments as in `resolve_plan`."""
    if world_size == 1:
        return "One rank computes everything."
    reasons = []
    if plan.batch > 1:
        reasons.append(_explain_batch(plan, batch))
    if plan.sequence > 1:
        each = f"{heads // plan.ulysses} of {heads} heads each"
        reasons.append(f"{plan.sequence} ranks share the tokens of a picture ({each})")
    if not reasons:
        reasons.append("one rank computes everything")
    sentence = "; ".join(reasons)
    text = f"{plan}: {sentence}." if plan.world_size > 1 else f"{sentence[0].upper()}{sentence[1:]}."
    idle = world_size - plan.world_size
    return f"{text} {_explain_idle(plan, config, idle, world_size, heads)}" if idle else text


def _check_product(config: ParallelConfig, world_size: int) -> None:
    wish = ParallelPlan(**{axis: getattr(config, axis) or 1 for axis in _GIVEN})
    if wish.world_size > world_size:
        ranks = "rank is" if world_size == 1 else "ranks are"
        raise ConfigurationError(
            f"The degrees {wish} need {wish.world_size} ranks, and {world_size} {ranks} there.",
            "Set a degree to auto or a smaller number, or add devices.",
        )


def _check_heads(config: ParallelConfig, world_size: int, heads: int) -> None:
    if config.ulysses is None or heads % config.ulysses == 0:
        return
    room = world_size // ((config.data or 1) * (config.cfg or 1))
    valid = ", ".join(str(degree) for degree in _divisors(heads, room))
    raise ConfigurationError(
        f"Degree ulysses is {config.ulysses}, which does not divide the model's {heads} attention heads.",
        f"Set ulysses to auto, or to one of {valid}.",
    )


def _batch_degrees(config: ParallelConfig, ranks: int, batch: int) -> tuple[int, int]:
    """Return (data, cfg) out of `ranks` ranks, keeping what is set."""
    if config.data is not None and config.cfg is not None:
        return config.data, config.cfg
    if config.data is not None:
        return config.data, min(2, _useful(batch, ranks, config.data))
    if config.cfg is not None:
        return _useful(batch, ranks, config.cfg), config.cfg
    ways = _useful(batch, ranks, 1)
    cfg = 2 if ways % 2 == 0 else 1
    return ways // cfg, cfg


def _useful(batch: int, ranks: int, given: int) -> int:
    """Return the degree that, times the `given` one, deals the batch in the fewest rows per rank, with no rank more."""
    most = max(1, min(batch, ranks) // given)
    rows = math.ceil(batch / (most * given))
    return next(degree for degree in range(1, most + 1) if math.ceil(batch / (degree * given)) == rows)


def _divisors(heads: int, limit: int) -> list[int]:
    return [degree for degree in range(1, limit + 1) if heads % degree == 0]


def _explain_batch(plan: ParallelPlan, batch: int) -> str:
    if batch < plan.batch:
        return f"the batch of {batch} fills {batch} of the {plan.batch} ways that the configuration splits it"
    least, rest = divmod(batch, plan.batch)
    rows = f"{least} or {least + 1}" if rest else f"{least}"
    return f"the batch of {batch} is split {plan.batch} ways, {rows} each, which needs no exchange inside of the model"


def _explain_idle(plan: ParallelPlan, config: ParallelConfig, idle: int, world_size: int, heads: int) -> str:
    ranks = f"{idle} of {world_size} ranks {'is' if idle == 1 else 'are'} not used"
    if all(getattr(config, axis) is not None for axis in _GIVEN):
        return f"{ranks}, as the configuration sets every degree."
    if config.ulysses is not None:
        return f"{ranks}, as ulysses is set to {config.ulysses} and more ways for the batch would not make it faster."
    room = world_size // plan.batch
    if room > plan.ulysses:
        return f"{ranks}, as no number from {plan.ulysses + 1} to {room} divides the model's {heads} heads."
    return f"{ranks}, as more would not make it faster."
