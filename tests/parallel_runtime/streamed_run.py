"""What each rank runs of the tests of weights that come block by block: the same requests with each kind of weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors import safe_open

from parallel_runtime.config import ParallelConfig
from parallel_runtime.engine import prepared_load, residency
from parallel_runtime.engine.engine import Engine
from parallel_runtime.engine.residency import Residency
from parallel_runtime.patching.patch_data import Encoder, PatchSet
from parallel_runtime.planning import cost_constants
from parallel_runtime.planning.coming_blocks import Coming
from parallel_runtime.planning.wish import Wish
from parallel_runtime.requests.comfyui_code import ComfyuiCode
from parallel_runtime.requests.conditioning import refer
from parallel_runtime.requests.facts import PCIE, known_gpu
from parallel_runtime.requests.requests import ConditioningRef, Forward, KeepPatches, Load, Release, Sample, Step
from parallel_runtime.streaming import shared_blocks
from parallel_runtime.streaming.dealer import Dealer
from parallel_runtime.streaming.share_memory import HostShare
from tests.parallel_runtime.staged_run import Quiet

CPU = torch.device("cpu")


class PoolRank:
    """An engine in a pool, without its supervisor: ranks run the same requests by themselves.

    Args:
        device: on a GPU, all ranks share this one.
    """

    def __init__(self, rank: int, world_size: int, folder: str, device: torch.device = CPU):
        self.engine = Engine(device, rank, world_size)
        self.engine.residency = Residency(device, rank, folder=Path(folder))
        self.ranks = world_size
        self.device = device

    def run(self, request: Any, tensors: dict[str, torch.Tensor] | None = None) -> Any:
        """Both phases; every rank offers the same here. All ranks are through with the last one, as in a pool."""
        if dist.is_initialized():
            dist.barrier()
        meta = {name: tensor.to("meta") for name, tensor in (tensors or {}).items()}
        prepared = self.engine.prepare(request, meta, Quiet())
        here = {name: tensor.to(self.device, copy=True) for name, tensor in (tensors or {}).items()}
        with torch.no_grad():
            return prepared.run(here, Quiet())

    def load(self, name: str, path: str, **options: Any) -> Any:
        """Load a model under a name."""
        if self.device.type == "cpu":
            config = ParallelConfig(devices=f"cpu:{self.ranks}", **options)
            return self.run(Load(name, path, "float32", config.to_mapping(), self.ranks))[0]
        config = ParallelConfig(devices=",".join(map(str, range(self.ranks))), compile="off", **options)
        machine = replace(known_gpu("NVIDIA H200", 10 << 30, PCIE), measured=True)  # they would measure each other
        return self.run(Load(name, path, "bfloat16", config.to_mapping(), self.ranks, machine))[0]

    def keep(self, comfyui: str, path: str) -> str:
        """Keep a LoRA for layers of a FLUX file; return the name of the set."""
        from parallel_runtime.networks.comfyui.comfy_code import use_comfyui

        use_comfyui(comfyui, {"cpu": True})
        made = lora(path)
        tensors = {name: factor.view(torch.uint8).reshape(-1) for name, factor in made.factors.items()}
        request = KeepPatches(ComfyuiCode(comfyui), tuple(tensors), (made.name,))
        self.run(request, {**tensors, made.name: made.to_bytes()})
        return made.name

    def weights(self, name: str) -> Any:
        """What holds the weights of a model."""
        held = self.engine.residency.get(name).loaded_model
        assert held is not None
        return held.weights


KINDS = ("dealt", "host")


@contextmanager
def staying(count: int, held: tuple[int, ...] = ()) -> Iterator[None]:
    """Loads keep so many blocks whole on each rank, and of the others so many as `held` says of each, whatever fits."""

    def choose(wish: Wish, weight_bytes: int) -> ParallelConfig:
        return replace(wish.config, resident=count, held=held)

    with patch.object(prepared_load, "choose_weights", choose):
        yield


LAYERS = ("double_blocks.0.img_attn.qkv", "double_blocks.1.txt_mlp.0", "single_blocks.1.linear1", "img_in")


def lora(path: str) -> PatchSet:
    """A LoRA for some layers in blocks, and one outside, the same in every process."""
    from comfy.weight_adapter import LoRAAdapter

    generator = torch.Generator().manual_seed(11)
    patches: dict[str, Any] = {}
    with safe_open(path, framework="pt") as file:
        for layer in LAYERS:
            outputs, inputs = file.get_slice(f"{layer}.weight").get_shape()
            up, down = (torch.randn(*shape, generator=generator) * 0.2 for shape in ((outputs, 4), (4, inputs)))
            adapter = LoRAAdapter(set(), (up, down, 2.0, None, None, None))
            patches[f"diffusion_model.{layer}.weight"] = [(0.8, adapter, 1.0, None, None)]
    return Encoder().encode(patches)


def flux_tensors(rows: int = 1) -> tuple[ConditioningRef, dict[str, torch.Tensor]]:
    """A call of a tiny FLUX, the same in every process."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    given = {"context": draw(rows, 7, 64), "y": draw(rows, 32), "guidance": torch.full((rows,), 3.5)}
    reference, tensors = refer(1, given)
    return reference, tensors | {"x": draw(rows, 16, 12, 6), "timestep": torch.full((rows,), 0.7)}


def forward(rank: PoolRank, name: str) -> torch.Tensor:
    """One call of a model in a pool."""
    reference, tensors = flux_tensors()
    return rank.run(Forward(name, reference), tensors)[1]["output"]


def sample(rank: PoolRank, name: str, steps: int = 3) -> torch.Tensor:
    """A run in the pool."""
    reference, tensors = flux_tensors()
    sigmas = torch.linspace(1, 0, steps + 1)
    del tensors["timestep"]
    tensors |= {"sigmas": sigmas, "timesteps": sigmas}
    return rank.run(Sample(name, "euler", (reference,), 1.0), tensors)[1]["latent"]


def compare(rank: int, world_size: int, path: str, other: str, folder: str) -> dict[str, Any]:
    """Forwards and runs with whole weights, and with those that come; two models in turn; bytes."""
    pool = PoolRank(rank, world_size, folder)
    residency.MOST = 16  # all of these stay known
    found: dict[str, Any] = {}
    expected: dict[str, torch.Tensor] = {}
    for weights in ("whole", *KINDS):
        for number, file in enumerate((path, other)):
            pool.load(f"{weights} {number}", file, weights=weights)
            expected.setdefault(str(number), forward(pool, f"{weights} {number}"))
    for weights in KINDS:
        for number in (0, 1, 0):
            name = f"{weights} {number}"
            found[f"{name} forward"] = torch.equal(forward(pool, name), expected[str(number)])
        with staying(3):
            pool.load(f"{weights} more", path, weights=weights)
        found[f"{weights} more"] = torch.equal(forward(pool, f"{weights} more"), expected["0"])
        found[f"{weights} stay"] = len(pool.weights(f"{weights} more").shared.sizes) == 2
        found[f"{weights} run"] = torch.equal(sample(pool, f"{weights} 0"), sample(pool, "whole 0"))
        own = pool.weights(f"{weights} 0")
        shared = own.shared
        found[f"{weights} bytes"] = [own.size, shared.size, sum(shared.sizes), max(shared.sizes)]
        pool.run(Release(f"{weights} 0"))
        found[f"{weights} here"] = own.here
        found[f"{weights} again"] = torch.equal(forward(pool, f"{weights} 0"), expected["0"])
    found["unlike"] = not torch.equal(expected["0"], expected["1"])
    found["repeated"] = _repeat(pool, expected["0"])
    for weights in KINDS:
        found |= _unlike(pool, weights, path, expected["0"])
    found |= _choose(pool, path, expected["0"])
    found |= _leave(pool, (path, other), expected)
    return found


def one_rank(path: str) -> torch.Tensor:
    """The call of `forward`, by one rank that has the whole model."""
    engine = Engine(CPU, 0, 1)
    engine.prepare(Load("m", path, "float32", ParallelConfig(devices="cpu:1").to_mapping(), 1), {}, Quiet()).run(
        {}, Quiet()
    )
    reference, tensors = flux_tensors()
    meta = {name: tensor.to("meta") for name, tensor in tensors.items()}
    with torch.no_grad():
        return engine.prepare(Forward("m", reference), meta, Quiet()).run(tensors, Quiet())[1]["output"]


def unlike_counts(ranks: int, coming: int) -> tuple[int, ...]:
    """Blocks that ranks keep of those that come: the first all, others fewer, the last none."""
    return tuple(coming * (ranks - 1 - rank) // max(1, ranks - 1) for rank in range(ranks))


def _unlike(pool: PoolRank, weights: str, path: str, expected: torch.Tensor) -> dict[str, Any]:
    """Ranks keep as many blocks as each has memory for: what comes to whom, and what it gives."""
    name, found = f"{weights} unlike", {}
    held = unlike_counts(pool.ranks, 4)
    with staying(1, held):
        pool.load(name, path, weights=weights)
    facts, own = pool.engine.residency.get(name).facts, pool.weights(name)
    planned = Coming(weights, pool.ranks, 1, held).kept_bytes(facts, held[pool.engine.rank])
    planned -= own.shared.size if weights == "dealt" else 0  # a CPU's share is not on it
    found[f"{name} bytes as planned"] = abs(own.size - planned) < 0.05 * planned
    fetched: list[int] = []
    fetch = own.shared.fetch

    def count(block: int, target: torch.Tensor) -> None:
        fetched.append(block)
        fetch(block, target)

    with patch.object(own.shared, "fetch", count):
        comes = 4 - held[pool.engine.rank]
        for turn, expects in (("", 4), (" again", comes)):
            found[f"{name}{turn}"] = torch.equal(forward(pool, name), expected)
            found[f"{name}{turn} copies"] = len(fetched) == expects
            fetched.clear()
        pool.run(Release(name, park=True))
        found[f"{name} is away"] = not own.here
        found[f"{name} back"] = torch.equal(forward(pool, name), expected) and len(fetched) == 4
    found[f"{name} of one rank"] = torch.allclose(one_rank(path), expected, atol=1e-5)
    return found


def _choose(pool: PoolRank, path: str, expected: torch.Tensor) -> dict[str, bool]:
    """`auto` on GPUs on which the network fits and does not fit, as the request tells of them."""
    for name in ("CONTEXT_BYTES", "LIVE_ACTIVATIONS", "EXCHANGE_BUFFERS"):  # more than so small a network
        setattr(cost_constants, name, 0)
    facts = pool.engine.residency.get("whole 0").facts
    whole = facts.parameters * facts.bytes_per_parameter
    small = Coming("host", pool.ranks).kept_bytes(facts)
    found = {"smaller": small < whole}
    config = ParallelConfig(devices=f"cpu:{pool.ranks}", compile="off").to_mapping()
    for memory, says in ((2 * whole, ""), (small, "Weights are in memory of the host")):
        machine = replace(known_gpu("NVIDIA small", memory, PCIE), measured=True)
        answer = pool.run(Load(f"auto {memory}", path, "float32", config, pool.ranks, machine))[0]
        streams = pool.weights(f"auto {memory}").stream is not None
        found[f"auto {says}"] = streams == bool(says) and says in answer.explanation
        reference, tensors = flux_tensors()
        output = pool.run(Forward(f"auto {memory}", reference), tensors)[1].get("output")  # one rank may do for a GPU
        found[f"auto {says} forward"] = output is None or torch.allclose(output, expected, atol=1e-5)
    return found


def _leave(pool: PoolRank, files: tuple[str, str], expected: dict[str, torch.Tensor]) -> dict[str, bool]:
    """Models dealt out over devices, whose memory others read, leave for each other and come back; one in the host's
    memory stays meanwhile."""
    found: dict[str, bool] = {}
    with (
        patch.object(Dealer, "on_device", property(lambda self: self.mode == "dealt")),
        patch.object(shared_blocks, "DeviceShare", lambda size, device: HostShare(size)),
        patch.object(torch.cuda, "can_device_access_peer", lambda one, other: True),
        staying(2),
    ):
        pool.load("beside", files[0], weights="host")
        pool.load("leaves 0", files[0], weights="dealt")
        pool.load("leaves 1", files[1], weights="dealt")
        found["share on the device"] = _as_planned(pool, "leaves 1")
        for number in (0, 1, 1, 0):
            name, other = f"leaves {number}", f"leaves {1 - number}"
            found[f"{name} back"] = torch.equal(forward(pool, name), expected[str(number)])
            here = [pool.weights(each).here for each in (name, other, "beside")]
            found[f"{name} alone"] = here == [True, False, True]
        pool.run(Release("leaves 0", park=True))
        found["leaves 0 parked"] = not pool.weights("leaves 0").here
        found["leaves 0 after that"] = torch.equal(forward(pool, "leaves 0"), expected["0"])
        found["beside"] = torch.equal(forward(pool, "beside"), expected["0"])
        found["leaves for whole"] = not pool.weights("leaves 0").here
        pool.run(Release("leaves 0"))
    return found


def _as_planned(pool: PoolRank, name: str) -> bool:
    """Whether a model that is dealt out has what the plan reckons with on the device."""
    weights, facts = pool.weights(name), pool.engine.residency.get(name).facts
    planned = Coming("dealt", pool.ranks, resident=2).kept_bytes(facts)
    return abs(weights.size - planned) < 0.05 * planned and weights.shared.dealer.on_device


def _repeat(pool: PoolRank, expected: torch.Tensor) -> bool:
    """Steps of two kinds of weights in turn, without a PREPARE."""
    reference, tensors = flux_tensors()
    for kind, name in enumerate(("dealt 0", "host 0"), 1):
        pool.run(Forward(name, reference, kind=kind, kept_kinds=tuple(range(kind))), tensors)
    step = {name: tensors[name] for name in ("x", "timestep")}
    outputs = []
    for kind in (1, 2, 1):
        with torch.no_grad():
            prepared = pool.engine.recall(Step(kind))
            outputs.append(prepared.run({name: tensor.clone() for name, tensor in step.items()}, Quiet())[1]["output"])
    return all(torch.equal(output, expected) for output in outputs)
