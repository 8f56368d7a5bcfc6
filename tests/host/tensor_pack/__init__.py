"""A custom node pack for the host tests: random CONDITIONING, LATENT and MASK tensors, made from seeds."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.nested_tensor
import comfy.ops
import comfy.utils
import comfy.weight_adapter
import torch
from comfy.controlnet import ControlNet
from comfy.latent_formats import SDXL, Wan21
from comfy.ldm.hydit.controlnet import HunYuanControlNet
from comfy.ldm.qwen_image.controlnet import QwenImageControlNetModel
from comfy_api.latest import ComfyExtension, io
from comfy_extras.nodes_model_patch import SigLIPMultiFeatProjModel

from .tiny_clip import TinyClip


def _random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class RandomConditioning(io.ComfyNode):
    """A text that no encoder ever saw."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestRandomConditioning",
            category="test",
            inputs=[
                io.Int.Input("seed", default=0),
                io.Int.Input("length", default=7),
                io.Int.Input("width", default=64),
                io.Int.Input("pooled", default=32),
                io.Float.Input("guidance", default=3.5),
            ],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, seed: int, length: int, width: int, pooled: int, guidance: float) -> io.NodeOutput:
        extras = {"pooled_output": _random(seed + 1, 1, pooled), "guidance": guidance}
        return io.NodeOutput([[_random(seed, 1, length, width), extras]])


class Prompt(io.ComfyNode):
    """A text that no encoder ever saw, though it may be read: for pictures."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestPrompt",
            category="test",
            inputs=[io.String.Input("text", multiline=True)],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, text: str) -> io.NodeOutput:
        seed = sum(text.encode())
        return io.NodeOutput([[_random(seed, 1, 7, 64), {"pooled_output": _random(seed + 1, 1, 32), "guidance": 3.5}]])


class Emoji(io.ComfyNode):
    """The words of an emoji's name, for the model that draws it (benchmarks/emoji)."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestEmoji",
            category="test",
            inputs=[io.String.Input("text", multiline=True)],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, text: str) -> io.NodeOutput:
        folder = Path(__file__).resolve().parents[3] / "benchmarks" / "emoji"
        if "emoji_model" not in sys.modules:  # the folder above is on no path: its `nodes` would hide ComfyUI's
            spec = importlib.util.spec_from_file_location(
                "emoji_model", folder / "__init__.py", submodule_search_locations=[str(folder)]
            )
            sys.modules["emoji_model"] = importlib.util.module_from_spec(spec)
        words = importlib.import_module("emoji_model.words").Words.read(folder / "model" / "emoji-words.safetensors")
        context, pooled = words.conditioning(text)
        return io.NodeOutput([[context, {"pooled_output": pooled}]])


class ConditioningValues(io.ComfyNode):
    """More values in a CONDITIONING, as the text nodes of some families put there."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestConditioningValues",
            category="test",
            inputs=[
                io.Conditioning.Input("conditioning"),
                io.String.Input("values", tooltip="JSON: name -> what `_make` knows."),
            ],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, conditioning, values: str) -> io.NodeOutput:
        made = {name: cls._make(value, number) for number, (name, value) in enumerate(json.loads(values).items())}
        return io.NodeOutput([[text, {**extras, **made}] for text, extras in conditioning])

    @classmethod
    def _make(cls, value, seed: int):
        """A number as it is; of a list, the random tensor of that shape; of a dict, what its key says."""
        if isinstance(value, list):
            return _random(seed + 50, *value)
        if not isinstance(value, dict):
            return value
        if "kept" in value:  # a mask over tokens
            return (torch.arange(value["length"])[None] < value["kept"]).long()
        if "plain" in value:
            return value["plain"]
        if "integers" in value:
            return torch.tensor(value["integers"])
        if "list" in value:
            return [cls._make(item, seed + 10 * number) for number, item in enumerate(value["list"])]
        # As nodes for CLIP vision return it.
        return SimpleNamespace(**{name: cls._make(item, seed) for name, item in value["fields"].items()})


class RandomLatent(io.ComfyNode):
    """A latent of noise; seed 0 gives an empty one."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestRandomLatent",
            category="test",
            inputs=[
                io.Int.Input("seed", default=0),
                io.Int.Input("batch", default=1),
                io.Int.Input("height", default=14),
                io.Int.Input("width", default=20),
                io.Boolean.Input("broken", default=False),
                io.Int.Input("frames", default=0, optional=True),
            ],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, seed: int, batch: int, height: int, width: int, broken: bool, frames: int = 0) -> io.NodeOutput:
        shape = (batch, 16, frames, height, width) if frames else (batch, 16, height, width)
        samples = _random(seed, *shape) if seed else torch.zeros(shape)
        if broken:
            samples[0, 0, 0, 0] = float("nan")
        return io.NodeOutput({"samples": samples})


class EmptyLatents(io.ComfyNode):
    """Latents of zeros of any shape; of several shapes, as video with audio has them."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestEmptyLatents",
            category="test",
            inputs=[io.String.Input("shapes", tooltip="JSON: a list of shapes.")],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, shapes: str) -> io.NodeOutput:
        latents = [torch.zeros(shape) for shape in json.loads(shapes)]
        several = len(latents) > 1
        return io.NodeOutput({"samples": comfy.nested_tensor.NestedTensor(latents) if several else latents[0]})


class PackedLatent(io.ComfyNode):
    """Latents as one tensor, which can be saved."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestPackedLatent",
            category="test",
            inputs=[io.Latent.Input("samples")],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, samples) -> io.NodeOutput:
        latent = samples["samples"]
        return io.NodeOutput({"samples": comfy.utils.pack_latents(latent.unbind())[0] if latent.is_nested else latent})


class RandomMask(io.ComfyNode):
    """A mask of soft blocks."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestRandomMask",
            category="test",
            inputs=[io.Int.Input("seed", default=0), io.Int.Input("height"), io.Int.Input("width")],
            outputs=[io.Mask.Output()],
        )

    @classmethod
    def execute(cls, seed: int, height: int, width: int) -> io.NodeOutput:
        generator = torch.Generator().manual_seed(seed)
        return io.NodeOutput(torch.rand((1, height, width), generator=generator).round(decimals=1))


class _Vae:
    """Encodes by averages, as far as a ControlNet asks."""

    def __init__(self, channels: int, video: bool):
        self._channels = channels
        self._video = video

    def spacial_compression_encode(self) -> int:
        return 8

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        latent = torch.nn.functional.avg_pool2d(pixels.movedim(-1, 1), 8)
        latent = torch.cat([latent * scale for scale in range(-3, 3)], dim=1)[:, : self._channels]
        return latent.unsqueeze(2) if self._video else latent


class MeanVae(io.ComfyNode):
    """A VAE without weights."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestVae",
            category="test",
            inputs=[io.Int.Input("channels", default=16), io.Boolean.Input("video", default=False)],
            outputs=[io.Vae.Output()],
        )

    @classmethod
    def execute(cls, channels: int, video: bool) -> io.NodeOutput:
        return io.NodeOutput(_Vae(channels, video))


class AudioVae(io.ComfyNode):
    """A VAE of sound that makes the same of all."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(node_id="TestAudioVae", category="test", outputs=[io.Vae.Output()])

    @classmethod
    def execute(cls) -> io.NodeOutput:
        return io.NodeOutput(SimpleNamespace(encode=lambda waveform: _random(91, 1, 8, 5, 16)))


class RandomImage(io.ComfyNode):
    """A picture of soft blocks."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestRandomImage",
            category="test",
            inputs=[io.Int.Input("seed", default=0), io.Int.Input("height"), io.Int.Input("width")],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(cls, seed: int, height: int, width: int) -> io.NodeOutput:
        return io.NodeOutput(torch.rand((1, height, width, 3), generator=torch.Generator().manual_seed(seed)))


class Weights(io.ComfyNode):
    """What a node reads of a network's weights, as a latent; or a layer that it runs."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestWeights",
            category="test",
            inputs=[io.Model.Input("model"), io.Boolean.Input("run", default=False)],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, model, run: bool) -> io.NodeOutput:
        network = model.model.diffusion_model
        if run:
            getattr(network, _parts(network)[2])(torch.zeros(1, 1, 64))
        means = [tensor.float().mean() for _, tensor in sorted(network.state_dict().items())]
        return io.NodeOutput({"samples": torch.stack(means)[None, None, None]})


_LIVING: list[object] = []
"""ComfyUI 0.33 fails in a ControlNet after a model that it had on a device is gone, whatever loader made it."""


class ControlNetOfClass(io.ComfyNode):
    """A ControlNet whose files ComfyUI takes at full size alone, made of its class as ComfyUI's loader makes it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestControlNet",
            category="test",
            inputs=[
                io.Combo.Input("kind", options=["hunyuan-dit", "qwen-image"]),
                io.Int.Input("width", default=256),
            ],
            outputs=[io.ControlNet.Output()],
        )

    @classmethod
    def execute(cls, kind: str, width: int) -> io.NodeOutput:
        plain = {"operations": comfy.ops.disable_weight_init, "device": "cpu", "dtype": torch.float32}
        if kind == "hunyuan-dit":  # of four blocks there is one long skip, and a residual is for each
            network = HunYuanControlNet(hidden_size=width, num_heads=16, mlp_ratio=4.0, **plain)
            network.blocks, network.after_proj_list = network.blocks[:1], network.after_proj_list[:1]
            form, extra = SDXL(), ["text_embedding_mask", "encoder_hidden_states_t5", "text_embedding_mask_t5"]
        else:
            network = QwenImageControlNetModel(
                in_channels=64, num_layers=1, num_attention_heads=width // 128, attention_head_dim=128, **plain
            )
            form, extra = Wan21(), []
        for number, parameter in enumerate(network.parameters()):
            rows = 0.3 * _random(number, 1, *parameter.shape[1:]) / max(1, parameter.shape[-1]) ** 0.5
            sides = _random(number + 1, parameter.shape[0], *[1] * (parameter.ndim - 1))
            parameter.data = rows * sides  # no matrix of random numbers, which takes seconds where it is wide
        control = ControlNet(
            network, compression_ratio=1, latent_format=form, extra_conds=extra,
            load_device=comfy.model_management.get_torch_device(),
        )  # fmt: skip
        _LIVING.append(control)
        return io.NodeOutput(control)


class StyleNetwork(io.ComfyNode):
    """A MODEL_PATCH for USOStyleReference, of random weights."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestStyleNetwork",
            category="test",
            inputs=[io.Int.Input("width", default=64), io.Int.Input("seed", default=0)],
            outputs=[io.Custom("MODEL_PATCH").Output()],
        )

    @classmethod
    def execute(cls, width: int, seed: int) -> io.NodeOutput:
        model = SigLIPMultiFeatProjModel(9, 4, 24, width, operations=comfy.ops.manual_cast)
        for number, parameter in enumerate(model.parameters()):
            parameter.data = 0.3 * _random(number + 100 * seed, *parameter.shape)
        devices = comfy.model_management.get_torch_device(), comfy.model_management.unet_offload_device()
        kinds = comfy.model_patcher
        patcher = getattr(kinds, "CoreModelPatcher", kinds.ModelPatcher)(model, *devices)  # 0.8.0 has the plain one
        _LIVING.append(patcher)
        return io.NodeOutput(patcher)


class ClipVisionOutput(io.ComfyNode):
    """What an image encoder saw in a picture that never was."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestClipVisionOutput", category="test", inputs=[], outputs=[io.ClipVisionOutput.Output()]
        )

    @classmethod
    def execute(cls) -> io.NodeOutput:
        states = _random(71, 1, 21, 9, 24)
        return io.NodeOutput(SimpleNamespace(all_hidden_states=states, penultimate_hidden_states=states[:, -2]))


class OwnAdapter(comfy.weight_adapter.WeightAdapterBase):
    """A kind of LoRA that only this pack has."""

    def __init__(self, weights):
        self.weights = weights


KINDS = [
    "adapter of its own", "of a text encoder", "attention", "rope", "cfg", "inside", "inside during a run",
    "times that count up",
]  # fmt: skip


class ModelPatch(io.ComfyNode):
    """A MODEL with one change of the kind that a node of an artist's graph would make."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestModelPatch",
            category="test",
            inputs=[io.Model.Input("model"), io.Combo.Input("kind", options=KINDS)],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model, kind: str) -> io.NodeOutput:
        patched = model.clone()
        if kind == "adapter of its own":
            texts = _parts(patched.model.diffusion_model)[2]
            patched.add_patches({f"diffusion_model.{texts}.weight": OwnAdapter((torch.ones(1),))}, 0.5)
        elif kind == "of a text encoder":
            assert patched.add_patches({"clip_l.transformer.weight": OwnAdapter((torch.ones(1),))}, 0.5) == []
        elif kind == "attention":
            patched.set_model_attn1_patch(lambda q, k, v, options: (q, k, v))
        elif kind == "rope":
            patched.set_model_rope_options(2.0, 0.0, 2.0, 0.0, 1.0, 0.0)
        elif kind == "inside":
            transformer = patched.model.diffusion_model  # of all clones, and so it stays
            method, latents, texts = _parts(transformer)
            setattr(transformer, method, lambda *args, **kwargs: args[0])
            getattr(transformer, latents).register_forward_hook(lambda module, args, output: output)
            layer = getattr(transformer, texts)
            layer.weight = torch.nn.Parameter(torch.ones(layer.weight.shape))
        elif kind == "inside during a run":
            patched.set_model_unet_function_wrapper(_run_patched)
        elif kind == "times that count up":  # MiniMax Music's, of which no file can be small
            patched.add_object_patch(
                "process_timestep", comfy.model_base.MiniMaxMusic3.process_timestep.__get__(patched.model)
            )
        else:
            patched.set_model_sampler_post_cfg_function(lambda args: args["denoised"] * 0.9)
        return io.NodeOutput(patched)


def _parts(transformer: torch.nn.Module) -> tuple[str, str, str]:
    """Names of a method, of the layer of latents and of that of texts: FLUX.1's, or SD3's, which may stand for it."""
    if hasattr(transformer, "img_in"):
        return "forward_orig", "img_in", "txt_in"
    return "forward_core_with_concat", "x_embedder", "context_embedder"


def _run_patched(apply_model, arguments):
    """As caches of steps do it: other methods for the time of one call."""
    transformer = apply_model.__self__.diffusion_model
    with patch.object(transformer, _parts(transformer)[0], lambda *args, **kwargs: args[0]):
        return apply_model(arguments["input"], arguments["timestep"], **arguments["c"])


class TensorPack(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [
            RandomConditioning,
            Prompt,
            Emoji,
            ConditioningValues,
            RandomLatent,
            EmptyLatents,
            PackedLatent,
            RandomMask,
            ControlNetOfClass,
            StyleNetwork,
            Weights,
            MeanVae,
            AudioVae,
            RandomImage,
            ClipVisionOutput,
            TinyClip,
            ModelPatch,
        ]


def comfy_entrypoint() -> TensorPack:
    return TensorPack()
