"""What one rank does in the tests of how many graphs are made: calls of other sizes, texts and numbers of rows."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import torch

from parallel_runtime.config import ParallelPlan
from parallel_runtime.denoising.predict import Call, Predictor
from parallel_runtime.mesh.mesh import build_mesh, single_rank_mesh
from parallel_runtime.networks import compiled_blocks
from parallel_runtime.networks.comfyui import comfy_network
from parallel_runtime.networks.comfyui.comfy_code import use_comfyui
from parallel_runtime.networks.comfyui.comfy_network import ComfyNetwork
from parallel_runtime.networks.comfyui.prepared_network import prepare_network
from parallel_runtime.networks.facts import describe_network
from parallel_runtime.networks.token_split import TokenSplit
from parallel_runtime.requests.conditioning import Conditioning
from tests.comfyui_networks.compiled import as_held, enter_forward, run_call


def graphs(rank: int, world_size: int, comfyui: str, names: list[str], unlike: dict[str, list[str]]) -> dict[str, Any]:
    """{network: {"one": graphs after a call of one row, then after another "size", another "text", "two" rows and
    "three"; of several ranks also after each has computed the first call "alone"}}, counted from the first call on.

    Args:
        unlike: network -> calls of these that it has not, or not by itself.
    """
    use_comfyui(comfyui, {"cpu": True})
    import torch._dynamo.utils

    from tests.comfyui_networks.catalogue import TINY

    torch.set_grad_enabled(False)
    mesh = build_mesh(ParallelPlan(ulysses=world_size), rank, world_size) if world_size > 1 else single_rank_mesh()
    found: dict[str, Any] = {}
    for name in names:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        made = TINY[name]()
        arguments = _rows(next(iter(made.calls.values())), 1)
        x = arguments["x"]
        network = _traced(made, (x if isinstance(x, torch.Tensor) else x[0]).ndim - 2)
        calls = {
            "one": arguments, "size": _wider(arguments), "text": _longer(arguments), "two": _rows(arguments, 2),
            "three": _rows(arguments, 3),
        }  # fmt: skip
        found[name] = {}
        for what, call in calls.items():
            if what not in unlike.get(name, ()):
                run_call(network, mesh, call)
                found[name][what] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        if world_size > 1:
            run_call(network, single_rank_mesh(), arguments)
            found[name]["alone"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert not network._compiled.methods.refused  # type: ignore[union-attr]
    return found


def of_lengths(rank: int, world_size: int, comfyui: str) -> dict[str, list[int]]:
    """Graphs of LTX-2 after each of three sizes and lengths of video and sound, by what has a timestep: all together,
    each frame (a picture to begin with), and each moment of the sound, too."""
    use_comfyui(comfyui, {"cpu": True})
    import torch._dynamo.utils

    from tests.comfyui_networks.catalogue import TINY
    from tests.comfyui_networks.tiny import noise

    torch.set_grad_enabled(False)
    mesh = build_mesh(ParallelPlan(ulysses=world_size), rank, world_size) if world_size > 1 else single_rank_mesh()
    found: dict[str, list[int]] = {"one": [], "frames": [], "sound": []}
    for kind, graphs in found.items():
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        network = _traced(TINY["ltx-2"](), 3)
        for frames, rows, columns, moments in ((3, 4, 7, 13), (5, 4, 7, 20), (9, 6, 8, 33)):
            mask = torch.ones(1, 1, frames, rows, columns)
            mask[:, :, 0] = 0.0
            sound = torch.full((1, moments), 0.7) if kind == "sound" else torch.tensor([0.7])
            call = {
                "x": [noise(1, 128, frames, rows, columns), noise(1, 8, moments, 16)], "context": noise(1, 9, 96),
                "timestep": torch.tensor([0.7]), "attention_mask": None, "frame_rate": 25,
            }  # fmt: skip
            if kind != "one":
                call |= {"denoise_mask": mask, "timestep": [0.7 * mask.flatten(1), sound]}
            run_call(network, mesh, call)
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        assert not network._compiled.methods.refused  # type: ignore[union-attr]
    return found


def _traced(made: Any, dims: int) -> ComfyNetwork:
    """A network whose blocks are compiled, as far as graphs go."""
    described = describe_network(made.network, 0, dims)
    assert described.data is not None
    split = TokenSplit(single_rank_mesh())
    prepare_network(made.network, described.data, split)
    eager = functools.partial(compiled_blocks.CompiledBlocks, backend="eager")
    with mock.patch.object(compiled_blocks, "CompiledBlocks", eager):
        return ComfyNetwork(as_held(made, described, split), described, None, "auto", torch.float32, compile=True)


def rows_apart(rank: int, world_size: int, comfyui: str) -> dict[str, Any]:
    """{"forwards": rows of each forward of Z-Image, "graphs": after each prediction, "differences": from the network as
    it is}: of one row, three times two, one row, two. The third of two is to have a graph of its own."""
    use_comfyui(comfyui, {"cpu": True})
    import torch._dynamo.utils

    from tests.comfyui_networks.catalogue import TINY

    torch.set_grad_enabled(False)
    torch._dynamo.reset()
    made = TINY["z-image"]()
    described = describe_network(made.network, 0, 2)
    assert described.data is not None
    split = TokenSplit(single_rank_mesh())
    prepare_network(made.network, described.data, split)
    held = as_held(made, described, split)
    eager = functools.partial(compiled_blocks.CompiledBlocks, backend="eager")
    plain = ComfyNetwork(held, described, None, "auto", torch.float32)
    with mock.patch.object(compiled_blocks, "CompiledBlocks", eager):
        compiled = ComfyNetwork(held, described, None, "auto", torch.float32, compile=True)
    found: dict[str, Any] = {"forwards": [], "graphs": [], "differences": []}
    compiled_blocks._APART = 4  # each prediction of two rows, and each question below
    predict = compiled.predict

    def count(x: torch.Tensor, timestep: torch.Tensor, arguments: Any) -> torch.Tensor:
        found["forwards"].append(x.shape[0])
        return predict(x, timestep, arguments)

    compiled.predict = count  # type: ignore[method-assign]
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    both = _rows(made.calls["plain"], 2)
    both["x"] = torch.cat([both["x"][:1], both["x"][1:] * 0.5])
    for rows in (1, 2, 2, 2, 1, 2):
        given = _rows(both, 1) if rows == 1 else both
        others = {name: value for name, value in given.items() if name not in ("x", "timestep")}
        call = Call(given["x"], given["timestep"], Conditioning(others))
        with mock.patch.object(comfy_network, "enter", enter_forward):
            output, expected = (Predictor(each, single_rank_mesh())([call])[0] for each in (compiled, plain))
        again = compiled._compiled.rows_go_apart  # type: ignore[union-attr]
        found["middle"] = [*found.get("middle", ()), again(2, begins=False)]
        found["graphs"].append(torch._dynamo.utils.counters["stats"]["unique_graphs"] - before)
        found["differences"].append(float((output - expected).abs().max() / expected.abs().max()))
    return found


def _rows(arguments: dict[str, Any], rows: int) -> dict[str, Any]:
    """The first row of each, so often."""
    x = arguments["x"]
    batch = (x if isinstance(x, torch.Tensor) else x[0]).shape[0]

    def repeat(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.ndim and value.shape[0] == batch:
            return value[:1].repeat(rows, *[1] * (value.ndim - 1))
        return type(value)(map(repeat, value)) if isinstance(value, list | tuple) else value

    return {name: repeat(value) for name, value in arguments.items()}


def _wider(arguments: dict[str, Any]) -> dict[str, Any]:
    """Four more columns of the first latent."""
    x = arguments["x"]
    first, *others = [x] if isinstance(x, torch.Tensor) else x
    first = torch.cat([first, first[..., -4:]], dim=-1)
    return arguments | {"x": first if isinstance(x, torch.Tensor) else [first, *others]}


def _longer(arguments: dict[str, Any]) -> dict[str, Any]:
    """Three more tokens of the text."""
    names = [name for name in ("context", "attention_mask") if isinstance(arguments.get(name), torch.Tensor)]
    return arguments | {name: torch.cat([arguments[name], arguments[name][:, :3]], dim=1) for name in names}
