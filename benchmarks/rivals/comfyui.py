"""ComfyUI's own FLUX network, out of a folder that is given, with the operations that it takes for such weights."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.authors_names import authors_names

from .measure import Engine, RivalError, main
from .task import Task, Velocity, euler


def build(task: Task) -> Engine:
    """One GPU: ComfyUI has no split of one picture."""
    network = _network(task)
    _fill(network, task)
    if task.case.compile:
        for block in [*network.double_blocks, *network.single_blocks]:
            # The guards that ComfyUI's own compile node leaves out: this dictionary changes with every block.
            block.compile(options={"guard_filter_fn": _without_options})
    return Engine(euler(_velocity(network, task)), "its default attention")


def _network(task: Task) -> Any:
    folder = Path(task.case.comfyui).expanduser()
    if not task.case.comfyui or not (folder / "comfy" / "ldm" / "flux").is_dir():
        raise RivalError(
            f"no ComfyUI in {task.case.comfyui or '--comfyui'!r}: give its folder by --comfyui or $COMFYUI_PATH"
        )
    sys.path.insert(0, str(folder))
    if task.case.tiny:
        from comfy.cli_args import args

        args.cpu = True  # before model_management looks for a GPU
    import comfy.ldm.flux.model
    import comfy.ops

    config = task.config
    width = config["num_attention_heads"] * config["attention_head_dim"]
    return comfy.ldm.flux.model.Flux(
        in_channels=config["in_channels"] // 4,
        out_channels=config["out_channels"] // 4,
        vec_in_dim=config["pooled_projection_dim"],
        context_in_dim=config["joint_attention_dim"],
        hidden_size=width,
        mlp_ratio=4.0,
        num_heads=config["num_attention_heads"],
        depth=config["num_layers"],
        depth_single_blocks=config["num_single_layers"],
        axes_dim=list(config["axes_dims_rope"]),
        theta=10000,
        patch_size=2,
        qkv_bias=True,
        guidance_embed=config["guidance_embeds"],
        txt_ids_dims=[],
        dtype=task.dtype,
        device=task.device,
        operations=comfy.ops.pick_operations(task.dtype, task.dtype, load_device=task.device),
    ).requires_grad_(False)


def _fill(network: Any, task: Task) -> None:
    """Write every weight to where its authors have it."""
    from diffusers import FluxTransformer2DModel

    own, missing = network.state_dict(), set(network.state_dict())
    with torch.device("meta"):
        theirs: Any = FluxTransformer2DModel(**task.config)
    shapes = {name: tuple(tensor.shape) for name, tensor in theirs.state_dict().items()}
    for source, made in authors_names("flux", shapes).items():
        name = source if source in own else source.replace("_norm.scale", "_norm.weight")
        own[name].copy_(made.join(lambda part: task.weight(part, shapes[part])))
        missing.discard(name)
    if missing:
        raise RivalError(f"this ComfyUI's network has weights that we do not know: {', '.join(sorted(missing)[:3])}")


def _without_options(guards: Sequence[Any]) -> list[bool]:
    return ["transformer_options" not in guard.name for guard in guards]


def _velocity(network: Any, task: Task) -> Velocity:
    given = task.conditioning()

    def velocity(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return network(
            x.to(task.dtype), sigma, given["context"], y=given["y"], guidance=given["guidance"], transformer_options={}
        )

    return velocity


if __name__ == "__main__":
    main(build)
