"""FLUX.1's model file: beside the tables of all families, packing, guidance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_runtime.networks.diffusers.flux import FLUX, prepare
from tests.tiny_flux import tiny_config

SMALL = {"num_attention_heads": 2, "num_layers": 1, "num_single_layers": 1}


@given(height=st.integers(1, 12), width=st.integers(1, 12), batch=st.integers(1, 3))
def test_packing_and_unpacking_gives_the_latent_back_at_any_size(height, width, batch):
    x = torch.randn(batch, 16, height, width)
    arguments = FLUX.adapter.to_transformer(x, torch.ones(batch), torch.randn(batch, 3, 64), tiny_config())
    tokens = arguments["hidden_states"]
    assert tokens.shape[1] == len(arguments["img_ids"]) == -(-height // 2) * -(-width // 2)
    assert torch.equal(FLUX.adapter.from_transformer(tokens, x), x)
    assert FLUX.adapter.output_shape(x.shape, tiny_config()) == x.shape


def test_tokens_are_squares_of_two_by_two_and_ids_their_places():
    """As FluxPipeline of diffusers packs them, which is not imported: it needs transformers."""
    x = torch.randn(2, 16, 8, 6)
    arguments = FLUX.adapter.to_transformer(x, torch.ones(2), torch.randn(2, 3, 64), tiny_config())
    assert torch.equal(arguments["hidden_states"], torch.nn.functional.pixel_unshuffle(x, 2).flatten(2).mT)
    assert torch.equal(arguments["img_ids"], torch.cartesian_prod(*map(torch.arange, (1, 4, 3))).float())


@pytest.mark.parametrize(("guidance_embeds", "passed"), [(True, True), (False, False)])
def test_the_config_decides_whether_guidance_is_passed(guidance_embeds, passed):
    config = tiny_config(guidance_embeds=guidance_embeds)
    arguments = FLUX.adapter.to_transformer(
        torch.randn(2, 16, 4, 4), torch.ones(2), torch.randn(2, 3, 64), config, guidance=torch.tensor([3.5])
    )
    assert ("guidance" in arguments) == passed
    assert not passed or arguments["guidance"].tolist() == [3.5, 3.5]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_guidance_that_is_no_number_gives_none_and_is_not_taken_for_left_out(wrong):
    """ComfyUI's network gives NaN for that picture, and for that one alone."""
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    config = tiny_config(**SMALL, guidance_embeds=True)
    transformer: Any = FluxTransformer2DModel(**config).eval()
    prepare(transformer)
    x, text = torch.randn(2, 16, 4, 4), torch.randn(2, 3, 64)

    def predict(**extras: torch.Tensor) -> torch.Tensor:
        arguments = FLUX.adapter.to_transformer(x, torch.full((2,), 0.7), text, config, **extras)
        with torch.no_grad():
            return transformer(**arguments, return_dict=False)[0]

    usual, without, found = (
        predict(guidance=torch.tensor([3.5])), predict(), predict(guidance=torch.tensor([3.5, wrong]))
    )  # fmt: skip
    assert torch.isfinite(without).all()
    assert torch.equal(found[0], usual[0])
    assert found[1].isnan().all()
