"""Where a forward of ComfyUI's own network spends its time in a rank: milliseconds, and kernels by kind.

    torchrun --nproc-per-node 2 -m benchmarks.host_step_profile --comfyui ~/ComfyUI --profile own-flux own-flux-fp8
    torchrun --nproc-per-node 2 -m benchmarks.host_step_profile --comfyui ~/ComfyUI --tiny own-flux  # on CPUs

Models are those of benchmarks/in_comfyui/host_families.py, with random weights made on the GPU: ComfyUI's loader gets
them as tensors and not as a file, and all that follows is what a rank does (blocks cut, compiled, forwards recorded).
`--format` takes another of its formats than the model's. A variant is what $PARALLEL_DIT_OFF holds, with `+` in
between; `native` is the network as ComfyUI runs it, whole on each rank, `uncompiled` ours without the compiler, and
`heads`, `inputs` or `int8` (inputs as layers round them) what goes through the host's memory, whatever is
reckoned to be sooner. The distance is from the first variant's output, over its norm; calls of one variant should be
0 apart.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from parallel_runtime.config import ATTENTION_BACKENDS
from parallel_runtime.mesh.mesh import Mesh, single_rank_mesh
from parallel_runtime.networks import block_attention
from parallel_runtime.networks.comfyui.comfy_network import ComfyNetwork, OwnCache
from parallel_runtime.networks.comfyui.prepared_network import prepare_network
from parallel_runtime.networks.comfyui.seam import enter
from parallel_runtime.networks.facts import describe_network
from parallel_runtime.networks.stages import Stages
from parallel_runtime.networks.tables.blocks import LATENT_SHAPES
from parallel_runtime.networks.token_split import TokenSplit
from parallel_runtime.planning.host_route import bytes_of_inputs
from parallel_runtime.requests.facts import MachineFacts
from parallel_runtime.switches import SWITCHES, VARIABLE

from . import slow_slot
from .in_comfyui.host_families import HostFamily, loaded_as_tensors
from .in_comfyui.host_files import SCALED_INPUTS
from .kernel_times import kind_of, milliseconds, profile
from .profiled_ranks import finish, measured, start

_SIGMA = 0.7
_WARM = 4
"""Calls before one is timed: the second is recorded, the third tried."""
_SENT = {"heads": 0, "inputs": 2, "int8": 1}
"""Bytes of an input, as of `bytes_of_inputs`."""
_SPATIAL, _TEMPORAL = 8, 4
"""Pixels of a latent position, frames of one."""


@dataclass(frozen=True)
class Loaded:
    """A network on the device with one call of it."""

    network: torch.nn.Module
    size: int
    latent: Any
    dtype: torch.dtype
    x: torch.Tensor
    timestep: torch.Tensor
    conditioning: Mapping[str, Any]


def load(family: HostFamily, comfyui: Path, device: torch.device, batch: int) -> Loaded:
    """ComfyUI's own loader on random tensors, and its own way from a conditioning to a call's arguments."""
    import comfy.cli_args
    import comfy.sd
    import comfy.utils

    from .in_comfyui.host_files import header_of, list_parts

    on_cpu = comfy.cli_args.args.cpu
    parts = list_parts(family, comfyui, seed=3)
    comfy.cli_args.args.cpu = on_cpu  # which the list has no GPU for
    tensors = {part.key: part.make(str(device)).to(part.dtype) for part in parts}
    size = sum(tensor.nbytes for tensor in tensors.values())
    quantised = any(key.endswith("comfy_quant") for key in tensors)
    plain = torch.float8_e4m3fn if family.format == "fp8" else family.dtype
    options = {"dtype": None if quantised else plain, "offload_device": device}
    patcher = comfy.sd.load_diffusion_model_state_dict(
        tensors, model_options=options, metadata=header_of(family), disable_dynamic=True
    )
    del tensors
    model = patcher.model
    network = model.diffusion_model.to(device)
    dtype = model.get_dtype_inference()
    generator = torch.Generator(device).manual_seed(5)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    width, height = family.size
    form = model.latent_format
    text = family.text
    given = {"cross_attn": noise(batch, text.length, text.width), "guidance": text.guidance}
    if family.latents:
        x, shapes = comfy.utils.pack_latents([noise(*shape) for shape in family.latents])
        given["latent_shapes"] = model.latent_shapes = shapes
    else:
        frames = ((family.frames or 1) - 1) // _TEMPORAL + 1
        sizes = ((frames,) if form.latent_dimensions == 3 else ()) + (height // _SPATIAL, width // _SPATIAL)
        x = noise(batch, form.latent_channels, *sizes)
    if text.pooled:
        given["pooled_output"] = noise(batch, text.pooled)
    conditioning = {name: cond.cond for name, cond in model.extra_conds(noise=x, device=device, **given).items()}
    conditioning["context"] = conditioning.pop("c_crossattn")
    timestep = model.model_sampling.timestep(torch.full((batch,), _SIGMA, device=device)).float()
    if hasattr(network, "av_ca_timestep_scale_multiplier"):
        conditioning["a_timestep"] = timestep  # which LTX-2's own forward adds before the seam
    arguments = {name: _as(dtype, value, device) for name, value in conditioning.items()}
    return Loaded(network, size, form, dtype, x.to(dtype), timestep, arguments)


def _as(dtype: torch.dtype, value: Any, device: torch.device) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(device, dtype if value.is_floating_point() else value.dtype)


def native(loaded: Loaded) -> Callable[[], torch.Tensor]:
    """A call as ComfyUI makes it; before the blocks are cut."""

    import comfy.utils

    def call() -> torch.Tensor:
        arguments = {**loaded.conditioning, "transformer_options": {}}
        shapes = arguments.pop(LATENT_SHAPES, None)
        x = loaded.x if shapes is None else comfy.utils.unpack_latents(loaded.x, shapes)
        output = enter(loaded.network, x, loaded.timestep, arguments)
        return output if shapes is None else comfy.utils.pack_latents(output)[0]

    return call


class Cut:
    """The network with its blocks cut, to be wrapped once for each variant."""

    def __init__(self, loaded: Loaded, mesh: Mesh, device: torch.device, machine: MachineFacts, attention: str):
        self._loaded = loaded
        self._attention = attention
        self._mesh = mesh
        self._described = describe_network(loaded.network, loaded.size, loaded.latent.latent_dimensions)
        assert self._described.data is not None, self._described.facts.why_whole
        split = TokenSplit(single_rank_mesh())
        split.tokens.machine = machine
        prepare_network(loaded.network, self._described.data, split)
        self._held: Any = SimpleNamespace(
            network=loaded.network,
            split=split,
            here=True,
            device=device,
            stream=None,
            stages=Stages(loaded.network, None, split, None),
            own_cache=OwnCache(self._described.data),
        )

    def wrap(self, compiles: bool) -> tuple[ComfyNetwork, Callable[[], torch.Tensor]]:
        """A wrapped network, and a call of it over the mesh."""
        loaded = self._loaded
        network = ComfyNetwork(self._held, self._described, loaded.latent, self._attention, loaded.dtype, compiles)
        network.set_mesh(self._mesh)
        return network, lambda: network.predict(loaded.x, loaded.timestep, loaded.conditioning)


def show(report: Mapping[str, Any], top: int) -> None:
    """Print a profile: kinds, and the longest kernels of each."""
    print(f"   busy {report['busy']:.2f} ms, {report['launches']:.0f} launches", flush=True)
    for kind, ms in sorted(report["kinds"].items(), key=lambda item: -item[1]):
        print(f"   {kind:28s} {ms:7.2f}")
        longest = [each for each in report["longest"] if kind_of(each[0]) == kind]
        for name, count, mean, total in longest[:top]:
            print(f"      {total:6.2f} ms = {count:5.1f} x {mean:7.1f} us  {name[:90]}")


def measure(
    family: HostFamily, mesh: Mesh, device: torch.device, machine: MachineFacts, options: argparse.Namespace
) -> None:
    """Print one line for each variant, with a profile under it."""
    lead = mesh.sequence_index == 0
    loaded = load(family, options.comfyui, device, options.batch)
    cut: Cut | None = None
    reference: torch.Tensor | None = None
    for variant in options.variants.split(","):
        torch._dynamo.reset()
        words = [word for word in variant.split("+") if word in SWITCHES]
        os.environ[VARIABLE] = ",".join(words)
        forced = [number for sent, number in _SENT.items() if sent in variant.split("+")]
        as_told = (lambda *asked, forced=forced, **more: forced[0]) if forced else bytes_of_inputs
        block_attention.bytes_of_inputs = as_told
        network: ComfyNetwork | None = None
        if variant == "native":
            assert cut is None, "native comes first"
            call = native(loaded)
        else:
            cut = cut or Cut(loaded, mesh, device, machine, options.attention)
            network, call = cut.wrap("uncompiled" not in variant)
        started = time.perf_counter()
        output = call().float()
        first = time.perf_counter() - started
        apart = 0.0
        for _ in range(_WARM):
            before, output = output, call().float()
            apart = float((output - before).norm() / output.norm())  # of the last two: plain, recorded and replayed
        ms = milliseconds(call, options.repeats)
        reference = output if reference is None else reference
        distance = float((output - reference).norm() / reference.norm())
        refused = _refused(network)
        if lead:
            line = f"== {family.described} [{variant or 'all on'}] on {mesh.plan.sequence}: {ms:.2f} ms"
            told = f"distance {distance:.2e}, the last two calls {apart:.2e} apart"
            print(f"{line}, first {first:.1f} s, {told} {refused}", flush=True)
        if options.profile and device.type == "cuda":
            report = profile(call)  # on every rank, as they exchange
            if lead:
                show(report, options.top)
        if network is not None:
            network.forget_runs()
    del loaded, cut, call, network
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _refused(network: ComfyNetwork | None) -> str:
    """Blocks that run as they are though they were to be compiled, in words."""
    owner = network._compiled if network is not None else None
    refused = owner.methods.refused if owner is not None else {}
    return "".join(f"; {each.__qualname__} not compiled: {why[:160]}" for each, why in refused.items())


@torch.no_grad()
def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=loaded_as_tensors())
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--format", choices=["", "fp8", "scaled fp8", SCALED_INPUTS, "int8"])
    parser.add_argument("--variants", default="native,")
    parser.add_argument("--size", type=int, help="pixels of a side, where it is not the model's")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--top", type=int, default=4)
    parser.add_argument("--attention", default="auto", choices=ATTENTION_BACKENDS)
    parser.add_argument("--alone", type=int, default=0, help="one GPU as one of so many (benchmarks/alone.py)")
    parser.add_argument("--slower", type=int, default=1, help="slots so many times as slow (benchmarks/slow_slot.py)")
    parser.add_argument("--tiny", action="store_true", help="small networks, on CPUs where there are no GPUs")
    options = parser.parse_args()
    device, families, mesh = start(options)
    machine = slow_slot.told(measured(device, mesh.plan.sequence), options.slower)
    slow_slot.begin(options.slower)
    if mesh.sequence_index == 0:
        print(machine, flush=True)
    for name in options.models:
        family = families[name]
        assert isinstance(family, HostFamily)
        if options.format is not None:
            family = replace(family, format=options.format)
        if options.size:
            family = replace(family, size=(options.size, options.size))
        measure(family, mesh, device, machine, options)
    finish()


if __name__ == "__main__":
    main()
