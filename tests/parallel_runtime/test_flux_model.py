"""FLUX.1's model file: beside the tables of all families, packing, guidance."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_runtime.networks.diffusers.flux import FLUX
from tests.tiny_flux import tiny_config


@given(height=st.integers(1, 12), width=st.integers(1, 12), batch=st.integers(1, 3))
def test_packing_and_unpacking_gives_the_latent_back_at_any_size(height, width, batch):
    x = torch.randn(batch, 16, height, width)
    arguments = FLUX.to_transformer(x, torch.ones(batch), torch.randn(batch, 3, 64), tiny_config())
    tokens = arguments["hidden_states"]
    assert tokens.shape[1] == len(arguments["img_ids"]) == -(-height // 2) * -(-width // 2)
    assert torch.equal(FLUX.from_transformer(tokens, x), x)
    assert FLUX.output_shape(x.shape, tiny_config()) == x.shape


def test_tokens_are_squares_of_two_by_two_and_ids_their_places():
    """As FluxPipeline of diffusers packs them, which is not imported: it needs transformers."""
    x = torch.randn(2, 16, 8, 6)
    arguments = FLUX.to_transformer(x, torch.ones(2), torch.randn(2, 3, 64), tiny_config())
    assert torch.equal(arguments["hidden_states"], torch.nn.functional.pixel_unshuffle(x, 2).flatten(2).mT)
    assert torch.equal(arguments["img_ids"], torch.cartesian_prod(*map(torch.arange, (1, 4, 3))).float())


@pytest.mark.parametrize(("guidance_embeds", "passed"), [(True, True), (False, False)])
def test_the_config_decides_whether_guidance_is_passed(guidance_embeds, passed):
    config = tiny_config(guidance_embeds=guidance_embeds)
    arguments = FLUX.to_transformer(
        torch.randn(2, 16, 4, 4), torch.ones(2), torch.randn(2, 3, 64), config, guidance=torch.tensor([3.5])
    )
    assert ("guidance" in arguments) == passed
    assert not passed or arguments["guidance"].tolist() == [3.5, 3.5]
