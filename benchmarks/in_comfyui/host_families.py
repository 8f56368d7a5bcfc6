"""Models that run in ComfyUI's own networks, at real size and in the formats of ComfyUI's templates, and tiny."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .families import ENDING, TWIN, Family, Text

GGUF = ".gguf"


@dataclass(frozen=True)
class HostFamily(Family):
    """As Family, but `config` is what ComfyUI's detection says of the file.

    Args:
        format: of the products in blocks: "" as they are, "fp8" cast, "scaled fp8", "int8" (with rotation), "Q4_K" in a
            GGUF file.
        latents: shapes of several latents that are sampled together; () where a node of the family's makes the latent.
        described_size: of those, for tables.
        header: metadata of the file that detection reads.
    """

    format: str = ""
    latents: tuple[tuple[int, ...], ...] = ()
    described_size: str = ""
    header: Mapping[str, Any] | None = None

    @property
    def gguf(self) -> bool:
        """Whether the file is a GGUF file, which ComfyUI reads with the pack ComfyUI-GGUF."""
        return self.format == "Q4_K"

    @property
    def described(self) -> str:
        """Title, format and size, for tables."""
        title = f"{self.title} {self.format or 'bf16'}"
        return f"{title}, {self.described_size}" if self.latents else replace(self, title=title)._described

    @property
    def _described(self) -> str:
        return super().described


def _flux(**more: Any) -> dict[str, Any]:
    return {
        "image_model": "flux", "axes_dim": [16, 56, 56], "num_heads": 24, "mlp_ratio": 4.0, "theta": 10000,
        "out_channels": 16, "qkv_bias": True, "txt_ids_dims": [], "in_channels": 16, "hidden_size": 3072,
        "context_in_dim": 4096, "patch_size": 2, "vec_in_dim": 768, "depth": 19, "depth_single_blocks": 38,
        "guidance_embed": True, "yak_mlp": False, "txt_norm": False, **more,
    }  # fmt: skip


_Z_IMAGE = {
    "image_model": "lumina2", "patch_size": 2, "in_channels": 16, "cap_feat_dim": 2560, "qk_norm": True, "dim": 3840,
    "n_layers": 30, "n_heads": 30, "n_kv_heads": 30, "axes_dims": [32, 48, 48], "axes_lens": [1536, 512, 512],
    "rope_theta": 256.0, "ffn_dim_multiplier": 8 / 3, "z_image_modulation": True, "time_scale": 1000.0,
    "pad_tokens_multiple": 32,
}  # fmt: skip
_KREA = {
    "image_model": "krea2", "features": 6144, "channels": 16, "patch": 2, "layers": 28, "heads": 48, "kvheads": 12,
    "txtlayers": 12, "txtdim": 2560,
}  # fmt: skip
_H3 = {
    "image_model": "minimax_h3", "num_layers": 50, "token_refiner_num_layers": 2, "hidden_size": 5376,
    "latents_dim": 24, "audio_latents_dim": 32, "attention_head_dim": 128, "num_attention_heads": 56,
    "ffn_hidden_size": 14336, "text_dim": 5120, "adaln_curve_grid": 1024, "time_embed_dim": 32,
    "rope_inv_freq_len": 16,
}  # fmt: skip


def _wan(dim: int = 5120, hidden: int = 13824, layers: int = 40) -> dict[str, Any]:
    return {
        "image_model": "wan2.1", "model_type": "t2v", "dim": dim, "ffn_dim": hidden, "num_heads": dim // 128,
        "num_layers": layers, "in_dim": 16, "out_dim": 16, "patch_size": (1, 2, 2), "freq_dim": 256,
        "window_size": (-1, -1), "qk_norm": True, "cross_attn_norm": True, "eps": 1e-6,
    }  # fmt: skip


_PICTURE, _VIDEO = "EmptySD3LatentImage", "EmptyHunyuanLatentVideo"
_FLUX_TEXT = Text(512, 4096, 768, 3.5)
_LTX_LATENTS = ((1, 128, 13, 16, 24), (1, 8, 97, 16))
_H3_LATENTS = ((1, 24, 22, 28, 48), (1, 32, 2, 125))


def _family(name: str, title: str, config: dict[str, Any], text: Text, gigabytes: float, **more: Any) -> HostFamily:
    given: dict[str, Any] = {"latent": _PICTURE, "steps": 8, "spec": None, **more}
    return HostFamily(name=name, title=title, config=config, text=text, gigabytes=gigabytes, **given)


HOST_REAL: dict[str, Family] = {
    family.name: family
    for family in (
        _family("own-flux", "FLUX.1-dev", _flux(), _FLUX_TEXT, 23.9),
        _family("own-flux-fp8", "FLUX.1-dev", _flux(), _FLUX_TEXT, 12.1, format="scaled fp8"),
        _family("own-flux-int8", "FLUX.1-dev", _flux(), _FLUX_TEXT, 12.1, format="int8"),
        _family("own-flux-gguf", "FLUX.1-dev", _flux(), _FLUX_TEXT, 7.3, format="Q4_K"),
        _family("own-z-image", "Z-Image Turbo", _Z_IMAGE, Text(128, 2560), 12.6),
        _family(
            "own-qwen", "Qwen-Image", {"image_model": "qwen_image", "in_channels": 64, "num_layers": 60},
            Text(256, 3584), 20.8, format="fp8", cfg=4.0,
        ),
        _family(
            "own-wan", "Wan 2.2 14B, one expert", _wan(), Text(512, 4096), 14.9, format="scaled fp8", cfg=3.5,
            latent=_VIDEO, size=(832, 480), frames=81, steps=3,
        ),
        _family(
            "own-ltx", "LTX-2", {"image_model": "ltxav", "num_layers": 48, "attention_head_dim": 128}, Text(256, 7680),
            20.2, format="scaled fp8", cfg=4.0, latents=_LTX_LATENTS, described_size="768 × 512, 97 frames, CFG",
            steps=5,
        ),
        _family("own-krea", "Krea 2", _KREA, Text(256, 30720), 13.4, format="int8"),
        _family(
            "own-h3", "MiniMax H3", _H3, Text(256, 5120), 20.7, format="int8", latents=_H3_LATENTS,
            described_size="768 × 448, 73 frames", steps=4,
        ),
    )
}  # fmt: skip


def file_name(file: str) -> str:
    """The name on disk of such a file."""
    family = HOST_REAL.get(file.removesuffix(TWIN))
    return file + (GGUF if isinstance(family, HostFamily) and family.gguf else ENDING)


def loaded_as_tensors() -> list[str]:
    """Names of those whose files ComfyUI's own loader takes as tensors."""
    return [name for name, family in HOST_REAL.items() if not (isinstance(family, HostFamily) and family.gguf)]


def host_tiny() -> dict[str, Family]:
    """The same for CPUs: small files that ComfyUI recognises. For those that never are small stands a FLUX."""
    from tests.comfyui_networks.files import FILES

    small = {"own-krea": "krea-2", "own-wan": "wan-t2v", "own-ltx": "ltx-2", "own-h3": "minimax-h3"}
    texts = {"own-krea": Text(9, 320), "own-wan": Text(9, 4096), "own-ltx": Text(9, 96), "own-h3": Text(9, 48)}
    latents = {"own-ltx": ((1, 128, 3, 4, 7), (1, 8, 13, 16)), "own-h3": ((1, 24, 3, 6, 8), (1, 32, 2, 11))}
    made: dict[str, Family] = {}
    for name, family in HOST_REAL.items():
        assert isinstance(family, HostFamily)
        file = FILES[small.get(name, "longcat")]
        made[name] = replace(
            family, config=file.config, text=texts.get(name, Text(9, 3584, 768)), size=(64, 64), steps=4,
            frames=5 if family.frames else 0, gigabytes=0.3, latents=latents.get(name, ()),
            header=file.metadata or None,
        )  # fmt: skip
    return made
