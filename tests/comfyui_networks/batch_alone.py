"""Networks whose tokens are not shared out: the batch alone is, and rows that need one another stay on one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from parallel_runtime.config import ParallelPlan
from parallel_runtime.denoising.predict import Call, Predictor
from parallel_runtime.mesh.mesh import build_mesh, single_rank_mesh
from parallel_runtime.networks.comfyui.comfy_code import use_comfyui
from parallel_runtime.networks.tables.comfyui import find_network
from parallel_runtime.requests.conditioning import Conditioning

BATCH = 5
"""Rows of a branch: no number of ranks here divides them."""


@dataclass(frozen=True)
class Alone:
    """A network, and one branch's call of it.

    Args:
        x: its rows are BATCH.
        conditioning: of a branch, by a seed.
        shared: as in `Conditioning`.
        channels: of the output, and those of x behind them are not.
        at_once: neighbouring rows that one rank computes.
    """

    network: torch.nn.Module
    x: tuple[int, ...]
    conditioning: Callable[[int], dict[str, Any]]
    shared: frozenset[str] = frozenset()
    channels: int = 0
    at_once: int = 1


@dataclass
class Counted:
    """A network as the `Predictor` takes one; counts the rows that this rank computes."""

    alone: Alone
    rows_together: bool = field(default=False, init=False)
    rows: int = field(default=0, init=False)

    def set_mesh(self, mesh: Any) -> None:
        """Nothing of it is cut but the batch."""

    def rows_go_apart(self, rows: int, begins: bool) -> bool:
        """Nothing of it is compiled."""
        return False

    def predict(self, x: torch.Tensor, timestep: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        """As the network of the engine."""
        self.rows += x.shape[0]
        return self.alone.network(x, timestep, **arguments)

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Without the channels of the picture that a video starts from."""
        return (shape[0], self.alone.channels or shape[1], *shape[2:])


def _svd() -> Alone:
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    from tests.comfyui_networks.tiny import build, noise

    unet = build(
        UNetModel, image_size=32, in_channels=8, out_channels=4, model_channels=32, num_res_blocks=[1, 1],
        channel_mult=[1, 1], num_head_channels=16, transformer_depth=[1, 0], transformer_depth_output=[1, 1, 0, 0],
        transformer_depth_middle=1, use_spatial_transformer=True, use_linear_in_transformer=True, context_dim=24,
        num_classes="sequential", adm_in_channels=48, legacy=False, extra_ff_mix_layer=True, use_spatial_context=True,
        merge_strategy="learned_with_images", merge_factor=0.0, video_kernel_size=[3, 1, 1],
        use_temporal_resblock=True, use_temporal_attention=True,
    )  # fmt: skip

    def given(seed: int) -> dict[str, Any]:
        rows = {"context": noise(BATCH, 1, 24, seed=seed), "y": noise(BATCH, 48, seed=seed)}
        return {**rows, "num_video_frames": BATCH}

    return Alone(unet, (BATCH, 8, 8, 6), given, channels=4, at_once=BATCH)


def _trellis() -> Alone:
    """Five shapes of other numbers of cells, in rows as long as the longest."""
    from comfy.ldm.trellis2.model import Trellis2

    from tests.comfyui_networks.tiny import build, noise

    network = build(
        Trellis2, resolution=8, in_channels=8, out_channels=8, model_channels=48, cond_channels=24, num_blocks=2,
        num_heads=2, mlp_ratio=2.0,
    )  # fmt: skip
    counts = torch.tensor([3, 7, 4, 5, 6])
    number = torch.arange(BATCH).repeat_interleave(counts)
    place = torch.cat([torch.arange(int(count)) for count in counts])
    coords = torch.stack([number, place, place % 3, place % 2], 1).int()
    one_for_all = {"trellis2_coords": coords, "trellis2_coord_counts": counts}

    def given(seed: int) -> dict[str, Any]:
        seen = noise(BATCH, 9, 24, seed=seed)
        return {"context": seen, "embeds": 2 * seen, "trellis2_generation_mode": "shape_generation", **one_for_all}

    return Alone(network, (BATCH, 8, 7, 1), given, frozenset(one_for_all), at_once=BATCH)


def _cascade_c() -> Alone:
    from comfy.ldm.cascade.stage_c import StageC

    from tests.comfyui_networks.tiny import build, noise

    network = build(
        StageC, c_cond=32, c_hidden=[32, 32], nhead=[2, 2], blocks=[[1, 1], [1, 1]], c_clip_text=24,
        c_clip_text_pooled=16, c_clip_img=16,
    )  # fmt: skip

    def given(seed: int) -> dict[str, Any]:
        texts = {"clip_text": noise(BATCH, 9, 24, seed=seed), "clip_text_pooled": noise(BATCH, 1, 16, seed=seed)}
        return {
            **texts,
            "clip_img": noise(BATCH, 1, 16, seed=seed),
            "sca": torch.zeros(BATCH),
            "crp": torch.zeros(BATCH),
        }

    return Alone(network, (BATCH, 16, 6, 8), given)


def _cascade_b() -> Alone:
    from comfy.ldm.cascade.stage_b import StageB

    from tests.comfyui_networks.tiny import build, noise

    network = build(
        StageB, c_cond=32, c_hidden=[16, 16, 32, 32], nhead=[-1, -1, 2, 2], blocks=[[1] * 4, [1] * 4],
        block_repeat=[[1] * 4, [1] * 4], c_clip=24,
    )  # fmt: skip

    def given(seed: int) -> dict[str, Any]:
        prior = noise(BATCH, 16, 3, 4, seed=seed)
        return {"clip": noise(BATCH, 1, 24, seed=seed), "effnet": prior, "sca": torch.zeros(BATCH)}

    return Alone(network, (BATCH, 4, 16, 16), given)


def _ace_step() -> Alone:
    from comfy.ldm.ace.model import ACEStepTransformer2DModel

    from tests.comfyui_networks.tiny import build, noise

    network = build(
        ACEStepTransformer2DModel, num_layers=2, attention_head_dim=16, num_attention_heads=2, mlp_ratio=2.0,
        text_embedding_dim=24, lyric_encoder_vocab_size=50,
    )  # fmt: skip

    def given(seed: int) -> dict[str, Any]:
        drawn = torch.Generator().manual_seed(seed)
        lyrics = torch.randint(1, 50, (BATCH, 7), generator=drawn)
        speaker = torch.zeros(BATCH, 512)
        return {"context": noise(BATCH, 9, 24, seed=seed), "lyric_token_idx": lyrics, "speaker_embeds": speaker}

    return Alone(network, (BATCH, 8, 16, 12), given)


def _mochi() -> Alone:
    from comfy.ldm.genmo.joint_model.asymm_models_joint import AsymmDiTJoint

    from tests.comfyui_networks.tiny import build, noise

    network = build(
        AsymmDiTJoint, in_channels=12, hidden_size_x=48, hidden_size_y=32, depth=2, num_heads=2, mlp_ratio_x=256.0,
        mlp_ratio_y=2.0, use_t5=True, t5_feat_dim=24, t5_token_length=9, learn_sigma=False, qk_norm=True,
        qkv_bias=False, out_bias=True, attn_drop=0.0, timestep_scale=1000.0, posenc_preserve_area=True,
    )  # fmt: skip

    def given(seed: int) -> dict[str, Any]:
        mask = torch.ones(BATCH, 9)
        mask[:, 6:] = 0
        return {"context": noise(BATCH, 9, 24, seed=seed), "attention_mask": mask, "num_tokens": 6}

    return Alone(network, (BATCH, 12, 3, 6, 8), given)


def _animate_2() -> Alone:
    from comfy.ldm.wan.model_animate2 import WanAnimate2Model

    from tests.comfyui_networks.tiny import build, noise

    network = build(
        WanAnimate2Model, dim=48, ffn_dim=64, freq_dim=32, text_dim=24, text_len=16, num_heads=2, num_layers=2,
        in_dim=36, out_dim=16,
    )  # fmt: skip

    def given(seed: int) -> dict[str, Any]:
        seen, pose = noise(BATCH, 257, 1280, seed=seed), noise(BATCH, 16, 2, 6, 8, seed=seed)
        texts = {"context": noise(BATCH, 9, 24, seed=seed), "context_pose": noise(BATCH, 9, 24, seed=seed + 1)}
        return {**texts, "clip_fea": seen, "clip_fea_pose": 2 * seen, "pose_latents": pose}

    return Alone(network, (BATCH, 36, 3, 6, 8), given, channels=16)


ALONE = {
    "stable video diffusion": _svd, "trellis 2": _trellis, "stable cascade c": _cascade_c,
    "stable cascade b": _cascade_b, "ace-step": _ace_step, "mochi": _mochi, "wan animate 2": _animate_2,
}  # fmt: skip


def compare(rank: int, world_size: int, comfyui: str, plan: dict[str, int]) -> dict[str, Any]:
    """{network: {case: {"difference" from one rank, over the largest number; "rows" that this rank computed}}}."""
    use_comfyui(comfyui, {"cpu": True})
    from tests.comfyui_networks.tiny import noise

    torch.set_grad_enabled(False)
    mesh = build_mesh(ParallelPlan(**plan), rank, world_size)
    assert mesh is not None
    found: dict[str, Any] = {}
    for name, make in ALONE.items():
        alone = make()
        known = find_network(type(alone.network))
        assert known is not None, name
        assert known.whole, name
        branches = [
            Call(
                noise(*alone.x, seed=1),
                torch.full((BATCH,), 0.5),
                Conditioning({**alone.conditioning(seed), "transformer_options": {}}, alone.shared),
            )
            for seed in (1, 2)
        ]
        both = Call(
            torch.cat([each.x for each in branches]),
            torch.cat([each.timestep for each in branches]),
            Conditioning(
                {
                    argument: value
                    if argument in alone.shared or not isinstance(value, torch.Tensor)
                    else torch.cat([each.conditioning.arguments[argument] for each in branches])
                    for argument, value in branches[0].conditioning.arguments.items()
                }
                | {"transformer_options": {"cond_or_uncond": [1, 0]}},
                alone.shared,
            ),
        )
        found[name] = {"at once": alone.at_once}
        for case, calls in {"one branch": branches[:1], "two branches": branches, "both in a call": [both]}.items():
            whole = Predictor(Counted(alone), single_rank_mesh())(calls)  # type: ignore[arg-type]
            own = Counted(alone)
            shared = Predictor(own, mesh)(calls)  # type: ignore[arg-type]
            pairs = list(zip(shared, whole, strict=True))
            assert all(other.std() > 0 for _, other in pairs), name
            difference = max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)
            found[name][case] = {"difference": difference, "rows": own.rows}
    return found
