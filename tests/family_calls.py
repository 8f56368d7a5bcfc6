"""Every family's calls as data: those that ComfyUI's own forward answers too, and the files that it runs on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from parallel_runtime.networks.diffusers.spec import ModelSpec
from tests import tiny_flux, tiny_flux2, tiny_hunyuan_dit, tiny_pixart, tiny_sd3, tiny_sdxl, tiny_wan
from tests.tiny_model import find_by_name, write_diffusers_folder, write_original

Call = dict[str, Any]
"""Arguments of ComfyUI's call: x, timestep, context and extras."""


@dataclass(frozen=True)
class FamilyCalls:
    """One family.

    Args:
        spec: its name in the registry.
        files: by name, what ComfyUI takes it for ("": not asked), config, and how `write_original` writes it.
        cases: (name of the file, call).
    """

    spec: str
    files: Mapping[str, tuple[str, dict[str, Any], dict[str, Any]]] = field(hash=False)
    cases: Mapping[str, tuple[str, Call]] = field(hash=False)

    @property
    def model(self) -> ModelSpec:
        """The family's data."""
        return find_by_name(self.spec)

    def write(self, folder: Path) -> None:
        """Write the files for ComfyUI's class, and for diffusers' a folder of the same weights beside each."""
        for name, (_, config, how) in self.files.items():
            alike = {key: how[key] for key in ("dtype", "seed") if key in how}
            write_diffusers_folder(self.model, folder / name, config, **alike)
            path = folder / f"{name}.safetensors"
            if "norm_key" in how:  # as ComfyUI saves them
                tiny_flux.write_original(path, config, **how)
                continue
            write_original(self.model, path, config, **how)


def _call(seed: int, x: tuple[int, ...], context: tuple[int, int], scale: float = 1.0, **more: Any) -> Call:
    """Noise of these shapes. `refs` are the sizes of reference latents; what else is None is left out."""
    generator = torch.Generator().manual_seed(seed)

    def noise(value: Any) -> Any:
        return torch.randn(*value, generator=generator) if isinstance(value, tuple) else value

    timestep = scale * torch.tensor([0.9046, 0.31, 0.02])[: x[0]]
    call = {"x": noise(x), "timestep": timestep, "context": noise((x[0], *context))}
    if refs := more.pop("refs", ()):
        call["ref_latents"] = [noise((*x[:2], *ref)) for ref in refs]
    return {**call, **{name: noise(value) for name, value in more.items() if value is not None}}


def flux_call(seed: int, size: tuple[int, int], batch: int = 1, channels: int = 16, **changes: Any) -> Call:
    """Of FLUX.1."""
    usual = {"y": (batch, 32), "guidance": torch.full((batch,), 3.5)}
    return _call(seed, (batch, channels, *size), (5, 64), **usual | changes)


def flux2_call(seed: int, size: tuple[int, int], batch: int = 1, **changes: Any) -> Call:
    """Of FLUX.2."""
    return flux_call(seed, size, batch, 128, **{"y": None} | changes)


def sd3_call(seed: int, size: tuple[int, int], batch: int = 1) -> Call:
    """Of SD3."""
    return _call(seed, (batch, 16, *size), (5, 64), 1000, y=(batch, 32))


def wan_call(
    seed: int, size: tuple[int, int, int], batch: int = 1, channels: int = 16, text: int = 5, image: int = 0
) -> Call:
    """Of Wan; `image` is the number of CLIP's tokens."""
    return _call(seed, (batch, channels, *size), (text, 4096), 1000, clip_fea=(batch, image, 1280) if image else None)


_sdxl, _pixart, _hunyuan = tiny_sdxl.make_call, tiny_pixart.make_call, tiny_hunyuan_dit.make_call
_BF16 = {"dtype": torch.bfloat16}  # of files that are large, as ComfyUI fixes their widths
_PIXART_WIDE = {"num_attention_heads": 16, "caption_channels": 4096, "num_layers": 1}
_HUNYUAN_WIDE = {**tiny_hunyuan_dit.COMFYUI_TEXTS, "num_attention_heads": 16}
_HUNYUAN_OLD = {"attention_head_dim": 88, "num_layers": 2, "use_style_cond_and_image_meta_size": True}
_TEXTS = partial(_hunyuan, texts=(77, 256), widths=(1024, 2048))
_SMALL = {"num_attention_heads": 2, "num_layers": 1, "num_single_layers": 1}

CALLS = {
    "FLUX.1": FamilyCalls(
        "flux",
        {
            "dev": ("Flux", tiny_flux.tiny_config(), {"norm_key": "scale"}),
            "schnell": ("FluxSchnell", tiny_flux.tiny_config(guidance_embeds=False), {"norm_key": "weight", "seed": 1}),
            "fill": ("FluxInpaint", tiny_flux.tiny_config(**_SMALL, in_channels=384), {"seed": 2}),
        },
        {
            "plain": ("dev", flux_call(1, (8, 12))),
            "odd size, batch 2": ("dev", flux_call(2, (9, 7), 2)),
            "one row, batch 3": ("dev", flux_call(3, (1, 6), 3)),
            "no y": ("dev", flux_call(4, (8, 8), 2, y=None)),
            "two guidances": ("dev", flux_call(7, (8, 8), 2, guidance=torch.tensor([1.0, 4.0]))),
            "schnell": ("schnell", flux_call(8, (8, 8), 2)),
            "fill": ("fill", flux_call(9, (8, 7), 2, channels=96)),
            "a reference": ("dev", flux_call(10, (9, 7), 2, refs=[(6, 9)])),
        },
    ),
    "FLUX.2": FamilyCalls(
        "flux2",
        {
            "dev": ("Flux2", tiny_flux2.tiny_config(), {}),
            "klein": (
                "Flux2",
                tiny_flux2.tiny_config(guidance_embeds=False, num_layers=2, num_single_layers=1),
                {"prefix": "model.diffusion_model.", "seed": 1},
            ),
        },
        {
            "odd size, batch 2": ("dev", flux2_call(1, (5, 7), 2)),
            "one row, batch 3": ("dev", flux2_call(2, (1, 6), 3)),
            "no guidance": ("dev", flux2_call(3, (4, 4), 2, guidance=None)),
            "two guidances": ("dev", flux2_call(4, (4, 4), 2, guidance=torch.tensor([1.0, 4.0]))),
            "klein": ("klein", flux2_call(6, (4, 5), 2)),
            "references": ("klein", flux2_call(7, (5, 3), 2, refs=[(3, 5), (4, 2), (2, 2)])),
        },
    ),
    "SD3": FamilyCalls(
        "sd3",
        {
            "sd3": ("SD3", tiny_sd3.tiny_config(qk_norm=None, dual_attention_layers=()), {}),
            "large": ("SD3", tiny_sd3.tiny_config(dual_attention_layers=()), {"prefix": "model.diffusion_model."}),
            "medium": ("SD3", tiny_sd3.tiny_config(layers=3), {"seed": 2}),
        },
        {
            "sd3, odd, batch 2": ("sd3", sd3_call(1, (9, 7), 2)),
            "large, plain": ("large", sd3_call(2, (8, 12))),
            "large, whole table, batch 3": ("large", sd3_call(3, (23, 24), 3)),
            "medium, odd, batch 2": ("medium", sd3_call(4, (7, 10), 2)),
            "medium, one row": ("medium", sd3_call(5, (1, 6))),
        },
    ),
    "SDXL": FamilyCalls(
        "sdxl",
        {name: ("", config, {}) for name, config in tiny_sdxl.KINDS.items()},
        {
            "base, batch of two": ("base", _sdxl(1, (12, 8), 2)),
            "base, odd size": ("base", _sdxl(2, (13, 7), text=9)),
            "inpainting": ("inpainting", _sdxl(3, (8, 8), channels=9)),
            "refiner": ("refiner", _sdxl(4, (16, 10), 2)),
            "SSD-1B": ("SSD-1B", _sdxl(5, (8, 12))),
            "KOALA": ("KOALA", _sdxl(6, (10, 9), 3, text=7)),
        },
    ),
    "PixArt": FamilyCalls(
        "pixart",
        {
            "alpha": ("PixArtAlpha", tiny_pixart.tiny_config(**_PIXART_WIDE, use_additional_conditions=True), _BF16),
            "sigma": ("PixArtSigma", tiny_pixart.tiny_config(**_PIXART_WIDE), _BF16),
        },
        {
            "alpha": ("alpha", _pixart(1, (36, 48), 2, width=4096, micro=True)),
            "alpha, no micro-conditions": ("alpha", _pixart(2, (40, 34), width=4096)),
            "sigma, batch of two": ("sigma", _pixart(3, (34, 50), 2, text=9, width=4096)),
            "sigma, positions at twice the size": ("sigma", _pixart(4, (110, 88), text=1, width=4096)),
        },
    ),
    "HunyuanDiT": FamilyCalls(
        "hunyuan_dit",
        {
            "1.2": ("HunyuanDiT", tiny_hunyuan_dit.tiny_config(**_HUNYUAN_WIDE, num_layers=6), _BF16),
            "1.1": ("HunyuanDiT1", tiny_hunyuan_dit.tiny_config(**_HUNYUAN_WIDE, **_HUNYUAN_OLD), _BF16),
        },
        {
            "1.2, batch of two": ("1.2", _TEXTS(1, (12, 20), 2)),
            "1.2, odd sides": ("1.2", _TEXTS(2, (9, 7))),
            "1.1": ("1.1", _TEXTS(4, (8, 14), 2, sizes=True)),
        },
    ),
    "Wan": FamilyCalls(
        "wan",
        {
            "text": ("", tiny_wan.tiny_config(), {}),
            "three heads": ("", tiny_wan.tiny_config(num_attention_heads=3, num_layers=1, ffn_dim=512), {}),
            "image": ("", tiny_wan.image_config(), {}),
            "first and last image": ("", tiny_wan.image_config(pos_embed_seq_len=514), {}),
            "5B": ("", tiny_wan.tiny_config(in_channels=48, out_channels=48, num_layers=1), {}),
            "2.2 image": ("", tiny_wan.tiny_config(in_channels=36, num_layers=1), {}),
        },
        {
            "plain": ("text", wan_call(1, (3, 8, 6))),
            "odd size, batch 2": ("text", wan_call(2, (2, 7, 5), 2)),
            "one frame": ("three heads", wan_call(3, (1, 4, 4), 2, text=9)),
            "image": ("image", wan_call(4, (2, 4, 5), 2, 36, text=512, image=257)),
            "two images": ("first and last image", wan_call(5, (2, 4, 4), 2, 36, text=512, image=514)),
            "Wan 2.2 5B": ("5B", wan_call(6, (2, 4, 4), channels=48)),
            "Wan 2.2 image": ("2.2 image", wan_call(7, (2, 4, 4), channels=36)),
        },
    ),
}
