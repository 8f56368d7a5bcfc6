"""The artist's wish (`ParallelConfig`) and what it resolves to for one request (`ParallelPlan`)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from .errors import ConfigurationError
from .said import Said, said, together

CONFIG_VERSION = 1
AXES = ("data", "cfg", "pipe", "ring", "ulysses")
"""Mesh axes, outermost first; ulysses is innermost because its ranks exchange the most."""
SHOWN_AXES = {"pipe": "stages"}
"""Axes that artists know by another name."""
FASTER = "faster, slightly different"
"""How artists allow `auto` to change pixels."""
COMFYUIS = "ComfyUI"
"""Attention that is ComfyUI's own function, as it is."""
ATTENTION_BACKENDS = ("auto", "sdpa", "cudnn", "flash", "efficient", "math", "flash3", "sage", COMFYUIS)
COMPILE_MODES = ("auto", "off")
ALWAYS_COMPILE = "on"
"""What graphs of earlier versions hold beside COMPILE_MODES, and tests on CPUs ask for."""
WEIGHTS = ("auto", "whole", "dealt", "host")
SHOWN_WEIGHTS = {"dealt": "spread"}
"""Places of weights that artists know by another name."""
STREAMED = ("dealt", "host")
"""Of WEIGHTS, those of which a GPU has a block when it runs."""

MOST_CPU_RANKS = 64
_MOST = 10_000
"""Of whatever is counted."""
_COUNT = said("a whole number from 1 to {most}", most=f"{_MOST:,}")
_AUTO_OR_COUNT = said("auto or {count}", count=_COUNT)
_LONGEST_SHOWN = 80
_DEVICES = re.compile(r"auto|cpu(:[1-9]\d{0,3})?|\d{1,4}(,\d{1,4})*", re.ASCII)

_FOUND = ("resident", "held")
"""Fields that no artist sets."""


@dataclass(frozen=True)
class ParallelConfig:
    """What the artist asks for; None in a degree means `auto`. ConfigurationError: a value that cannot hold."""

    devices: str = "auto"  # every GPU that ComfyUI may see, else one CPU rank; or a list such as `0,1`, or `cpu:N`
    data: int | None = None
    cfg: int | None = None
    pipe: int | None = None  # above 1 PipeFusion, which changes the picture slightly
    ring: int | None = None
    ulysses: int | None = None
    patches: int | None = None  # parts that PipeFusion cuts the latent into; None takes as many as there are stages
    warmup_steps: int = 1  # exact ones at the start of PipeFusion, which then works with the K and V of the step before
    attention: str = "auto"  # one of ATTENTION_BACKENDS
    # Regional torch.compile of the repeated blocks: one of COMPILE_MODES, or ALWAYS_COMPILE. `auto` compiles on GPUs,
    # and not on a CPU. Graphs and prompts of earlier versions hold a bool, taken for on and off.
    compile: str = "auto"
    hosts: int = 1  # machines that the pool spans; each brings as many devices (docs/several-hosts.md)
    # With pipe on auto, PipeFusion may be taken. Without, stages that memory asks for compute the whole picture in
    # turn, which is exact.
    may_change_pixels: bool = False
    # One of WEIGHTS. Every GPU has all of them; each keeps its share of every block, and gets the others' just before
    # the block runs; or blocks come from memory of the host, of which each rank fills its share.
    weights: str = "auto"
    resident: int = 0  # blocks that stay whole on each GPU where weights stream; `choose_weights` finds it, as `held`
    held: tuple[int, ...] = ()  # of each rank, how many of the other blocks it keeps, where one has more memory
    version: int = CONFIG_VERSION  # of the schema; a newer one than ours is refused

    def __post_init__(self) -> None:
        if not isinstance(self.version, int) or self.version > CONFIG_VERSION:
            what = (
                "This parallel configuration has version {version}, and the installed Parallel DiT reads up to version "
                "{config_version}."
            )
            fix = "Update Parallel DiT, or make the Parallel Config node anew."
            raise ConfigurationError(what, fix, version=self.version, config_version=CONFIG_VERSION)
        if not isinstance(self.devices, str) or not _DEVICES.fullmatch(self.devices):
            fix = "Write auto, GPU numbers such as 0,1, or cpu:2 for two processes on the CPU."
            raise ConfigurationError("Devices {devices} is not understood.", fix, devices=_shown(self.devices))
        if self.devices.startswith("cpu:") and int(self.devices[4:]) > MOST_CPU_RANKS:
            what = "Devices {devices} asks for more than {most_cpu_ranks} processes on the CPU."
            fix = "Write fewer: more processes than cores gain nothing."
            raise ConfigurationError(what, fix, devices=repr(self.devices), most_cpu_ranks=MOST_CPU_RANKS)
        numbers = self.device_indices
        if numbers is not None and len(set(numbers)) != len(numbers):
            what = "Devices {devices} names a GPU twice."
            raise ConfigurationError(what, "Name each GPU once.", devices=_shown(self.devices))
        if isinstance(self.compile, bool):
            object.__setattr__(self, "compile", "on" if self.compile else "off")
        for name in (*AXES, "patches"):
            self._check(name, getattr(self, name) is None or _is_count(getattr(self, name)), _AUTO_OR_COUNT)
        for name in ("warmup_steps", "hosts"):
            self._check(name, _is_count(getattr(self, name)), _COUNT)
        self._check("cfg", self.cfg is None or self.cfg <= 2, said("auto, 1 or 2, as there are two CFG branches"))
        self._check("may_change_pixels", isinstance(self.may_change_pixels, bool), said("true or false"))
        self._check("attention", self.attention in ATTENTION_BACKENDS, ", ".join(ATTENTION_BACKENDS))
        self._check("compile", self.compile in (*COMPILE_MODES, ALWAYS_COMPILE), ", ".join(COMPILE_MODES))
        self._check("weights", self.weights in WEIGHTS, ", ".join(WEIGHTS))
        if self.weights in STREAMED:
            if (self.pipe or 1) > 1:
                what = "Weights is {weights}, and stages is {pipe}: stages keep weights of their own."
                fix = "Set stages to 1, or weights to whole."
                raise ConfigurationError(what, fix, weights=self.weights, pipe=self.pipe)
            if self.hosts > 1:
                what = "Weights is {weights}, which goes over the memory of one machine, and hosts is {hosts}."
                fix = "Set hosts to 1, or weights to whole."
                raise ConfigurationError(what, fix, weights=self.weights, hosts=self.hosts)
            object.__setattr__(self, "pipe", 1)

    def _check(self, name: str, holds: bool, choices: str) -> None:
        if not holds:
            value = _shown(getattr(self, name))
            what = "{name} is {value}."
            raise ConfigurationError(what, "Choose: {choices}.", name=name, value=value, choices=choices)

    @property
    def device_indices(self) -> tuple[int, ...] | None:
        """GPU numbers where `devices` lists them, else None."""
        return tuple(int(part) for part in self.devices.split(",")) if self.devices[0].isdigit() else None

    def may_use_gpu(self, index: int) -> bool:
        """Whether a rank may compute on this GPU."""
        listed = self.device_indices
        return index in listed if listed is not None else not self.devices.startswith("cpu")

    @property
    def keeps_pixels(self) -> bool:
        """The picture is that of one GPU up to rounding, whatever is chosen. Stages that are set are asked for."""
        return self.pipe == 1 or (self.pipe is None and not self.may_change_pixels)

    def compiles(self, on_gpu: bool) -> bool:
        """Whether the model's blocks are compiled."""
        return self.compile == ALWAYS_COMPILE or (self.compile == "auto" and on_gpu)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> ParallelConfig:
        """Read a configuration from plain data (the PARALLEL_CONFIG socket, the wire); ConfigurationError where it is
        no mapping, a newer version, or has a field that this version does not have."""
        if not isinstance(values, Mapping):
            what = "A parallel configuration was expected, not {name}."
            raise ConfigurationError(what, "Connect a Parallel Config node.", name=type(values).__name__)
        cls(version=values.get("version", CONFIG_VERSION))  # fields of a newer version are not known either
        unknown = sorted(set(values) - {f.name for f in fields(cls) if f.name not in _FOUND})
        if unknown:
            what = "The parallel configuration has fields that are not known: {unknown}."
            fix = "Make the Parallel Config node anew, or update Parallel DiT."
            raise ConfigurationError(what, fix, unknown=", ".join(unknown))
        return cls(**values)

    def to_mapping(self) -> dict[str, Any]:
        """Plain data, as `from_mapping` reads it; each rank finds the rest."""
        return {name: value for name, value in asdict(self).items() if name not in _FOUND}


@dataclass(frozen=True)
class ParallelPlan:
    """Degrees of the mesh for one request: world_size == data * cfg * pipe * ring * ulysses. `patches` and
    `warmup_steps` mean something where pipe > 1 only, and are 1 and 0 elsewhere."""

    data: int = 1
    cfg: int = 1
    pipe: int = 1
    ring: int = 1
    ulysses: int = 1
    patches: int = 1
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        for name in (*AXES, "patches", "warmup_steps"):
            value, least = getattr(self, name), int(name != "warmup_steps")
            if value < least:
                what = "{name} is {value}."
                raise ConfigurationError(what, "It is at least {least}.", name=name, value=value, least=least)

    @property
    def shape(self) -> tuple[int, ...]:
        """Degrees in the order of AXES."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def world_size(self) -> int:
        """Ranks that take part."""
        return math.prod(self.shape)

    @property
    def batch(self) -> int:
        """Ways the batch is split (data and cfg are one split where ComfyUI hands over a ready batch)."""
        return self.data * self.cfg

    @property
    def sequence(self) -> int:
        """Ways the token sequence is split."""
        return self.ring * self.ulysses

    def __str__(self) -> str:
        return str(self.words)

    @property
    def words(self) -> Said:
        """Its degrees above 1."""
        named = [self._named(axis, degree) for axis, degree in zip(AXES, self.shape, strict=True) if degree > 1]
        return together(named, " × ") if named else said("one device")

    def _named(self, axis: str, degree: int) -> Said:
        if axis != "pipe":
            return Said(f"{axis} {degree}")
        if self.patches == 1:
            return said("stages {degree} (in turn)", degree=degree)
        if self.warmup_steps == 1:
            return said("stages {degree} ({patches} patches, 1 warm-up step)", degree=degree, patches=self.patches)
        template = "stages {degree} ({patches} patches, {steps} warm-up steps)"
        return said(template, degree=degree, patches=self.patches, steps=self.warmup_steps)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MOST


def _shown(value: object) -> str:
    """A value of the artist's, or of whoever sends requests, in a message."""
    text = repr(value) if not isinstance(value, int) or abs(value) <= _MOST else f"a number over {_MOST}"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
