"""ComfyUI's VAEs at tiny width, each with what it decodes and encodes."""

from __future__ import annotations

import unittest.mock
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

KL = {"z_channels": 4, "resolution": 64, "in_channels": 3, "out_ch": 3, "ch": 32, "ch_mult": [1, 2, 2]}
KL |= {"double_z": True, "num_res_blocks": 1, "attn_resolutions": [], "dropout": 0.0}
WAN = {"dim_mult": [1, 2, 4, 4], "num_res_blocks": 1, "attn_scales": [], "temperal_downsample": [False, True, True]}
HUNYUAN = {"in_channels": 3, "out_channels": 3, "num_res_blocks": 1, "z_channels": 8}


class Tiny(NamedTuple):
    """A VAE.

    Args:
        latent: shape of what is decoded; picture: of what is encoded, None where it has no encoder here.
        unit: rows of the picture for one of the latent.
        int8: layers of its blocks are quantised, with rotation.
    """

    make: Callable[[], nn.Module]
    latent: tuple[int, ...]
    picture: tuple[int, ...] | None
    unit: int
    int8: bool = False


def kl() -> nn.Module:
    from comfy.ldm.models.autoencoder import AutoencoderKL

    return AutoencoderKL(embed_dim=4, ddconfig=KL)


def engine() -> nn.Module:
    """FLUX's: without layers around the latent."""
    from comfy.ldm.models.autoencoder import AutoencodingEngine

    parts = "comfy.ldm.modules.diffusionmodules.model"
    return AutoencodingEngine(
        regularizer_config={"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"},
        encoder_config={"target": f"{parts}.Encoder", "params": KL},
        decoder_config={"target": f"{parts}.Decoder", "params": KL},
    )


def flux2() -> nn.Module:
    from comfy.ldm.models.autoencoder import AutoencoderKL

    return AutoencoderKL(embed_dim=4, ddconfig=KL | {"batch_norm_latent": True})


def hunyuan_video() -> nn.Module:
    from comfy.ldm.models.autoencoder import AutoencoderKL

    return AutoencoderKL(embed_dim=4, ddconfig=KL | {"ch_mult": [1, 2, 2, 2], "conv3d": True, "time_compress": 4})


def wan21() -> nn.Module:
    from comfy.ldm.wan.vae import WanVAE

    return WanVAE(dim=16, z_dim=4, dropout=0.0, **WAN)


def wan22() -> nn.Module:
    from comfy.ldm.wan.vae2_2 import WanVAE

    return WanVAE(z_dim=8, dim=16, dec_dim=16, dropout=0.0, **WAN)


def hunyuan_image() -> nn.Module:
    return _hunyuan("vae", {"block_out_channels": [32, 64], "ffactor_spatial": 4})


def hunyuan_video_15() -> nn.Module:
    return _hunyuan("vae_refiner", {"block_out_channels": [32, 64, 64], "ffactor_spatial": 8, "ffactor_temporal": 4})


def hunyuan_image_refiner() -> nn.Module:
    sizes = {"block_out_channels": [32, 64, 64], "ffactor_spatial": 8, "ffactor_temporal": 4, "refiner_vae": False}
    return _hunyuan("vae_refiner", sizes)


def _hunyuan(module: str, sizes: dict[str, object]) -> nn.Module:
    from comfy.ldm.models.autoencoder import AutoencodingEngine

    return AutoencodingEngine(
        regularizer_config={"target": "comfy.ldm.models.autoencoder.EmptyRegularizer"},
        encoder_config={"target": f"comfy.ldm.hunyuan_video.{module}.Encoder", "params": HUNYUAN | sizes},
        decoder_config={"target": f"comfy.ldm.hunyuan_video.{module}.Decoder", "params": HUNYUAN | sizes},
    )


def ltx() -> nn.Module:
    """With noise, told the time; in chunks of frames."""
    return _ltx({"timestep_conditioning": True, "blocks": _ltx_blocks(True), "spatial_padding_mode": "zeros"})


def ltx2() -> nn.Module:
    """Mirrored at the border."""
    return _ltx({"timestep_conditioning": False, "blocks": _ltx_blocks(False), "spatial_padding_mode": "reflect"})


def _ltx_blocks(noise: bool) -> list[object]:
    return [
        ["res_x", {"num_layers": 1, "inject_noise": noise}],
        ["compress_all", {"residual": True, "multiplier": 2}],
        ["res_x", {"num_layers": 1, "inject_noise": False}],
    ]


def _ltx(options: dict[str, object]) -> nn.Module:
    from comfy.ldm.lightricks.vae.causal_video_autoencoder import VideoVAE

    decoder = options.pop("blocks")
    encoder = [["res_x", {"num_layers": 1}], ["compress_all_res", {"multiplier": 2}], ["compress_all", {}]]
    config = {
        "dims": 3,
        "latent_channels": 128,
        "patch_size": 2,
        "latent_log_var": "uniform",
        "norm_layer": "pixel_norm",
    }
    sizes = {"encoder_base_channels": 16, "decoder_base_channels": 16, "causal_decoder": False}
    return VideoVAE(config={**config, **sizes, **options, "encoder_blocks": encoder, "decoder_blocks": decoder})


def cosmos() -> nn.Module:
    from comfy.ldm.cosmos.vae import CausalContinuousVideoTokenizer

    sizes = {"z_channels": 4, "latent_channels": 4, "z_factor": 1, "resolution": 64, "in_channels": 3}
    sizes |= {"out_channels": 3, "channels": 16, "channels_mult": [1, 2], "num_res_blocks": 1, "attn_resolutions": [32]}
    sizes |= {"dropout": 0.0, "patch_size": 4, "num_groups": 1, "temporal_compression": 8, "spacial_compression": 8}
    return CausalContinuousVideoTokenizer(**sizes)


def mochi() -> nn.Module:
    from comfy.ldm.genmo.vae.model import Decoder, Encoder, VideoVAE

    vae = VideoVAE.__new__(VideoVAE)
    nn.Module.__init__(vae)
    common = {"channel_multipliers": [1, 2], "num_res_blocks": [1, 1, 1], "latent_dim": 12, "padding_mode": "replicate"}
    vae.encoder = Encoder(
        in_channels=15, base_channels=32, temporal_reductions=[2], spatial_reductions=[2], affine=True, bias=True,
        prune_bottlenecks=[False] * 3, has_attentions=[False, True, True], input_is_conv_1x1=True, **common,
    )  # fmt: skip
    vae.decoder = Decoder(
        out_channels=3, base_channels=32, temporal_expansions=[2], spatial_expansions=[2], has_attention=[False] * 3,
        output_norm=False, nonlinearity="silu", output_nonlinearity="silu", causal=True, **common,
    )  # fmt: skip
    return vae


def seedvr2() -> nn.Module:
    from comfy.ldm.seedvr import vae

    with unittest.mock.patch.object(vae, "BYTEDANCE_BLOCK_OUT_CHANNELS", (32, 32, 64, 64)):
        made = vae.VideoAutoencoderKLWrapper()
    made.set_memory_limit(2e-3, 2e-3)  # so that it computes parts of large tensors, as at real size
    return made


def h3(operations: Any = None) -> nn.Module:
    """Cuts what it gets into tiles of 64 pixels."""
    import comfy.ops
    from comfy.ldm.minimax.vae import MiniMaxH3VideoVAE, ViT3DDecoder

    vae = MiniMaxH3VideoVAE(ch=32, tile_size=64, tile_overlap_min=16)
    vae.decoder = ViT3DDecoder(num_layers=2, heads=4, operations=operations or comfy.ops.disable_weight_init)
    return vae


def newer_h3() -> nn.Module:
    """Computes some tiles of a row at once, as newer ComfyUIs do."""
    vae: Any = h3()
    own = vae.tiled_decode

    def tiled_decode(z: torch.Tensor) -> torch.Tensor:
        (rows, high, _), (columns, wide, _) = (vae.split_tiles(length * vae.vae_ratio) for length in z.shape[-2:])
        size = high[0] // vae.vae_ratio, wide[0] // vae.vae_ratio
        made: list[torch.Tensor] = []
        for row in (start // vae.vae_ratio for start in rows):
            starts = [start // vae.vae_ratio for start in columns]
            tiles = [z[..., row : row + size[0], column : column + size[1]] for column in starts]
            for first in range(0, len(tiles), 2):
                some = tiles[first : first + 2]
                made += vae._decode_pixels(torch.cat(some)).chunk(len(some))
        with unittest.mock.patch.object(vae, "_decode_pixels", side_effect=made):
            done: torch.Tensor = own(z)
        return done

    vae.tiled_decode = tiled_decode
    return vae


def h3_in_int8(vae: nn.Module) -> nn.Module:
    """Such a VAE, made of one with weights, as ComfyUI loads the official file."""
    import comfy.ops

    from benchmarks.in_comfyui.vae_files import in_int8

    made = h3(comfy.ops.mixed_precision_ops({"mixed_ops": True}, torch.float32))
    made.load_state_dict(in_int8(vae.state_dict()))
    return made.eval()


TINY = {
    "kl": Tiny(kl, (2, 4, 11, 6), (2, 3, 44, 24), 4),
    "flux": Tiny(engine, (1, 4, 13, 5), (1, 3, 52, 20), 4),
    "flux2": Tiny(flux2, (1, 16, 7, 6), (1, 3, 56, 48), 8),
    "hunyuan video": Tiny(hunyuan_video, (1, 4, 3, 7, 6), (1, 3, 9, 56, 48), 8),
    "wan 2.1": Tiny(wan21, (1, 4, 3, 7, 6), (1, 3, 9, 56, 48), 8),
    "wan 2.1 picture": Tiny(wan21, (2, 4, 1, 7, 6), (2, 3, 1, 56, 48), 8),
    "wan 2.2": Tiny(wan22, (1, 8, 3, 7, 6), None, 16),
    "hunyuan image": Tiny(hunyuan_image, (1, 8, 7, 6), (1, 3, 28, 24), 4),
    "hunyuan video 1.5": Tiny(hunyuan_video_15, (1, 8, 3, 7, 6), (1, 3, 9, 56, 48), 8),
    "hunyuan image refiner": Tiny(hunyuan_image_refiner, (1, 8, 1, 7, 6), (1, 3, 1, 56, 48), 8),
    "ltx": Tiny(ltx, (1, 128, 3, 7, 6), (1, 3, 9, 56, 48), 8),
    "ltx-2": Tiny(ltx2, (1, 128, 3, 7, 6), (1, 3, 9, 56, 48), 8),
    "mochi": Tiny(mochi, (1, 12, 3, 7, 6), (1, 3, 5, 14, 12), 2),
    "seedvr2": Tiny(seedvr2, (1, 16, 3, 7, 6), (1, 3, 9, 56, 48), 8),
    "h3": Tiny(h3, (1, 24, 7, 7, 5), (1, 3, 5, 80, 112), 16),
    "h3 int8": Tiny(h3, (1, 24, 7, 7, 5), (1, 3, 5, 80, 112), 16, int8=True),
    "newer h3": Tiny(newer_h3, (2, 24, 7, 7, 8), None, 16),
    "h3 picture": Tiny(h3, (2, 24, 1, 7, 3), (2, 3, 1, 80, 48), 16),
    "cosmos": Tiny(cosmos, (1, 4, 2, 7, 6), (1, 3, 9, 56, 48), 8),
}


def make(tiny: Tiny) -> nn.Module:
    """The VAE with random weights."""
    return h3_in_int8(fill(tiny.make())) if tiny.int8 else fill(tiny.make())


def fill(vae: nn.Module) -> nn.Module:
    """Random weights that keep numbers in range, made where the VAE is."""
    device = next(vae.parameters()).device
    generator = torch.Generator(device).manual_seed(0)
    for name, value in vae.eval().state_dict().items():
        if not value.is_floating_point():
            continue
        noise = torch.randn(value.shape, generator=generator, device=device)
        whole = any(part in name for part in ("norm", "gamma", "std", "running_var"))
        if whole and not name.endswith("bias") and "mean" not in name:
            value.copy_(1 + 0.1 * noise)
        else:
            value.copy_(noise * (value[0].numel() ** -0.5 if value.ndim > 1 else 0.02))
    return vae
