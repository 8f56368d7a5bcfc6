"""The functions and guiders of ComfyUI's nodes that run in the ranks, and what travels of each. Data alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class PatchRule:
    """One function, or one class whose objects are called."""

    node: str  # that sets it, as its class is called
    values: tuple[str, ...] = ()  # closure variables or attributes that travel
    # Values or attributes that begin so in a rank, whatever they are at the client.
    fresh: Mapping[str, Any] = field(default_factory=dict)
    # Values that are its largest and least sigma: the client leaves the patch out beyond them, and in the rank it is
    # always within, so that steps differ in nothing.
    between: tuple[str, str] | None = None
    together: bool = False  # it looks at several rows of the batch
    remembers: bool = False  # the object lives from step to step
    # It takes a picture through a VAE when the latent's size is another than before, which the client has it do before
    # it sends what came of it.
    encodes: bool = False
    defaults: tuple[None, ...] = ()  # of a function's last arguments
    functions: tuple[str, ...] = ()  # values that are functions of the table of those for the inside of a network
    sampling: str = ""  # value that is the model sampling, which a rank has itself
    owner: str = ""  # value that is the class in which it is written
    uses: tuple[str, ...] = ()  # modules, where its own is not to be imported: that imports all of ComfyUI's nodes


_LLLITE, _MULTITALK = "comfy.ldm.anima.lllite", "comfy.ldm.wan.model_multitalk"
_MODEL_PATCH = "comfy_extras.nodes_model_patch"
_DOWNSCALE = "comfy_extras.nodes_model_downscale:PatchModelAddDownscale"
_NO_DEVICES: Mapping[str, Any] = {"on_cpu_devices": {}}
_SIGMAS = ("sigma_start", "sigma_end")
_SKIPPED = ("double_layers", "single_layers")
_ENCODED = ("model_patch", "vae", "strength", "encoded_image", "encoded_image_size")

PATCH_RULES: Mapping[str, PatchRule] = {
    "comfy_extras.nodes_slg:SkipLayerGuidanceDiT.skip": PatchRule("SkipLayerGuidanceDiT"),
    "comfy_extras.nodes_slg:SkipLayerGuidanceDiTSimple.skip": PatchRule("SkipLayerGuidanceDiTSimple"),
    "comfy_extras.nodes_pag:PerturbedAttentionGuidance.perturbed_attention":
        PatchRule("PerturbedAttentionGuidance", defaults=(None,)),
    "comfy_extras.nodes_nag:NAGuidance.nag_attention_output_patch":
        PatchRule("NAGuidance", ("nag_scale", "nag_alpha", "nag_tau"), together=True),
    "comfy_extras.nodes_freelunch:FreeU.output_block_patch": PatchRule("FreeU", ("scale_dict",), _NO_DEVICES),
    "comfy_extras.nodes_freelunch:FreeU_V2.output_block_patch": PatchRule("FreeU_V2", ("scale_dict",), _NO_DEVICES),
    f"{_DOWNSCALE}.input_block_patch": PatchRule(
        "PatchModelAddDownscale", ("block_number", "downscale_factor", "downscale_method", *_SIGMAS), between=_SIGMAS
    ),
    f"{_DOWNSCALE}.output_block_patch": PatchRule("PatchModelAddDownscale", ("upscale_method",)),
    "comfy_extras.nodes_flux:KV_Attn_Input":
        PatchRule("FluxKVCache", fresh={"cache": {}}, together=True, remembers=True),
    "comfy_extras.nodes_flux:FluxKVCache.model_input_patch": PatchRule("FluxKVCache", ("input_patch_obj",)),
    f"{_MODEL_PATCH}:DiffSynthCnetPatch": PatchRule("QwenImageDiffsynthControlnet", _ENCODED, encodes=True),
    f"{_MODEL_PATCH}:ZImageControlPatch":
        PatchRule("ZImageFunControlnet", (*_ENCODED, "is_inpaint"), fresh={"temp_data": None}, encodes=True),
    f"{_MODEL_PATCH}:UsoStyleProjectorPatch": PatchRule("USOStyleReference", ("model_patch", "encoded_image")),
    f"{_LLLITE}:AnimaLLLitePatch":
        PatchRule("AnimaLLLiteApply", ("model_patch", "image", "mask", "strength", *_SIGMAS), between=_SIGMAS),
    f"{_LLLITE}:AnimaLLLiteAttentionPatch": PatchRule("AnimaLLLiteApply", ("patch", "targets")),
    f"{_LLLITE}:AnimaLLLiteMLPPatch": PatchRule("AnimaLLLiteApply", ("patch",)),
    f"{_MULTITALK}:MultiTalkCrossAttnPatch":
        PatchRule("WanInfiniteTalkToVideo", ("model_patch", "audio_scale", "ref_target_masks")),
    f"{_MULTITALK}:MultiTalkGetAttnMapPatch": PatchRule("WanInfiniteTalkToVideo", ("ref_target_masks",)),
    "comfy.ldm.wan.model_animate2:PoseBranchCache": PatchRule(
        "WanAnimate2Cache", ("store_device", "dtype"),
        fresh={"slots": [], "slot": None, "_pending": {}, "_staging": {}}, remembers=True,
    ),
}  # fmt: skip
"""By "module:Class.function" or "module:Class", without methods around a function, whose names differ by version."""


AROUND_GUIDER = "predict_noise"  # of ComfyUI's kinds of wrappers, that around a guider's evaluation
GUIDANCE_RULES: Mapping[str, PatchRule] = {
    "comfy_extras.nodes_custom_sampler:CFGOverride.predict_noise_wrapper":
        PatchRule("CFGOverride", ("cfg", "sigma_hi", "sigma_lo")),
    "comfy_extras.nodes_model_advanced:RescaleCFG.rescale_cfg":
        PatchRule("RescaleCFG", ("is_flow", "multiplier"), uses=("torch",)),
    "comfy_extras.nodes_lt:Guider_LTXAVDualCFG.dual_cfg":
        PatchRule("LTXVDualCFGGuider", ("audio_cfg", "v", "video_cfg"), uses=("math",)),
    "comfy_extras.nodes_lt:LTXVReferenceAudio.post_cfg_function":
        PatchRule("LTXVReferenceAudio", ("scale", *_SIGMAS), uses=("comfy",)),
    "comfy_extras.nodes_lt:LTXVSpatioTemporalGuidance.post_cfg_function":
        PatchRule("LTXVSpatioTemporalGuidance", ("block_set", "scale", *_SIGMAS), uses=("comfy",)),
    "comfy_extras.nodes_lt:LTXVModalityGuidance.post_cfg_function":
        PatchRule("LTXVModalityGuidance", ("modality_scale", *_SIGMAS), uses=("comfy", "math")),
    "comfy_extras.nodes_video_model:VideoLinearCFGGuidance.linear_cfg":
        PatchRule("VideoLinearCFGGuidance", ("min_cfg",), uses=("torch",)),
    "comfy_extras.nodes_video_model:VideoTriangleCFGGuidance.linear_cfg":
        PatchRule("VideoTriangleCFGGuidance", ("min_cfg",), uses=("torch",)),
    "comfy_extras.nodes_slg:SkipLayerGuidanceDiT.post_cfg_function": PatchRule(
        "SkipLayerGuidanceDiT", (*_SKIPPED, *_SIGMAS, "scale", "rescaling_scale", "start_percent"),
        functions=("skip",), sampling="model_sampling",
    ),
    "comfy_extras.nodes_slg:SkipLayerGuidanceDiTSimple.calc_cond_batch_function":
        PatchRule("SkipLayerGuidanceDiTSimple", (*_SKIPPED, *_SIGMAS), functions=("skip",)),
    "comfy_extras.nodes_pag:PerturbedAttentionGuidance.post_cfg_function": PatchRule(
        "PerturbedAttentionGuidance", ("scale", "unet_block", "unet_block_id"), functions=("perturbed_attention",)
    ),
    "comfy_extras.nodes_cfg:CFGNorm.cfg_norm": PatchRule("CFGNorm", ("strength",)),
    "comfy_extras.nodes_cfg:CFGNorm.cfg_norm_pre": PatchRule("CFGNorm", ("strength",)),
    "comfy_extras.nodes_cfg:CFGZeroStar.cfg_zero_star": PatchRule("CFGZeroStar"),
    "comfy_extras.nodes_differential_diffusion:DifferentialDiffusion.<lambda>":
        PatchRule("DifferentialDiffusion", ("strength",), owner="cls"),
    "comfy_extras.nodes_mahiro:Mahiro.mahiro_normd": PatchRule("Mahiro"),
    "comfy_extras.nodes_tcfg:TCFG.tangential_damping_cfg": PatchRule("TCFG"),
}  # fmt: skip
"""Functions around guidance and on the noise mask, which a loop calls and no network."""


def name_of(code: str) -> str:
    """The name in the table: "module:Class.execute.<locals>.f" -> "module:Class.f"."""
    module, _, path = code.partition(":")
    first, *more = path.split(".")
    return f"{module}:{first}.{more[-1]}" if "<locals>" in more else code


def rule_of(code: str, table: Mapping[str, PatchRule] = PATCH_RULES) -> PatchRule | None:
    """What is known of a function; None where it is no function of the table."""
    return table.get(name_of(code))


CFG = "comfy.samplers:CFGGuider"


@dataclass(frozen=True)
class GuiderRule:
    """One guider."""

    values: tuple[str, ...]  # attributes that travel
    conds: tuple[str, ...]  # names of its conditionings, in the order in which it has the model evaluate them
    code: str  # class whose `predict_noise` a rank runs


_PLAIN = GuiderRule(("cfg",), ("positive", "negative"), CFG)
_DUAL, _PERP = "comfy_extras.nodes_custom_sampler:Guider_DualCFG", "comfy_extras.nodes_perpneg:Guider_PerpNeg"
SECOND_SCALE = "comfy_extras.nodes_lt:Guider_LTXAVDualCFG"
"""It has another scale for the second of two latents in one, by a function around guidance."""

GUIDER_RULES: Mapping[str, GuiderRule] = {
    CFG: _PLAIN,
    "comfy_extras.nodes_custom_sampler:Guider_Basic": _PLAIN,
    SECOND_SCALE: _PLAIN,
    _DUAL: GuiderRule(("cfg1", "cfg2", "nested"), ("negative", "middle", "positive"), _DUAL),
    _PERP: GuiderRule(("cfg", "neg_scale"), ("positive", "negative", "empty_negative_prompt"), _PERP),
}
"""By "module:Class" of the guider. Ranks run those alone that are their own `code`."""
