"""What a file holds that is no model of ComfyUI's, by the names of its tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..said import Said, said

_TELLTALES: tuple[tuple[Said, str], ...] = (
    (said("a LoRA"), r"lora_(A|B|up|down)|\.lora\.|lokr_w|hada_w|dora_scale|\.oft_blocks"),
    (said("a ControlNet"), r"^(control_model|controlnet)|controlnet_(blocks|x_embedder|cond_embedding|mode_embed)"),
    (said("a Sana transformer"), r"^(blocks\.0\.mlp\.inverted_conv|transformer_blocks\.0\.ff\.conv_inverted)\."),
    (said("a Latte transformer"), r"^temporal_transformer_blocks\."),
    (said("a Kolors U-Net"), r"^encoder_hid_proj\."),
    (said("a VAE"), r"^(first_stage_model\.|vae\.)?(encoder|decoder)\.(conv_in|conv1|conv_out|downsamples)\."),
    (said("a CLIP text encoder"), r"(text_model\.encoder|transformer\.resblocks)"),
    (said("a CLIP vision encoder"), r"vision_model\.encoder"),
    (said("a T5 text encoder"), r"encoder\.block\.0\.layer\.0\.SelfAttention\."),
    (said("a language model"), r"model\.layers\.0\.self_attn\."),
)
"""What ComfyUI's networks do not run, and an expression that finds it in a key (prefix taken off): the first counts."""


def name_contents(keys: Iterable[str]) -> Said:
    """Describe a file by its keys, such as "a VAE", else by the first few keys."""
    keys = sorted(keys)
    for what, telltale in _TELLTALES:
        if any(re.search(telltale, key) for key in keys):
            return what
    if not keys:
        return said("a file without tensors")
    names = ", ".join(keys[:4])
    return said("something unknown, with {count} tensors such as {names}", count=len(keys), names=names)
