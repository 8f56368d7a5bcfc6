"""Networks that make shapes, as data."""

from __future__ import annotations

from collections.abc import Mapping

from .blocks import Blocks, Network
from .image_networks import FLUX


def _triposplat(path: str) -> Blocks:
    return Blocks(path, {"x": 1}, ("x",), joint={"rotary_emb": 1}, alike=("mod", "transformer_options"))


SHAPES: Mapping[str, Network] = {
    "comfy.ldm.hunyuan3d.model:Hunyuan3Dv2": Network(
        "Hunyuan3D 2", FLUX, heads="double_blocks.0.num_heads"
    ),
    "comfy.ldm.hunyuan3dv2_1.hunyuandit:HunYuanDiTPlain": Network(
        "Hunyuan3D 2.1",
        (
            Blocks(
                "blocks", {"hidden_states": 1}, ("hidden_states",), rows={"skip_tensor": ("hidden_states", 1)},
                cross=("attn2",), alike=("conditioning", "text_states"),
            ),
        ),
        attention_in=("comfy.ldm.hunyuan3dv2_1.hunyuandit",), rows_together=True,
    ),
    "comfy.ldm.triposplat.model:LatentSeqMMFlowModel": Network(
        "TripoSplat", (_triposplat("blocks"), _triposplat("noise_refiner"))
    ),
    "comfy.ldm.trellis2.model:Trellis2": Network(
        "Trellis 2", whole="its tokens are the filled cells of a sparse grid, of another number in each shape"
    ),
}  # fmt: skip
