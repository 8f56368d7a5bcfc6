"""ComfyUI's encoders and decoders whose pictures ranks can share out: the halves of a VAE, by class.

Of a class it is known that rows meet in convolutions, paddings and group norms alone, and in attention of one head that
asks its module for `optimized_attention` or `optimized_vae_attention` with (B, C, rows, columns), or of modules that
are named here.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Half:
    """What is known of an encoder or a decoder.

    Args:
        noise: it adds noise to what it decodes.
        chunks: names, in its class's module, a function that says how many bytes may be computed at once.
        limits: names of numbers of its modules, and of its class's module; of what is larger it computes parts.
    """

    noise: bool = False
    chunks: str = ""
    limits: tuple[str, ...] = ()


_LDM = "comfy.ldm."
HALVES = {
    f"{_LDM}{name}": half
    for names, half in (
        (("modules.diffusionmodules.model:Encoder", "modules.diffusionmodules.model:Decoder"), Half()),
        (("wan.vae:Encoder3d", "wan.vae:Decoder3d", "wan.vae2_2:Encoder3d", "wan.vae2_2:Decoder3d"), Half()),
        (("hunyuan_video.vae:Encoder", "hunyuan_video.vae:Decoder"), Half()),
        (("hunyuan_video.vae_refiner:Encoder", "hunyuan_video.vae_refiner:Decoder"), Half()),
        (
            (
                "lightricks.vae.causal_video_autoencoder:Encoder",
                "lightricks.vae.causal_video_autoencoder:Decoder",
            ),
            Half(noise=True, chunks="get_max_chunk_size"),
        ),
        (
            (
                "cosmos.cosmos_tokenizer.layers3d:EncoderFactorized",
                "cosmos.cosmos_tokenizer.layers3d:DecoderFactorized",
            ),
            Half(),
        ),
        (("genmo.vae.model:Encoder", "genmo.vae.model:Decoder"), Half()),
        (("seedvr.vae:Encoder3D", "seedvr.vae:Decoder3D"), Half(limits=("memory_limit", "_NORM_LIMIT"))),
    )
    for name in names
}


def find_half(vae: nn.Module, name: str) -> Half | None:
    """What is known of a VAE's `encoder` or `decoder`; None of one that only a single rank can run."""
    part = getattr(vae, name, None)
    return HALVES.get(f"{type(part).__module__}:{type(part).__name__}")
