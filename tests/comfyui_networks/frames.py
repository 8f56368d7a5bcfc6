"""What one rank does in the test of Stable Video Diffusion's U-Net: its frames are rows of the batch."""

from __future__ import annotations

from typing import Any

import torch

from parallel_runtime.config import ParallelPlan
from parallel_runtime.denoising.predict import Call, Predictor
from parallel_runtime.mesh.mesh import build_mesh, single_rank_mesh
from parallel_runtime.networks.comfyui.host_code import use_comfyui
from parallel_runtime.requests.conditioning import Conditioning

FRAMES = 5
"""Of a video: no number of ranks here divides them."""


class Frames:
    """The U-Net as the `Predictor` takes a network; counts the rows that this rank computes."""

    rows_together = False

    def __init__(self, unet: torch.nn.Module):
        self._unet = unet
        self.rows = 0

    def set_mesh(self, mesh: Any) -> None:
        """Nothing of it is cut but the batch."""

    def predict(self, x: torch.Tensor, timestep: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        """As the network of the engine."""
        self.rows += x.shape[0]
        return self._unet(x, timestep, **arguments)

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Without the channels of the picture that the video starts from."""
        return (shape[0], 4, *shape[2:])


def share_videos(rank: int, world_size: int, comfyui: str, plan: dict[str, int]) -> dict[str, Any]:
    """{case: difference from one rank, over the largest number}, and rows that this rank computed in each."""
    use_comfyui(comfyui, {"cpu": True})
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    from tests.comfyui_networks.tiny import build, noise

    torch.set_grad_enabled(False)
    unet = build(
        UNetModel, image_size=32, in_channels=8, out_channels=4, model_channels=32, num_res_blocks=[1, 1],
        channel_mult=[1, 1], num_head_channels=16, transformer_depth=[1, 0], transformer_depth_output=[1, 1, 0, 0],
        transformer_depth_middle=1, use_spatial_transformer=True, use_linear_in_transformer=True, context_dim=24,
        num_classes="sequential", adm_in_channels=48, legacy=False, extra_ff_mix_layer=True, use_spatial_context=True,
        merge_strategy="learned_with_images", merge_factor=0.0, video_kernel_size=[3, 1, 1],
        use_temporal_resblock=True, use_temporal_attention=True,
    )  # fmt: skip

    def call(videos: int, seed: int) -> Call:
        rows = videos * FRAMES
        conditioning = {"context": noise(rows, 1, 24, seed=seed), "y": noise(rows, 48, seed=seed)}
        given = Conditioning({**conditioning, "num_video_frames": FRAMES})
        return Call(noise(rows, 8, 8, 6, seed=seed), torch.full((rows,), 500.0), given)

    cases = {"one video": [call(1, 1)], "two branches": [call(1, 1), call(1, 2)], "both in a call": [call(2, 3)]}
    mesh = build_mesh(ParallelPlan(**plan), rank, world_size)
    assert mesh is not None
    found: dict[str, Any] = {}
    for name, calls in cases.items():
        whole = Predictor(Frames(unet), single_rank_mesh())(calls)  # type: ignore[arg-type]
        own = Frames(unet)
        shared = Predictor(own, mesh)(calls)  # type: ignore[arg-type]
        pairs = list(zip(shared, whole, strict=True))
        difference = max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)
        found[name] = {"difference": difference, "rows": own.rows}
    return found
