"""Which network runs a file of an official template, as its name tells: names are all that a template has."""

from __future__ import annotations

import re
from dataclasses import dataclass

from parallel_runtime.networks.tables.comfyui import NETWORKS

_LDM = "comfy.ldm."
_CLASSES: tuple[tuple[str, str], ...] = (
    (r"minimax_h3|fasth3", "minimax.model:MiniMaxH3Model"),
    (r"minimax_music", "minimax_music.dit:MiniMaxMusic3DiT"),
    (r"ltx-2", "lightricks.av_model:LTXAVModel"),
    (r"ltx-video", "lightricks.model:LTXVModel"),
    (r"wan.*scail_?2", "wan.model:SCAIL2WanModel"),
    (r"wan.*scail", "wan.model:SCAILWanModel"),
    (r"humo", "wan.model:HumoWanModel"),
    (r"wan.*s2v", "wan.model:WanModel_S2V"),
    (r"wan.*animate_?2", "wan.model_animate2:WanAnimate2Model"),
    (r"wan.*animate", "wan.model_animate:AnimateWanModel"),
    (r"wan.*dancer", "wan.model_wandancer:WanDancerModel"),
    (r"wan.*camera", "wan.model:CameraWanModel"),
    (r"wan.*vace", "wan.model:VaceWanModel"),
    (r"causal_forcing", "wan.ar_model:CausalWanModel"),
    (r"wan|chrono_edit", "wan.model:WanModel"),
    (r"z_image|netayume|newbie|lumina", "lumina.model:NextDiT"),
    (r"qwen_image_2\.1", "qwen_image21.model:QwenImage21Transformer2DModel"),
    (r"qwen_image|firered", "qwen_image.model:QwenImageTransformer2DModel"),
    (r"krea2", "krea2.model:SingleStreamDiT"),
    (r"chroma-radiance", "chroma_radiance.model:ChromaRadiance"),
    (r"chroma", "chroma.model:Chroma"),
    (r"pid_", "pixeldit.pid:PidNet"),
    (r"pixeldit", "pixeldit.model:PixDiT_T2I"),
    (r"flux|longcat|ovis", "flux.model:Flux"),
    (r"capybara|hunyuan_?video", "hunyuan_video.model:HunyuanVideo"),
    (r"hunyuan_?3d.*2\.1", "hunyuan3dv2_1.hunyuandit:HunYuanDiTPlain"),
    (r"hunyuan_?3d", "hunyuan3d.model:Hunyuan3Dv2"),
    (r"hidream_o1", "hidream_o1.model:HiDreamO1Transformer"),
    (r"hidream", "hidream.model:HiDreamImageTransformer2DModel"),
    (r"anima", "anima.model:Anima"),
    (r"ace_?step_?v?1\.5", "ace.ace_step15:AceStepConditionGenerationModel"),
    (r"ace_?step", "ace.model:ACEStepTransformer2DModel"),
    (r"stable[-_]audio", "audio.dit:AudioDiffusionTransformer"),
    (r"sd3", "modules.diffusionmodules.mmdit:OpenAISignatureMMDITWrapper"),
    (r"sd_xl|svd|lotus", "modules.diffusionmodules.openaimodel:UNetModel"),
    (r"kandinsky5", "kandinsky5.model:Kandinsky5"),
    (r"boogu", "boogu.model:BooguTransformer2DModel"),
    (r"ideogram4", "ideogram4.model:Ideogram4Transformer2DModel"),
    (r"ernie", "ernie.model:ErnieImageModel"),
    (r"joyai", "joyimage.model:JoyImageTransformer3DModel"),
    (r"lens_", "lens.model:LensTransformer2DModel"),
    (r"mage_flow", "mage_flow.model:MageFlowTransformer2DModel"),
    (r"omnigen2", "omnigen.omnigen2:OmniGen2Transformer2DModel"),
    (r"seedvr2", "seedvr.model:NaDiT"),
    (r"triposplat", "triposplat.model:LatentSeqMMFlowModel"),
    (r"pixal3d|trellis2", "trellis2.model:Trellis2"),
    (r"void_pass", "cogvideo.model:CogVideoXTransformer3DModel"),
)
"""Pattern of a file's name -> class; the first that fits."""

_FORMATS = (
    ("int8_convrot", r"int8.convrot"),
    ("scaled fp8", r"fp8(_e4m3fn)?_scaled"),
    ("mixed fp8", r"fp8mixed"),
    ("fp8", r"fp8"),
)


@dataclass(frozen=True)
class Runner:
    """What runs a file.

    Args:
        title: of the family; "?" where the name tells nothing.
        tokens_split: ranks share out the tokens of one picture; else the batch alone.
        weights: how they are stored.
    """

    title: str
    tokens_split: bool
    weights: str

    def __str__(self) -> str:
        return f"{self.title}, {self.weights}, {'tokens' if self.tokens_split else 'batch alone'}"


def find_runner(file: str) -> Runner:
    """The network of a file by its name."""
    name = file.lower().replace("\\", "/").rsplit("/", 1)[-1]
    weights = next((title for title, pattern in _FORMATS if re.search(pattern, name)), "plain")
    network = NETWORKS.get(_LDM + class_of(name))
    return Runner(
        title=network.title if network else "?",
        tokens_split=bool(network and network.blocks),
        weights=weights,
    )


def class_of(name: str) -> str:
    """Class of ComfyUI's, below comfy.ldm; "" where the name tells nothing."""
    return next((path for pattern, path in _CLASSES if re.search(pattern, name)), "")
