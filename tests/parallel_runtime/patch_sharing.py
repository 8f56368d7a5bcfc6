"""What each rank does in the tests of weights that ranks patch by shares."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallel_runtime.config import ParallelConfig
from parallel_runtime.engine.engine import Engine
from parallel_runtime.engine.residency import Residency
from parallel_runtime.patching.comfyui_patches import Computing
from parallel_runtime.patching.patch_data import Encoder, PatchSet, WeightPatches
from parallel_runtime.patching.patch_shares import ALWAYS
from parallel_runtime.requests.requests import ComfyuiCode, ConditioningRef, Forward, KeepPatches, Load, tensor_name
from tests.parallel_runtime.staged_run import Quiet
from tests.parallel_runtime.test_weight_store import PlainArena

CPU = torch.device("cpu")


class _Pool:
    """This rank's engine, with what the supervisor does: the least of all ranks' offers comes back."""

    def __init__(self, rank: int, ranks: int, comfyui: str, mapped: bool):
        self.engine, self.ranks, self.comfyui = Engine(CPU, rank, ranks), ranks, comfyui
        if not mapped:
            self.engine.residency = Residency(CPU, rank, arena=PlainArena)

    def run(self, request: Any, tensors: dict[str, torch.Tensor] | None = None) -> Any:
        meta = {name: tensor.to("meta") for name, tensor in (tensors or {}).items()}
        prepared = self.engine.prepare(request, meta, Quiet())
        offers: list[Any] = [None] * self.ranks
        dist.all_gather_object(offers, dict(prepared.offers))
        agreed = {name: min(each[name] for each in offers) for name in offers[0]}
        return prepared.run(tensors or {}, Quiet(), agreed)[1]

    def load(self, path: str) -> None:
        config = ParallelConfig(devices=f"cpu:{self.ranks}", ulysses=self.ranks)
        self.run(Load("m", path, "float32", config.to_mapping(), self.ranks))

    def keep(self, *sets: PatchSet) -> None:
        tensors = {name: factor.view(torch.uint8).reshape(-1) for each in sets for name, factor in each.factors.items()}
        request = KeepPatches(ComfyuiCode(self.comfyui, {"cpu": True}), tuple(tensors), tuple(s.name for s in sets), ())
        self.run(request, {**tensors, **{each.name: each.to_bytes() for each in sets}})

    def weights(self, patches: PatchSet | None) -> dict[str, torch.Tensor]:
        """Those that a call with the patches leaves."""
        generator = torch.Generator().manual_seed(3)
        given = {
            "context": torch.randn(1, 7, 64, generator=generator), "y": torch.randn(1, 32, generator=generator),
            "guidance": torch.full((1,), 3.5),
        }  # fmt: skip
        tensors = {tensor_name(1, key): tensor for key, tensor in given.items()}
        tensors |= {"x": torch.randn(1, 16, 8, 6, generator=generator), "timestep": torch.full((1,), 0.7)}
        reference = ConditioningRef(1, new=True, tensors=tuple(given))
        with torch.no_grad():
            self.run(Forward("m", reference, patches=(patches.name if patches else "", "")), tensors)
        network: Any = self.engine.residency.get("m").transformer
        return {name: parameter.data.clone() for name, parameter in network.named_parameters()}


def compare(rank: int, world_size: int, comfyui: str, path: str, mapped: bool) -> dict[str, Any]:
    """{"wrong": turns after which a weight has other bits than without shares, "computed": weights by turn,
    "shared": see `_apart`}."""
    from parallel_runtime.networks.comfyui.host_code import use_comfyui

    use_comfyui(comfyui, {"cpu": True})
    from tests.parallel_runtime.test_patching import lora

    computed: list[str] = []
    weight = Computing.weight
    Computing.weight = lambda *args: computed.append(args[1]) or weight(*args)  # type: ignore[method-assign,func-returns-value,return-value]
    sets = [lora(Path(path), 0.8), lora(Path(path), -0.5), lora(Path(path), 0.6, seed=1)]
    turns = {"added": sets[0], "strength": sets[1], "another": sets[2], "away": None, "again": sets[0], "lost": sets[1]}
    found: dict[bool, Any] = {}
    for always in (False, True):
        os.environ[ALWAYS] = "1" if always else ""
        pool = _Pool(rank, world_size, comfyui, mapped)
        pool.load(path)
        for each in sets:
            pool.keep(each)
        found[always] = {}
        for name, patches in turns.items():
            if name == "lost" and rank == 1:  # this rank alone has its weights from the file again
                pool.engine.residency.get("m").held.give_back()
            computed.clear()
            found[always][name] = pool.weights(patches), len(computed)
    wrong = [
        name
        for name, (weights, _) in found[True].items()
        if any(not torch.equal(tensor, found[False][name][0][key]) for key, tensor in weights.items())
    ]
    counts = {str(always): {name: count for name, (_, count) in each.items()} for always, each in found.items()}
    return {"wrong": wrong, "computed": counts, "shared": _apart(pool)}


def _apart(pool: _Pool) -> list[bool]:
    """Whether ranks share sets that might not fit, or change a weight's shape: these are computed in PREPARE."""
    from comfy.weight_adapter import LoRAAdapter

    up, down = torch.zeros(192, 2), torch.zeros(2, 64)
    resident = pool.engine.residency.get("m")
    name = "double_blocks.0.img_attn.qkv.weight"
    assert resident.held is not None
    rows, columns = resident.held.weights.shape(name) or (0, 0)
    fitting, alien = torch.zeros(rows, 2), torch.zeros(2, columns)
    shared = []
    for factors, reshape in (
        ((fitting, alien), None),
        ((up[:-1], down), None),
        ((fitting, alien), [rows, columns + 1]),
    ):
        adapter = LoRAAdapter(set(), (*factors, 1.0, None, None, reshape))
        patches = Encoder().encode({f"diffusion_model.{name}": [(1.0, adapter, 1.0, None, None)]})
        shared.append(pool.engine.shares_patches(resident, WeightPatches(patches)))
    return shared
