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
ConfigSocket = io.Custom("PARALLEL_CONFIG")

DEGREES = ("auto", "1", "2", "3", "4", "6", "8")
CFG_DEGREES = ("auto", "1", "2")
STAGES = ("auto", FASTER, *DEGREES[1:])
PATCHES = (*DEGREES, "12", "16")

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


def _menu(name: str, options: Sequence[str], tooltip: str, advanced: bool = True) -> io.Input:
    extra, entries = {"advanced": True} if advanced else None, numbers(options)
    return io.Combo.Input(name, options=entries, default=AUTO, optional=True, extra_dict=extra, tooltip=tooltip)


def _count(name: str, most: int, tooltip: str) -> io.Input:
    return io.Int.Input(name, default=1, min=1, max=most, optional=True, extra_dict={"advanced": True}, tooltip=tooltip)


class ParallelConfigNode(io.ComfyNode):
    """Outputs `ParallelConfig.to_mapping()`: plain data, so that it travels and is compared like any value."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make_schema(
            node_id="ParallelConfig",
            display_name="Parallel Config",
            description="How a model is split over the GPUs. Leave everything on auto, or connect no config at all: "
            "the split is then chosen from the model, the picture and the devices.",
            search_aliases=["multi gpu", "devices", "ulysses", "parallel"],
            has_intermediate_output=True,  # ComfyUI sends the text again where the node is cached
            inputs=[
                io.String.Input(
                    "devices",
                    default="auto",
                    optional=True,
                    tooltip="Which GPUs take part: auto for all that ComfyUI sees, numbers such as 0,1, "
                    "or cpu:2 for two processes on the CPU.",
                ),
                _menu(
                    "cfg",
                    CFG_DEGREES,
                    tooltip="2 computes the positive and the negative prompt at the same time, on different GPUs. "
                    "Helps only where CFG is above 1.",
                ),
                _menu("data", DEGREES, tooltip="Spreads the pictures of a batch over this many groups of GPUs."),
                _menu(
                    "ulysses",
                    DEGREES,
                    tooltip="Splits one picture over this many GPUs: each computes a part of the attention heads. "
                    "At most the model's head count.",
                ),
                _menu(
                    "attention",
                    ATTENTION_BACKENDS,
                    tooltip="Attention kernel. Auto measures which is the fastest on your GPU. The choice "
                    "changes speed, and the result only by rounding; sage changes it slightly more. ComfyUI: its own "
                    "function; with compile off, one GPU then gives Load Diffusion Model's picture bit for bit.",
                ),
                _menu(
                    "compile",
                    _COMPILE_ENTRIES,
                    tooltip="Compiles the model's blocks with torch.compile, which makes every step faster. Auto: on "
                    "GPUs, before the first step, once per machine.",
                ),
                _count(
                    "hosts",
                    64,
                    tooltip="How many machines take part. Above 1, start torchrun on each other machine first; "
                    "the help page shows it.",
                ),
                _menu(
                    "ring",
                    DEGREES,
                    tooltip="Splits one picture over this many GPUs that pass parts of it round. Helps where there are "
                    "more GPUs than attention heads, or links that Ulysses keeps waiting.",
                ),
                _menu(
                    "stages",
                    STAGES,
                    tooltip="PipeFusion: cuts the model into this many parts, each on its own GPU. Changes the picture "
                    "slightly; for GPUs joined by slow links or too small for the model. Auto never changes the "
                    'picture; "faster, slightly different" lets auto take PipeFusion where it gains.',
                    advanced=False,
                ),
                _menu(
                    "patches",
                    PATCHES,
                    tooltip="Parts of the picture that travel through the stages one behind the other; auto: as many "
                    "as stages. More of them change the picture more. Without stages, nothing.",
                ),
                _count(
                    "warmup_steps",
                    100,
                    tooltip="How many steps the stages first compute exactly. More of them are slower and closer to "
                    "the picture of one GPU. Without stages, nothing.",
                ),
                _menu(
                    "weights",
                    _WEIGHTS_ENTRIES,
                    tooltip="Where a model's weights are. Whole: each GPU has all. Spread: each GPU keeps its share, "
                    "and gets the rest of a block from the others just before it runs. Host: blocks come from the "
                    "computer's memory. The picture is the same. Auto: the first of these that fits.",
                    advanced=False,
                ),
            ],
            outputs=[ConfigSocket.Output(display_name="config", tooltip="For Parallel Loader.")],
            hidden=[io.Hidden.unique_id],
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
        """Pass the values on, of which `degrees` are cfg, data, ulysses, ring and patches, and show what they ask for;
        ConfigurationError where they cannot hold."""
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
        return io.NodeOutput(config.to_mapping(), ui=show_text(cls.hidden.unique_id, preview(config)))


def preview(config: ParallelConfig) -> Said:
    """Which devices the configuration takes, and what it leaves open. What is wrong is told, and not raised: loader and
    sampler raise it, and say what it does with a model and a run."""
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
