"""HunyuanDiT's model file: its detection, its weight rules, and its adapter against ComfyUI's own forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import save_file

from parallel_runtime.errors import RequestError, UnsupportedModelError
from parallel_runtime.loading.checkpoint import open_checkpoint
from parallel_runtime.loading.weights import load_transformer
from parallel_runtime.networks.diffusers.centred_rotary import rotary_embedding
from parallel_runtime.networks.diffusers.headers import original_header
from parallel_runtime.networks.diffusers.hunyuan_dit import HUNYUAN_DIT
from parallel_runtime.networks.diffusers.spec import TensorInfo
from tests.comfyui_checkout import HOW, find_comfyui
from tests.parallel_runtime.comfyui_forward import output_of, run_comfyui
from tests.parallel_runtime.model_forward import CPU, comfyui_call, header_of, relative_error
from tests.tiny_hunyuan_dit import COMFYUI_TEXTS, make_call, tiny_config
from tests.tiny_model import (
    make_state_dict,
    to_original,
    write_diffusers_file,
    write_diffusers_folder,
    write_original,
)

COMFYUI = find_comfyui()
OLD = tiny_config(use_style_cond_and_image_meta_size=True)


def _header(config: dict[str, Any], original: bool = True) -> dict[str, TensorInfo]:
    tensors = make_state_dict(HUNYUAN_DIT, config)
    tensors = to_original(HUNYUAN_DIT, tensors, config) if original else tensors
    return header_of(tensors)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_style_cond_and_image_meta_size": True},
        {"num_layers": 6, "mlp_ratio": 4.3637},
        {"num_attention_heads": 3, "attention_head_dim": 88, "num_layers": 2},
    ],
)
def test_detect_gives_back_the_config_from_the_shapes_of_either_layout(changes):
    config = tiny_config(**changes)
    original, renamed = _header(config), _header(config, original=False)
    found = HUNYUAN_DIT.detect(original)
    assert found is not None
    assert int(found["mlp_ratio"] * found["hidden_size"]) == int(config["mlp_ratio"] * config["hidden_size"])
    assert {**found, "mlp_ratio": config["mlp_ratio"]} == config
    assert HUNYUAN_DIT.recognise(renamed, {}) == found
    assert HUNYUAN_DIT.recognise(renamed, config) == config
    assert HUNYUAN_DIT.detect(renamed) is None
    assert HUNYUAN_DIT.recognise(original, {}) is None
    assert original_header(HUNYUAN_DIT.keys, renamed) == original


@pytest.mark.parametrize(
    ("removed", "added", "named"),
    [
        (None, "controlnet_blocks.0.weight", "a ControlNet"),
        (None, "after_proj_list.0.weight", "not HunyuanDiT"),
        ("blocks.3.", None, "not HunyuanDiT"),
        ("text_embedding_padding", None, "not HunyuanDiT"),
        ("extra_embedder.0.weight", "extra_embedder.0.weight", "not HunyuanDiT"),
    ],
)
def test_relatives_in_the_same_key_style_are_refused_by_name(removed, added, named, tmp_path):
    config = tiny_config()
    tensors = to_original(HUNYUAN_DIT, make_state_dict(HUNYUAN_DIT, config), config)
    tensors = {key: tensor for key, tensor in tensors.items() if removed is None or not key.startswith(removed)}
    if added:
        tensors[added] = torch.ones(8, 8)
    save_file(tensors, tmp_path / "m.safetensors")
    with pytest.raises(UnsupportedModelError, match=named):
        open_checkpoint(tmp_path / "m.safetensors")


LAYOUTS = {
    "original": lambda path: write_original(HUNYUAN_DIT, path / "m.safetensors", OLD),
    "full checkpoint": lambda path: write_original(HUNYUAN_DIT, path / "m.safetensors", OLD, "model.diffusion_model."),
    "diffusers file": lambda path: write_diffusers_file(HUNYUAN_DIT, path / "m.safetensors", OLD),
    "transformer folder": lambda path: write_diffusers_folder(HUNYUAN_DIT, path / "m", OLD),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_weights(layout, tmp_path):
    checkpoint = open_checkpoint(LAYOUTS[layout](tmp_path))
    assert checkpoint.spec is HUNYUAN_DIT
    loaded, expected = load_transformer(checkpoint, torch.float32, CPU).state_dict(), make_state_dict(HUNYUAN_DIT, OLD)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


@pytest.mark.parametrize("size", [(32, 32), (48, 24), (9, 31), (1, 5)])
def test_rotary_embedding_agrees_with_that_of_diffusers(size):
    """At evenly spaced positions, as HunyuanDiT was trained: those of diffusers' own grid end too early."""
    from diffusers.models.embeddings import get_2d_rotary_pos_embed_from_grid
    from diffusers.pipelines.hunyuandit.pipeline_hunyuandit import get_resize_crop_region_for_grid

    places = [
        numpy.linspace(start, stop, count, endpoint=False, dtype=numpy.float32)
        for start, stop, count in zip(*get_resize_crop_region_for_grid(size, 32), size, strict=True)
    ]
    grid = torch.from_numpy(numpy.stack(numpy.meshgrid(places[1], places[0])))
    expected = get_2d_rotary_pos_embed_from_grid(88, grid, use_real=True)
    for ours, theirs in zip(rotary_embedding(*size, 88, CPU), expected, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() < 1e-5


def test_the_timestep_stays_exact_in_bfloat16(tmp_path):
    """A timestep that bfloat16 would round by 2 moves the embedding as it does in float32."""
    checkpoint = open_checkpoint(write_original(HUNYUAN_DIT, tmp_path / "m.safetensors", tiny_config()))
    outputs = {}
    for dtype in (torch.float32, torch.bfloat16):
        transformer = load_transformer(checkpoint, dtype, CPU)
        for timestep in (902.0, 904.0):
            call = make_call(1, (6, 8))
            call = {name: value.to(dtype) if value.is_floating_point() else value for name, value in call.items()}
            call["timestep"] = torch.tensor([timestep])
            with torch.no_grad():
                arguments = HUNYUAN_DIT.adapter.to_transformer(**call, config=checkpoint.config)
                outputs[dtype, timestep] = transformer(**arguments, return_dict=False)[0].float()
    moved = outputs[torch.float32, 904.0] - outputs[torch.float32, 902.0]
    moved_too = outputs[torch.bfloat16, 904.0] - outputs[torch.bfloat16, 902.0]
    assert torch.nn.functional.cosine_similarity(moved.flatten(), moved_too.flatten(), dim=0) > 0.5


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"x": torch.ones(1, 16, 8, 8)}, "(1, 16, 8, 8)"),
        ({"x": torch.ones(1, 4, 1, 8, 8)}, "(1, 4, 1, 8, 8)"),
        ({"context": torch.ones(3, 5, 24)}, "(3, 5, 24)"),
        ({"control": {}}, "control"),
        ({"text_embedding_mask": None}, "masks"),
        ({"text_embedding_mask_t5": torch.ones(1, 6)}, "(1, 6)"),
        ({"encoder_hidden_states_t5": None}, "two encoders"),
        ({"context": torch.ones(1, 4, 24), "text_embedding_mask": torch.ones(1, 4)}, "at least 5"),
        ({"image_meta_size": torch.ones(1, 4)}, "image_meta_size"),
        ({"image_meta_size": None}, "image_meta_size"),
    ],
)
def test_calls_that_hunyuan_dit_cannot_carry_are_refused_by_name(changes, named):
    with pytest.raises(RequestError) as error:
        HUNYUAN_DIT.adapter.to_transformer(**{**make_call(1, (8, 8), sizes=True), **changes}, config=OLD)
    assert named in str(error.value)


@pytest.mark.parametrize("widths", [(32, 32), (24, 24)])
def test_texts_of_other_encoders_are_refused_from_their_shapes_alone(widths):
    call = {name: tensor.to("meta") for name, tensor in make_call(1, (8, 8), widths=widths, sizes=True).items()}
    with pytest.raises(RequestError):
        HUNYUAN_DIT.check_widths(HUNYUAN_DIT.adapter.to_transformer(**call, config=OLD), OLD)


def test_the_masks_of_a_kept_conditioning_are_not_written_to():
    call = make_call(1, (8, 8), texts=(9, 11))
    call["text_embedding_mask"] = torch.zeros(1, 9, dtype=torch.bool)
    HUNYUAN_DIT.adapter.to_transformer(**call, config=tiny_config())
    assert not call["text_embedding_mask"].any()


TEXTS = {"texts": (77, 256), "widths": (1024, 2048)}
CHECKPOINTS = {
    "1.2": tiny_config(**COMFYUI_TEXTS, num_attention_heads=16, num_layers=6),
    "1.1": tiny_config(
        **COMFYUI_TEXTS,
        num_attention_heads=16,
        attention_head_dim=88,
        num_layers=2,
        use_style_cond_and_image_meta_size=True,
    ),
}
CASES = {
    "1.2, batch of two": ("1.2", make_call(1, (12, 20), 2, **TEXTS)),
    "1.2, odd sides": ("1.2", make_call(2, (9, 7), **TEXTS)),
    "1.2, prompts in two windows": ("1.2", make_call(3, (20, 8), 2, texts=(154, 300), widths=(1024, 2048))),
    "1.1": ("1.1", make_call(4, (8, 14), 2, **TEXTS, sizes=True)),
}


@pytest.fixture(scope="module")
def comfyui(tmp_path_factory) -> Path:
    """Folder with ComfyUI's outputs for all CASES, and the checkpoints they ran on."""
    if COMFYUI is None:
        pytest.skip(HOW)
    folder = tmp_path_factory.mktemp("comfyui")
    for name, config in CHECKPOINTS.items():
        write_original(HUNYUAN_DIT, folder / f"{name}.safetensors", config, dtype=torch.bfloat16)
    assert run_comfyui(COMFYUI, folder, CASES) == {"1.2": "HunyuanDiT", "1.1": "HunyuanDiT1"}
    return folder


@pytest.mark.host
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_loaded_model_and_adapter_give_what_comfyui_gives(comfyui, name):
    kind, call = CASES[name]
    output, expected = comfyui_call(comfyui / f"{kind}.safetensors", call), output_of(comfyui, name)
    assert expected.std() > 0.1
    assert output.shape == HUNYUAN_DIT.adapter.output_shape(call["x"].shape, CHECKPOINTS[kind])
    assert relative_error(output, expected) < 1e-4
