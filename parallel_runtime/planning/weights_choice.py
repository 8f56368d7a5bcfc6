"""Where `auto` has a model's weights: the first of whole, dealt and host that fits. Pure: all ranks find the same."""

from __future__ import annotations

from dataclasses import replace

from ..config import SHOWN_WEIGHTS, STREAMED, ParallelConfig
from ..requests.facts import GIB, ModelFacts
from ..said import Said, said
from .coming_blocks import Coming
from .plan import choose
from .wish import TYPICAL, Wish

_FILLED = 2 / 3
"""Of a GPU's memory, for weights where blocks stay that could as well come: requests are larger than TYPICAL, too."""
_MORE = 2 * GIB  # bytes by which a rank has more memory than the one with the least, or both keep as many blocks
_WORTH_THE_HOST = 0.9
"""Weights in the host's memory take at most this share of a step of dealt ones, or the host's memory stays free."""
_RESERVE = 512 << 20  # that a load leaves free beside the weights (`parallel_runtime.memory`, which needs torch)


def choose_weights(wish: Wish, weight_bytes: int) -> ParallelConfig:
    """Return the configuration that a model is loaded with, for whatever request will come: that of the artist, or with
    weights that stream, and how many blocks stay where they do: as many as fit on `auto` and `host`, on `dealt` the
    first, behind which the next is on its way. `weight_bytes` are those of the whole model on a device, by its file.

    Weights stream where whole ones certainly do not fit, or where stages would compute in turn for that. What is in
    doubt stays as it is, and stages stay where nothing that streams fits either. Where others hold memory of a GPU,
    what is free counts, as the ranks have agreed on it, and nothing is in doubt: what is more would be refused. The GPU
    with the least decides, and others keep as many blocks as their own memory holds. Errors as of `check_limits`."""
    wish = replace(wish, request=TYPICAL, loaded=None)
    config, model, machine = wish.config, wish.model, wish.machine
    if config.weights in STREAMED and model.blocks > 1:
        # The link to the host's memory is the slowest: what is on the GPU need not come over it in each step.
        return _placed(wish, model.blocks if config.weights == "host" else 1, weight_bytes)[0]
    if config.weights != "auto" or not _may_stream(wish):
        return config
    choice = choose(wish)
    if choice.reason == "memory" and config.may_change_pixels:
        return config  # the artist prefers PipeFusion
    if choice.reason != "memory" and weight_bytes <= machine.usable_bytes - (_RESERVE if machine.is_crowded else 0):
        return config
    return next((fitting for fitting, _ in _fitting(wish, model.blocks, weight_bytes)), config)


def ways_out(wish: Wish, weight_bytes: int) -> list[Said]:
    """What of `weights` would fit where the configuration does not, as sentences; [] where nothing is known to."""
    in_stages = (wish.config.pipe or 1) > 1
    whole = replace(wish, config=replace(wish.config, pipe=1), request=TYPICAL, loaded=None)
    if wish.config.weights in STREAMED or not _may_stream(whole):
        return []
    template, ways = "Set weights in Parallel Config to {way}: that needs about {size} GiB on each GPU.", []
    for config, needs in _fitting(whole, 1, weight_bytes):
        shown = SHOWN_WEIGHTS.get(config.weights, config.weights)
        way = said("{weights} and stages to 1", weights=shown) if in_stages else shown
        ways.append(said(template, way=way, size=f"{needs / GIB:.1f}"))
    return ways


def _may_stream(wish: Wish) -> bool:
    """A network whose blocks are known, on GPUs of one host of which the memory is known."""
    config, model, machine = wish.config, wish.model, wish.machine
    known = model.splits_sequence and model.blocks > 1 and machine.memory_bytes > 0
    return known and (config.pipe or 1) == 1 and config.hosts == 1 and machine.network is None


def _fitting(wish: Wish, most: int, weight_bytes: int) -> list[tuple[ParallelConfig, int]]:
    """The configurations that fit with weights that stream, in the order of preference, and bytes on each GPU: dealt
    before host, but where both links were measured and host is faster. At `most` so many blocks stay."""
    model, machine = wish.model, wish.machine
    found, seconds = [], {}
    for weights in STREAMED:
        if weights == "dealt" and (wish.ranks == 1 or not machine.link.peer_access):
            continue
        coming = model.block_parameters * model.bytes_per_parameter * _exact(model, weight_bytes)
        if weights == "host" and machine.host_bytes and coming > machine.host_bytes:
            continue
        streamed = replace(wish, config=replace(wish.config, weights=weights))
        config, needs = _placed(streamed, most, weight_bytes)
        if needs <= machine.usable_bytes:
            found.append((config, needs))
            seconds[weights] = choose(replace(wish, config=config)).cost.seconds
    known = machine.host_rate and machine.link.measured and len(found) > 1
    return found[::-1] if known and seconds["host"] < seconds["dealt"] * _WORTH_THE_HOST else found


def _placed(wish: Wish, most: int, weight_bytes: int) -> tuple[ParallelConfig, int]:
    """The configuration, of weights that stream, with how many blocks stay, at `most`, and bytes on each GPU then.
    Where memory is not known the first stays."""
    config, model, machine = wish.config, wish.model, wish.machine
    cost = choose(replace(wish, config=replace(config, resident=0))).cost
    beside, exact, memory = cost.bytes - cost.weight_bytes, _exact(model, weight_bytes), machine.usable_bytes
    room = int(min(machine.memory_bytes * _FILLED, memory - beside) / exact)
    for resident in range(min(most, model.blocks - 1), -1, -1):
        weights = Coming(config.weights, wish.ranks, resident).kept_bytes(model)
        least = resident <= 1 and (not memory or weights * exact + beside <= memory)
        if least or weights <= room:
            break
    placed = replace(config, resident=resident)
    held = _held(replace(wish, config=placed), exact, beside)
    return replace(placed, held=held), int(weights * exact) + beside


def _held(wish: Wish, exact: float, beside: int) -> tuple[int, ...]:
    """How many of the blocks that come to the rank with the least memory each rank keeps, () where none keeps more;
    `beside` are bytes beside the weights."""
    config, ranks, model, machine = wish.config, wish.ranks, wish.model, wish.machine
    coming = Coming(config.weights, ranks, config.resident)
    blocks, counts = len(coming.sizes(model)), []
    for free in machine.free_each if len(machine.free_each) == ranks else ():
        counts.append(0)
        if free < machine.usable_bytes + _MORE:
            continue
        # One that has all needs no room for pictures beyond that of whole weights.
        if coming.kept_bytes(model, blocks) * exact + beside <= free:
            counts[-1] = blocks
            continue
        room = min(free * _FILLED, free - beside)
        fitting = (count for count in range(blocks - 1, 0, -1) if coming.kept_bytes(model, count) * exact <= room)
        counts[-1] = next(fitting, 0)
    return tuple(counts) if any(counts) else ()


def _exact(model: ModelFacts, weight_bytes: int) -> float:
    """Bytes by those that parameters are reckoned with: those of a quantised file have no whole number."""
    return weight_bytes / (model.parameters * model.bytes_per_parameter)
