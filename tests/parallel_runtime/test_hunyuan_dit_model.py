"""HunyuanDiT's model file: beside the tables of all families, rotation, timestep, masks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from benchmarks.load_transformer import load_transformer
from parallel_runtime.loading.checkpoint import open_checkpoint
from parallel_runtime.networks.diffusers.hunyuan_dit import HUNYUAN_DIT, rotary_embedding
from tests.parallel_runtime.model_forward import CPU
from tests.tiny_hunyuan_dit import make_call, tiny_config
from tests.tiny_model import (
    write_diffusers_folder,
)


@pytest.mark.parametrize(
    ("size", "region"),
    [
        ((32, 32), ((0, 0), (32, 32))),
        ((48, 24), ((0, 8), (32, 24))),
        ((9, 31), ((12, 0), (21, 32))),
        ((1, 5), ((13, 0), (19, 32))),
    ],
)
def test_rotary_embedding_agrees_with_that_of_diffusers(size, region):
    """At evenly spaced positions, as HunyuanDiT was trained: those of diffusers' own grid end too early.

    Regions are what `get_resize_crop_region_for_grid` gives, of the pipeline, which needs transformers.
    """
    from diffusers.models.embeddings import get_2d_rotary_pos_embed_from_grid

    places = [
        numpy.linspace(start, stop, count, endpoint=False, dtype=numpy.float32)
        for start, stop, count in zip(*region, size, strict=True)
    ]
    grid = torch.from_numpy(numpy.stack(numpy.meshgrid(places[1], places[0])))
    expected = get_2d_rotary_pos_embed_from_grid(88, grid, use_real=True)
    config = {"patch_size": 2, "attention_head_dim": 88}
    call: Any = SimpleNamespace(x=torch.empty(1, 4, 2 * size[0], 2 * size[1]), config=config)
    for ours, theirs in zip(rotary_embedding(call), expected, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() < 1e-5


def test_the_timestep_stays_exact_in_bfloat16(tmp_path):
    """A timestep that bfloat16 would round by 2 moves the embedding as it does in float32."""
    checkpoint = open_checkpoint(write_diffusers_folder(HUNYUAN_DIT, tmp_path / "m", tiny_config()))
    outputs = {}
    for dtype in (torch.float32, torch.bfloat16):
        transformer = load_transformer(checkpoint, dtype, CPU)
        for timestep in (902.0, 904.0):
            call = make_call(1, (6, 8))
            call = {name: value.to(dtype) if value.is_floating_point() else value for name, value in call.items()}
            call["timestep"] = torch.tensor([timestep])
            with torch.no_grad():
                arguments = HUNYUAN_DIT.to_transformer(**call, config=checkpoint.config)
                outputs[dtype, timestep] = transformer(**arguments, return_dict=False)[0].float()
    moved = outputs[torch.float32, 904.0] - outputs[torch.float32, 902.0]
    moved_too = outputs[torch.bfloat16, 904.0] - outputs[torch.bfloat16, 902.0]
    assert torch.nn.functional.cosine_similarity(moved.flatten(), moved_too.flatten(), dim=0) > 0.5


def test_the_masks_of_a_kept_conditioning_are_not_written_to():
    call = make_call(1, (8, 8))
    call["text_embedding_mask"] = torch.zeros(1, 5, dtype=torch.bool)
    HUNYUAN_DIT.to_transformer(**call, config=tiny_config())
    assert not call["text_embedding_mask"].any()
