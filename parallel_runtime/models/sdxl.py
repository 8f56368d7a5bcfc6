"""SDXL (base, refiner, inpainting, and the smaller SSD-1B, Vega and KOALA): diffusers' UNet2DConditionModel as data.

A U-Net: its resolutions are joined by convolutions, which need their neighbours, so no rank takes a share of the
tokens. Ranks share out the rows of a batch, CFG branches and pictures, and each has the whole model.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from .sdxl_adapter import SDXLAdapter
from .sdxl_layout import ATTENDING, PLAIN, weight_rules
from .spec import ModelSpec, TensorInfo
from .weight_rules import count_blocks

HEAD_DIM = 64
"""No tensor's shape tells it; all published ones have it, and ComfyUI takes no other."""
_MICRO_CONDITION_DIM = 256
_SAMPLE_SIZE = 128

_LOOKALIKES = (
    "controlnet_",
    "input_hint_block.",  # ControlNets in the original key style
    "encoder_hid_proj.",  # Kolors
    "edm_vpred.",  # its range of noise is in tensors, which the loader does not read
)

_ORIGINAL = {"image": "input_blocks.0.0.weight", "micro": "label_emb.0.0.weight", "output": "out.2.weight"}
_DIFFUSERS = {"image": "conv_in.weight", "micro": "add_embedding.linear_1.weight", "output": "conv_out.weight"}

_Place = tuple[str, str]
"""Where a layer is: the resnet's last convolution, and what the names of its attention start with."""


def _config(
    header: Mapping[str, TensorInfo],
    names: Mapping[str, str],
    down: Sequence[Sequence[_Place]],
    mid: _Place,
    up: Sequence[Sequence[_Place]],
) -> dict[str, Any] | None:
    """The diffusers config of a U-Net whose layers are at these places; None where it is not of SDXL's kind."""
    shapes = {part: header[key].shape if key in header else () for part, key in names.items()}
    places = [place for level in (*down, *up) for place in level]
    if [len(shapes[part]) for part in ("image", "micro", "output")] != [4, 2, 4] or not all(down):
        return None
    if any(key.startswith(_LOOKALIKES) for key in header) or any(place[0] not in header for place in places):
        return None
    depths = [[_depth(header, place) for place in level] for level in down]
    up_depths = [[_depth(header, place) for place in level] for level in up]
    # SDXL has no attention at the highest resolution. Stable Diffusion 1 and 2 and their relatives do.
    if any(depths[0]) or any(any(level) != all(level) for level in (*depths, *up_depths)):
        return None
    attends = [any(level) for level in depths]
    if not any(attends) or attends != [any(level) for level in up_depths][::-1]:
        return None
    first = next(place for place in places if _depth(header, place))[1]
    text = header.get(f"{first}.transformer_blocks.0.attn2.to_k.weight")
    projection = header.get(f"{first}.proj_in.weight")
    channels = tuple(header[level[0][0]].shape[0] for level in down)
    if text is None or projection is None or (len(text.shape), len(projection.shape)) != (2, 2):
        return None
    if any(width % HEAD_DIM for width, attending in zip(channels, attends, strict=True) if attending):
        return None
    return {
        "sample_size": _SAMPLE_SIZE,
        "in_channels": shapes["image"][1],
        "out_channels": shapes["output"][0],
        "block_out_channels": channels,
        "down_block_types": tuple((ATTENDING if attending else PLAIN)["down"] for attending in attends),
        "up_block_types": tuple((ATTENDING if attending else PLAIN)["up"] for attending in attends[::-1]),
        "layers_per_block": _short([len(level) for level in down]),
        "attention_head_dim": tuple(max(1, width // HEAD_DIM) for width in channels),
        "cross_attention_dim": text.shape[1],
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": _MICRO_CONDITION_DIM,
        "projection_class_embeddings_input_dim": shapes["micro"][1],
        **_depth_settings(depths, up_depths, _depth(header, mid), mid[0] in header),
    }


def _depth(header: Mapping[str, TensorInfo], place: _Place) -> int:
    return count_blocks(header, f"{place[1]}.transformer_blocks.")


def _depth_settings(
    depths: Sequence[Sequence[int]], up_depths: Sequence[Sequence[int]], mid: int, has_mid: bool
) -> dict[str, Any]:
    """How many transformer blocks there are, in diffusers' spelling: a number where layers are alike."""
    levels = [_short(level) or 1 for level in depths]
    if mid and not any(depths[-1]):
        levels[-1] = mid  # the middle goes by the lowest resolution's number
    mirrored = all(set(up) == set(level) for up, level in zip(up_depths, depths[::-1], strict=True))
    alike = mirrored and all(isinstance(level, int) for level in levels)
    plain = PLAIN["mid"] if has_mid else None
    return {
        "mid_block_type": ATTENDING["mid"] if mid else plain,
        "transformer_layers_per_block": tuple(levels),
        "reverse_transformer_layers_per_block": None if alike else tuple(_short(level) or 1 for level in up_depths),
    }


def _short(values: Sequence[int]) -> int | tuple[int, ...]:
    return values[0] if len(set(values)) == 1 else tuple(values)


def detect(header: Mapping[str, TensorInfo]) -> dict[str, Any] | None:
    """Config of a file with Stability AI's names; None for other U-Nets (Stable Diffusion 1 and 2, video, Kolors)."""
    down: list[list[_Place]] = [[]]
    for number in range(1, count_blocks(header, "input_blocks.")):
        if f"input_blocks.{number}.0.op.weight" in header:
            down.append([])
        else:
            down[-1].append(_original_place(f"input_blocks.{number}"))
    numbers = itertools.count()
    up = [[_original_place(f"output_blocks.{next(numbers)}") for _ in range(len(level) + 1)] for level in down[::-1]]
    return _config(header, _ORIGINAL, down, _original_place("middle_block"), up)


def _original_place(block: str) -> _Place:
    return f"{block}.0.out_layers.3.weight", f"{block}.1"


def detect_diffusers(header: Mapping[str, TensorInfo], written: Mapping[str, Any]) -> dict[str, Any] | None:
    """Config of a file with diffusers' UNet2DConditionModel names; `written` wins where it says something."""
    down, up = (
        [
            [_place(f"{blocks}.{level}", layer) for layer in range(count_blocks(header, f"{blocks}.{level}.resnets."))]
            for level in range(count_blocks(header, f"{blocks}."))
        ]
        for blocks in ("down_blocks", "up_blocks")
    )
    if len(down) != len(up) or any(len(level) + 1 != len(other) for level, other in zip(down, up[::-1], strict=True)):
        return None
    found = _config(header, _DIFFUSERS, down, _place("mid_block", 0), up)
    return found and {**found, **written}


def _place(block: str, layer: int) -> _Place:
    return f"{block}.resnets.{layer}.conv2.weight", f"{block}.attentions.{layer}"


SDXL = ModelSpec(
    name="sdxl",
    title="SDXL",
    transformer_class="UNet2DConditionModel",
    shares_class=True,
    block_lists=tuple(
        f"{part}.attentions.*.transformer_blocks" for part in ("down_blocks.*", "mid_block", "up_blocks.*")
    ),
    self_attention=(),
    sequence_inputs={},
    sequence_outputs={},
    attended=(),
    heads=lambda config: 1,  # heads stay together on one rank
    timestep_embedder="time_proj",
    timestep_scale=1.0,
    detect=detect,
    detect_diffusers=detect_diffusers,
    weight_rules=weight_rules,
    adapter=SDXLAdapter(),
    widths={"encoder_hidden_states": "cross_attention_dim"},
)
