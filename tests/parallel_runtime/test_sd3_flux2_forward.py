"""SD3 and FLUX.2 on P ranks against the same diffusers transformer, unwrapped, in one process and float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallel_runtime.config import ParallelPlan
from parallel_runtime.errors import UnsupportedModelError
from parallel_runtime.mesh import Mesh, build_mesh, single_rank_mesh
from parallel_runtime.models.flux2 import FLUX2
from parallel_runtime.models.sd3 import SD3
from parallel_runtime.wrappers.parallel_transformer import parallelize
from tests import tiny_flux2, tiny_sd3
from tests.parallel_runtime.model_forward import relative_error
from tests.ranks import run_ranks
from tests.tiny_model import make_state_dict

SPECS = {"sd3": SD3, "flux2": FLUX2}
PLANS = [{"ulysses": 2}, {"ulysses": 3}]
# (height, width of the latent, text tokens, batch)
UNEVEN = [10, 14, 7, 2]  # nothing divides
CASES = [[8, 12, 12, 1], UNEVEN, [4, 4, 13, 1]]


def build(name: str) -> Any:
    """A transformer of six heads, the same in every process."""
    import diffusers

    spec = SPECS[name]
    if name == "sd3":
        config = tiny_sd3.tiny_config(
            layers=2, num_attention_heads=6, attention_head_dim=32, caption_projection_dim=192
        )
    else:
        config = tiny_flux2.tiny_config(
            num_attention_heads=6, attention_head_dim=32, axes_dims_rope=(8, 8, 8, 8), in_channels=16, out_channels=16
        )
    transformer: Any = getattr(diffusers, spec.transformer_class)(**config)
    transformer.load_state_dict(make_state_dict(spec, config))
    return transformer.requires_grad_(False).eval()


@torch.no_grad()
def run(
    name: str,
    transformer: Any,
    height: int,
    width: int,
    text: int,
    batch: int,
    timestep: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    rounded: torch.dtype = torch.float32,
) -> torch.Tensor:
    """One call from a seed, through the adapter as the pool does; inputs of `dtype`, of values that `rounded` has."""
    generator = torch.Generator().manual_seed(1000 * height + 100 * width + 10 * text + batch)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(rounded).to(dtype)

    x, context = noise(batch, 16, height, width), noise(batch, text, 64)
    if timestep is None:
        timestep = torch.rand(batch, generator=generator) * (1000 if name == "sd3" else 1)
    # In bfloat16, ComfyUI and diffusers both make 3.504 of a guidance of 3.5.
    guidance = 3.504 if rounded == torch.bfloat16 else 3.5
    extras = {"y": noise(batch, 32)} if name == "sd3" else {"guidance": torch.tensor([guidance])}
    adapter = SPECS[name].adapter
    arguments = adapter.to_transformer(x, timestep, context, transformer.config, **extras)
    return adapter.from_transformer(transformer(**arguments, return_dict=False)[0], x)


def run_plans(rank: int, world_size: int) -> dict[str, Any]:
    """Run by `run_ranks`: every case of both models on every plan."""
    outputs = {}
    meshes = [build_mesh(ParallelPlan(**plan), rank, world_size) for plan in PLANS]
    for name, spec in SPECS.items():
        transformer = parallelize(build(name), spec, single_rank_mesh())
        for number, mesh in enumerate(meshes):
            if mesh is None:
                continue
            transformer.set_mesh(mesh)
            for case, given in enumerate(CASES):
                outputs[f"{name} {number} {case}"] = run(name, transformer, *given)
    return outputs


def test_two_and_three_ranks_give_the_one_process_result_on_every_rank():
    results = run_ranks(3, f"{__name__}:run_plans", timeout=250)
    for name in SPECS:
        transformer = build(name)
        for case, given in enumerate(CASES):
            expected = run(name, transformer, *given)
            for number, plan in enumerate(PLANS):
                ranks = plan["ulysses"]
                outputs = [result.get(f"{name} {number} {case}") for result in results]
                assert all(output is None for output in outputs[ranks:])
                assert relative_error(outputs[0], expected) < 1e-5, (name, plan, given)
                assert all(torch.equal(output, outputs[0]) for output in outputs[1:ranks]), (name, plan, given)


def run_compiled(rank: int, world_size: int) -> dict[str, Any]:
    """Run by `run_ranks`: SD3.5's blocks, one with a second attention, compiled without graph breaks."""
    mesh = build_mesh(ParallelPlan(ulysses=world_size), rank, world_size)
    assert mesh is not None
    return {"output": run("sd3", parallelize(build("sd3"), SD3, mesh, compile=True), *UNEVEN)}


def test_compiled_blocks_with_two_attentions_give_the_same_result():
    results = run_ranks(2, f"{__name__}:run_compiled", timeout=280)
    expected = run("sd3", build("sd3"), *UNEVEN)
    assert all(relative_error(result["output"], expected) < 1e-5 for result in results)


def test_a_picture_of_fewer_tokens_than_ranks_is_refused_before_any_exchange():
    mesh = Mesh(ParallelPlan(ulysses=2), 0, single_rank_mesh().coordinate)
    with pytest.raises(UnsupportedModelError, match="1 tokens cannot be split over 2 ranks"):
        run("sd3", parallelize(build("sd3"), SD3, mesh), 2, 2, 8, 1)


def test_the_timestep_of_flux_2_stays_exact_in_bfloat16():
    transformer, reference = build("flux2").bfloat16(), build("flux2")
    reference.load_state_dict(transformer.state_dict())  # the same weights, rounded alike
    # Between two bfloat16 numbers, where rounding moves the scaled timestep by several units.
    given = {"timestep": torch.tensor([0.9046, 0.6039]), "dtype": torch.bfloat16}
    expected = run("flux2", reference, 5, 3, 7, 2, timestep=given["timestep"], rounded=torch.bfloat16)
    rounded = run("flux2", transformer, 5, 3, 7, 2, **given)
    exact = run("flux2", parallelize(transformer, FLUX2, single_rank_mesh()), 5, 3, 7, 2, **given)
    assert exact.dtype == torch.bfloat16
    assert relative_error(exact, expected) < 0.02
    assert relative_error(rounded, expected) > 5 * relative_error(exact, expected)
