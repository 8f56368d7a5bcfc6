"""What the examples in the template browser are: graphs in API form, and a few words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.host.workflow import Prompt, link, node


@dataclass(frozen=True)
class Example:
    """An example.

    Args:
        title: of its card.
        use: below the title.
        words: what it is, for the note on the canvas.
    """

    prompt: Prompt
    title: str
    use: str
    words: str


def _loader(file: str) -> dict[str, Any]:
    return node("ParallelLoader", model_name=file, weight_dtype="default")


def _checkpoint(file: str) -> dict[str, Any]:
    return node("ParallelCheckpointLoader", ckpt_name=file, weight_dtype="default")


def _lora(model: str, file: str, strength: float = 1.0) -> dict[str, Any]:
    return node("LoraLoaderModelOnly", model=link(model), lora_name=file, strength_model=strength)


def _text(text: str, clip: list[Any] | None = None) -> dict[str, Any]:
    return node("CLIPTextEncode", text=text, clip=clip or link("clip"))


def _flux_encoders() -> Prompt:
    files = {"clip_name1": "clip_l.safetensors", "clip_name2": "t5xxl_fp16.safetensors"}
    return {
        "clip": node("DualCLIPLoader", **files, type="flux", device="default"),
        "vae": node("VAELoader", vae_name="ae.safetensors"),
    }


def _picture(name: str, vae: list[Any] | None = None) -> Prompt:
    return {
        "decode": node("VAEDecode", samples=link("sampler"), vae=vae or link("vae")),
        "save": node("SaveImage", images=link("decode"), filename_prefix=f"parallel-dit/{name}"),
    }


def _video(name: str, fps: float, samples: str = "sampler", vae: list[Any] | None = None) -> Prompt:
    return {
        "decode": node("VAEDecode", samples=link(samples), vae=vae or link("vae")),
        "video": node("CreateVideo", images=link("decode"), fps=fps),
        "save": node("SaveVideo", video=link("video"), filename_prefix=f"video/{name}", format="auto", codec="auto"),
    }


def _sampler(
    model: str, latent: list[Any], steps: int, cfg: float, name: str = "euler", **others: Any
) -> dict[str, Any]:
    return node(
        "KSampler", model=link(model), positive=link("positive"), negative=link("negative"), latent_image=latent,
        seed=42, steps=steps, cfg=cfg, sampler_name=name, scheduler="simple", denoise=1.0, **others,
    )  # fmt: skip


def _flux_lora() -> Prompt:
    return {
        "loader": _loader("flux1-dev.safetensors"),
        "lora": _lora("loader", "Hyper-FLUX.1-dev-8steps-lora.safetensors", 0.125),
        **_flux_encoders(),
        "text": _text("A lighthouse on a basalt cliff at dusk, waves below, warm light in its windows, oil painting"),
        "positive": node("FluxGuidance", conditioning=link("text"), guidance=3.5),
        "negative": node("ConditioningZeroOut", conditioning=link("text")),
        "latent": node("EmptySD3LatentImage", width=1024, height=1024, batch_size=1),
        "sampler": _sampler("lora", link("latent"), 8, 1.0),
        **_picture("parallel-flux-lora"),
    }


def _kontext() -> Prompt:
    return {
        "loader": _loader("flux1-dev-kontext_fp8_scaled.safetensors"),
        **_flux_encoders(),
        "picture": node("LoadImage", image="example.png"),
        "scaled": node("FluxKontextImageScale", image=link("picture")),
        "latent": node("VAEEncode", pixels=link("scaled"), vae=link("vae")),
        "text": _text("Turn the scene into a winter evening with falling snow, keep everything else as it is"),
        "reference": node("ReferenceLatent", conditioning=link("text"), latent=link("latent")),
        "positive": node("FluxGuidance", conditioning=link("reference"), guidance=2.5),
        "negative": node("ConditioningZeroOut", conditioning=link("text")),
        "sampler": _sampler("loader", link("latent"), 20, 1.0),
        **_picture("kontext"),
    }


def _qwen_edit() -> Prompt:
    encode = {"clip": link("clip"), "vae": link("vae"), "image1": link("scaled")}
    return {
        "loader": _loader("qwen_image_edit_2511_fp8mixed.safetensors"),
        "lora": _lora("loader", "Qwen-Image-Edit-2511-Lightning-4steps-V1.0-bf16.safetensors"),
        "shift": node("ModelSamplingAuraFlow", model=link("lora"), shift=3.1),
        "norm": node("CFGNorm", model=link("shift"), strength=1.0),
        "clip": node(
            "CLIPLoader", clip_name="qwen_2.5_vl_7b_fp8_scaled.safetensors", type="qwen_image", device="default"
        ),
        "vae": node("VAELoader", vae_name="qwen_image_vae.safetensors"),
        "picture": node("LoadImage", image="example.png"),
        "scaled": node("FluxKontextImageScale", image=link("picture")),
        "positive": node("TextEncodeQwenImageEditPlus", prompt="Give the coat the colour of ripe cherries", **encode),
        "negative": node("TextEncodeQwenImageEditPlus", prompt="", **encode),
        "latent": node("VAEEncode", pixels=link("scaled"), vae=link("vae")),
        "sampler": _sampler("norm", link("latent"), 4, 1.0),
        **_picture("parallel-qwen-image-edit"),
    }


def _z_image() -> Prompt:
    return {
        "loader": _loader("z_image_turbo_bf16.safetensors"),
        "shift": node("ModelSamplingAuraFlow", model=link("loader"), shift=3.0),
        "clip": node("CLIPLoader", clip_name="qwen_3_4b.safetensors", type="lumina2", device="default"),
        "vae": node("VAELoader", vae_name="ae.safetensors"),
        "positive": _text("A tram in the rain at night, reflections on the cobbles, shop signs, 35 mm photograph"),
        "negative": node("ConditioningZeroOut", conditioning=link("positive")),
        "latent": node("EmptySD3LatentImage", width=1024, height=1024, batch_size=1),
        "sampler": _sampler("shift", link("latent"), 8, 1.0, "res_multistep"),
        **_picture("parallel-z-image-turbo"),
    }


def _wan() -> Prompt:
    graph: Prompt = {
        "clip": node("CLIPLoader", clip_name="umt5_xxl_fp8_e4m3fn_scaled.safetensors", type="wan", device="default"),
        "vae": node("VAELoader", vae_name="wan_2.1_vae.safetensors"),
        "positive": _text("A paper boat drifts down a stream in a sunlit forest, slow camera movement"),
        "negative": _text("static, blurred, overexposed, subtitles, low quality"),
        "latent": node("EmptyHunyuanLatentVideo", width=640, height=640, length=81, batch_size=1),
    }
    halves = {"high": ("enable", 0, 2, "enable", "latent"), "low": ("disable", 2, 4, "disable", "sampler high")}
    for noise, (adds, first, last, leaves, latent) in halves.items():
        graph[f"loader {noise}"] = _loader(f"wan2.2_t2v_{noise}_noise_14B_fp8_scaled.safetensors")
        file = f"wan2.2_t2v_lightx2v_4steps_lora_v1.1_{noise}_noise.safetensors"
        graph[f"lora {noise}"] = _lora(f"loader {noise}", file)
        graph[f"shift {noise}"] = node("ModelSamplingSD3", model=link(f"lora {noise}"), shift=5.0)
        graph[f"sampler {noise}"] = node(
            "KSamplerAdvanced", model=link(f"shift {noise}"), positive=link("positive"), negative=link("negative"),
            latent_image=link(latent), add_noise=adds, noise_seed=42, steps=4, cfg=1.0, sampler_name="euler",
            scheduler="simple", start_at_step=first, end_at_step=last, return_with_leftover_noise=leaves,
        )  # fmt: skip
    return {**graph, **_video("wan-2.2", 16.0, "sampler low")}


def _ltx() -> Prompt:
    file = "ltx-2-19b-dev-fp8.safetensors"
    return {
        "loader": _checkpoint(file),
        "clip": node(
            "LTXAVTextEncoderLoader",
            text_encoder="gemma_3_12B_it_fp4_mixed.safetensors", ckpt_name=file, device="default",
        ),
        "sound vae": node("LTXVAudioVAELoader", ckpt_name=file),
        "text": _text("A street musician plays the accordion under a stone arch while pigeons take off around her"),
        "unwanted": _text("blurry, still frame, watermark, subtitles"),
        "conditioning": node("LTXVConditioning", positive=link("text"), negative=link("unwanted"), frame_rate=24.0),
        "picture latent": node("EmptyLTXVLatentVideo", width=768, height=512, length=97, batch_size=1),
        "sound latent": node(
            "LTXVEmptyLatentAudio", audio_vae=link("sound vae"), frames_number=97, frame_rate=24, batch_size=1
        ),
        "latent": node("LTXVConcatAVLatent", video_latent=link("picture latent"), audio_latent=link("sound latent")),
        "noise": node("RandomNoise", noise_seed=42),
        "guider": node(
            "CFGGuider", model=link("loader"), positive=link("conditioning"), negative=link("conditioning", 1), cfg=4.0
        ),
        "method": node("KSamplerSelect", sampler_name="euler_ancestral"),
        "sigmas": node(
            "LTXVScheduler",
            latent=link("latent"), steps=20, max_shift=2.05, base_shift=0.95, stretch=True, terminal=0.1,
        ),
        "sampler": _custom_sampler(link("latent")),
        "parts": node("LTXVSeparateAVLatent", av_latent=link("sampler")),
        "sound": node("LTXVAudioVAEDecode", samples=link("parts", 1), audio_vae=link("sound vae")),
        **_with_sound(_video("ltx-2", 24.0, "parts", link("loader", 2))),
    }  # fmt: skip


def _h3() -> Prompt:
    return {
        "loader": _loader("minimax_h3_fl2va_pruned_int8_convrot.safetensors"),
        "clip": node(
            "CLIPLoader", clip_name="qwen3vl_32b_minimax_h3_nvfp4_awq.safetensors", type="minimax", device="default"
        ),
        "vae": node("VAELoader", vae_name="minimax_h3_video_vae_fp16.safetensors"),
        "sound vae": node("VAELoader", vae_name="minimax_h3_audio_vae_fp32.safetensors"),
        "scene": node(
            "MiniMaxH3ImageToVideo", clip=link("clip"), vae=link("vae"), audio_vae=link("sound vae"),
            prompt="A blacksmith hammers glowing iron, sparks fly, the strokes ring through the workshop",
            width=832, height=480, length=107, batch_size=1,
        ),
        "noise": node("RandomNoise", noise_seed=42),
        "guider": node("BasicGuider", model=link("loader"), conditioning=link("scene")),
        "method": node("KSamplerSelect", sampler_name="res_multistep"),
        "sigmas": node("BasicScheduler", model=link("loader"), scheduler="simple", steps=20, denoise=1.0),
        "sampler": _custom_sampler(link("scene", 1)),
        "sound": node("VAEDecodeAudio", samples=link("sampler"), vae=link("sound vae")),
        **_with_sound(_video("minimax-h3", 24.0)),
    }  # fmt: skip


def _custom_sampler(latent: list[Any]) -> dict[str, Any]:
    parts = {"noise": "noise", "guider": "guider", "sampler": "method", "sigmas": "sigmas"}
    return node("SamplerCustomAdvanced", latent_image=latent, **{key: link(name) for key, name in parts.items()})


def _with_sound(video: Prompt) -> Prompt:
    video["video"]["inputs"]["audio"] = link("sound")
    return video


def _sdxl() -> Prompt:
    return {
        "loader": _checkpoint("sd_xl_base_1.0.safetensors"),
        "positive": _text("A fox asleep in a wheelbarrow full of autumn leaves, soft light", link("loader", 1)),
        "negative": _text("text, watermark", link("loader", 1)),
        "latent": node("EmptyLatentImage", width=1024, height=1024, batch_size=1),
        "sampler": _sampler("loader", link("latent"), 25, 7.0),
        **_picture("sdxl", link("loader", 2)),
    }


EXAMPLES: Mapping[str, Example] = {
    "parallel-flux-lora": Example(
        _flux_lora(),
        "FLUX.1 dev",
        "text to image, with a LoRA",
        "FLUX.1 dev with a LoRA that needs eight steps. Any LoRA node works after the loader.",
    ),
    "parallel-flux-kontext-edit": Example(
        _kontext(),
        "FLUX.1 Kontext",
        "changes a picture",
        "Changes a picture by a sentence with FLUX.1 Kontext. Choose your own picture.",
    ),
    "parallel-qwen-image-edit": Example(
        _qwen_edit(),
        "Qwen-Image-Edit",
        "changes a picture, with a LoRA",
        "Changes a picture by a sentence with Qwen-Image-Edit and a four-step LoRA.",
    ),
    "parallel-z-image-turbo": Example(
        _z_image(), "Z-Image Turbo", "text to image", "Z-Image Turbo: a picture in eight steps."
    ),
    "parallel-wan-2.2-two-experts": Example(
        _wan(),
        "Wan 2.2",
        "text to video, two experts with LoRAs",
        "Wan 2.2 14B, text to video: two experts, each with its LoRA. Both stay loaded where memory allows.",
    ),
    "parallel-ltx-2-video-with-sound": Example(
        _ltx(), "LTX-2", "text to video with sound", "LTX-2 from its checkpoint: video and sound out of one model."
    ),
    "parallel-minimax-h3-video-with-sound": Example(
        _h3(), "MiniMax H3", "text to video with sound", "MiniMax H3 in int8: video and sound out of one model."
    ),
    "parallel-sdxl-checkpoint": Example(
        _sdxl(),
        "SDXL",
        "text to image, from a checkpoint",
        "SDXL from a checkpoint. A U-Net: two GPUs compute the positive and the negative prompt at once.",
    ),
}
"""By the name of the file."""
