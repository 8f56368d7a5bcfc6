"""PixArt and HunyuanDiT on several ranks: models that cut the latent into tokens themselves, behind the split."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from parallel_runtime.config import ParallelPlan
from parallel_runtime.errors import UnsupportedModelError
from parallel_runtime.mesh import build_mesh
from parallel_runtime.models.spec import ModelSpec
from parallel_runtime.pipefusion.blocks import keep_blocks, share_blocks
from parallel_runtime.pipefusion.denoise import forward_once
from parallel_runtime.pipefusion.links import build_links
from parallel_runtime.pipefusion.runner import StageRunner
from parallel_runtime.pipefusion.stage import Stage
from parallel_runtime.pipeline.conditioning import Conditioning
from parallel_runtime.registry import find_by_name
from parallel_runtime.wrappers.parallel_transformer import parallelize
from tests import tiny_hunyuan_dit, tiny_pixart
from tests.parallel_runtime.model_forward import relative_error
from tests.ranks import run_ranks
from tests.tiny_model import make_state_dict

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "PixArt-α": ("pixart", tiny_pixart.tiny_config(use_additional_conditions=True)),
    "PixArt-Σ": ("pixart", tiny_pixart.tiny_config(num_attention_heads=3)),
    "HunyuanDiT 1.1": ("hunyuan_dit", tiny_hunyuan_dit.tiny_config(use_style_cond_and_image_meta_size=True)),
    "HunyuanDiT 1.2": ("hunyuan_dit", tiny_hunyuan_dit.tiny_config(num_layers=6)),
}
CALLS: dict[str, list[dict[str, torch.Tensor]]] = {
    "pixart": [
        tiny_pixart.make_call(1, (6, 8), 2),  # 12 tokens
        tiny_pixart.make_call(2, (10, 14), micro=True),  # 35
        tiny_pixart.make_call(3, (2, 2)),  # one: there is nothing to split
    ],
    "hunyuan_dit": [
        tiny_hunyuan_dit.make_call(1, (6, 8), 2, sizes=True),
        tiny_hunyuan_dit.make_call(2, (9, 14), sizes=True),  # 35
        tiny_hunyuan_dit.make_call(3, (7, 6), texts=(10, 9), sizes=True),  # 12, prompts longer than learned
    ],
}


def _build(spec: ModelSpec, config: Mapping[str, Any]) -> Any:
    """The transformer as it is after loading, the same in every process."""
    import diffusers

    transformer = getattr(diffusers, spec.transformer_class)(**config)
    transformer.load_state_dict(make_state_dict(spec, config))
    assert spec.prepare is not None
    spec.prepare(transformer)
    return transformer.requires_grad_(False).eval()


@torch.no_grad()
def _run(transformer: Any, spec: ModelSpec, call: Mapping[str, torch.Tensor]) -> torch.Tensor:
    arguments = spec.adapter.to_transformer(**call, config=transformer.config)
    return spec.adapter.from_transformer(transformer(**arguments, return_dict=False)[0], call["x"])


def run_models(rank: int, world_size: int) -> dict[str, Any]:
    """Run by `run_ranks`: every call of every model over all ranks, and over two."""
    outputs: dict[str, Any] = {}
    meshes = [build_mesh(ParallelPlan(ulysses=degree), rank, world_size) for degree in {2, world_size}]
    for name, (family, config) in MODELS.items():
        spec = find_by_name(family)
        transformer: Any = None
        for mesh in filter(None, meshes):
            transformer = transformer or parallelize(_build(spec, config), spec, mesh)
            transformer.set_mesh(mesh)
            for number, call in enumerate(CALLS[family]):
                outputs[f"{mesh.plan.ulysses} {name} {number}"] = _run(transformer, spec, call)
    return outputs


def test_two_and_three_ranks_give_the_one_process_result_on_every_rank():
    results = run_ranks(3, f"{__name__}:run_models")
    for name, (family, config) in MODELS.items():
        spec = find_by_name(family)
        transformer = _build(spec, config)
        for number, call in enumerate(CALLS[family]):
            expected = _run(transformer, spec, call)
            assert expected.std() > 0.1
            for degree in (2, 3):
                for result in results[:degree]:
                    output = result[f"{degree} {name} {number}"]
                    assert relative_error(output, expected) < 1e-5, (degree, name, number)


def run_compiled(rank: int, world_size: int) -> dict[str, Any]:
    """Run by `run_ranks`: compiled blocks, with and without a long skip."""
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    mesh = build_mesh(ParallelPlan(ulysses=world_size), rank, world_size)
    assert mesh is not None
    spec = find_by_name("hunyuan_dit")
    transformer = parallelize(_build(spec, tiny_hunyuan_dit.tiny_config()), spec, mesh, compile=True)
    return {"output": _run(transformer, spec, CALLS["hunyuan_dit"][1])}


def test_compiled_blocks_without_graph_breaks_give_the_same_result():
    results = run_ranks(2, f"{__name__}:run_compiled", timeout=280)
    spec = find_by_name("hunyuan_dit")
    expected = _run(_build(spec, tiny_hunyuan_dit.tiny_config()), spec, CALLS["hunyuan_dit"][1])
    assert all(relative_error(result["output"], expected) < 1e-5 for result in results)


def run_tiny_picture(rank: int, world_size: int) -> dict[str, Any]:
    """Run by `run_ranks`: a latent of one token, whose rotary embedding has been dealt when the tokens are counted."""
    mesh = build_mesh(ParallelPlan(ulysses=world_size), rank, world_size)
    spec = find_by_name("hunyuan_dit")
    transformer = parallelize(_build(spec, tiny_hunyuan_dit.tiny_config(num_layers=2)), spec, mesh)
    with pytest.raises(UnsupportedModelError, match="1 tokens cannot be split"):
        _run(transformer, spec, tiny_hunyuan_dit.make_call(1, (2, 2)))
    return {}


def test_a_picture_of_fewer_tokens_than_ranks_is_refused_on_all_ranks_where_it_cannot_stay_whole():
    assert run_ranks(2, f"{__name__}:run_tiny_picture") == [{}, {}]


@torch.no_grad()
def run_stages(rank: int, world_size: int) -> dict[str, Any]:
    """Run by `run_ranks`: one exact call of every model in stages, each with its own blocks only."""
    plan = ParallelPlan(pipe=world_size)
    mesh = build_mesh(plan, rank, world_size)
    assert mesh is not None
    outputs: dict[str, Any] = {}
    for name in ("PixArt-α", "HunyuanDiT 1.2"):
        family, config = MODELS[name]
        spec = find_by_name(family)
        links = build_links(plan, rank, mirrored=spec.stages is not None and spec.stages.skips)
        assert links is not None
        transformer = _build(spec, config)
        relay = keep_blocks(transformer, spec, share_blocks(transformer, spec, world_size)[rank])
        stage = Stage(transformer, spec, relay, mesh, attention="auto", compile=False)
        for number, call in enumerate(CALLS[family]):
            given = dict(call)
            x, timestep = given.pop("x"), given.pop("timestep")
            result = forward_once(StageRunner(stage, links, [Conditioning(given)], x, 1, keep=False), x, timestep)
            if result is not None:
                outputs[f"{name} {number}"] = result
    return outputs


def test_two_stages_give_the_one_process_result():
    first, last = run_ranks(2, f"{__name__}:run_stages")
    assert last == {}
    for name in ("PixArt-α", "HunyuanDiT 1.2"):
        family, config = MODELS[name]
        spec = find_by_name(family)
        transformer = _build(spec, config)
        for number, call in enumerate(CALLS[family]):
            assert relative_error(first[f"{name} {number}"], _run(transformer, spec, call)) < 1e-5, (name, number)
