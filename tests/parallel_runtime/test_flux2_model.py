"""FLUX.2's model file: beside the tables of all families, packing, layouts."""

from __future__ import annotations

from itertools import product

import torch

from parallel_runtime.networks.diffusers.flux2 import FLUX2
from tests.parallel_runtime.model_forward import apply_rules, header_of, rules_of
from tests.tiny_flux2 import tiny_config
from tests.tiny_model import make_state_dict, to_original


def test_an_unknown_head_dim_is_not_guessed():
    config = tiny_config(attention_head_dim=64, axes_dims_rope=(16, 16, 16, 16))
    state_dict = make_state_dict(FLUX2, config)
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
