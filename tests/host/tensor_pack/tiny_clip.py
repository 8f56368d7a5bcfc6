"""A CLIP of ComfyUI's own class and tokenizer, so small that it needs no file."""

from __future__ import annotations

from types import SimpleNamespace

import comfy.sd
import comfy.sd1_clip
import torch
from comfy_api.latest import io

_CONFIG = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


class TinyClip(io.ComfyNode):
    """Two layers of random weights, 64 wide, by the names that LoRA files have for CLIP-L."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(node_id="TestTinyClip", category="test", inputs=[], outputs=[io.Clip.Output()])

    @classmethod
    def execute(cls) -> io.NodeOutput:
        target = SimpleNamespace(params={}, clip=comfy.sd1_clip.SD1ClipModel, tokenizer=comfy.sd1_clip.SD1Tokenizer)
        clip = comfy.sd.CLIP(target, model_options={"clip_l_model_config": _CONFIG, "dtype": torch.float32})
        generator = torch.Generator().manual_seed(4)
        for name, weight in clip.cond_stage_model.named_parameters():
            drawn = torch.randn(weight.shape, generator=generator) * 0.1
            weight.data = drawn + 1 if "norm" in name and name.endswith("weight") else drawn
        return io.NodeOutput(clip)
