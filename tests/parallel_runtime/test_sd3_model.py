"""SD3's model file: its detection, its weight rules, and its adapter against ComfyUI's own forward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_runtime.errors import RequestError
from parallel_runtime.loading.checkpoint import open_checkpoint
from parallel_runtime.networks.diffusers.headers import original_header
from parallel_runtime.networks.diffusers.sd3 import SD3
from parallel_runtime.networks.diffusers.spec import TensorInfo
from tests.comfyui_checkout import HOW, find_comfyui
from tests.parallel_runtime.comfyui_forward import output_of, run_comfyui
from tests.parallel_runtime.model_forward import apply_rules, comfyui_call, header_of, relative_error, rules_of
from tests.tiny_model import make_state_dict, to_original, write_diffusers_file, write_diffusers_folder, write_original
from tests.tiny_sd3 import tiny_config

COMFYUI = find_comfyui()
KINDS: dict[str, dict[str, Any]] = {
    "sd3": tiny_config(qk_norm=None, dual_attention_layers=()),
    "sd3.5 large": tiny_config(dual_attention_layers=()),
    "sd3.5 medium": tiny_config(layers=3),
}


@pytest.mark.parametrize("kind", KINDS)
def test_detect_gives_back_the_config_from_the_shapes_of_either_layout(kind):
    config = KINDS[kind]
    state_dict = make_state_dict(SD3, config)
    original, diffusers = header_of(to_original(SD3, state_dict, config)), header_of(state_dict)
    assert SD3.detect(original) == config
    assert SD3.recognise(diffusers, {}) == config
    assert SD3.detect(diffusers) is None
    assert SD3.recognise(original, {}) is None
    assert original_header(SD3.keys, diffusers) == original


@pytest.mark.parametrize(
    ("removed", "added"),
    [
        (None, "controlnet_blocks.0.weight"),
        (None, "pos_embed_input.proj.weight"),
        (None, "context_processor.layers.0.attn.qkv.weight"),
        (None, "register"),
        ("final_layer.", None),
        ("pos_embed", None),
        ("y_embedder.", None),
        ("joint_blocks.0.context_block.", None),
    ],
)
def test_relatives_in_the_same_key_style_are_not_sd3(removed, added):
    config = KINDS["sd3"]
    header = header_of(to_original(SD3, make_state_dict(SD3, config), config))
    header = {key: info for key, info in header.items() if removed is None or not key.startswith(removed)}
    if added is not None:
        header[added] = TensorInfo((8, 8), "F32")
    assert SD3.detect(header) is None


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ("x_embedder.proj.weight", (256, 16, 4, 4)),  # another patch
        ("pos_embed", (1, 143, 256)),  # no square of positions
        ("context_embedder.weight", (128, 64)),  # text of another width
        ("joint_blocks.0.x_block.attn.ln_q.weight", (32,)),  # heads of another size
    ],
)
def test_shapes_that_are_not_sd3s_are_not_taken(key, shape):
    config = KINDS["sd3.5 large"]
    header = header_of(to_original(SD3, make_state_dict(SD3, config), config))
    assert key in header
    assert SD3.detect({**header, key: TensorInfo(shape, "F32")}) is None


def test_weight_rules_agree_with_the_converter_of_diffusers():
    from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers

    config = KINDS["sd3.5 medium"]
    state_dict = make_state_dict(SD3, config)
    original = to_original(SD3, state_dict, config)
    # The converter looks only for the widths of the published models.
    widened = {**original, "context_embedder.weight": torch.randn(1536, 64)}
    expected = convert_sd3_transformer_checkpoint_to_diffusers(dict(widened))
    made = apply_rules(rules_of(SD3, state_dict), widened)
    assert made.keys() == expected.keys()
    assert [name for name in made if not torch.equal(made[name], expected[name])] == []


def _case(seed: int, size: tuple[int, int], batch: int = 1, text: int = 5, **changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "x": noise(batch, 16, *size),
        "timestep": torch.tensor([904.6, 310.2, 20.0])[:batch],
        "context": noise(batch, text, 64),
        "y": noise(batch, 32),
        **changes,
    }


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sd3, odd, batch 2": ("sd3", _case(1, (9, 7), 2)),
    "large, plain": ("sd3.5 large", _case(2, (8, 12))),
    "large, whole table, batch 3": ("sd3.5 large", _case(3, (23, 24), 3)),
    "medium, odd, batch 2": ("sd3.5 medium", _case(4, (7, 10), 2)),
    "medium, one row": ("sd3.5 medium", _case(5, (1, 6))),
}


@pytest.fixture(scope="module")
def comfyui(tmp_path_factory) -> Path:
    """Folder with ComfyUI's outputs for all CASES, and the checkpoints they ran on."""
    if COMFYUI is None:
        pytest.skip(HOW)
    folder = tmp_path_factory.mktemp("comfyui")
    for number, (name, config) in enumerate(KINDS.items()):
        prefix = ("", "model.diffusion_model.", "")[number]
        write_original(SD3, folder / f"{name}.safetensors", config, prefix, seed=number)
    assert set(run_comfyui(COMFYUI, folder, CASES).values()) == {"SD3"}
    return folder


@pytest.mark.host
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_loaded_model_and_adapter_give_what_comfyui_gives(comfyui, name):
    kind, call = CASES[name]
    expected = output_of(comfyui, name)
    assert expected.std() > 0.1
    assert relative_error(comfyui_call(comfyui / f"{kind}.safetensors", call), expected) < 1e-4


def _old_folder(path: Path, config: dict[str, Any]) -> Path:
    """As SD3 medium was published: before the config had entries for SD3.5."""
    folder = write_diffusers_folder(SD3, path, config)
    written = json.loads((folder / "config.json").read_text())
    kept = {key: value for key, value in written.items() if key not in ("dual_attention_layers", "qk_norm")}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def _full_checkpoint(path: Path, config: dict[str, Any]) -> Path:
    write_original(SD3, path, config, prefix="model.diffusion_model.")
    others = {
        "first_stage_model.decoder.conv_in.weight": torch.ones(2, 2),
        "text_encoders.clip_g.transformer.text_model.encoder.layers.0.mlp.fc1.weight": torch.ones(2),
    }
    save_file({**load_file(path), **others}, path)
    return path


def test_every_layout_of_the_same_weights_gives_the_same_output(tmp_path):
    config, (_, call) = KINDS["sd3.5 medium"], CASES["medium, odd, batch 2"]
    expected = comfyui_call(write_original(SD3, tmp_path / "plain.safetensors", config), call)
    layouts = [
        _full_checkpoint(tmp_path / "full.safetensors", config),
        write_diffusers_file(SD3, tmp_path / "diffusers.safetensors", config),
        write_diffusers_folder(SD3, tmp_path / "pipeline", config, shards=2, pipeline="StableDiffusion3Pipeline"),
        _old_folder(tmp_path / "old", config),
    ]
    for path in layouts:
        assert open_checkpoint(path).spec is SD3
        assert torch.equal(comfyui_call(path, call), expected), path


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"x": torch.ones(1, 16, 1, 8, 8)}, "(1, 16, 1, 8, 8)"),
        ({"x": torch.ones(1, 4, 8, 8)}, "4 channels"),
        ({"x": torch.ones(1, 16, 8, 26)}, "8 x 26"),
        ({"context": torch.ones(3, 5, 64)}, "(3, 5, 64)"),
        ({"timestep": torch.ones(3)}, "timestep"),
        ({"y": None}, "pooled text"),
        ({"y": torch.ones(2, 2, 32)}, "(2, 2, 32)"),
        ({"control": {}}, "control"),
    ],
)
def test_calls_that_sd3_cannot_carry_are_refused_by_name(changes, named):
    call = {**_case(0, (8, 8)), **changes}
    with pytest.raises(RequestError) as error:
        SD3.adapter.to_transformer(call.pop("x"), call.pop("timestep"), call.pop("context"), tiny_config(), **call)
    assert named in str(error.value)


@pytest.mark.parametrize("changes", [{"context": torch.ones(1, 5, 32)}, {"y": torch.ones(1, 40)}])
def test_inputs_of_another_models_text_encoder_are_refused_from_their_shapes_alone(changes):
    call = {name: value.to("meta") for name, value in {**_case(0, (8, 8)), **changes}.items()}
    arguments = SD3.adapter.to_transformer(
        call.pop("x"), call.pop("timestep"), call.pop("context"), tiny_config(), **call
    )
    with pytest.raises(RequestError, match="width"):
        SD3.check_widths(arguments, tiny_config())


def test_the_shape_and_the_token_count_are_known_before_the_forward():
    call = _case(0, (7, 10), 2)
    arguments = SD3.adapter.to_transformer(call["x"], call["timestep"], call["context"], tiny_config(), y=call["y"])
    tokens = arguments["hidden_states"][0, 0].numel() // 4
    assert SD3.adapter.sequence_length(call["x"].shape, call["context"].shape) == tokens + 5
    assert SD3.adapter.output_shape(call["x"].shape, tiny_config()) == call["x"].shape
