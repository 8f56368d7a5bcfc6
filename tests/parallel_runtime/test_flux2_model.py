"""FLUX.2's model file: beside the tables of all families, packing, layouts."""

from __future__ import annotations

from itertools import product

import torch
from safetensors.torch import load_file, save_file

from parallel_runtime.loading.checkpoint import open_checkpoint
from parallel_runtime.networks.diffusers.flux2 import FLUX2
from tests.family_calls import CALLS
from tests.parallel_runtime.model_forward import apply_rules, comfyui_call, header_of, rules_of
from tests.tiny_flux2 import tiny_config
from tests.tiny_model import make_state_dict, to_original, write_diffusers_file, write_diffusers_folder, write_original


def test_an_unknown_head_dim_is_not_guessed():
    config = tiny_config(attention_head_dim=64, axes_dims_rope=(16, 16, 16, 16))
    state_dict = make_state_dict(FLUX2, config)
    assert FLUX2.detect(header_of(to_original(FLUX2, state_dict, config))) is None
    assert FLUX2.recognise(header_of(state_dict), {}) is None
    assert FLUX2.recognise(header_of(state_dict), config) == config


def test_weight_rules_agree_with_the_converter_of_diffusers():
    from diffusers.loaders.single_file_utils import convert_flux2_transformer_checkpoint_to_diffusers

    config = tiny_config()
    state_dict = make_state_dict(FLUX2, config)
    original = to_original(FLUX2, state_dict, config)
    expected = convert_flux2_transformer_checkpoint_to_diffusers(dict(original))
    made = apply_rules(rules_of(FLUX2, state_dict), original)
    assert made.keys() == expected.keys()
    assert [name for name in made if not torch.equal(made[name], expected[name])] == []


def test_tokens_are_places_of_the_latent_and_ids_tell_references_and_text_apart():
    """As Flux2Pipeline of diffusers packs them, which is not imported: it needs transformers."""
    x, context = torch.randn(2, 128, 5, 3), torch.randn(2, 4, 64)
    references = [torch.randn(1, 128, 2, 3), torch.randn(1, 128, 4, 4)]
    arguments = FLUX2.adapter.to_transformer(x, torch.ones(2), context, tiny_config(), ref_latents=references)
    assert torch.equal(arguments["hidden_states"][:, :15], x.flatten(2).mT)
    places = [*product([0], range(5), range(3), [0])]  # time, height, width, place in the text
    places += [*product([10], range(2), range(3), [0]), *product([20], range(4), range(4), [0])]
    assert arguments["img_ids"].tolist() == [list(place) for place in places]
    assert arguments["txt_ids"].tolist() == [[0, 0, 0, token] for token in range(4)]
    assert FLUX2.adapter.sequence_length(x.shape, context.shape) == 15 + 4
    assert FLUX2.adapter.output_shape(x.shape, tiny_config()) == x.shape


def test_every_layout_of_the_same_weights_gives_the_same_output(tmp_path):
    config, (_, call) = tiny_config(), CALLS["FLUX.2"].cases["odd size, batch 2"]
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
