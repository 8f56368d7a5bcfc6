"""Networks that make pictures, as data."""

from __future__ import annotations

from collections.abc import Mapping

from ...said import said
from .blocks import OPTIONS, Blocks, Network

# Global conditioning (vec) is one row per picture; modulation_dims tells which tokens take which of its rows.
FLUX = (
    Blocks(
        "double_blocks", {"txt": 1, "img": 1}, ("img", "txt"), joint={"pe": 2},
        segments={"modulation_dims_img": "img", "modulation_dims_txt": "txt"}, alike=("vec", "attn_mask", *OPTIONS),
        modulations={"vec": ("img_mod.lin", "txt_mod.lin")}, latent="img",
        projects={},
        unless={"flipped_img_txt": True},  # HunyuanVideo of ComfyUI 0.8.0 has the picture's tokens before the text's
    ),
    Blocks(
        "single_blocks", {"x": 1}, ("x",), joint={"pe": 2}, segments={"modulation_dims": "x"},
        alike=("vec", "attn_mask", *OPTIONS), modulations={"vec": ("modulation.lin",)}, latent="x", parallel=True,
        projects={},
    ),
)  # fmt: skip

_QWEN_IMAGE = Blocks(
    "transformer_blocks", {"encoder_hidden_states": 1, "hidden_states": 1}, ("encoder_hidden_states", "hidden_states"),
    joint={"image_rotary_emb": 2}, rows={"encoder_hidden_states_mask": ("encoder_hidden_states", 1)},
    border={"timestep_zero_index": "hidden_states"}, alike=("temb", *OPTIONS),
    modulations={"temb": ("img_mod.1", "txt_mod.1")}, latent="hidden_states", projects={},
)  # fmt: skip


def _lumina(path: str) -> Blocks:
    return Blocks(
        path, {"x": 1}, ("x",), joint={"freqs_cis": 1}, segments={"timestep_zero_index": "x"},
        sorts=("timestep_zero_index",), alike=("x_mask", "adaln_input", *OPTIONS),
        modulations={"adaln_input": ("adaLN_modulation.1",)}, latent="x",
        projects={"attention.n_rep": 1},  # each head of keys serves one of queries
    )  # fmt: skip


_LUMINA = _lumina("noise_refiner"), _lumina("layers")


def _omnigen(path: str) -> Blocks:
    return Blocks(
        path, {"hidden_states": 1}, ("hidden_states",), joint={"image_rotary_emb": 1},
        alike=("attention_mask", "temb", *OPTIONS), modulations={"temb": ("norm1.linear",)},
    )  # fmt: skip


_OMNIGEN_REFINERS = _omnigen("noise_refiner"), _omnigen("ref_image_refiner")

_BOOGU_NORMS = ("img_norm1", "img_norm2", "img_norm3", "instruct_norm1", "instruct_norm2")
_BOOGU = Blocks(
    "double_stream_layers", {"instruct_hidden_states": 1, "img_hidden_states": 1},
    ("img_hidden_states", "instruct_hidden_states"), joint={"joint_rotary_emb": 1},
    rows={"img_rotary_emb": ("img_hidden_states", 1)}, alone="img_hidden_states", again="img_self_attn",
    alike=("temb", "joint_attention_mask", "img_attention_mask", *OPTIONS),
    modulations={"temb": tuple(f"{name}.linear" for name in _BOOGU_NORMS)},
)  # fmt: skip

_HIDREAM = (
    Blocks(
        "double_stream_blocks", {"image_tokens": 1, "text_tokens": 1}, ("image_tokens", "text_tokens"),
        joint={"rope": 1}, rows={"image_tokens_masks": ("image_tokens", 1)}, alike=("adaln_input", *OPTIONS),
        modulations={"adaln_input": ("block.adaLN_modulation.1",)},
    ),
    Blocks(
        "single_stream_blocks", {"image_tokens": 1}, ("image_tokens",), joint={"rope": 1},
        rows={"image_tokens_masks": ("image_tokens", 1)}, alike=("text_tokens", "adaln_input", *OPTIONS),
        modulations={"adaln_input": ("block.adaLN_modulation.1",)},
    ),
)  # fmt: skip

# The first call with a prompt keeps what the prompt makes of it, causally: a rank that has not computes it.
_HIDREAM_O1 = Blocks(
    "language_model.layers", {"x": 1}, ("x", None), joint={"freqs_cis": -2}, kept="past_key_value",
    alike=("attention_mask", "optimized_attention"),
)  # fmt: skip

# A frame of the grid is a timestep's; with an own one for each token, any tokens can be shared out.
PREDICT_2 = Blocks(
    "blocks", {"x_B_T_H_W_D": 1}, ("x_B_T_H_W_D",), joint={"rope_emb_L_1_1_D": 1},
    rows=dict.fromkeys(("emb_B_T_D", "adaln_lora_B_T_3D", "extra_per_block_pos_emb"), ("x_B_T_H_W_D", 1)),
    grids=("x_B_T_H_W_D", "extra_per_block_pos_emb"), cross=("cross_attn",),
    alike=("crossattn_emb", *OPTIONS), longer={"crossattn_emb": 1},
)  # fmt: skip

_KREA_2 = Blocks(
    "blocks", {"x": 1}, ("x",), joint={"freqs": 2}, border={"timestep_zero_index": "x"},
    alike=("vec", "mask", *OPTIONS),
)  # fmt: skip

_IDEOGRAM_4 = Blocks(
    "layers", {"x": 1}, ("x",), joint={"freqs_cis": 1}, rows={"adaln_input": ("x", 1)},
    alike=("attn_mask", *OPTIONS),
)  # fmt: skip

_ERNIE_IMAGE = Blocks("layers", {"x": 1}, ("x",), joint={"rotary_pos_emb": 1}, alike=("temb", "attention_mask"))

_LENS = Blocks(
    "transformer_blocks", {"hidden_states": 1, "encoder_hidden_states": 1}, ("encoder_hidden_states", "hidden_states"),
    joint={"freqs_cis": 2, "attention_mask": 3}, alike=("temb", *OPTIONS),
    modulations={"temb": ("img_mod.1", "txt_mod.1")},
)  # fmt: skip

_JOY = Blocks(
    "double_blocks", {"hidden_states": 1, "encoder_hidden_states": 1}, ("hidden_states", "encoder_hidden_states"),
    rows={"image_rotary_emb": ("hidden_states", 1)}, alike=("temb", *OPTIONS), latent="hidden_states",
)  # fmt: skip

_SD3 = Blocks(
    "joint_blocks", {"context": 1, "x": 1}, ("context", "x"), positional=("context", "x"), alone="x",
    again="x_block.attn2", alike=("c", "use_checkpoint", *OPTIONS),
    modulations={"c": ("context_block.adaLN_modulation.1", "x_block.adaLN_modulation.1")}, latent="x",
)  # fmt: skip

_AURA_FLOW = (
    Blocks(
        "double_layers", {"c": 1, "x": 1}, ("c", "x"), alike=("global_cond", *OPTIONS),
        modulations={"global_cond": ("modC.1", "modX.1")}, latent="x",
    ),
    Blocks(
        "single_layers", {"cx": 1}, ("cx",), alike=("global_cond", *OPTIONS),
        modulations={"global_cond": ("modCX.1",)}, latent="cx",
    ),
)  # fmt: skip

_PIXART = Blocks(
    "blocks", {"x": 1}, ("x",), cross=("cross_attn",), when={"attn.sr_ratio": 1}, alike=("y", "t", "mask", "HW"),
    longer={"y": 1}, latent="x",
)  # fmt: skip

_HUNYUAN_DIT = Blocks(
    "blocks", {"x": 1}, ("x",), joint={"freq_cis_img": 0}, rows={"skip": ("x", 1)}, cross=("attn2",),
    alike=("c", "text_states"), longer={"text_states": 1}, skips=True, latent="x",
)  # fmt: skip

_PIXEL_DIT = Blocks(
    "patch_blocks", {"y": 1, "x": 1}, ("x", "y"), rows={"pos_img": ("x", 0), "pos_txt": ("y", 0)},
    alike=("c", "attn_mask", *OPTIONS),
)  # fmt: skip

CONVOLVES = said("it convolves over the whole picture")

IMAGE: Mapping[str, Network] = {
    "comfy.ldm.flux.model:Flux": Network("FLUX, LongCat and Ovis", FLUX, stages=True, behind=True),
    "comfy.ldm.chroma.model:Chroma": Network("Chroma", FLUX, stages=True, behind=True),
    "comfy.ldm.chroma_radiance.model:ChromaRadiance": Network("Chroma Radiance", FLUX),
    "comfy.ldm.qwen_image.model:QwenImageTransformer2DModel": Network(
        "Qwen-Image", (_QWEN_IMAGE,), heads="transformer_blocks.0.attn.heads",
        run_outside=("img_in", "txt_norm", "txt_in", "time_text_embed"), stages=True, behind=True,
    ),
    # Attention is called once for each segment, over all that stands before its end.
    "comfy.ldm.qwen_image21.model:QwenImage21Transformer2DModel": Network(
        "Qwen-Image 2.1", read="0.38",
        whole=said("its text and references attend to what stands before them alone, segment by segment"),
    ),
    # Its arguments have a row for each branch where x has one for each picture.
    "comfy.ldm.sensenova.model:SenseNovaU15": Network(
        "SenseNova U1.5", whole=said("ComfyUI asks it for the prompt's keys before a run, which is refused"),
        rows_together=True, read="0.38",
    ),
    "comfy.ldm.mage_flow.model:MageFlowTransformer2DModel":
        Network("Mage-Flow", (_QWEN_IMAGE,), heads="transformer_blocks.0.attn.heads", stages=True, behind=True),
    "comfy.ldm.lumina.model:NextDiT":
        Network("Lumina 2 and Z-Image", _LUMINA, heads="n_heads", stages=True, behind=True),
    "comfy.ldm.lumina.model:NextDiTPixelSpace": Network("Z-Image in pixels", _LUMINA, heads="n_heads"),
    "comfy.ldm.krea2.model:SingleStreamDiT": Network("Krea 2", (_KREA_2,), heads="heads"),
    "comfy.ldm.anima.model:Anima": Network("Anima", (PREDICT_2,)),
    "comfy.ldm.hidream.model:HiDreamImageTransformer2DModel": Network("HiDream", _HIDREAM, heads="num_attention_heads"),
    "comfy.ldm.hidream_o1.model:HiDreamO1Transformer": Network(
        "HiDream O1", (_HIDREAM_O1,), heads="language_model.layers.0.self_attn.num_heads", clears="clear_kv_cache",
        by_object=("ref_pixel_values",),
    ),
    "comfy.ldm.omnigen.omnigen2:OmniGen2Transformer2DModel":
        Network("OmniGen 2", (_omnigen("layers"), *_OMNIGEN_REFINERS), heads="layers.0.attn.heads"),
    "comfy.ldm.boogu.model:BooguTransformer2DModel": Network(
        "Boogu", (_BOOGU, _omnigen("single_stream_layers"), *_OMNIGEN_REFINERS),
        heads="single_stream_layers.0.attn.heads",
    ),
    "comfy.ldm.ideogram4.model:Ideogram4Transformer2DModel":
        Network("Ideogram 4", (_IDEOGRAM_4,), heads="layers.0.attention.num_heads"),
    "comfy.ldm.ernie.model:ErnieImageModel":
        Network("ERNIE-Image", (_ERNIE_IMAGE,), attention_in=("comfy.ldm.ernie.model",)),
    "comfy.ldm.joyimage.model:JoyImageTransformer3DModel":
        Network("JoyImage", (_JOY,), heads="double_blocks.0.attn.num_attention_heads", stages=True),
    "comfy.ldm.lens.model:LensTransformer2DModel": Network("Lens", (_LENS,), heads="transformer_blocks.0.attn.heads"),
    "comfy.ldm.modules.diffusionmodules.mmdit:OpenAISignatureMMDITWrapper":
        Network("Stable Diffusion 3 and 3.5", (_SD3,), heads="joint_blocks.0.x_block.attn.num_heads", stages=True),
    "comfy.ldm.aura.mmdit:MMDiT": Network("AuraFlow", _AURA_FLOW, heads="single_layers.0.attn.n_heads", stages=True),
    "comfy.ldm.pixart.pixartms:PixArtMS":
        Network("PixArt", (_PIXART,), attention_in=("comfy.ldm.pixart.blocks",), stages=True),
    "comfy.ldm.hydit.models:HunYuanDiT":
        Network("HunyuanDiT", (_HUNYUAN_DIT,), attention_in=("comfy.ldm.hydit.attn_layers",), stages=True),
    # Blocks of pixels come after those of patches: every rank computes all of them.
    "comfy.ldm.pixeldit.model:PixDiT_T2I": Network("PixelDiT", (_PIXEL_DIT,), heads="num_groups"),
    "comfy.ldm.pixeldit.pid:PidNet": Network("PiD", (_PIXEL_DIT,), heads="num_groups"),
    "comfy.ldm.modules.diffusionmodules.openaimodel:UNetModel":
        Network("U-Net (SD 1.5, SDXL, SVD, Lotus)", whole=CONVOLVES, side_by_side=True),
    "comfy.ldm.cascade.stage_c:StageC": Network("Stable Cascade", whole=CONVOLVES),
    "comfy.ldm.cascade.stage_b:StageB": Network("Stable Cascade", whole=CONVOLVES),
}  # fmt: skip
