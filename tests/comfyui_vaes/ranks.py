"""What a rank does for tests of VAEs: run one with the others, beside the VAE alone."""

from __future__ import annotations

import contextlib
import os
import unittest.mock
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import parallel_runtime.acceleration
from benchmarks.vae_memory import Case, lone, make_vae, peak_of
from parallel_runtime.acceleration import channels_last
from parallel_runtime.networks.comfyui.comfy_code import use_comfyui
from parallel_runtime.networks.quantised_layers import QuantisedLayer
from parallel_runtime.vae.compiled_decoder import CompiledDecoder
from parallel_runtime.vae.families import find_half
from parallel_runtime.vae.shared_vae import Run, run_half, shared_ranks
from parallel_runtime.vae.vae_weights import RecordedPart
from tests.comfyui_vaes import plain_kernels
from tests.comfyui_vaes.tiny import TINY, make
from tests.recorders import recorded_by


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Inside, norms and SiLU behind them are fused on a CPU, too, and in float32."""
    with (
        unittest.mock.patch.object(channels_last, "takes", lambda x: x.ndim in (4, 5)),
        unittest.mock.patch.object(parallel_runtime.acceleration, "channels_last_kernels", plain_kernels, create=True),
    ):
        yield


@contextlib.contextmanager
def attention_of_a_gpu() -> Iterator[None]:
    """Inside, MiniMax H3's decoder attends as on a GPU: on a CPU ComfyUI's function reads files, which no graph can."""
    import comfy.ldm.minimax.vae
    from comfy.ldm.modules.attention import attention_pytorch

    with unittest.mock.patch.object(comfy.ldm.minimax.vae, "optimized_attention", attention_pytorch):
        yield


def compare(rank: int, world_size: int, comfyui: str, names: list[str], fused: bool) -> dict[str, Any]:
    """Largest difference to the VAE alone, as part of its largest number, by VAE and half; how many ranks ran;
    strides between channels of what attention got, which is 1 for the kernels that keep no products; what was fused how
    often; and what was compiled, and could not be."""
    use_comfyui(comfyui, {"cpu": True})
    compiled = CompiledDecoder("eager")
    called = unittest.mock.Mock(wraps=compiled.methods.call)
    compiled.methods.call = called  # type: ignore[method-assign]
    in_graphs: set[str] = set()
    found: dict[str, dict[str, float]] = {}
    strides: set[int] = set()
    attend = F.scaled_dot_product_attention

    def noting(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        strides.update(tensor.stride(-1) for tensor in tensors)
        return attend(*tensors, **options)

    ran: dict[str, int] = {}
    with torch.inference_mode():
        for name in names:
            tiny, vae = TINY[name], make(TINY[name])
            for half, shape, unit in (("decoder", tiny.latent, 1), ("encoder", tiny.picture, tiny.unit)):
                if shape is None:
                    continue
                x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
                torch.manual_seed(2)
                ranks = ran[f"{name} {half}"] = shared_ranks(vae, half, shape, unit, world_size)
                group = dist.group.WORLD
                with (
                    unittest.mock.patch.object(F, "scaled_dot_product_attention", noting),
                    as_on_a_gpu() if fused else contextlib.nullcontext(),
                    attention_of_a_gpu() if fused else contextlib.nullcontext(),
                ):
                    how: dict[str, Any] = {"fused": fused, "compiled": (lambda: compiled) if fused else None}
                    ours = run_half(vae, half, x.clone(), unit=unit, ranks=ranks, rank=rank, group=group, **how)
                inside = [layer.kind for layer in vae.modules() if isinstance(layer, QuantisedLayer)]
                assert all(inside)
                assert bool(inside) == (fused and tiny.int8)
                if called.called:
                    in_graphs.add(f"{name} {half}")
                    called.reset_mock()
                if ours is None:
                    continue
                torch.manual_seed(2)
                alone = vae.decode(x) if half == "decoder" else vae.encode(x)
                assert ours.shape == alone.shape
                found.setdefault(name, {})[half] = float((ours - alone).abs().max() / alone.abs().max())
    assert not compiled.methods.refused
    calls = {f"{name}{' and SiLU' if silu else ''}": count for (name, silu), count in plain_kernels.calls.items()}
    return {
        "differences": found,
        "ran": ran,
        "strides": sorted(strides),
        "fused": calls,
        "in graphs": sorted(in_graphs),
    }


def record(rank: int, world_size: int, comfyui: str, names: list[str], real: bool = False) -> dict[str, Any]:
    """For each VAE: "differences", of each decoder's call from the same one launched kernel by kernel, over its scale,
    on the first rank; "ran", how often it ran other than by a replay; "known", whether pools record it. The sizes
    alternate, and one rank has as many rows in both.

    Args:
        real: on GPUs, one for each rank.
    """
    use_comfyui(comfyui, {} if real else {"cpu": True})
    device = torch.device("cuda", rank) if real else torch.device("cpu")
    if real:
        torch.cuda.set_device(device)
        os.environ["NCCL_GRAPH_REGISTER"] = "0"  # as in pools (workers/launch.py)
    group = dist.new_group(range(world_size), backend="nccl") if real else dist.group.WORLD
    mesh: Any = SimpleNamespace(sequence=group, sequence_ranks=tuple(range(world_size)), peers=None)
    found: dict[str, Any] = {}
    for name in names:
        vae = make(TINY[name]).to(device).to(torch.bfloat16 if real else torch.float32)
        half = find_half(vae, "decoder")
        if half is None or half.noise:
            continue
        found[name] = {"differences": [], "ran": 0, "rows": 0, "known": half.recorded}
        recorded = RecordedPart()
        recorded_by(None if real else partial(_pretend_to_record, found[name]), recorded)

        def through(run: Run, own: torch.Tensor, recorded: Any = recorded, told: Any = found[name]) -> torch.Tensor:
            def counted(given: torch.Tensor) -> torch.Tensor:
                told["ran"] += 1
                return run(given)

            return recorded.record_or_run(mesh, counted, own, rows=told["rows"])

        shape = list(TINY[name].latent)
        least = world_size * (shape[-2] // world_size + 1)
        with torch.inference_mode():
            for seed in range(10):
                shape[-2] = found[name]["rows"] = least - seed % 2
                x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, vae_type(vae))
                options: dict[str, Any] = {"unit": 1, "ranks": world_size, "rank": rank, "group": group, "tried": True}
                plain = run_half(vae, "decoder", x.clone(), **options)
                ours = run_half(vae, "decoder", x.clone(), **options, through=through)
                if ours is not None and plain is not None:
                    scale = float(plain.abs().max())
                    found[name]["differences"].append(float((ours - plain).abs().max()) / scale)
        recorded.clear()  # NCCL's group does not end while a graph holds its collectives
    if real:
        torch.cuda.synchronize()
        dist.destroy_process_group(group)
    return found


def vae_type(vae: torch.nn.Module) -> torch.dtype:
    """Of its weights."""
    return next(vae.parameters()).dtype


def _pretend_to_record(told: dict[str, Any], call: Any, static: list[torch.Tensor], made_outside: Any) -> Any:
    """As `CudaGraphs.record`: runs it once, and again, uncounted, at each replay."""
    call(static)

    def replay(tensors: list[torch.Tensor]) -> Any:
        told["ran"] -= 1
        for old, new in zip(static, tensors, strict=True):
            old.copy_(new)
        return call(static)

    return replay


LARGE = {
    "KL 2048² decoded": Case("flux", "decoder", (1, 16, 256, 256)),
    "KL 2048² encoded": Case("flux", "encoder", (1, 3, 2048, 2048), 8),
    "Wan decoded": Case("wan", "decoder", (1, 16, 4, 60, 104)),
    "Wan encoded": Case("wan", "encoder", (1, 3, 13, 480, 832), 8),
}


def peaks(rank: int, world_size: int, comfyui: str, names: list[str]) -> dict[str, Any]:
    """Bytes at once: of small VAEs, run with the others and as if there were any; of large ones, alone and as if."""
    use_comfyui(comfyui, {"cpu": True})
    together, as_if = {}, {}
    for name in names:
        vae, case = make(TINY[name]), Case(name, "decoder", TINY[name].latent)
        together[name] = peak_of(vae, case, world_size, rank, torch.float32, dist.group.WORLD)
        with lone():
            as_if[name] = peak_of(vae, case, world_size, rank, torch.float32)
    large = {}
    for name, case in LARGE.items():
        vae = make_vae(case.vae, torch.device("meta"))
        with lone():
            large[name] = peak_of(vae, case, 1, 0), peak_of(vae, case, world_size, rank)
    return {"together": together, "as_if": as_if, "large": large}
