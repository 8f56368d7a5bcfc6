"""What a rank of the tests of stages does: one stage of a ComfyUI network on a pipeline, and all stages in one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from parallel_runtime.attention.kernels import KERNELS
from parallel_runtime.config import ParallelPlan
from parallel_runtime.denoising.denoise import Denoising
from parallel_runtime.mesh.mesh import build_mesh
from parallel_runtime.networks.block_attention import BlockAttention
from parallel_runtime.networks.comfyui.comfy_code import use_comfyui
from parallel_runtime.networks.comfyui.prepared_network import ask_the_split
from parallel_runtime.networks.cut_blocks import cut_blocks
from parallel_runtime.networks.stages import StageBlocks, all_blocks, let_go
from parallel_runtime.networks.tables.comfyui import find_network
from parallel_runtime.networks.token_split import TokenSplit
from parallel_runtime.pipefusion.denoise import PipelineDenoising
from parallel_runtime.pipefusion.runner import StageRunner, flatten_rows
from parallel_runtime.planning.cut import split_blocks
from parallel_runtime.requests.conditioning import Conditioning
from tests.parallel_runtime.staged_run import LAYERS, Quiet, make_inputs, sample_request
from tests.unwritten_memory import fill_with_nan


class TinyStage:
    """A tiny network that has the blocks of one stage."""

    def __init__(self, network: Any, mesh: Any):
        data = find_network(type(network))
        assert data is not None
        size = getattr(network, "patch_size", 2)
        self.network, self.token = network, size if isinstance(size, int) else size[-1]
        self.mesh = mesh
        self.split = TokenSplit(mesh)
        ask_the_split(data.attention_in)
        cut_blocks(network, data.blocks, self.split)
        found = all_blocks(network, data.blocks)
        owned = split_blocks([1.0] * len(found), mesh.plan.pipe)[mesh.coordinate["pipe"]]
        let_go(network, data.blocks, owned)
        self.stages = SimpleNamespace(now=StageBlocks(network, data, self.split, owned))
        self.attention = BlockAttention(KERNELS["sdpa"], self.split)

    def predict(self, x: torch.Tensor, timestep: torch.Tensor, conditioning: Any) -> torch.Tensor:
        self.split.begin(self.attention, None, None)
        self.split.modulation.begin(None)
        arguments = dict(conditioning)
        options = {**arguments.pop("transformer_options", {}), "optimized_attention_override": self.attention}
        made: torch.Tensor = self.network(x, timestep, transformer_options=options, **arguments)
        return made

    def output_shape(self, x_shape: tuple[int, ...]) -> tuple[int, ...]:
        return x_shape


def comfyui_flux() -> Any:
    """ComfyUI's FLUX with the weights of `build_transformer(layers=LAYERS)`."""
    from comfy.ldm.flux.model import Flux

    from tests.comfyui_networks.tiny import build
    from tests.parallel_runtime.flux_forward import build_transformer
    from tests.tiny_flux import to_original

    transformer = build_transformer(layers=LAYERS)
    network = build(
        Flux, image_model="flux", in_channels=4, out_channels=4, vec_in_dim=32, context_in_dim=64, hidden_size=128,
        mlp_ratio=4.0, num_heads=4, depth=LAYERS, depth_single_blocks=LAYERS, axes_dim=[8, 12, 12], theta=10000,
        patch_size=2, qkv_bias=True, guidance_embed=True, txt_ids_dims=[],
    )  # fmt: skip
    original = to_original(transformer.state_dict(), "weight")
    network.load_state_dict(original)
    return network


def run_flux(rank: int, world_size: int, comfyui: str, cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Case name -> finished latent, on rank 0."""
    use_comfyui(comfyui, {"cpu": True})
    fill_with_nan()
    found = {}
    for each in cases:
        plan = ParallelPlan(**each["plan"])
        mesh = build_mesh(plan, rank, world_size)
        inputs, request = make_inputs(each), sample_request(each)
        branches = [
            Conditioning({"context": context, **extras})
            for context, extras in zip(inputs["contexts"], inputs["extras"], strict=True)
        ]
        network: Any = TinyStage(comfyui_flux(), mesh)
        runner = StageRunner(network, branches, inputs["x"], plan.patches, keep=True)
        tensors = {"x": inputs["x"], "sigmas": inputs["sigmas"], "timesteps": inputs["sigmas"]}
        denoising = Denoising(request, torch.float32)
        latent = PipelineDenoising(denoising, runner, plan.warmup_steps, tensors, Quiet()).run()
        if latent is not None and rank == 0:
            found[each["name"]] = latent
    return found


def _in_bfloat16(network: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments so, and the network, but for what ComfyUI keeps in float32."""
    network.to(torch.bfloat16)
    if hasattr(network, "patch_embedding"):
        network.patch_embedding.float()
    return {
        name: value.bfloat16() if name != "timestep" and isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in arguments.items()
    }  # fmt: skip


@torch.no_grad()
def run_tiny(rank: int, world_size: int, comfyui: str, names: list[str], stages: int, dtype: str) -> dict[str, Any]:
    """Network -> on the last stage, how far it is from the whole network: all tokens at once, and patch by patch.

    Keys and values are kept of the same latent, so that every patch has the whole forward's rows.
    """
    use_comfyui(comfyui, {"cpu": True})
    fill_with_nan()
    from tests.comfyui_networks.catalogue import TINY, call

    plan = ParallelPlan(pipe=stages, ulysses=world_size // stages, patches=3)
    mesh = build_mesh(plan, rank, world_size)
    found = {}
    for name in names:
        tiny = TINY[name]()
        case, arguments = next(iter(tiny.calls.items()))
        if dtype == "bfloat16":
            arguments = _in_bfloat16(tiny.network, arguments)
            tiny = replace(tiny, calls={case: arguments})
        expected = flatten_rows(call(tiny, case))
        given = {key: value for key, value in arguments.items() if key not in ("x", "timestep")}
        x = arguments["x"] if mesh.coordinate["pipe"] == 0 else torch.full_like(arguments["x"], float("nan"))
        network: Any = TinyStage(tiny.network, mesh)
        runner = StageRunner(network, [Conditioning(given)], x, plan.patches, keep=True)
        worst = []
        for patch in (None, *runner.patches):
            runner.expect(patch)
            outputs = runner.evaluate([x], arguments["timestep"], patch)
            if outputs is not None:
                whole = expected if patch is None else expected[:, :, slice(*patch.rows)]
                worst.append(float((outputs[0] - whole).abs().max() / expected.abs().max()))
        runner.outbox.flush()
        found[name] = worst
    return found
