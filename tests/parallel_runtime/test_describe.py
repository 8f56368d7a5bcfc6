"""What a family's data says of its layers, against what its forward hands to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallel_runtime.networks.marked_blocks import find_modules
from parallel_runtime.planning.describe import describe_model, describe_request
from tests.families import FAMILIES, build, run
from tests.tiny_sdxl import KINDS


def weights_by_tokens(transformer: Any, spec: Any, family: Any, call: Any) -> dict[int, int]:
    """{tokens: weights of the linear layers in the blocks that get so many of each picture}; one row counts as 0."""
    seen: dict[int, int] = {}

    def note(layer: torch.nn.Linear, inputs: tuple[torch.Tensor, ...]) -> None:
        given = inputs[0]
        tokens = 0 if given.dim() == 2 else given.shape[1]
        seen[tokens] = seen.get(tokens, 0) + layer.weight.numel()

    for blocks in find_modules(transformer, spec.block_lists).values():
        for layer in blocks.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.register_forward_pre_hook(note)
    run(transformer, family, call)
    return seen


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_get_the_tokens_that_the_familys_data_says(name):
    family = FAMILIES[name]
    spec, transformer = family.model, build(family)
    shapes = {name: tuple(parameter.shape) for name, parameter in transformer.named_parameters()}
    facts = describe_model(spec, family.config, shapes, 4)
    call = family.calls[:2][-1]  # in none of these are there as many tokens of text as of the image
    request = describe_request(spec, tuple(call["x"].shape), tuple(call["context"].shape), batch=1)
    seen = weights_by_tokens(transformer, spec, family, call)
    whole = (request.tokens, request.tokens + request.text_tokens)
    image = sum(weights for tokens, weights in seen.items() if tokens in whole)
    assert facts.image_parameters == image
    own = sum(weights for tokens, weights in seen.items() if tokens and tokens not in whole)
    assert facts.text_parameters >= own
    assert own or request.text_tokens


def test_a_unet_is_as_wide_as_its_first_transformer_block():
    from diffusers import UNet2DConditionModel

    from parallel_runtime.networks.diffusers.sdxl import SDXL

    for config in KINDS.values():
        with torch.device("meta"):
            unet = UNet2DConditionModel(**config)
        first = next(iter(find_modules(unet, SDXL.block_lists).values()))[0]
        assert SDXL.token_width(dict(unet.config)) == first.attn1.to_q.in_features
