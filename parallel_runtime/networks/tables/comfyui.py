"""ComfyUI's classes of diffusion networks as data: "module:Class" -> what ranks may share out of it.

Names are those of `comfy.ldm`. A class that is not here shares out the batch alone; `tests` compare this table with
ComfyUI's own list of models, so that a new one is known as such."""

from __future__ import annotations

from collections.abc import Mapping

from ...said import said
from .blocks import OPTIONS, Blocks, Network
from .image import FLUX, IMAGE
from .video import VIDEO, WAN

# Every other layer attends within a window, which it makes from the number of its tokens.
_ACE_STEP_15 = Blocks(
    "decoder.layers", {"hidden_states": 1}, ("hidden_states",), joint={"position_embeddings": 0},
    cross=("cross_attn",), when={"self_attn.sliding_window": None},
    alike=("temb", "encoder_hidden_states", "attention_mask", "encoder_attention_mask"),
    longer={"encoder_hidden_states": 1},
)  # fmt: skip

_STABLE_AUDIO = Blocks(
    "transformer.layers", {"x": 1}, ("x",), joint={"rotary_pos_emb": 0}, cross=("cross_attn",),
    when={"self_attn.feat_scale": False, "conformer": None}, whole_with=("mask", "local_add_cond"),
    alike=("context", "global_cond", "context_mask", *OPTIONS), longer={"context": 1},
)  # fmt: skip

_MINIMAX_MUSIC = Blocks("diffusion_transformer.transformer.layers", {"x": 1}, ("x",), joint={"rotation_matrix": 2})

_HUNYUAN_3D_21 = Blocks(
    "blocks", {"hidden_states": 1}, ("hidden_states",), rows={"skip_tensor": ("hidden_states", 1)}, cross=("attn2",),
    alike=("conditioning", "text_states"),
)  # fmt: skip


def _triposplat(path: str) -> Blocks:
    return Blocks(path, {"x": 1}, ("x",), joint={"rotary_emb": 1}, alike=("mod", *OPTIONS))


_SOUND = {
    # The timbres of all rows of a batch go to the first.
    "comfy.ldm.ace.ace_step15:AceStepConditionGenerationModel": Network(
        "ACE-Step 1.5", (_ACE_STEP_15,), attention_in=("comfy.ldm.ace.ace_step15",),
        heads="decoder.layers.0.self_attn.num_heads", rows_together=True,
    ),
    "comfy.ldm.ace.model:ACEStepTransformer2DModel":
        Network("ACE-Step", whole=said("its blocks convolve along the song, and their linear attention sums over it")),
    "comfy.ldm.audio.dit:AudioDiffusionTransformer":
        Network("Stable Audio", (_STABLE_AUDIO,), heads="transformer.layers.0.self_attn.num_heads"),
    "comfy.ldm.minimax_music.dit:MiniMaxMusic3DiT": Network(
        "MiniMax Music", (_MINIMAX_MUSIC,), attention_in=("comfy.ldm.minimax_music.dit",),
        heads="diffusion_transformer.transformer.layers.0.self_attn.num_heads",
    ),
}  # fmt: skip

_SHAPES = {
    "comfy.ldm.hunyuan3d.model:Hunyuan3Dv2": Network("Hunyuan3D 2", FLUX, heads="double_blocks.0.num_heads"),
    "comfy.ldm.hunyuan3dv2_1.hunyuandit:HunYuanDiTPlain": Network(
        "Hunyuan3D 2.1", (_HUNYUAN_3D_21,), attention_in=("comfy.ldm.hunyuan3dv2_1.hunyuandit",), rows_together=True
    ),
    "comfy.ldm.triposplat.model:LatentSeqMMFlowModel":
        Network("TripoSplat", (_triposplat("blocks"), _triposplat("noise_refiner"))),
    "comfy.ldm.trellis2.model:Trellis2": Network(
        "Trellis 2", whole=said("its tokens are the filled cells of a sparse grid, of another number in each shape")
    ),
}  # fmt: skip

NETWORKS: Mapping[str, Network] = {**IMAGE, **VIDEO, **WAN, **_SOUND, **_SHAPES}


def find_network(network: type) -> Network | None:
    """The data of a class; None where there is none."""
    return NETWORKS.get(f"{network.__module__}:{network.__qualname__}")
