"""FLUX.2's model file: its detection, its weight rules, and its adapter against ComfyUI's own forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_runtime.errors import RequestError
from parallel_runtime.loading.checkpoint import open_checkpoint
from parallel_runtime.networks.diffusers.flux import FLUX
from parallel_runtime.networks.diffusers.flux2 import FLUX2
from parallel_runtime.networks.diffusers.headers import original_header
from parallel_runtime.networks.diffusers.spec import TensorInfo
from tests.comfyui_checkout import HOW, find_comfyui
from tests.parallel_runtime.comfyui_forward import output_of, run_comfyui
from tests.parallel_runtime.model_forward import apply_rules, comfyui_call, header_of, relative_error, rules_of
from tests.tiny_flux2 import tiny_config
from tests.tiny_model import make_state_dict, to_original, write_diffusers_file, write_diffusers_folder, write_original

COMFYUI = find_comfyui()
KINDS = {"dev": tiny_config(), "klein": tiny_config(guidance_embeds=False, num_layers=2, num_single_layers=1)}


@pytest.mark.parametrize("kind", KINDS)
def test_detect_gives_back_the_config_from_the_shapes_of_either_layout(kind):
    config = KINDS[kind]
    state_dict = make_state_dict(FLUX2, config)
    original, diffusers = header_of(to_original(FLUX2, state_dict, config)), header_of(state_dict)
    assert FLUX2.detect(original) == config
    assert FLUX2.recognise(diffusers, {}) == config
    assert FLUX2.detect(diffusers) is None
    assert FLUX2.recognise(original, {}) is None
    assert FLUX.detect(original) is None
    assert FLUX.recognise(diffusers, {}) is None
    assert original_header(FLUX2.keys, diffusers) == original


@pytest.mark.parametrize(
    ("removed", "added"),
    [
        (None, "distilled_guidance_layer.in_proj.weight"),
        (None, "vector_in.in_layer.weight"),
        (None, "controlnet_x_embedder.weight"),
        (None, "txt_norm.scale"),
        ("double_stream_modulation_img.", None),
        ("final_layer.", None),
        ("img_in.", None),
    ],
)
def test_relatives_in_the_same_key_style_are_not_flux_2(removed, added):
    config = KINDS["dev"]
    header = header_of(to_original(FLUX2, make_state_dict(FLUX2, config), config))
    header = {key: info for key, info in header.items() if removed is None or not key.startswith(removed)}
    if added is not None:
        header[added] = TensorInfo((8, 8), "F32")
    assert FLUX2.detect(header) is None


def test_an_unknown_head_dim_is_not_guessed():
    config = tiny_config(attention_head_dim=64, axes_dims_rope=(16, 16, 16, 16))
    state_dict = make_state_dict(FLUX2, config)
    assert FLUX2.detect(header_of(to_original(FLUX2, state_dict, config))) is None
    assert FLUX2.recognise(header_of(state_dict), {}) is None
    assert FLUX2.recognise(header_of(state_dict), config) == config


def test_weight_rules_agree_with_the_converter_of_diffusers():
    from diffusers.loaders.single_file_utils import convert_flux2_transformer_checkpoint_to_diffusers

    config = KINDS["dev"]
    state_dict = make_state_dict(FLUX2, config)
    original = to_original(FLUX2, state_dict, config)
    expected = convert_flux2_transformer_checkpoint_to_diffusers(dict(original))
    made = apply_rules(rules_of(FLUX2, state_dict), original)
    assert made.keys() == expected.keys()
    assert [name for name in made if not torch.equal(made[name], expected[name])] == []


def test_packing_and_ids_agree_with_the_pipeline_of_diffusers():
    from diffusers import Flux2Pipeline

    x, context = torch.randn(2, 128, 5, 3), torch.randn(2, 4, 64)
    references = [torch.randn(1, 128, 2, 3), torch.randn(1, 128, 4, 4)]
    arguments = FLUX2.adapter.to_transformer(x, torch.ones(2), context, tiny_config(), ref_latents=references)
    assert torch.equal(arguments["hidden_states"][:, :15], Flux2Pipeline._pack_latents(x))
    places = [Flux2Pipeline._prepare_latent_ids(x)[0], Flux2Pipeline._prepare_image_ids(references)[0]]
    assert torch.equal(arguments["img_ids"], torch.cat(places).float())
    assert torch.equal(arguments["txt_ids"], Flux2Pipeline._prepare_text_ids(context)[0].float())
    assert FLUX2.adapter.sequence_length(x.shape, context.shape) == 15 + 4
    assert FLUX2.adapter.output_shape(x.shape, tiny_config()) == x.shape


def _case(seed: int, size: tuple[int, int], batch: int = 1, **changes: Any) -> dict[str, Any]:
    """Tensors of one ComfyUI call; `changes` set or (None) remove arguments."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    arguments = {
        "x": noise(batch, 128, *size),
        "timestep": torch.tensor([0.9046, 0.31, 0.02])[:batch],
        "context": noise(batch, 5, 64),
        "guidance": torch.full((batch,), 3.5),
    }
    if "ref_sizes" in changes:
        changes["ref_latents"] = [noise(batch, 128, *ref) for ref in changes.pop("ref_sizes")]
    return {key: value for key, value in {**arguments, **changes}.items() if value is not None}


REFERENCES = [(3, 5), (4, 2), (2, 2)]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "odd size, batch 2": ("dev", _case(1, (5, 7), 2)),
    "one row, batch 3": ("dev", _case(2, (1, 6), 3)),
    "no guidance": ("dev", _case(3, (4, 4), 2, guidance=None)),
    "two guidances": ("dev", _case(4, (4, 4), 2, guidance=torch.tensor([1.0, 4.0]))),
    "a pooled text": ("dev", _case(5, (4, 4), y=torch.ones(1, 32))),
    "klein": ("klein", _case(6, (4, 5), 2)),
    "references": ("dev", _case(7, (4, 3), ref_sizes=REFERENCES)),
    "references, index": ("klein", _case(8, (5, 3), 2, ref_sizes=REFERENCES, ref_latents_method="index")),
    "references, offset": ("dev", _case(9, (5, 3), ref_sizes=REFERENCES, ref_latents_method="offset")),
    "references, uxo": ("dev", _case(10, (5, 3), ref_sizes=REFERENCES, ref_latents_method="uxo")),
}


@pytest.fixture(scope="module")
def comfyui(tmp_path_factory) -> Path:
    """Folder with ComfyUI's outputs for all CASES, and the checkpoints they ran on."""
    if COMFYUI is None:
        pytest.skip(HOW)
    folder = tmp_path_factory.mktemp("comfyui")
    write_original(FLUX2, folder / "dev.safetensors", KINDS["dev"])
    write_original(FLUX2, folder / "klein.safetensors", KINDS["klein"], "model.diffusion_model.", seed=1)
    assert set(run_comfyui(COMFYUI, folder, CASES).values()) == {"Flux2"}
    return folder


@pytest.mark.host
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_loaded_model_and_adapter_give_what_comfyui_gives(comfyui, name):
    kind, call = CASES[name]
    expected = output_of(comfyui, name)
    assert expected.std() > 0.1
    assert relative_error(comfyui_call(comfyui / f"{kind}.safetensors", call), expected) < 1e-4


def test_every_layout_of_the_same_weights_gives_the_same_output(tmp_path):
    config, (_, call) = KINDS["dev"], CASES["odd size, batch 2"]
    plain = write_original(FLUX2, tmp_path / "plain.safetensors", config)
    expected = comfyui_call(plain, call)
    saved = {key.replace("_norm.scale", "_norm.weight"): tensor for key, tensor in load_file(plain).items()}
    save_file({"diffusion_model." + key: tensor for key, tensor in saved.items()}, tmp_path / "saved.safetensors")
    layouts = [
        tmp_path / "saved.safetensors",
        write_diffusers_file(FLUX2, tmp_path / "diffusers.safetensors", config),
        write_diffusers_folder(FLUX2, tmp_path / "pipeline", config, shards=2, pipeline="Flux2Pipeline"),
    ]
    for path in layouts:
        assert open_checkpoint(path).spec is FLUX2
        assert torch.equal(comfyui_call(path, call), expected), path


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"x": torch.ones(1, 128, 1, 8, 8)}, "(1, 128, 1, 8, 8)"),
        ({"context": torch.ones(3, 5, 64)}, "(3, 5, 64)"),
        ({"guidance": torch.ones(3)}, "guidance"),
        ({"attention_mask": torch.ones(3)}, "attention_mask"),
        ({"ref_latents": [torch.ones(1, 16, 4, 4)]}, "(1, 16, 4, 4)"),
        (
            {"ref_latents": [torch.ones(1, 128, 4, 4)], "ref_latents_method": "index_timestep_zero"},
            "index_timestep_zero",
        ),
    ],
)
def test_calls_that_flux_2_cannot_carry_are_refused_by_name(changes, named):
    call = {**_case(0, (4, 4)), **changes}
    with pytest.raises(RequestError) as error:
        FLUX2.adapter.to_transformer(call.pop("x"), call.pop("timestep"), call.pop("context"), tiny_config(), **call)
    assert named in str(error.value)


@pytest.mark.parametrize("changes", [{"x": torch.ones(1, 16, 4, 4)}, {"context": torch.ones(1, 5, 32)}])
def test_inputs_of_another_model_are_refused_from_their_shapes_alone(changes):
    call = {name: value.to("meta") for name, value in {**_case(0, (4, 4)), **changes}.items()}
    arguments = FLUX2.adapter.to_transformer(
        call.pop("x"), call.pop("timestep"), call.pop("context"), tiny_config(), **call
    )
    with pytest.raises(RequestError, match="width"):
        FLUX2.check_widths(arguments, tiny_config())
