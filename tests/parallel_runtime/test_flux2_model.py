"""FLUX.2's model file: beside the tables of all families, packing, layouts."""

from __future__ import annotations

from itertools import product

import torch

from parallel_runtime.networks.diffusers.flux import FLUX2
from tests.tiny_flux2 import tiny_config


def test_tokens_are_places_of_the_latent_and_ids_tell_references_and_text_apart():
    """As Flux2Pipeline of diffusers packs them, which is not imported: it needs transformers."""
    x, context = torch.randn(2, 128, 5, 3), torch.randn(2, 4, 64)
    references = [torch.randn(1, 128, 2, 3), torch.randn(1, 128, 4, 4)]
    arguments = FLUX2.to_transformer(x, torch.ones(2), context, tiny_config(), ref_latents=references)
    assert torch.equal(arguments["hidden_states"][:, :15], x.flatten(2).mT)
    places = [*product([0], range(5), range(3), [0])]  # time, height, width, place in the text
    places += [*product([10], range(2), range(3), [0]), *product([20], range(4), range(4), [0])]
    assert arguments["img_ids"].tolist() == [list(place) for place in places]
    assert arguments["txt_ids"].tolist() == [[0, 0, 0, token] for token in range(4)]
    assert FLUX2.output_shape(x.shape, tiny_config()) == x.shape
