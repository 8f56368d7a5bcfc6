"""ComfyUI's own networks whose weights come block by block, on each rank, in every format that ComfyUI reads."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from parallel_runtime.config import ParallelConfig
from parallel_runtime.loading import host_copies
from parallel_runtime.loading.comfyui_network import NetworkReader
from parallel_runtime.requests.comfyui_code import ComfyuiCode
from parallel_runtime.requests.conditioning import refer
from parallel_runtime.requests.requests import Forward, Load, Release
from tests.parallel_runtime.streamed_run import KINDS, PoolRank, staying, unlike_counts

UNLIKE = ", unlike ranks"


def compare(rank: int, world_size: int, comfyui: str, folder: str, formats: list[str]) -> dict[str, Any]:
    """{"format weights": whether it is what whole weights give}, and the shares of the bytes that a rank keeps."""
    pool = PoolRank(rank, world_size, folder)
    found: dict[str, Any] = {}
    plain = Path(folder) / "source.safetensors"
    if rank == 0:
        _write(plain, comfyui, "plain")
    dist.barrier()
    patches = (pool.keep(comfyui, str(plain)), "")
    for name in formats:
        path = Path(folder) / f"{name}.safetensors"
        if rank == 0:
            _write(path, comfyui, name)
        dist.barrier()
        code = ComfyuiCode(comfyui, {"cpu": True}, "float32" if name == "plain" else "", False)
        outputs: dict[str, torch.Tensor] = {}
        for weights, kind in (("whole", "whole"), *((f"{kind}{how}", kind) for kind in KINDS for how in ("", UNLIKE))):
            config = ParallelConfig(devices=f"cpu:{world_size}", weights=kind)
            model = f"{name} {weights}"
            unlike = staying(1, unlike_counts(world_size, 3))
            with unlike if weights.endswith(UNLIKE) else staying(2) if kind == "host" else nullcontext():
                pool.run(Load(model, str(path), "float32", config.to_mapping(), world_size, comfyui=code))
            outputs[weights] = _forward(pool, model)
            outputs[f"{weights} patched"] = _forward(pool, model, patches)
            outputs[f"{weights} again"] = _forward(pool, model)
            if weights.endswith(UNLIKE):
                pool.run(Release(model, park=True))
                found[f"{model} is away"] = not pool.weights(model).here
                places = pool.weights(model).shared.dealer.turns(len(pool.weights(model).shared.sizes))
                found[f"{model} keeps"] = places.count(None) == (3 if rank == 0 else 0)
                found[f"{model} back"] = torch.equal(_forward(pool, model, patches), outputs["whole patched"])
            if weights != "whole":
                for state in ("", " patched", " again"):
                    found[f"{model}{state}"] = torch.equal(outputs[weights + state], outputs["whole" + state])
                shared = pool.weights(model).shared
                found[f"{model} share"] = shared.size / sum(shared.sizes)
        if name == "plain":
            alone = PoolRank(0, 1, folder)
            request = Load(name, str(path), "float32", ParallelConfig(devices="cpu:1").to_mapping(), 1, comfyui=code)
            alone.run(request)
            found[f"{name} of one rank"] = torch.allclose(_forward(alone, name), outputs[f"host{UNLIKE}"], atol=1e-5)
        for state, given in (("parked", patches), ("parked again", ("", ""))):
            found[f"{name} {state}"] = _back_from_the_host(pool, f"{name} whole", given)
        assert torch.equal(_forward(pool, f"{name} whole", patches), outputs["whole patched"])
        assert not outputs["whole"].isnan().any()
        assert not torch.equal(outputs["whole"], outputs["whole patched"])
    return found


def _back_from_the_host(pool: PoolRank, model: str, patches: tuple[str, str]) -> bool:
    """Whether a network with patches is parked, and comes back without its file as that has it."""
    before, network = _forward(pool, model), pool.weights(model).network
    places = _places(network)
    _forward(pool, model, patches)
    with patch.object(host_copies, "left_free", lambda total: 0):
        pool.run(Release(model, park=True))
    left = not pool.weights(model).here
    with patch.object(NetworkReader, "open", None):
        after = _forward(pool, model)
    same = network is pool.weights(model).network
    same &= places == _places(network)
    return left and same and torch.equal(before, after)


def _places(network: Any) -> list[int]:
    """Where each plain weight lies in the network's region."""
    parameters = network.parameters()
    return [each.storage_offset() for each in parameters if not hasattr(each, "_qdata")]


def _forward(pool: PoolRank, model: str, patches: tuple[str, str] = ("", "")) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    given = {"context": torch.randn(1, 7, 3584, generator=generator)}
    reference, tensors = refer(1, given)
    tensors |= {"x": torch.randn(1, 16, 10, 12, generator=generator), "timestep": torch.full((1,), 0.7)}
    return pool.run(Forward(model, reference, patches=patches), tensors)[1]["output"]


def _write(path: Path, comfyui: str, name: str) -> None:
    from parallel_runtime.networks.comfyui.comfy_code import use_comfyui

    use_comfyui(comfyui, {"cpu": True})
    from tests.comfyui_networks.files import FILES
    from tests.comfyui_networks.formats import write
    from tests.comfyui_networks.write_files import tensors_of

    tensors = tensors_of(FILES["longcat"])
    save_file(tensors if name == "plain" else write(tensors, name), path)
