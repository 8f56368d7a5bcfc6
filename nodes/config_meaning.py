"""What the values of Parallel Config mean for the devices. No ComfyUI needed."""

from __future__ import annotations

from parallel_runtime.config import AXES, SHOWN_AXES, ParallelConfig
from parallel_runtime.errors import ConfigurationError
from parallel_runtime.said import Said, said, together


def preview(config: ParallelConfig) -> Said:
    """Return which devices the configuration takes, and what it leaves open; what is wrong is told, and not raised.

    What it does with a model is on Parallel Loader, and of a run on the sampler. They raise what is wrong, too.
    """
    # Imported here and not at the top: ComfyUI's start shall not pay for it.
    import torch

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
    if named:
        meaning = said(
            "{devices}: {named}. The rest of the split is chosen for the model and the picture; the loader shows it.",
            devices=devices,
            named=named,
        )
    else:
        template = "{devices}. The split is chosen for the model and the picture; the loader shows it."
        meaning = said(template, devices=devices)
    if ends := devices_in_the_way(spec):
        others = ", ".join(map(str, ends))
        leave = said("What is loaded on {others} now leaves when a model is loaded on these devices.", others=others)
        meaning = together((meaning, leave))
    return meaning
