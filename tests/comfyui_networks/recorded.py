"""What tests of recorded networks run: calls recorded, and replayed with other values; on a GPU or a pretended one."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree

from parallel_runtime.acceleration.recordings import RecordedForward
from parallel_runtime.mesh.mesh import single_rank_mesh
from parallel_runtime.networks.comfyui import comfy_network
from parallel_runtime.networks.comfyui.comfy_code import use_comfyui
from parallel_runtime.networks.comfyui.comfy_network import ComfyNetwork, OwnCache
from parallel_runtime.networks.comfyui.prepared_network import prepare_network
from parallel_runtime.networks.facts import describe_network
from parallel_runtime.networks.stages import Stages
from parallel_runtime.networks.tables.blocks import LATENT_SHAPES
from parallel_runtime.networks.token_split import TokenSplit
from tests.pretended_gpu import PretendedGpu, inside, module_to_gpu, to_gpu
from tests.recorders import recorded_by

STEPS = 5


def record(rank: int, world_size: int, comfyui: str, names: list[str], real: bool = False) -> dict[str, Any]:
    """{"network, call": {"differences": of each step from the network's own result, over its scale, "kept": whether the
    recording was, "said": the log's lines, "sent": tensors that a call sends to the
    GPU, where it is none}}.

    Args:
        real: on the GPU of this machine.
    """
    use_comfyui(comfyui, {} if real else {"cpu": True, "use_pytorch_cross_attention": True})
    from tests.comfyui_networks.catalogue import TINY

    torch.set_grad_enabled(False)
    found: dict[str, Any] = {}
    for name in names:
        for each, arguments in TINY[name]().calls.items():
            made = TINY[name]()  # calls may leave something behind
            found[f"{name}, {each}"] = _record(made.network, arguments, real)
    return found


def _record(module: torch.nn.Module, arguments: dict[str, Any], real: bool) -> dict[str, Any]:
    x = arguments["x"]
    described = describe_network(module, 0, (x if isinstance(x, torch.Tensor) else x[0]).ndim - 2)
    assert described.data is not None
    device = torch.device("cuda" if real else "cpu")
    split = TokenSplit(single_rank_mesh())
    held: Any = SimpleNamespace(
        network=module,
        split=split,
        here=True,
        device=device,
        stream=None,
        stages=Stages(module, None, split, None),
        own_cache=OwnCache(described.data),
    )
    prepare_network(module, described.data, held.split)
    network = ComfyNetwork(held, described, None, "auto", torch.float32)
    gpu = PretendedGpu()
    if real:
        module.to(device)
        recorded = network._recorded
    else:
        module_to_gpu(module)
        recorded = RecordedForward(network.call_at_once, held.split.read, comfy_network._other_values)
        recorded_by(gpu.record, recorded)
    assert recorded is not None
    differences, sent = [], 0
    # The calls are those of `forward`, which is more than the seam in some networks.
    entered = mock.patch.object(
        comfy_network, "enter", lambda network, x, timestep, more, _: network(x, timestep, **more)
    )
    with contextlib.nullcontext() if real else gpu, entered, _said() as lines:
        for step in range(STEPS):
            outputs = []
            for network._recorded in (None, recorded):
                gpu.crossed.clear()
                there = pytree.tree_map_only(torch.Tensor, lambda each: each.to(device), arguments)
                outputs.append(network.predict(*_call(there if real else to_gpu(arguments), step)))
                sent = max(sent, sum(count for what, count in gpu.crossed.items() if what.endswith("to the GPU")))
            one, other = outputs if real else map(inside, outputs)
            differences.append(float((one - other).abs().max() / one.abs().max()))
    kinds: list[Any] = list(recorded._over[single_rank_mesh().sequence_ranks].kinds.values())
    held_by = [kind.host for kind in kinds if kind.replay is not None]
    return {"differences": differences, "kept": bool(held_by), "said": lines, "sent": sent}


def _call(arguments: dict[str, Any], step: int) -> tuple[Any, Any, dict[str, Any]]:
    """x, timestep and the others, of a later step."""
    from comfy.utils import pack_latents

    given = dict(arguments)
    x, timestep = given.pop("x"), given.pop("timestep")
    x = pytree.tree_map(lambda part: (1 - 0.1 * step) * part, x)
    if isinstance(x, list) and len(x) > 1:  # they travel as one
        given[LATENT_SHAPES] = [list(part.shape) for part in x]
        x = pack_latents(x)[0]
    return x, pytree.tree_map(lambda part: (1 - 0.15 * step) * part, timestep), given


@contextlib.contextmanager
def _said() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("parallel_runtime")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)
