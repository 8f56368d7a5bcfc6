"""Which measurements belong together, in which order, and how long each may take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from .bench import Bench, Found, Measure
from .families import TWIN
from .graphs import Way
from .host_families import HOST_REAL, HostFamily
from .journey_verdict import BEST
from .journey_verdict import NATIVE as NATIVE_JOURNEY
from .measures import journey
from .measures.controlnet import controlnet
from .measures.distances import distances
from .measures.encoder import encoder
from .measures.experts import experts
from .measures.faults import cancel, fault, kill_rank, stop_rank
from .measures.limit import limited
from .measures.loops import loops
from .measures.lora import lora
from .measures.memory import unload
from .measures.pools import pools
from .measures.prompts import prompts
from .measures.speed import short_speed, speed
from .measures.vae import vae
from .vaes import VAES
from .whole_prompts import WHOLE

SETS = (
    "quick", "families", "memory", "experts", "lora", "controlnet", "faults",
    "host_networks", "memory_limit", "journey", "distances", "loops", "vae", "prompts", "encoder", "pools",
)  # fmt: skip
SECONDS = {
    "quick": 350.0,
    "lora": 700.0,
    "controlnet": 560.0,
    "host_networks": 1500.0,
    "memory_limit": 1500.0,
    "journey": 560.0,
    "distances": 560.0,
    "loops": 400.0,
    "vae": 300.0,
    "prompts": 1500.0,
}
"""Of a whole set, by default `USUAL`."""
ALONE = ("host_networks", "memory_limit", "journey", "distances", "loops", "vae", "prompts", "encoder", "pools")
"""Sets that "all" leaves out."""
USUAL = 470.0
SPARE = {"prompts": 40.0, "encoder": 11.0}
"""Gigabytes of the disk that a set's text encoders and VAEs take beside its models, by default few."""
NATIVE = Way()
SMALL = ("klein", "sd35", "sdxl", "wan1")
"""Families of the set "families"; FLUX.1 is in "quick"."""


def plan(name: str, one: str, many: str, families: tuple[str, ...] = ()) -> list[Measure]:
    """Measurements of a set, or of all.

    Args:
        one, many: devices, see Bench; the same where there is only one.
        families: those that the set is limited to; none is all of them.
    """
    names = tuple(each for each in SETS if each not in ALONE) if name == "all" else (name,)
    measures = [measure for part in names for measure in _MAKERS[part](one, many)]
    there = {measure.name: measure for measure in measures if one != many or measure.devices == 1}
    return [
        measure
        for measure in there.values()
        if not families or {_family(file) for file in measure.files} <= set(families)
    ]


def _family(file: str) -> str:
    return file.removesuffix(TWIN)


def _speed(file: str, way: Way, bound: float) -> Measure:
    name = f"speed {file} {'native' if not way.devices else f'{way.sampler} {way.devices}'}"
    return Measure(name, (file,), bound, partial(speed, file=file, way=way), way.gpus)


def _ways(one: str, many: str) -> list[Way]:
    return [Way(devices, sampler) for devices in (one, many) for sampler in ("KSampler", "ParallelSampler")]


def _unload(file: str, way: Way) -> Measure:
    run = partial(unload, file=file, way=way)
    return Measure(f"unload {file} {way.devices or 'native'}", (file,), 90, run, way.gpus)


def _quick(one: str, many: str) -> Iterator[Measure]:
    yield _speed("flux", NATIVE, 70)
    for way in _ways(one, many):
        yield _speed("flux", way, 110 if way.sampler == "KSampler" else 60)
    yield _unload("flux", Way(many))


def _families(one: str, many: str) -> Iterator[Measure]:
    for file in SMALL:
        yield _speed(file, NATIVE, 80)
    for devices in (one, many):
        for file in SMALL:  # a pool's turn of devices is longer than a model's
            yield from (_speed(file, way, 90) for way in _ways(devices, devices)[:2])


def _host_networks(one: str, many: str) -> Iterator[Measure]:
    for file, family in HOST_REAL.items():
        several = isinstance(family, HostFamily) and family.latents  # Parallel Sampler takes them step by step
        for way in (NATIVE, *(each for each in _ways(one, many) if each.sampler == "KSampler" or not several)):
            name = f"{file} {'native' if not way.devices else f'{way.sampler} {way.devices}'}"
            bound = 240 if family.frames or several else 180
            yield Measure(name, (file,), bound, partial(short_speed, file=file, way=way), way.gpus)


def _memory(one: str, many: str) -> Iterator[Measure]:
    for file in ("flux", "sd35"):
        for way in (NATIVE, Way(one), Way(many)):
            yield _unload(file, way)


def _experts(one: str, many: str) -> Iterator[Measure]:
    twins = ("wan14", "wan14" + TWIN)
    for way in (Way(many), NATIVE):
        run = partial(experts, files=twins, way=way)
        yield Measure(f"experts {way.devices or 'native'}", twins, 200, run, way.gpus)


def _lora(one: str, many: str) -> Iterator[Measure]:
    for way in (NATIVE, Way(one), Way(many)):
        run = partial(lora, file="flux", way=way)
        yield Measure(f"lora {way.devices or 'native'}", ("flux",), 220, run, way.gpus)


def _controlnet(one: str, many: str) -> Iterator[Measure]:
    for way in (NATIVE, Way(one), Way(many)):
        run = partial(controlnet, file="flux", way=way)
        yield Measure(f"controlnet {way.devices or 'native'}", ("flux",), 240, run, way.gpus)


def _faults(one: str, many: str) -> Iterator[Measure]:
    sampler = Way(many, "ParallelSampler")
    for way, do, loading in (
        (Way(many), cancel, False),
        (sampler, cancel, False),
        (sampler, cancel, True),
        (sampler, kill_rank, False),
        (Way(many), kill_rank, False),
        (sampler, kill_rank, True),
        (Way(many), stop_rank, False),
    ):
        name = f"{do.__name__} {way.sampler}{' while loading' if loading else ''}"
        run = partial(fault, file="flux", way=way, do=do, loading=loading)
        yield Measure(name, ("flux",), 150, run, way.gpus)


def _memory_limit(one: str, many: str) -> Iterator[Measure]:
    """Under each limit what fits; without one, what it costs beside."""
    for file in ("flux", "own-qwen", "own-ltx", "own-h3"):
        for gib, way in _limits(one, many):
            yield _limited(f"limit {file}", (file,), 170, partial(short_speed, file=file, way=way), way, gib)
    twins = ("own-wan", "own-wan" + TWIN)
    for gib, way in _limits(one, many):
        yield _limited("limit experts", twins, 220, partial(experts, files=twins, way=way), way, gib)


def _limits(one: str, many: str) -> Iterator[tuple[float, Way]]:
    whole, dealt = Way(many), Way(many, weights="dealt")
    host, auto = replace(dealt, weights="host"), replace(dealt, weights="auto")
    alone = replace(host, devices=one)
    for gib, ways in (
        (0, (NATIVE, whole, dealt, host)),
        (24, (NATIVE, dealt, host, auto)),
        (16, (NATIVE, host, alone, auto)),
    ):
        yield from ((gib, way) for way in ways)


def _limited(
    name: str, files: tuple[str, ...], bound: float, measure: Callable[[Bench, Found], None], way: Way, gib: float
) -> Measure:
    limit = f"{gib} GiB" if gib else "whole card"
    kind = f"{way.weights or 'whole'} {way.devices}" if way.devices else "native"
    run = partial(limited, measure=measure, way=way, gib=gib)
    return Measure(f"{name} {limit} {kind}", files, bound, run, way.gpus)


def _journey(one: str, many: str) -> Iterator[Measure]:
    """In this order: each but the second one goes on in the server of the one before."""
    parts: tuple[tuple[str, Callable[[Bench, Found], None]], ...] = (
        (journey.EMPTY, partial(journey.fresh, emptied=True)),
        (NATIVE_JOURNEY, journey.native),
        (journey.FULL, partial(journey.fresh, emptied=False)),
        (BEST, journey.best),
    )
    for name, run in parts:
        yield Measure(name, journey.FILES, 260, run)


def _distances(one: str, many: str) -> Iterator[Measure]:
    for file in ("own-qwen", "own-flux", "own-flux-int8", "own-z-image", "own-wan"):
        yield Measure(f"distances {file}", (file,), 240, partial(distances, file=file))


def _loops(one: str, many: str) -> Iterator[Measure]:
    for file in ("flux", *SMALL, "own-z-image", "own-qwen"):
        yield Measure(f"loops {file}", (file,), 310 if file == "wan1" else 150, partial(loops, file=file))


def _vae(one: str, many: str) -> Iterator[Measure]:
    for name in VAES:
        for way in (NATIVE, Way(one), Way(many)):
            run = partial(vae, name=name, way=way)
            yield Measure(f"vae {name} {way.devices or 'native'}", (), 120, run, way.gpus)


def _encoder(one: str, many: str) -> Iterator[Measure]:
    """On cards for which FLUX.1 and its text encoder are too large together; the pool is on the first."""
    way = Way(one)
    for place in (0, 1):
        run = partial(limited, measure=partial(encoder, file="own-flux", way=way, place=place), way=way, gib=32)
        yield Measure(f"encoder own-flux gpu:{place}", ("own-flux",), 120, run, 1 + place)


def _pools(one: str, many: str) -> Iterator[Measure]:
    yield Measure("pools flux", ("flux",), 150, partial(pools, file="flux"), 2)


def _prompts(one: str, many: str) -> Iterator[Measure]:
    """Parallel VAE goes on where the way without it ended."""
    for file, whole in WHOLE.items():
        for way, parallel_vae in (
            (NATIVE, False),
            *((Way(devices), parallel_vae) for devices in (one, many) for parallel_vae in (False, True)),
        ):
            run = partial(prompts, file=file, way=way, parallel_vae=parallel_vae)
            name = f"prompts {file} {way.devices or 'native'}{' vae' if parallel_vae else ''}"
            yield Measure(name, whole.files, 240, run, way.gpus)


_MAKERS = {
    "quick": _quick,
    "families": _families,
    "memory": _memory,
    "experts": _experts,
    "lora": _lora,
    "controlnet": _controlnet,
    "faults": _faults,
    "host_networks": _host_networks,
    "memory_limit": _memory_limit,
    "journey": _journey,
    "distances": _distances,
    "loops": _loops,
    "vae": _vae,
    "prompts": _prompts,
    "encoder": _encoder,
    "pools": _pools,
}
