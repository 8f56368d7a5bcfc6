"""A custom node pack that stands in for a template's encoders, decoders and files: random, of the shapes of a family.

What they give depends on what they get (a text, pixels), so that a graph that mixes them up gives another latent.
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from typing import Any

import comfy.clip_vision
import comfy.controlnet
import comfy.model_management
import comfy.model_patcher
import comfy.nested_tensor
import comfy.ops
import comfy.sd
import comfy.utils
import torch
from comfy_api.latest import InputImpl, Types
from comfy_extras.nodes_model_patch import QwenImageBlockWiseControlNet

_MOST = 40
"""Of a latent's height and width, where a node of the template makes large pictures whatever its widgets say."""


def _random(seed: Any, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(str(seed).encode())))


def _seeing(seed: Any, seen: torch.Tensor, *shape: int) -> torch.Tensor:
    """Random values that follow what is seen, by steps as small as its own: it may be made of a sampler's latent."""
    parts = _random(seed, 3, *shape) / 3**0.5
    return parts[0] + seen.float().mean() * parts[1] + seen.float().std() * parts[2]


def _values(values: dict[str, Any], seed: Any) -> dict[str, Any]:
    """A list is the shape of a random tensor, {"kept": length} a mask, {"list": shapes} several, else itself."""
    made: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, list):
            made[name] = _random((seed, name), *value)
        elif isinstance(value, dict) and "ones" in value:
            made[name] = torch.ones(value["ones"], dtype=torch.long)
        elif isinstance(value, dict) and "integers" in value:
            made[name] = torch.tensor(value["integers"])
        else:
            made[name] = value
    return made


class Tokens(defaultdict[str, list[Any]]):
    """What a tokenizer gives, under whatever name it is asked for."""

    def __init__(self, text: str):
        super().__init__(lambda: [[(zlib.crc32(text.encode()), 1.0)]])
        self.text = text


class Clip(comfy.sd.CLIP):
    """A text encoder that gives random tokens of the spec's width for each text."""

    def __init__(self, spec: dict[str, Any]):
        super().__init__(no_init=True)
        self.spec = spec
        self.layer_idx = None
        self.use_clip_schedule = False
        self.tokenizer_options: dict[str, Any] = {}
        self.apply_hooks_to_conds = None
        self.cond_stage_model = torch.nn.Module()

    def clone(self, **_: Any) -> Clip:
        return self

    def set_tokenizer_option(self, option_name: str, value: Any) -> None:
        pass

    def add_patches(self, patches: Any, strength_patch: float = 1.0, strength_model: float = 1.0) -> list[str]:
        return []

    def is_dynamic(self) -> bool:
        return False

    def clip_layer(self, layer_idx: int) -> None:
        pass

    def tokenize(self, text: str, return_word_ids: bool = False, **more: Any) -> Tokens:
        plain = {name: value for name, value in more.items() if isinstance(value, (str, int, float))}
        return Tokens(f"{text} {sorted(plain.items())}")

    def encode_from_tokens(self, tokens: Any, return_pooled: Any = False, return_dict: bool = False) -> Any:
        text = getattr(tokens, "text", str(tokens))
        cond = _random(text, 1, self.spec["length"], self.spec["width"])
        pooled = _random((text, "pooled"), 1, self.spec["pooled"])
        if return_dict:
            return {"cond": cond, "pooled_output": pooled, **_values(self.spec["values"], text)}
        return (cond, pooled) if return_pooled else cond

    def encode_from_tokens_scheduled(
        self, tokens: Any, unprojected: bool = False, add_dict: Any = None, show_pbar: bool = True
    ) -> Any:
        found = self.encode_from_tokens(tokens, return_dict=True)
        return [[found.pop("cond"), {**found, **(add_dict or {})}]]


class Vae(comfy.sd.VAE):
    """An encoder that averages pixels, with a latent of the spec's channels and sizes, and a decoder back."""

    def __init__(self, spec: dict[str, Any]):
        self.channels, self.frames, self.factor = spec["channels"], spec["frames"], spec["factor"]
        self.dims = spec["dims"]
        self.latent_channels, self.latent_dim, self.output_channels = self.channels, self.dims, 3
        frames, factor = self.frames, self.factor
        self.downscale_ratio: Any = (lambda a: max(0, (a + frames - 1) // frames), factor, factor)
        self.upscale_ratio: Any = (lambda a: max(0, a * frames - frames + 1), factor, factor)
        if self.dims != 3:
            self.downscale_ratio = self.upscale_ratio = factor
        self.downscale_index_formula = self.upscale_index_formula = (frames, factor, factor) if self.dims == 3 else None
        self.not_video = self.crop_input = False
        self.pad_channel_value = self.extra_1d_channel = None
        self.audio_sample_rate = self.audio_sample_rate_output = 44100
        self.first_stage_model = self
        self.device = self.output_device = torch.device("cpu")

    def is_dynamic(self) -> bool:
        return False

    def throw_exception_if_invalid(self) -> None:
        pass

    def vae_output_dtype(self) -> torch.dtype:
        return torch.float32

    def encode(self, pixels: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        if self.dims == 1:  # samples (B, N, 2) of a sound
            length = min(64, max(8, pixels.shape[1] // self.factor))
            return _random(("sound", float(pixels.sum())), pixels.shape[0], self.channels, length)
        video = pixels[..., :3].movedim(-1, 1).float()
        if self.dims == 3:
            video = video if video.ndim == 5 else video.movedim(1, 0)[None]
            sizes = (1 + (video.shape[2] - 1) // self.frames, *self._sizes(video))
            pooled = torch.nn.functional.adaptive_avg_pool3d(video, sizes)
        else:
            pooled = torch.nn.functional.adaptive_avg_pool2d(video, self._sizes(video))
        return torch.einsum("dc,bc...->bd...", _random("encoder", self.channels, 3), 2 * pooled - 1)

    encode_tiled = encode

    def _sizes(self, video: torch.Tensor) -> tuple[int, int]:
        height, width = (max(1, size // self.factor) for size in video.shape[-2:])
        most = max(height, width)
        if most > _MOST:
            height, width = (max(2, size * _MOST // most) // 2 * 2 for size in (height, width))
        return height, width

    def decode(self, latent: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        if self.dims == 1:
            return torch.tanh(latent[:, :2].repeat_interleave(8, -1)).movedim(1, -1)
        picture = torch.einsum("cd,bd...->bc...", _random("decoder", 3, self.channels) / 8, latent)
        for dim in (-2, -1):
            picture = picture.repeat_interleave(self.factor, dim)
        if picture.ndim == 5:
            frames = 1 + (picture.shape[2] - 1) * self.frames
            picture = picture.repeat_interleave(self.frames, 2)[:, :, :frames]
        return torch.sigmoid(picture).movedim(1, -1)

    decode_tiled = decode


class ClipVision:
    """What sees a picture, of the spec's shapes."""

    def __init__(self, spec: dict[str, Any]):
        self.spec = spec

    def encode_image(self, image: torch.Tensor, *_: Any, **__: Any) -> Any:
        output = comfy.clip_vision.Output()
        for name, shape in self.spec["seen"].items():
            output[name] = _seeing(name, image, image.shape[0], *shape)
        output["mm_projected"] = None
        return output


class Control(comfy.controlnet.ControlBase):
    """A ControlNet: residuals of the spec's width for the picture's tokens."""

    def __init__(self, spec: dict[str, Any]):
        super().__init__()
        self.spec = spec

    def copy(self) -> Control:
        copied = Control(self.spec)
        self.copy_to(copied)
        return copied

    def get_control(
        self, x_noisy: torch.Tensor, t: Any, cond: Any, batched_number: int, transformer_options: Any
    ) -> dict[str, list[torch.Tensor]]:
        tokens = -(-x_noisy.shape[-2] // 2) * -(-x_noisy.shape[-1] // 2)
        seen = _seeing("control", self.cond_hint_original, 1, tokens, self.spec["control"])
        residual = self.strength * 0.1 * seen
        rows = residual.repeat(x_noisy.shape[0], 1, 1)
        return {"input": [rows], "output": [rows]}


class Style:
    """A style model: more tokens of text."""

    def __init__(self, spec: dict[str, Any]):
        self.spec = spec

    def get_cond(self, seen: Any) -> torch.Tensor:
        return _seeing("style", seen.last_hidden_state, 1, 5, self.spec["width"])


def _block_patch(spec: dict[str, Any]) -> Any:
    """DiffSynth's ControlNet of Qwen-Image, a model patch: what it adds behind each block of the model, here of one."""
    network = QwenImageBlockWiseControlNet(num_layers=1, dim=spec["patch"], operations=comfy.ops.manual_cast)
    for name, parameter in network.named_parameters():
        rows = 0.3 * _random((name, "rows"), 1, *parameter.shape[1:]) / parameter.shape[-1] ** 0.5
        parameter.data = rows * _random((name, "sides"), parameter.shape[0], *[1] * (parameter.ndim - 1))
    devices = comfy.model_management.get_torch_device(), comfy.model_management.unet_offload_device()
    return comfy.model_patcher.CoreModelPatcher(network, *devices)


def _video(frames: torch.Tensor) -> Any:
    return InputImpl.VideoFromComponents(Types.VideoComponents(images=frames, audio=_sound("video"), frame_rate=24))


def _sound(seed: Any) -> dict[str, Any]:
    return {"waveform": 0.1 * _random(seed, 1, 2, 44100 * 2), "sample_rate": 44100}


def _heard(layers: int, width: int) -> dict[str, Any]:
    """What an encoder of sounds gives of two seconds at 16 kHz, 50 tokens a second."""
    return {"encoded_audio_all_layers": list(_random("heard", layers, 1, 100, width)), "audio_samples": 32000}


def _pictures(seed: Any, count: int = 1) -> torch.Tensor:
    return torch.sigmoid(torch.nn.functional.interpolate(_random(seed, count, 3, 8, 12), scale_factor=8)).movedim(1, -1)


_MAKE = {
    "CLIP": lambda spec: Clip(spec),
    "VAE": lambda spec: Vae(spec["vae"]),
    "CLIP_VISION": lambda spec: ClipVision(spec),
    "CONTROL_NET": lambda spec: Control(spec),
    "STYLE_MODEL": lambda spec: Style(spec),
    "MODEL_PATCH": _block_patch,
    "CLIP_VISION_OUTPUT": lambda spec: ClipVision(spec).encode_image(_pictures(spec["seed"])),
    "IMAGE": lambda spec: _pictures(spec["seed"]),
    "MASK": lambda spec: _random(spec["seed"], 1, 64, 96).sigmoid().round(decimals=1),
    "VIDEO": lambda spec: _video(_pictures(spec["seed"], 9)),
    "AUDIO": lambda spec: _sound(spec["seed"]),
    "AUDIO_ENCODER_OUTPUT": lambda spec: _heard(*spec["heard"]),
    "STRING": lambda spec: f"text {spec['seed']}",
    "INT": lambda spec: 64,
    "FLOAT": lambda spec: 1.0,
    "BOOLEAN": lambda spec: False,
    "LATENT": lambda spec: {"samples": torch.zeros(spec["latent"]), "type": "audio"},
}


def _stand_in(kind: str) -> type:
    class StandIn:
        RETURN_TYPES = (kind,)
        FUNCTION = "make"
        CATEGORY = "stand-ins"

        @classmethod
        def INPUT_TYPES(cls) -> dict[str, Any]:
            return {"required": {"spec": ("STRING", {"default": "{}"})}}

        def make(self, spec: str) -> tuple[Any]:
            return (_MAKE[kind](json.loads(spec)),)

    return StandIn


class LatentTwice:
    """A latent of twice the height and width, as the upscalers of latents give it."""

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "make"
    CATEGORY = "stand-ins"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"samples": ("LATENT",)}}

    def make(self, samples: dict[str, Any]) -> tuple[dict[str, Any]]:
        latent = samples["samples"]
        for dim in (-2, -1):
            latent = latent.repeat_interleave(2, dim)
        return ({"samples": latent},)


class SaveSampled:
    """Writes a sampler's latent, video and audio as one, under a name."""

    RETURN_TYPES = ()
    FUNCTION = "save"
    CATEGORY = "stand-ins"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"samples": ("LATENT",), "path": ("STRING", {"default": ""})}}

    @classmethod
    def IS_CHANGED(cls, **_: Any) -> float:
        """Never taken from ComfyUI's cache: the file would be missing."""
        return float("nan")

    def save(self, samples: dict[str, Any], path: str) -> dict[str, Any]:
        latent = samples["samples"]
        packed = comfy.utils.pack_latents(latent.unbind())[0] if latent.is_nested else latent
        comfy.utils.save_torch_file({"latent": packed.contiguous().float()}, path)
        return {"ui": {"text": [str(list(packed.shape))]}}


NODE_CLASS_MAPPINGS = {
    **{f"StandIn{kind}": _stand_in(kind) for kind in _MAKE},
    "StandInLatentTwice": LatentTwice,
    "StandInSaveSampled": SaveSampled,
}
