"""SDXL's model file: beside the tables of all families, folders, sizes."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.load_transformer import load_transformer
from parallel_runtime.errors import CheckpointError, UnsupportedModelError
from parallel_runtime.loading.checkpoint import open_checkpoint
from parallel_runtime.networks.diffusers.sdxl import SDXL
from tests.parallel_runtime.model_forward import CPU
from tests.tiny_flux import weights_file
from tests.tiny_model import make_state_dict
from tests.tiny_sdxl import (
    ATTENDING_DOWN,
    ATTENDING_UP,
    KINDS,
    make_call,
    tiny_config,
    write_pipeline,
)

KOALA = KINDS["KOALA"]
STABLE_DIFFUSION = tiny_config(
    down_block_types=(ATTENDING_DOWN,) * 3,
    up_block_types=(ATTENDING_UP,) * 3,
    block_out_channels=(64, 64, 64),
    attention_head_dim=(1, 1, 1),
    layers_per_block=1,
    transformer_layers_per_block=(1, 1, 1),
    addition_embed_type=None,
    projection_class_embeddings_input_dim=None,
)


def test_a_folder_of_the_same_diffusers_class_is_refused_by_its_config(tmp_path):
    with pytest.raises(UnsupportedModelError, match="UNet2DConditionModel that is not SDXL"):
        open_checkpoint(write_pipeline(tmp_path / "m", STABLE_DIFFUSION))


LAYOUTS = {
    "pipeline folder": lambda path: write_pipeline(path / "m", KOALA),
    "U-Net folder": lambda path: write_pipeline(path / "m", KOALA) / "unet",
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_folder_gives_the_same_weights_and_config(layout, tmp_path):
    checkpoint = open_checkpoint(LAYOUTS[layout](tmp_path))
    assert checkpoint.spec is SDXL
    # Through JSON, as tuples come back as lists from a folder.
    assert checkpoint.config == json.loads(json.dumps({**KOALA, "upcast_attention": None, "act_fn": "silu"}))
    loaded, expected = load_transformer(checkpoint, torch.float32, CPU).state_dict(), make_state_dict(SDXL, KOALA)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_tensors_that_a_file_lacks_are_named(tmp_path):
    folder = write_pipeline(tmp_path / "m", KOALA) / "unet"
    tensors = make_state_dict(SDXL, KOALA)
    missing = next(name for name in tensors if name.endswith("attn2.to_v.weight"))
    del tensors[missing]
    save_file(tensors, weights_file(folder))
    with pytest.raises(CheckpointError, match=rf"lacks 1 of \d+ tensors of SDXL, first {missing}"):
        load_transformer(open_checkpoint(folder), torch.float32, CPU)


def test_micro_conditions_are_those_that_diffusers_makes_of_the_same_sizes():
    """ComfyUI's y holds the sinusoids of the sizes already; given as numbers, diffusers' own path must agree."""
    from diffusers import UNet2DConditionModel
    from diffusers.models.embeddings import Timesteps

    config = tiny_config(**{**KOALA, "projection_class_embeddings_input_dim": 32 + 6 * 256})
    unet = UNet2DConditionModel(**config).eval()
    unet.load_state_dict(make_state_dict(SDXL, config))
    call, sizes = make_call(4, (8, 8), 2), torch.tensor([[768.0, 512.0, 0.0, 64.0, 1024.0, 1024.0]] * 2)
    pooled = torch.randn(2, 32)
    call["y"] = torch.cat([pooled, Timesteps(256, True, 0)(sizes.flatten()).reshape(2, -1)], dim=1)
    arguments = SDXL.to_transformer(**call, config=config)
    with torch.no_grad():
        ours = unet(**arguments).sample
        arguments["added_cond_kwargs"] = {"text_embeds": pooled, "time_ids": sizes}
        assert torch.equal(ours, unet(**arguments).sample)
