"""Wan's model file: its detection, its weight rules, and its adapter against ComfyUI's own forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from parallel_runtime.errors import RequestError, UnsupportedModelError
from parallel_runtime.loading.checkpoint import open_checkpoint
from parallel_runtime.loading.weights import load_transformer
from parallel_runtime.networks.diffusers.spec import TensorInfo
from parallel_runtime.networks.diffusers.wan import WAN
from tests.comfyui_checkout import HOW, find_comfyui
from tests.parallel_runtime.comfyui_forward import Case, output_of, run_comfyui
from tests.parallel_runtime.model_forward import comfyui_call, header_of, relative_error, rules_of
from tests.tiny_model import make_state_dict, to_original, write_original
from tests.tiny_wan import image_config, tiny_config

COMFYUI = find_comfyui()
CONFIGS: dict[str, dict[str, Any]] = {
    "text to video": tiny_config(),
    "three heads": tiny_config(num_attention_heads=3, num_layers=1, ffn_dim=512),
    "image to video": image_config(),
    "first and last image": image_config(pos_embed_seq_len=514),
    "Wan 2.2 5B": tiny_config(in_channels=48, out_channels=48, num_layers=1),
    "Wan 2.2 image to video": tiny_config(in_channels=36, num_layers=1),
}


def _header(config: dict[str, Any], original: bool) -> dict[str, TensorInfo]:
    from diffusers import WanTransformer3DModel

    with torch.device("meta"):
        transformer: Any = WanTransformer3DModel(**config)
    tensors = transformer.state_dict()
    return header_of(to_original(WAN, tensors, config) if original else tensors)


@pytest.mark.parametrize("name", CONFIGS)
def test_detect_gives_back_the_config_from_the_shapes_of_either_layout(name):
    config = CONFIGS[name]
    original, renamed = _header(config, original=True), _header(config, original=False)
    assert WAN.detect(original) == config
    assert WAN.recognise(renamed, {}) == config
    assert WAN.detect(renamed) is None
    assert WAN.recognise(original, {}) is None


@pytest.mark.parametrize(
    ("added", "named"),
    [
        ("vace_patch_embedding.weight", "VACE"),
        ("control_adapter.conv.weight", "camera"),
        ("casual_audio_encoder.encoder.final_linear.weight", "speech"),
        ("audio_proj.audio_proj_glob_1.layer.bias", "HuMo"),
        ("face_adapter.fuser_blocks.0.k_norm.weight", "Animate"),
        ("patch_embedding_mask.weight", "SCAIL"),
        ("patch_embedding_pose.weight", "SCAIL"),
        ("patch_embedding_global.weight", "WanDancer"),
        ("ref_conv.weight", "reference"),
        ("blocks.0.audio_cross_attn.q_linear.weight", "additions"),
        ("blocks.1.cross_attn.processor.k_proj.weight", "additions"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_relatives_with_more_modules_are_refused_by_name(added, named, prefix, tmp_path):
    keys = [*_header(CONFIGS["three heads"], original=True), added]
    path = tmp_path / "m.safetensors"
    save_file({prefix + key: torch.ones(1) for key in keys}, path)
    with pytest.raises(UnsupportedModelError, match=named):
        open_checkpoint(path)


@pytest.mark.parametrize("removed", ["head.head.weight", "patch_embedding.weight", "blocks.0.modulation"])
def test_a_file_without_what_tells_wan_is_not_wan(removed):
    header = _header(CONFIGS["three heads"], original=True)
    del header[removed]
    assert WAN.detect(header) is None


@pytest.mark.parametrize("name", ["text to video", "image to video"])
def test_weight_rules_agree_with_the_converter_of_diffusers(name):
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    config = CONFIGS[name]
    tensors = {key: torch.randn(1) for key in _header(config, original=False)}
    original = to_original(WAN, tensors, config)
    expected = convert_wan_transformer_to_diffusers(dict(original))
    rules = {target: rule.source for target, rule in rules_of(WAN, tensors).items()}
    assert rules.keys() == expected.keys()
    assert all(torch.equal(original[rules[target]], tensor) for target, tensor in expected.items())


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "diffusion_model."])
def test_every_prefix_gives_the_same_weights(prefix, tmp_path):
    config = tiny_config(num_attention_heads=1, num_layers=1, ffn_dim=128)
    path = write_original(WAN, tmp_path / "m.safetensors", config, prefix, torch.bfloat16)
    loaded = load_transformer(open_checkpoint(path), torch.bfloat16, torch.device("cpu")).state_dict()
    expected = make_state_dict(WAN, config, torch.bfloat16)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[key], tensor) for key, tensor in expected.items())


@given(frames=st.integers(1, 5), height=st.integers(2, 9), width=st.integers(2, 9), batch=st.integers(1, 2))
def test_any_size_is_padded_to_whole_tokens_and_cut_back(frames, height, width, batch):
    x = torch.randn(batch, 16, frames, height, width)
    arguments = WAN.adapter.to_transformer(x, torch.ones(batch), torch.randn(1, 3, 4096), tiny_config())
    padded = arguments["hidden_states"]
    assert padded.shape[3:] == (height + height % 2, width + width % 2)
    assert WAN.adapter.sequence_length(x.shape, (batch, 3, 4096)) == padded[0, 0].numel() // 4
    assert torch.equal(WAN.adapter.from_transformer(padded, x), x)
    assert WAN.adapter.output_shape(x.shape, tiny_config()) == x.shape


IMAGES = {"clip_fea": torch.ones(1, 257, 1280)}


@pytest.mark.parametrize(
    ("config", "x", "context", "extras", "named"),
    [
        ({}, (1, 16, 8, 8), (1, 3, 4096), {}, "(1, 16, 8, 8)"),
        ({}, (2, 16, 1, 8, 8), (3, 3, 4096), {}, "(3, 3, 4096)"),
        ({}, (1, 4, 1, 8, 8), (1, 3, 4096), {}, "16 latent channels"),
        ({}, (1, 16, 1025, 2, 2), (1, 3, 4096), {}, "1025"),
        ({}, (1, 16, 1, 8, 8), (1, 3, 4096), {"time_dim_concat": torch.ones(1)}, "time_dim_concat"),
        ({}, (1, 16, 1, 8, 8), (1, 3, 4096), {"timestep": torch.ones(1, 3)}, "one per frame"),
        (image_config(), (1, 36, 1, 8, 8), (1, 512, 4096), {}, "CLIP vision"),
        (image_config(), (1, 36, 1, 8, 8), (1, 77, 4096), IMAGES, "512 tokens"),
        (image_config(pos_embed_seq_len=514), (1, 36, 1, 8, 8), (1, 512, 4096), IMAGES, "an end image"),
    ],
)
def test_calls_that_wan_cannot_carry_are_refused_by_name(config, x, context, extras, named):
    config = config or tiny_config()
    extras = {"timestep": torch.ones(x[0]), **extras}
    with pytest.raises(RequestError) as error:
        WAN.adapter.to_transformer(torch.ones(x), context=torch.ones(context), config=config, **extras)
    assert named in str(error.value)


@pytest.mark.parametrize(("width", "image"), [(64, 1280), (4096, 1024)])
def test_inputs_of_another_model_are_refused_from_their_shapes_alone(width, image):
    config, device = image_config(), torch.device("meta")
    arguments = WAN.adapter.to_transformer(
        torch.ones(1, 36, 1, 8, 8, device=device),
        torch.ones(1, device=device),
        torch.ones(1, 512, width, device=device),
        config,
        clip_fea=torch.ones(1, 257, image, device=device),
    )
    with pytest.raises(RequestError):
        WAN.check_widths(arguments, config)


def _case(seed: int, size: tuple[int, int, int], batch: int = 1, channels: int = 16, text: int = 5, image: int = 0):
    """Tensors of one ComfyUI call; `image` is the number of CLIP's tokens."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    arguments = {
        "x": noise(batch, channels, *size),
        "timestep": torch.tensor([904.6, 31.25])[:batch],
        "context": noise(batch, text, 4096),
    }
    return {**arguments, "clip_fea": noise(batch, image, 1280)} if image else arguments


CASES: dict[str, Case] = {
    "plain": ("text to video", _case(1, (3, 8, 6))),
    "odd size, batch 2": ("text to video", _case(2, (2, 7, 5), 2)),
    "one frame": ("three heads", _case(3, (1, 4, 4), 2, text=9)),
    "image": ("image to video", _case(4, (2, 4, 5), 2, 36, text=512, image=257)),
    "two images": ("first and last image", _case(5, (2, 4, 4), 2, 36, text=512, image=514)),
    "Wan 2.2 5B": ("Wan 2.2 5B", _case(6, (2, 4, 4), channels=48)),
    "Wan 2.2 image": ("Wan 2.2 image to video", _case(7, (2, 4, 4), channels=36)),
}


@pytest.fixture(scope="module")
def comfyui(tmp_path_factory) -> Path:
    """Folder with ComfyUI's outputs for all CASES, and the checkpoints they ran on."""
    if COMFYUI is None:
        pytest.skip(HOW)
    folder = tmp_path_factory.mktemp("comfyui")
    for kind in {kind for kind, _ in CASES.values()}:
        write_original(WAN, folder / f"{kind}.safetensors", CONFIGS[kind])
    run_comfyui(COMFYUI, folder, CASES)
    return folder


@pytest.mark.host
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_loaded_model_and_adapter_give_what_comfyui_gives(comfyui, name):
    kind, call = CASES[name]
    output, expected = comfyui_call(comfyui / f"{kind}.safetensors", call), output_of(comfyui, name)
    assert expected.std() > 0.1
    assert output.shape == WAN.adapter.output_shape(call["x"].shape, CONFIGS[kind])
    assert relative_error(output, expected) < 1e-4
