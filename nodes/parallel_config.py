"""Parallel Config: the artist's wishes for the split, as a socket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from comfy_api.latest import io

from parallel_runtime.config import (
    ALWAYS_COMPILE,
    ATTENTION_BACKENDS,
    AXES,
    COMPILE_MODES,
    FASTER,
    SHOWN_AXES,
    SHOWN_WEIGHTS,
    WEIGHTS,
    ParallelConfig,
)
from parallel_runtime.errors import ConfigurationError
from parallel_runtime.said import Said, said, together

from .menu_entry import MenuEntry, numbers
from .node_text import make_schema, show_text

AUTO = "auto"
_ADVANCED = {"advanced": True}
ConfigSocket = io.Custom("PARALLEL_CONFIG")

DEGREES = (AUTO, "1", "2", "3", "4", "6", "8")

_COMPILED_BEFORE: dict[str, list[object]] = {"auto": [True, ALWAYS_COMPILE], "off": [False]}
_COMPILE_ENTRIES = [MenuEntry(mode, _COMPILED_BEFORE.get(mode, [])) for mode in COMPILE_MODES]
"""Graphs and prompts of earlier versions hold true, false and "on"."""

_WEIGHTS_ENTRIES = [
    MenuEntry(SHOWN_WEIGHTS.get(place, place), [place] if place in SHOWN_WEIGHTS else []) for place in WEIGHTS
]
_PLACES = {shown: place for place, shown in SHOWN_WEIGHTS.items()}


def read_degree(entry: str | int) -> int | None:
    """Number of a degree's menu entry, or that number; None for auto and what `auto` is allowed."""
    return None if entry in (AUTO, FASTER) else int(entry)


def _menu(name: str, options: Sequence[str], extra: dict[str, Any] | None = _ADVANCED) -> io.Input:
    return io.Combo.Input(name, options=numbers(options), default=AUTO, optional=True, extra_dict=extra)


class ParallelConfigNode(io.ComfyNode):
    """Outputs `ParallelConfig.to_mapping()`: plain data, so that it travels and is compared like any value."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make_schema(
            "ParallelConfig",
            search_aliases=["multi gpu", "devices", "ulysses", "parallel"],
            has_intermediate_output=True,  # ComfyUI sends the text again where the node is cached
            inputs=[
                io.String.Input("devices", default="auto", optional=True),
                _menu("cfg", DEGREES[:3]),
                _menu("data", DEGREES),
                _menu("ulysses", DEGREES),
                _menu("attention", ATTENTION_BACKENDS),
                _menu("compile", _COMPILE_ENTRIES),
                io.Int.Input("hosts", default=1, min=1, max=64, optional=True, extra_dict=_ADVANCED),
                _menu("ring", DEGREES),
                _menu("stages", (AUTO, FASTER, *DEGREES[1:]), extra=None),
                _menu("patches", (*DEGREES, "12", "16")),
                io.Int.Input("warmup_steps", default=1, min=1, max=100, optional=True, extra_dict=_ADVANCED),
                _menu("weights", _WEIGHTS_ENTRIES, extra=None),
            ],
            outputs=[ConfigSocket.Output()],
            hidden=[io.Hidden.unique_id],  # ComfyUI keeps the results of two such nodes apart
        )

    @classmethod
    def execute(
        cls,
        devices: str = AUTO,
        attention: str = AUTO,
        compile: str = AUTO,
        hosts: int = 1,
        stages: str | int = AUTO,
        warmup_steps: int = 1,
        weights: str = AUTO,
        **degrees: str | int,
    ) -> io.NodeOutput:
        """Pass the values on (`degrees`: cfg, data, ulysses, ring, patches); ConfigurationError if they cannot hold."""
        split: dict[str, Any] = {axis: read_degree(entry) for axis, entry in degrees.items()}
        config = ParallelConfig(
            devices=devices.strip(),
            pipe=read_degree(stages),
            may_change_pixels=stages == FASTER,
            warmup_steps=warmup_steps,
            attention=attention,
            compile=compile,
            hosts=hosts,
            weights=_PLACES.get(weights, weights),
            **split,
        )
        return io.NodeOutput(config.to_mapping(), ui=show_text(preview(config)))


def preview(config: ParallelConfig) -> Said:
    """Which devices the configuration takes, and what it leaves open, or what is wrong, which the loader raises."""
    # Imported here and not at the top: ComfyUI's start shall not pay for it.
    from workers.client.pool_registry import devices_in_the_way
    from workers.launch import count_devices, resolve_devices

    try:
        spec = resolve_devices(config, torch.cuda.device_count)
    except ConfigurationError as error:
        return error.said
    devices = count_devices(spec.device_type, spec.world_size)
    if spec.hosts > 1:
        devices = said("{devices} of {hosts} hosts", devices=devices, hosts=spec.hosts)
    elif spec.device_type == "cuda":
        devices = said("{devices} ({numbers})", devices=devices, numbers=", ".join(map(str, spec.devices)))
    given = {SHOWN_AXES.get(axis, axis): getattr(config, axis) for axis in AXES}
    named = ", ".join(f"{axis} {degree}" for axis, degree in given.items() if degree is not None)
    template = "{devices}. The split is chosen for the model and the picture; the loader shows it."
    if named:
        template = (
            "{devices}: {named}. The rest of the split is chosen for the model and the picture; the loader shows it."
        )
    meaning = said(template, devices=devices, named=named)
    if ends := devices_in_the_way(spec):
        others = ", ".join(map(str, ends))
        leave = said("What is loaded on {others} now leaves when a model is loaded on these devices.", others=others)
        meaning = together((meaning, leave))
    return meaning
