"""FLUX.1's model file: its detection, its weight rules, and its adapter against ComfyUI's own forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_runtime.errors import RequestError
from parallel_runtime.loading.checkpoint import open_checkpoint
from parallel_runtime.loading.weights import load_transformer
from parallel_runtime.networks.diffusers.flux import FLUX
from parallel_runtime.networks.diffusers.spec import TensorInfo
from tests.comfyui_checkout import HOW, find_comfyui
from tests.parallel_runtime.comfyui_forward import output_of, run_comfyui
from tests.parallel_runtime.model_forward import rules_of
from tests.tiny_flux import make_state_dict, tiny_config, to_original, write_original

SMALL = {"num_attention_heads": 2, "num_layers": 1, "num_single_layers": 1}
COMFYUI = find_comfyui()


def _header(tensors: dict[str, torch.Tensor]) -> dict[str, TensorInfo]:
    return {key: TensorInfo(tuple(tensor.shape), "F32") for key, tensor in tensors.items()}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"guidance_embeds": False},
        {"in_channels": 384},
        {"num_attention_heads": 3, "num_layers": 3, "num_single_layers": 1},
        {"joint_attention_dim": 96, "pooled_projection_dim": 48},
    ],
)
def test_detect_gives_back_the_config_from_the_shapes_of_either_layout(changes):
    config = tiny_config(**changes)
    with torch.device("meta"):
        state_dict = {key: torch.empty(tensor.shape) for key, tensor in make_state_dict(config).items()}
    assert FLUX.detect(_header(to_original(state_dict, config))) == config
    assert FLUX.recognise(_header(state_dict), {}) == config
    assert FLUX.detect(_header(state_dict)) is None
    assert FLUX.recognise(_header(to_original(state_dict, config)), {}) is None


@pytest.mark.parametrize(
    ("removed", "added"),
    [
        ("vector_in.", "distilled_guidance_layer.norms.0.scale"),
        ("vector_in.", "double_stream_modulation_img.lin.weight"),
        ("vector_in.", None),
        (None, "distilled_guidance_layer.in_proj.weight"),
        (None, "double_stream_modulation_img.lin.weight"),
        ("txt_in.", "txt_in.individual_token_refiner.blocks.0.norm1.weight"),
        (None, "txt_norm.scale"),
        (None, "double_blocks.0.img_mlp.gate_proj.weight"),
        (None, "controlnet_blocks.0.weight"),
        ("final_layer.", None),
        ("img_in.", None),
    ],
)
def test_relatives_in_the_same_key_style_are_not_flux_1(removed, added):
    config = tiny_config(**SMALL)
    header = _header(to_original(make_state_dict(config), config))
    assert FLUX.detect(header) is not None
    header = {key: info for key, info in header.items() if removed is None or not key.startswith(removed)}
    if added is not None:
        header[added] = TensorInfo((8, 8), "F32")
    assert FLUX.detect(header) is None


def test_an_unknown_head_dim_is_not_guessed():
    config = tiny_config(**SMALL, attention_head_dim=64, axes_dims_rope=(8, 28, 28))
    state_dict = make_state_dict(config)
    assert FLUX.detect(_header(to_original(state_dict, config))) is None
    assert FLUX.recognise(_header(state_dict), {}) is None
    assert FLUX.recognise(_header(state_dict), config) == config


def test_weight_rules_agree_with_the_converter_of_diffusers():
    """Diffusers' converter works on rows and knows one width only: give it that many rows, of one column."""
    from diffusers import FluxTransformer2DModel
    from diffusers.loaders.single_file_utils import convert_flux_transformer_checkpoint_to_diffusers

    with torch.device("meta"):
        transformer: Any = FluxTransformer2DModel(**tiny_config(num_attention_heads=24))
    rules = rules_of(FLUX, transformer.state_dict())
    rows: dict[str, int] = {}
    for rule in rules.values():
        length = rule.rows[0] + rule.rows[1] if rule.rows else 16
        rows[rule.source] = max(rows.get(rule.source, 0), length)
    original = {key: torch.randn(count, 1) for key, count in rows.items()}
    expected = convert_flux_transformer_checkpoint_to_diffusers(dict(original))
    assert rules.keys() == expected.keys()
    for target, tensor in expected.items():
        rule = rules[target]
        source = original[rule.source]
        start, length = rule.rows or (0, len(source))
        mine = source[start : start + length]
        mine = torch.cat([mine[len(mine) // 2 :], mine[: len(mine) // 2]]) if rule.swap_halves else mine
        assert torch.equal(mine, tensor), target


@given(height=st.integers(1, 12), width=st.integers(1, 12), batch=st.integers(1, 3))
def test_packing_and_unpacking_gives_the_latent_back_at_any_size(height, width, batch):
    x = torch.randn(batch, 16, height, width)
    arguments = FLUX.adapter.to_transformer(x, torch.ones(batch), torch.randn(batch, 3, 64), tiny_config())
    tokens = arguments["hidden_states"]
    assert tokens.shape[1] == len(arguments["img_ids"]) == -(-height // 2) * -(-width // 2)
    assert tokens.shape[1] + 3 == FLUX.adapter.sequence_length(x.shape, (batch, 3, 64))
    assert torch.equal(FLUX.adapter.from_transformer(tokens, x), x)
    assert FLUX.adapter.output_shape(x.shape, tiny_config()) == x.shape


def test_packing_and_ids_agree_with_the_pipeline_of_diffusers():
    from diffusers import FluxPipeline

    x = torch.randn(2, 16, 8, 6)
    arguments = FLUX.adapter.to_transformer(x, torch.ones(2), torch.randn(2, 3, 64), tiny_config())
    assert torch.equal(arguments["hidden_states"], FluxPipeline._pack_latents(x, 2, 16, 8, 6))
    ids = FluxPipeline._prepare_latent_image_ids(2, 4, 3, torch.device("cpu"), torch.float32)
    assert torch.equal(arguments["img_ids"], ids)


@pytest.mark.parametrize(("guidance_embeds", "passed"), [(True, True), (False, False)])
def test_the_config_decides_whether_guidance_is_passed(guidance_embeds, passed):
    config = tiny_config(guidance_embeds=guidance_embeds)
    arguments = FLUX.adapter.to_transformer(
        torch.randn(2, 16, 4, 4), torch.ones(2), torch.randn(2, 3, 64), config, guidance=torch.tensor([3.5])
    )
    assert ("guidance" in arguments) == passed
    assert not passed or arguments["guidance"].tolist() == [3.5, 3.5]


@pytest.mark.parametrize(
    ("x", "context", "extras", "named"),
    [
        ((1, 16, 1, 8, 8), (1, 3, 64), {}, "(1, 16, 1, 8, 8)"),
        ((2, 16, 8, 8), (3, 3, 64), {}, "(3, 3, 64)"),
        ((1, 16, 8, 8), (1, 3, 64), {"control": {}}, "control"),
        ((2, 16, 8, 8), (2, 3, 64), {"guidance": torch.ones(3)}, "guidance"),
        ((1, 16, 8, 8), (1, 3, 64), {"ref_latents": [torch.ones(1, 4, 8, 8)]}, "(1, 4, 8, 8)"),
        (
            (1, 16, 8, 8),
            (1, 3, 64),
            {"ref_latents": [torch.ones(1, 16, 8, 8)], "ref_latents_method": "index_timestep_zero"},
            "index_timestep_zero",
        ),
    ],
)
def test_calls_that_flux_cannot_carry_are_refused_by_name(x, context, extras, named):
    with pytest.raises(RequestError) as error:
        FLUX.adapter.to_transformer(torch.ones(x), torch.ones(x[0]), torch.ones(context), tiny_config(), **extras)
    assert named in str(error.value)


@pytest.mark.parametrize(
    ("x", "context", "extras"),
    [((1, 4, 8, 8), (1, 3, 64), {}), ((1, 16, 8, 8), (1, 3, 32), {}), ((1, 16, 8, 8), (1, 3, 64), {"y": (1, 8)})],
)
def test_inputs_of_another_model_are_refused_from_their_shapes_alone(x, context, extras):
    config, device = tiny_config(), torch.device("meta")
    arguments = FLUX.adapter.to_transformer(
        torch.ones(x, device=device),
        torch.ones(1, device=device),
        torch.ones(context, device=device),
        config,
        **{name: torch.ones(shape, device=device) for name, shape in extras.items()},
    )
    with pytest.raises(RequestError):
        FLUX.check_widths(arguments, config)


def _case(seed: int, size: tuple[int, int], batch: int = 1, channels: int = 16, **changes: Any) -> dict[str, Any]:
    """Tensors of one ComfyUI call; `changes` set or (None) remove arguments."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    arguments = {
        "x": noise(batch, channels, *size),
        "timestep": torch.tensor([0.9046, 0.31, 0.02])[:batch],
        "context": noise(batch, 5, 64),
        "y": noise(batch, 32),
        "guidance": torch.full((batch,), 3.5),
    }
    if "ref_sizes" in changes:
        changes["ref_latents"] = [noise(batch, channels, *ref) for ref in changes.pop("ref_sizes")]
    return {key: value for key, value in {**arguments, **changes}.items() if value is not None}


REFERENCES = [(6, 9), (8, 4), (3, 3), (5, 8)]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("dev", _case(1, (8, 12))),
    "odd size, batch 2": ("dev", _case(2, (9, 7), 2)),
    "one row, batch 3": ("dev", _case(3, (1, 6), 3)),
    "no y": ("dev", _case(4, (8, 8), 2, y=None)),
    "wide y": ("dev", _case(5, (8, 8), y=torch.ones(1, 40))),
    "no guidance": ("dev", _case(6, (8, 8), 2, guidance=None)),
    "two guidances": ("dev", _case(7, (8, 8), 2, guidance=torch.tensor([1.0, 4.0]))),
    "schnell": ("schnell", _case(8, (8, 8), 2)),
    "fill": ("fill", _case(9, (8, 7), 2, channels=96)),
    "references": ("dev", _case(10, (8, 7), ref_sizes=REFERENCES)),
    "references, offset": ("dev", _case(11, (9, 7), 2, ref_sizes=REFERENCES, ref_latents_method="offset")),
    "square references": ("dev", _case(14, (8, 8), ref_sizes=[(4, 4)] * 3)),
    "references, index": ("dev", _case(12, (9, 7), 2, ref_sizes=REFERENCES, ref_latents_method="index")),
    "references, uxo": ("dev", _case(13, (9, 7), 2, ref_sizes=REFERENCES, ref_latents_method="uxo")),
}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "dev": {},
    "schnell": {"guidance_embeds": False},
    "fill": {**SMALL, "in_channels": 384},
}


@pytest.fixture(scope="module")
def comfyui(tmp_path_factory) -> Path:
    """Folder with ComfyUI's outputs for all CASES, and the checkpoints they ran on."""
    if COMFYUI is None:
        pytest.skip(HOW)
    folder = tmp_path_factory.mktemp("comfyui")
    for number, (name, changes) in enumerate(CHECKPOINTS.items()):
        write_original(
            folder / f"{name}.safetensors",
            tiny_config(**changes),
            norm_key=("scale", "weight")[number % 2],
            seed=number,
        )
    assert run_comfyui(COMFYUI, folder, CASES) == {"dev": "Flux", "schnell": "FluxSchnell", "fill": "FluxInpaint"}
    return folder


@pytest.mark.slow
@pytest.mark.host
@pytest.mark.parametrize("name", CASES)
def test_the_loaded_model_and_adapter_give_what_comfyui_gives(comfyui, name):
    kind, call = CASES[name]
    checkpoint = open_checkpoint(comfyui / f"{kind}.safetensors")
    transformer = load_transformer(checkpoint, torch.float32, torch.device("cpu"))
    extras = dict(call)
    x, timestep, context = (extras.pop(key) for key in ("x", "timestep", "context"))
    with torch.no_grad():
        arguments = FLUX.adapter.to_transformer(x, timestep, context, checkpoint.config, **extras)
        output = transformer(**arguments, return_dict=False)[0]
    output = FLUX.adapter.from_transformer(output, x)
    expected = output_of(comfyui, name)
    assert expected.std() > 0.1
    assert output.shape == expected.shape
    assert (output - expected).abs().max() < 1e-4
