"""Makes LoRA files, and others of the kinds that ComfyUI knows, for some layers of a tiny model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = 4
Layers = dict[str, tuple[int, int]]
"""Layer -> (outputs, inputs)."""
FLUX: Layers = {
    "double_blocks.0.img_attn.qkv": (1536, 512),
    "double_blocks.1.txt_mlp.0": (2048, 512),
    "double_blocks.1.img_mod.lin": (3072, 512),
    "single_blocks.0.linear1": (3584, 512),
    "single_blocks.1.linear2": (512, 2560),
    "final_layer.adaLN_modulation.1": (1024, 512),
}
FLUX_DIFFUSERS: Layers = {
    "transformer_blocks.0.attn.to_k": (512, 512),
    "transformer_blocks.1.attn.add_v_proj": (512, 512),
    "single_transformer_blocks.0.proj_mlp": (2048, 512),
    "norm_out.linear": (1024, 512),
}
SD3: Layers = {
    "joint_blocks.0.x_block.attn.qkv": (768, 256),
    "joint_blocks.1.x_block.attn2.proj": (256, 256),
    "joint_blocks.1.context_block.mlp.fc1": (1024, 256),
    "joint_blocks.2.x_block.adaLN_modulation.1": (1536, 256),
    "joint_blocks.3.x_block.mlp.fc2": (256, 1024),
    "final_layer.adaLN_modulation.1": (512, 256),
}
SD3_DIFFUSERS: Layers = {
    "transformer_blocks.0.attn.to_k": (256, 256),
    "transformer_blocks.1.attn.add_v_proj": (256, 256),
    "transformer_blocks.2.ff.net.0.proj": (1024, 256),
    "norm_out.linear": (512, 256),
}
Factors = dict[str, torch.Tensor]


def _draw(*shape: int, scale: float = 0.1) -> torch.Tensor:
    return torch.randn(*shape) * scale


def _lora(out: int, inputs: int) -> Factors:
    return {"lora_up.weight": _draw(out, RANK), "lora_down.weight": _draw(RANK, inputs), "alpha": torch.tensor(3.0)}


def _peft(out: int, inputs: int) -> Factors:
    return {"lora_B.weight": _draw(out, RANK), "lora_A.weight": _draw(RANK, inputs)}


def _dora(out: int, inputs: int) -> Factors:
    return {**_lora(out, inputs), "dora_scale": 0.5 + torch.rand(out, 1)}


def _loha(out: int, inputs: int) -> Factors:
    pairs = {f"hada_w{number}_{side}": _draw(*shape, scale=0.3)
             for number in (1, 2) for side, shape in (("a", (out, RANK)), ("b", (RANK, inputs)))}  # fmt: skip
    return {**pairs, "alpha": torch.tensor(2.0)}


def _lokr(out: int, inputs: int) -> Factors:
    return {"lokr_w1": _draw(4, 4, scale=0.3), "lokr_w2": _draw(out // 4, inputs // 4, scale=0.3)}


def _glora(out: int, inputs: int) -> Factors:
    return {
        "a1.weight": _draw(inputs, RANK), "a2.weight": _draw(RANK, inputs),
        "b1.weight": _draw(out, RANK), "b2.weight": _draw(RANK, inputs), "alpha": torch.tensor(4.0),
    }  # fmt: skip


def _oft(out: int, inputs: int) -> Factors:
    return {"oft_blocks": _draw(out // 16, 16, 16), "alpha": torch.tensor(0.0)}


def _boft(out: int, inputs: int) -> Factors:
    return {"oft_blocks": _draw(2, out // 16, 16, 16), "alpha": torch.tensor(0.0)}


def _diff(out: int, inputs: int) -> Factors:
    return {"diff": _draw(out, inputs, scale=0.02), "diff_b": _draw(out)}


def _set(out: int, inputs: int) -> Factors:
    return {"set_weight": _draw(out, inputs, scale=0.05)}


KINDS: Mapping[str, Callable[[int, int], Factors]] = {
    "lora": _lora, "peft": _peft, "dora": _dora, "loha": _loha, "lokr": _lokr, "glora": _glora, "oft": _oft,
    "boft": _boft, "diff": _diff, "set": _set,
}  # fmt: skip


def kohya(layer: str) -> str:
    """A layer's name as kohya's scripts write it."""
    return f"lora_unet_{layer.replace('.', '_')}"


def peft(layer: str) -> str:
    """A layer's name as most newer scripts write it."""
    return f"diffusion_model.{layer}"


def write_lora(
    path: Path,
    shapes: Mapping[str, tuple[int, int]],
    kind: str = "lora",
    spell: Callable[[str], str] = kohya,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a file of one kind.

    Args:
        shapes: layer -> (outputs, inputs).
        spell: layer -> its name in the file.
    """
    torch.manual_seed(seed)
    tensors = {
        f"{spell(layer)}.{name}": factor.to(dtype)
        for layer, shape in shapes.items()
        for name, factor in KINDS[kind](*shape).items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)
    return path
