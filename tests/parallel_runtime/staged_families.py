"""Families in stages, for the PipeFusion tests: tiny models, one run on a pipeline, one in a single stage."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import diffusers
import torch

from parallel_runtime.config import ParallelPlan
from parallel_runtime.mesh import build_mesh
from parallel_runtime.pipefusion.blocks import keep_blocks, share_blocks
from parallel_runtime.pipefusion.denoise import PipelineDenoising
from parallel_runtime.pipefusion.links import Links, build_links
from parallel_runtime.pipefusion.lone import LoneRunner, whole_stage
from parallel_runtime.pipefusion.runner import StageRunner
from parallel_runtime.pipefusion.stage import Stage
from parallel_runtime.pipeline.conditioning import Conditioning
from parallel_runtime.pipeline.denoise import Denoising
from parallel_runtime.pipeline.requests import ConditioningRef, Sample
from parallel_runtime.registry import find_by_name
from tests import tiny_flux2, tiny_hunyuan_dit, tiny_pixart, tiny_sd3, tiny_wan
from tests.parallel_runtime.staged_run import Quiet
from tests.tiny_model import make_state_dict

PATCHES, STEPS, WARMUP = 3, 4, 1


@dataclass(frozen=True)
class Family:
    """A tiny model and one call of it."""

    spec: str
    config: dict[str, Any]
    call: dict[str, Any] = field(hash=False)


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _families() -> dict[str, Family]:
    hunyuan = tiny_hunyuan_dit.make_call(1, (12, 8), sizes=True)
    sd3 = {"num_attention_heads": 2, "attention_head_dim": 32, "caption_projection_dim": 64}
    flux2 = {"num_attention_heads": 2, "attention_head_dim": 32, "axes_dims_rope": (8, 8, 8, 8), "in_channels": 16}
    wan = {"num_attention_heads": 2, "attention_head_dim": 32, "text_dim": 48, "ffn_dim": 128, "freq_dim": 32}
    return {
        "PixArt": Family("pixart", tiny_pixart.tiny_config(num_layers=4), tiny_pixart.make_call(1, (14, 8), 2)),
        "HunyuanDiT": Family(
            "hunyuan_dit",
            tiny_hunyuan_dit.tiny_config(num_layers=8, use_style_cond_and_image_meta_size=True),
            hunyuan,
        ),
        "SD3.5 medium": Family(
            "sd3",
            tiny_sd3.tiny_config(layers=4, dual_attention_layers=(0, 1, 2), **sd3),
            {"x": _noise(1, 16, 14, 8), "context": _noise(1, 7, 64), "y": _noise(1, 32)},
        ),
        "FLUX.2": Family(
            "flux2",
            tiny_flux2.tiny_config(num_layers=2, num_single_layers=4, out_channels=16, **flux2),
            {"x": _noise(1, 16, 7, 5), "context": _noise(1, 6, 64), "guidance": torch.tensor([3.5])},
        ),
        "Wan": Family(
            "wan",
            tiny_wan.tiny_config(num_layers=4, **wan),
            {"x": _noise(1, 16, 3, 6, 4), "context": _noise(1, 9, 48)},
        ),
    }


FAMILIES = _families()


def build(family: Family) -> Any:
    """The transformer as it is after loading, the same in every process."""
    spec = find_by_name(family.spec)
    transformer = getattr(diffusers, spec.transformer_class)(**family.config)
    transformer.load_state_dict(make_state_dict(spec, family.config))
    if spec.prepare is not None:
        spec.prepare(transformer)
    return transformer.requires_grad_(False).eval()


def run_family(family: Family, stage: Stage, links: Links | None, steps: int = STEPS) -> Any:
    """A few steps of euler; the latent on the first stage. Without links the stage is the only one."""
    extras = {name: value for name, value in family.call.items() if name not in ("x", "timestep")}
    x, sigmas = family.call["x"], torch.linspace(1, 0, steps + 1)
    denoising = Denoising(Sample("m", "euler", (ConditioningRef(0),), 1.0, 0, "cpu"), torch.float32)
    branches = [Conditioning(extras)]
    if links is None:
        runner: StageRunner = LoneRunner(stage, branches, x, PATCHES)
    else:
        runner = StageRunner(stage, links, branches, x, PATCHES, keep=True)
    tensors = {"x": x, "sigmas": sigmas, "timesteps": sigmas * 1000}
    return PipelineDenoising(denoising, runner, WARMUP, tensors, Quiet()).run()


def run_on_pipeline(rank: int, world_size: int, plans: dict[str, list[dict[str, int]]]) -> dict[str, Any]:
    """Run by `run_ranks`: family -> its plans; what the first stage has, on rank 0."""
    results = {}
    for name, degrees in plans.items():
        family = FAMILIES[name]
        spec = find_by_name(family.spec)
        assert spec.stages is not None
        for number, each in enumerate(degrees):
            plan = ParallelPlan(**each)
            mesh, links = build_mesh(plan, rank, world_size), build_links(plan, rank, spec.stages.skips)
            assert mesh is not None
            assert links is not None
            module = build(family)
            relay = keep_blocks(module, spec, share_blocks(module, spec, plan.pipe)[mesh.coordinate["pipe"]])
            latent = run_family(family, Stage(module, spec, relay, mesh, "auto", False), links)
            if rank == 0:
                results[f"{name} {number}"] = latent
    return results


def run_alone(family: Family, steps: int = STEPS) -> torch.Tensor:
    """The same patches with all blocks in one stage and one process."""
    return run_family(family, whole_stage(build(family), find_by_name(family.spec)), None, steps)
