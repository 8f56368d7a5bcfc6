"""What one rank does in the tests of compiled networks: calls as they are, then with the blocks compiled."""

from __future__ import annotations

import functools
import logging
import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from parallel_runtime.acceleration.recordings import RecordedForward
from parallel_runtime.config import ParallelPlan
from parallel_runtime.exchange import grown_memory, head_routes, host_lanes
from parallel_runtime.exchange.head_routes import HeadRoutes
from parallel_runtime.exchange.host_gather import gather_through_host
from parallel_runtime.mesh.agreement import all_same
from parallel_runtime.mesh.mesh import Groups, build_mesh, single_rank_mesh
from parallel_runtime.networks import block_attention, compiled_blocks
from parallel_runtime.networks.comfyui import comfy_network
from parallel_runtime.networks.comfyui.comfy_code import use_comfyui
from parallel_runtime.networks.comfyui.comfy_network import ComfyNetwork, OwnCache
from parallel_runtime.networks.comfyui.prepared_network import prepare_network
from parallel_runtime.networks.cut_blocks import cut_blocks
from parallel_runtime.networks.facts import describe_network
from parallel_runtime.networks.gathered_inputs import GatheredInputs
from parallel_runtime.networks.stages import Stages
from parallel_runtime.networks.token_split import TokenSplit
from parallel_runtime.requests.patches import CARRIED, PATCHES, REPLACED, Patch
from parallel_runtime.switches import VARIABLE
from tests.comfyui_networks.quantised import in_format
from tests.parallel_runtime.polled_memory import PolledMemory
from tests.recorders import recorded_by


def compare(rank: int, world_size: int, comfyui: str, names: list[str], backend: str) -> dict[str, Any]:
    """{"differences": {network: {"ranks, call": largest over the scale}}, "refused": {network: {block: why}},
    "graphs": {network: how many}, "attended": {network: {ranks: calls of graphs}}, "warnings": lines of the log,
    "operators": of ours in rewritten graphs}.

    Args:
        backend: of torch.compile; "rewritten" runs the graph as our passes leave it.
    """
    use_comfyui(comfyui, {"cpu": True})
    import torch._dynamo.utils

    from tests.comfyui_networks.catalogue import TINY

    torch.set_grad_enabled(False)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("parallel_runtime").addHandler(handler)
    meshes = {1: single_rank_mesh()}
    if world_size > 1:
        meshes[world_size] = build_mesh(ParallelPlan(ulysses=world_size), rank, world_size)
    operators: set[str] = set()
    found: dict[str, Any] = {"differences": {}, "refused": {}, "graphs": {}, "attended": {}, "warnings": lines}
    for name in names:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        made = TINY[name]()
        first = next(iter(made.calls.values()))["x"]
        described = describe_network(made.network, 0, (first if isinstance(first, torch.Tensor) else first[0]).ndim - 2)
        assert described.data is not None, described.facts.why_whole
        split = TokenSplit(single_rank_mesh())
        prepare_network(made.network, described.data, split)
        held = as_held(made, described, split)
        plain = ComfyNetwork(held, described, None, "auto", torch.float32)
        chosen: Any = _rewritten(operators) if backend == "rewritten" else backend
        with mock.patch.object(
            compiled_blocks, "CompiledBlocks", functools.partial(compiled_blocks.CompiledBlocks, backend=chosen)
        ):
            compiled = ComfyNetwork(held, described, None, "auto", torch.float32, compile=True)
        differences, attended = {}, {}
        found["differences"][name], found["attended"][name] = differences, attended
        for ranks, mesh in meshes.items():
            before = compiled._attend.calls
            for each, arguments in made.calls.items():
                calls = [run_call(network, mesh, arguments) for network in (plain, compiled, compiled)]
                scale = calls[0].abs().max()
                differences[f"{ranks}, {each}"] = max(float((call - calls[0]).abs().max() / scale) for call in calls)
            attended[ranks] = compiled._attend.calls - before
        cut = compiled._compiled  # type: ignore[union-attr]
        found["refused"][name] = {each.__qualname__: why for each, why in cut.methods.refused.items()}
        found["graphs"][name] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        dist.barrier()
    return found | {"operators": sorted(operators)}


def through_host(rank: int, world_size: int, comfyui: str, names: list[str]) -> dict[str, Any]:
    """{"differences": {network: largest over the scale from the blocks as they are, by NCCL's route, of blocks that run
    compiled, that do so on the first rank alone, of inputs that are gathered, and of int8 as they are before rounding},
    "sent": {network: of these two from each other}, "gathered": {network: types of what came for each attention},
    "bytes": {network: in which what a block's layers take of a token would go, for each number},
    "noted": {network: whether ranks did alike, whether they did not, and whether they tell alike of what both refuse}};
    all through the host's memory, in chunks."""
    use_comfyui(comfyui, {"cpu": True})
    from tests.comfyui_networks.catalogue import TINY

    torch.set_grad_enabled(False)
    head_routes.may_go_through_host = lambda device: True
    grown_memory.StreamMemory = PolledMemory  # type: ignore[misc]
    host_lanes.LEAST_MESSAGE = 1
    gathered: list[str] = []

    def gather(*given: Any, **how: Any) -> torch.Tensor:
        gathered.append(str(given[0].sent()[0].dtype))
        return gather_through_host(*given, **how)

    block_attention.gather_through_host = gather  # type: ignore[attr-defined]
    rounded, numbers = [1], set[int]()

    def bytes_of_inputs(
        machine: Any, inner: int, width: int, number: int, *more: Any, rounds: bool, **named: Any
    ) -> int:
        numbers.add(number)
        return rounded[0] if rounds else 4

    block_attention.bytes_of_inputs = bytes_of_inputs  # type: ignore[attr-defined]
    plan = ParallelPlan(ulysses=world_size)
    meshes = [build_mesh(plan, rank, world_size, groups=Groups(rank, world_size, way)) for way in (None, HeadRoutes)]
    found: dict[str, Any] = {"differences": {}, "sent": {}, "gathered": {}, "bytes": {}, "noted": {}}
    for name in names:
        torch._dynamo.reset()
        heads = {"heads": 2 * world_size} if "z-image" in name else {}  # as many on each rank
        made = TINY[name.partition(",")[0]](**heads)
        if format := name.partition(", ")[2]:
            torch.manual_seed(0)
            in_format(made.network, format)
        described = describe_network(made.network, 0, 2)
        split = TokenSplit(single_rank_mesh())
        prepare_network(made.network, described.data, split)
        held = as_held(made, described, split)
        plain = ComfyNetwork(held, described, None, "auto", torch.float32)
        chosen = functools.partial(compiled_blocks.CompiledBlocks, backend=_rewritten(set()))
        with mock.patch.object(compiled_blocks, "CompiledBlocks", chosen):
            compiled = ComfyNetwork(held, described, None, "auto", torch.float32, compile=True)
        arguments = next(iter(made.calls.values()))
        expected = run_call(plain, meshes[0], arguments)
        calls = [run_call(compiled, meshes[1], arguments)]
        way = GatheredInputs(split.tokens, compiled._refused)
        same = all_same(way.seen(), meshes[1].sequence, torch.device("cpu"))
        calls.append(run_call(plain if rank else compiled, meshes[1], arguments))
        unlike = not all_same(way.seen(), meshes[1].sequence, torch.device("cpu"))
        with way.taken():
            calls.append(run_call(compiled, meshes[1], arguments))
            if "int8" in name:
                rounded[0] = 4
                calls.append(run_call(compiled, meshes[1], arguments))
                rounded[0] = 1
                found["sent"][name] = float((calls[-1] - calls[-2]).abs().max() / expected.abs().max())
        found["differences"][name] = [float((call - expected).abs().max() / expected.abs().max()) for call in calls]
        before, compiled._compiled.methods.refused[through_host] = way.state(), "told"  # type: ignore[union-attr]
        alike = all_same(way.state(), meshes[1].sequence, torch.device("cpu")) and way.state() != before
        found["gathered"][name], found["noted"][name] = list(gathered), [same, unlike, alike]
        found["bytes"][name] = sorted(numbers)
        gathered.clear()
        numbers.clear()
        dist.barrier()
    return found


def record(rank: int, world_size: int, comfyui: str, name: str) -> dict[str, Any]:
    """{"differences": of each call from the network's own result, "replays", "read": layouts that a recording keeps}.

    The stand-in for a CUDA graph reads only the tensors that were there when it was recorded.
    """
    use_comfyui(comfyui, {"cpu": True})
    from tests.comfyui_networks.catalogue import TINY

    # On a CPU every tensor is the host's, those of the picture too; recorded.py has what crosses.
    os.environ[VARIABLE] = "sent"
    torch.set_grad_enabled(False)
    made = TINY[name]()
    described = describe_network(made.network, 0, 2)
    assert described.data is not None
    split = TokenSplit(single_rank_mesh())
    cut_blocks(made.network, described.data.blocks, split)
    held = as_held(made, described, split)
    network = ComfyNetwork(held, described, None, "auto", torch.float32)
    replays: list[Any] = []

    def recorder(call: Any, static: list[torch.Tensor], made_outside: Any) -> Any:
        outside = made_outside()

        def replay(tensors: list[torch.Tensor]) -> Any:
            replays.append(outside)
            for old, new in zip(static, tensors, strict=True):
                old.copy_(new)
            return call(static)

        return replay

    recorded = RecordedForward(network.call_at_once, split.read, comfy_network._other_values)
    recorded_by(recorder, recorded)
    mesh = build_mesh(ParallelPlan(ulysses=world_size), rank, world_size)
    assert mesh is not None
    differences = []
    for step in range(5):
        arguments = dict(made.calls["plain"])
        arguments["x"] = arguments["x"] * (1 - 0.1 * step)
        arguments["timestep"] = arguments["timestep"] * (1 - 0.15 * step)
        network._recorded = None
        expected = run_call(network, mesh, arguments)
        network._recorded = recorded
        differences.append(float((run_call(network, mesh, arguments) - expected).abs().max()))
    read = [part for parts in replays[-1] for part in parts if part is not None]
    return {"differences": differences, "replays": len(replays), "read": len(read)}


def functions(rank: int, world_size: int, comfyui: str) -> dict[str, Any]:
    """{where functions of nodes act: {"difference": largest over the scale, "changed": largest from the call without,
    "compiled": calls of compiled blocks, "graphs": made for them}}, of FLUX, after a call without any."""
    use_comfyui(comfyui, {"cpu": True})
    import torch._dynamo.utils

    from tests.comfyui_networks.catalogue import TINY

    torch.set_grad_enabled(False)
    torch._dynamo.reset()
    made = TINY["flux"]()
    described = describe_network(made.network, 0, 2)
    assert described.data is not None
    mesh = build_mesh(ParallelPlan(ulysses=world_size), rank, world_size) if world_size > 1 else single_rank_mesh()
    split = TokenSplit(single_rank_mesh())
    prepare_network(made.network, described.data, split)
    held = as_held(made, described, split)
    os.environ[VARIABLE] = "modulation"  # which calls with functions leave to the blocks
    plain = ComfyNetwork(held, described, None, "auto", torch.float32)
    eager = functools.partial(compiled_blocks.CompiledBlocks, backend="eager")
    with mock.patch.object(compiled_blocks, "CompiledBlocks", eager):
        compiled = ComfyNetwork(held, described, None, "auto", torch.float32, compile=True)
    methods = compiled._compiled.methods  # type: ignore[union-attr]
    skip = Patch("comfy_extras.nodes_slg:SkipLayerGuidanceDiT.execute.<locals>.skip", 0)
    nag = "comfy_extras.nodes_nag:NAGuidance.execute.<locals>.nag_attention_output_patch"
    told = Patch(nag, 1, values={"nag_scale": 2.0, "nag_alpha": 0.5, "nag_tau": 1.5})
    carried: dict[str, Any] = {
        "nowhere": {},
        "between blocks": {REPLACED: [("dit", ("double_block", 1), skip)]},
        "inside of blocks": {PATCHES: {"attn1_output_patch": [told]}},
    }
    found = {}
    for where, each in carried.items():
        arguments = {**made.calls["plain"], "transformer_options": {CARRIED: each} if each else {}}
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        expected = run_call(plain, mesh, arguments)
        with mock.patch.object(methods, "call", wraps=methods.call) as called:
            outputs = [run_call(compiled, mesh, arguments) for _ in range(2)]
        found[where] = {
            "difference": max(float((output - expected).abs().max() / expected.abs().max()) for output in outputs),
            "changed": float((expected - run_call(plain, mesh, made.calls["plain"])).abs().max()),
            "compiled": called.call_count,
            "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"] - before,
        }
    assert not methods.refused
    return found


def as_held(made: Any, described: Any, split: TokenSplit) -> Any:
    """The network as a rank has it, on a CPU."""
    return SimpleNamespace(
        network=made.network, split=split, here=True, device=torch.device("cpu"), stream=None,
        stages=Stages(made.network, None, split, None), own_cache=OwnCache(described.data),
    )  # fmt: skip


def _rewritten(operators: set[str]) -> Any:
    from parallel_runtime.acceleration.passes import Passes

    def backend(module: Any, inputs: Any) -> Any:
        Passes()(module.graph)
        operators.update(str(node.target) for node in module.graph.nodes if "parallel_dit" in str(node.target))
        module.recompile()
        return module.forward

    return backend


def run_call(network: ComfyNetwork, mesh: Any, arguments: dict[str, Any]) -> torch.Tensor:
    """What the network gives of a call, which it may write into."""
    import copy

    network.set_mesh(mesh)
    given = copy.deepcopy(arguments)  # some networks write into them
    x, timestep = given.pop("x"), given.pop("timestep")
    with mock.patch.object(comfy_network, "enter", enter_forward):
        return network.predict(x, timestep, given)


def enter_forward(network: Any, x: Any, timestep: torch.Tensor, more: dict[str, Any], _: Any) -> Any:
    """Calls are those of `forward`, which is more than the seam in some networks."""
    return network(x, timestep, **more)
