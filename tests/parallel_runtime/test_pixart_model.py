"""PixArt's model file: its detection, its weight rules, and its adapter against ComfyUI's own forward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_runtime.errors import RequestError, UnsupportedModelError
from parallel_runtime.loading.checkpoint import open_checkpoint
from parallel_runtime.loading.weights import load_transformer
from parallel_runtime.networks.diffusers.pixart import PIXART
from parallel_runtime.networks.diffusers.spec import TensorInfo
from tests.comfyui_checkout import HOW, find_comfyui
from tests.parallel_runtime.comfyui_forward import output_of, run_comfyui
from tests.parallel_runtime.model_forward import CPU, comfyui_call, header_of, relative_error
from tests.tiny_model import (
    make_state_dict,
    to_original,
    write_diffusers_file,
    write_diffusers_folder,
    write_original,
)
from tests.tiny_pixart import make_call, tiny_config

COMFYUI = find_comfyui()
ALPHA = tiny_config(use_additional_conditions=True, num_layers=1)
SIGMA = tiny_config(num_layers=1)


def _header(config: dict[str, Any], original: bool = True) -> dict[str, TensorInfo]:
    with torch.device("meta"):
        tensors = {key: torch.empty(tensor.shape) for key, tensor in make_state_dict(PIXART, config).items()}
    tensors = to_original(PIXART, tensors, config) if original else tensors
    return header_of(tensors)


@pytest.mark.parametrize("changes", [{}, {"use_additional_conditions": True}, {"num_layers": 3}, {"in_channels": 16}])
def test_detect_gives_back_the_config_from_the_shapes_of_either_layout(changes):
    config = tiny_config(**changes, out_channels=2 * changes.get("in_channels", 4))
    original, renamed = _header(config), _header(config, original=False)
    assert PIXART.detect(original) == config
    assert PIXART.recognise(renamed, {}) == config
    assert PIXART.detect(renamed) is None
    assert PIXART.recognise(original, {}) is None


@pytest.mark.parametrize(("places", "scale"), [(256, 1), (1024, 1), (4096, 2), (16384, 4)])
def test_positions_in_a_file_fix_how_they_are_scaled(places, scale):
    found = PIXART.detect({**_header(SIGMA), "pos_embed": TensorInfo((1, places, 288), "F32")})
    assert found is not None
    assert found["interpolation_scale"] == scale
    assert found["sample_size"] == 2 * places**0.5


@pytest.mark.parametrize(
    ("removed", "added", "named"),
    [
        ("blocks.0.mlp.", "blocks.0.mlp.inverted_conv.conv.weight", "a Sana"),
        (None, "blocks.0.attn.sr.weight", "not PixArt-α or PixArt-Σ"),
        (None, "blocks.0.attn.q_norm.weight", "not PixArt-α or PixArt-Σ"),
        (None, "controlnet_blocks.0.weight", "a ControlNet"),
        (None, "temporal_transformer_blocks.0.attn1.to_q.weight", "a Latte"),
        ("final_layer.", None, "not PixArt-α or PixArt-Σ"),
    ],
)
def test_relatives_in_the_same_key_style_are_refused_by_name(removed, added, named, tmp_path):
    tensors = to_original(PIXART, make_state_dict(PIXART, SIGMA), SIGMA)
    tensors = {key: tensor for key, tensor in tensors.items() if removed is None or not key.startswith(removed)}
    if added:
        tensors[added] = torch.ones(8, 8)
    save_file(tensors, tmp_path / "m.safetensors")
    with pytest.raises(UnsupportedModelError, match=named):
        open_checkpoint(tmp_path / "m.safetensors")


def test_a_model_that_predicts_no_variance_is_not_pixart():
    """Allegro and others keep diffusers' PixArt names."""
    header = _header(SIGMA, original=False)
    header["proj_out.weight"] = TensorInfo((16, 288), "F32")
    assert PIXART.recognise(header, {}) is None


def _former_class(folder: Path) -> Path:
    """As the published folders are: written for the class that PixArt shared with others."""
    written = json.loads((folder / "config.json").read_text())
    former = {"_class_name": "Transformer2DModel", "double_self_attention": False, "num_vector_embeds": None}
    (folder / "config.json").write_text(json.dumps({**written, **former, "interpolation_scale": 2}))
    return folder


LAYOUTS = {
    "original": lambda path: write_original(PIXART, path / "m.safetensors", ALPHA),
    "full checkpoint": lambda path: write_original(PIXART, path / "m.safetensors", ALPHA, "model.diffusion_model."),
    "diffusers file": lambda path: write_diffusers_file(PIXART, path / "m.safetensors", ALPHA),
    "transformer folder": lambda path: write_diffusers_folder(PIXART, path / "m", ALPHA),
    "folder of the former class": lambda path: _former_class(write_diffusers_folder(PIXART, path / "m", ALPHA)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_weights_and_config(layout, tmp_path):
    checkpoint = open_checkpoint(LAYOUTS[layout](tmp_path))
    assert checkpoint.spec is PIXART
    assert checkpoint.config == ALPHA
    loaded, expected = load_transformer(checkpoint, torch.float32, CPU).state_dict(), make_state_dict(PIXART, ALPHA)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_another_model_of_the_former_class_is_refused(tmp_path):
    folder = _former_class(write_diffusers_folder(PIXART, tmp_path / "m", ALPHA))
    file = folder / "diffusion_pytorch_model.safetensors"
    save_file({key: tensor for key, tensor in load_file(file).items() if "caption" not in key}, file)
    with pytest.raises(UnsupportedModelError, match="Transformer2DModel"):
        open_checkpoint(folder)


@pytest.mark.parametrize("config", [ALPHA, SIGMA])
@pytest.mark.parametrize("size", [(128, 128), (64, 64), (192, 128)])
def test_at_the_sizes_of_training_positions_are_those_of_diffusers(config, size, tmp_path):
    """Trained at 512² and 1024²; in between, diffusers goes by the size in the config, ComfyUI by the latent."""
    from diffusers import PixArtTransformer2DModel

    checkpoint = open_checkpoint(write_original(PIXART, tmp_path / "m.safetensors", config))
    sample_size = 64 * round(sum(size) / 128)
    reference: Any = PixArtTransformer2DModel(**{**config, "sample_size": sample_size})
    reference.load_state_dict(make_state_dict(PIXART, config))
    x = torch.randn(1, 4, *size)
    with torch.no_grad():
        ours = load_transformer(checkpoint, torch.float32, CPU).pos_embed(x)
        assert torch.equal(ours, reference.pos_embed(x))


def test_micro_conditions_follow_from_the_latent_where_none_are_given():
    given = PIXART.adapter.to_transformer(**make_call(1, (6, 8), 2), config=ALPHA)["added_cond_kwargs"]
    assert given["resolution"].tolist() == [[48, 64]] * 2
    assert given["aspect_ratio"].tolist() == [[0.75]] * 2
    assert "added_cond_kwargs" not in PIXART.adapter.to_transformer(**make_call(1, (6, 8), micro=True), config=SIGMA)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"x": torch.ones(1, 4, 7, 8)}, "7 x 8"),
        ({"x": torch.ones(1, 16, 8, 8)}, "(1, 16, 8, 8)"),
        ({"x": torch.ones(1, 4, 1, 8, 8)}, "(1, 4, 1, 8, 8)"),
        ({"context": torch.ones(3, 5, 48)}, "(3, 5, 48)"),
        ({"control": {}}, "control"),
        ({"c_size": torch.ones(3, 2)}, "c_size"),
    ],
)
def test_calls_that_pixart_cannot_carry_are_refused_by_name(changes, named):
    with pytest.raises(RequestError) as error:
        PIXART.adapter.to_transformer(**{**make_call(1, (8, 8)), **changes}, config=ALPHA)
    assert named in str(error.value)


def test_a_text_of_another_encoder_is_refused_from_its_shape_alone():
    call = {name: tensor.to("meta") for name, tensor in make_call(1, (8, 8), width=64, micro=True).items()}
    with pytest.raises(RequestError, match="48"):
        PIXART.check_widths(PIXART.adapter.to_transformer(**call, config=ALPHA), ALPHA)


REAL = {"num_attention_heads": 16, "caption_channels": 4096, "num_layers": 1}
CHECKPOINTS = {
    "alpha": tiny_config(**REAL, use_additional_conditions=True),
    "sigma": tiny_config(**REAL),
    "fixed": tiny_config(**REAL),
}
CASES = {
    "alpha": ("alpha", make_call(1, (36, 48), 2, width=4096, micro=True)),
    "alpha, no micro-conditions": ("alpha", make_call(2, (40, 34), width=4096)),
    "sigma, batch of two": ("sigma", make_call(3, (34, 50), 2, text=9, width=4096)),
    "sigma, positions at twice the size": ("sigma", make_call(4, (110, 88), text=1, width=4096)),
    "fixed positions": ("fixed", make_call(5, (36, 48), width=4096)),
}


@pytest.fixture(scope="module")
def comfyui(tmp_path_factory) -> Path:
    """Folder with ComfyUI's outputs for all CASES, and the checkpoints they ran on."""
    if COMFYUI is None:
        pytest.skip(HOW)
    folder = tmp_path_factory.mktemp("comfyui")
    for name, config in CHECKPOINTS.items():
        write_original(PIXART, folder / f"{name}.safetensors", config, dtype=torch.bfloat16)
    # Only the number of positions counts: this file was trained at 1024².
    tensors = load_file(folder / "fixed.safetensors")
    save_file({**tensors, "pos_embed": torch.zeros(1, 4096, 1)}, folder / "fixed.safetensors")
    found = run_comfyui(COMFYUI, folder, CASES)
    assert found == {"alpha": "PixArtAlpha", "sigma": "PixArtSigma", "fixed": "PixArtSigma"}
    return folder


@pytest.mark.host
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_loaded_model_and_adapter_give_what_comfyui_gives(comfyui, name):
    kind, call = CASES[name]
    output, expected = comfyui_call(comfyui / f"{kind}.safetensors", call), output_of(comfyui, name)
    assert expected.std() > 0.1
    assert output.shape == PIXART.adapter.output_shape(call["x"].shape, CHECKPOINTS[kind])
    assert relative_error(output, expected) < 1e-4
