"""PixArt's model file: beside the tables of all families, positions, the former class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.load_transformer import load_transformer
from parallel_runtime.errors import UnsupportedModelError
from parallel_runtime.loading.checkpoint import open_checkpoint
from parallel_runtime.networks.diffusers.pixart import PIXART
from tests.parallel_runtime.model_forward import CPU
from tests.tiny_model import (
    make_state_dict,
    write_diffusers_folder,
)
from tests.tiny_pixart import make_call, tiny_config

ALPHA = tiny_config(use_additional_conditions=True, num_layers=1)
SIGMA = tiny_config(num_layers=1)


def _former_class(folder: Path, **changes: Any) -> Path:
    """As the published folders are: written for the class that PixArt shared with others."""
    written = json.loads((folder / "config.json").read_text())
    former = {"_class_name": "Transformer2DModel", "double_self_attention": False, "num_vector_embeds": None}
    former |= {"norm_type": "ada_norm_single", "use_additional_conditions": None, "interpolation_scale": 2, **changes}
    (folder / "config.json").write_text(json.dumps({**written, **former}))
    return folder


def test_a_folder_of_the_former_class_gives_the_same_weights_and_config(tmp_path):
    """Whether there are micro-conditions no such config says: there are for pictures of 1024²."""
    checkpoint = open_checkpoint(_former_class(write_diffusers_folder(PIXART, tmp_path / "m", ALPHA)))
    assert checkpoint.spec is PIXART
    transformer: Any = load_transformer(checkpoint, torch.float32, CPU)
    loaded, expected = transformer.state_dict(), make_state_dict(PIXART, ALPHA)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    arguments = PIXART.to_transformer(**make_call(1, (6, 8)), config=transformer.config)
    assert "added_cond_kwargs" in arguments


def test_another_model_of_the_former_class_is_refused(tmp_path):
    folder = _former_class(write_diffusers_folder(PIXART, tmp_path / "m", ALPHA), norm_type="ada_norm_zero")
    with pytest.raises(UnsupportedModelError, match="Transformer2DModel"):
        open_checkpoint(folder)


@pytest.mark.parametrize("config", [ALPHA, SIGMA])
@pytest.mark.parametrize("size", [(128, 128), (64, 64), (192, 128)])
def test_at_the_sizes_of_training_positions_are_those_of_diffusers(config, size, tmp_path):
    """Trained at 512² and 1024²; in between, diffusers goes by the size in the config, ComfyUI by the latent."""
    from diffusers import PixArtTransformer2DModel

    checkpoint = open_checkpoint(write_diffusers_folder(PIXART, tmp_path / "m", config))
    sample_size = 64 * round(sum(size) / 128)
    reference: Any = PixArtTransformer2DModel(**{**config, "sample_size": sample_size})
    reference.load_state_dict(make_state_dict(PIXART, config))
    x = torch.randn(1, 4, *size)
    with torch.no_grad():
        ours = load_transformer(checkpoint, torch.float32, CPU).pos_embed(x)
        assert torch.equal(ours, reference.pos_embed(x))


def test_micro_conditions_follow_from_the_latent_where_none_are_given():
    given = PIXART.to_transformer(**make_call(1, (6, 8), 2), config=ALPHA)["added_cond_kwargs"]
    assert given["resolution"].tolist() == [[48, 64]] * 2
    assert given["aspect_ratio"].tolist() == [[0.75]] * 2
    assert "added_cond_kwargs" not in PIXART.to_transformer(**make_call(1, (6, 8), micro=True), config=SIGMA)
