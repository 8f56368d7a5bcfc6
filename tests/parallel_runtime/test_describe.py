"""What plans reckon with of a family's layers, against what its forward hands to them."""

from __future__ import annotations

import pytest
import torch

from parallel_runtime.engine.opened import DiffusersFamily
from parallel_runtime.networks.facts import describe_request
from parallel_runtime.requests.facts import Seen
from tests.families import FAMILIES, build, facts_of, run


# A view of the start image is many times as long as a tiny video.
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "Wan from a picture"])
def test_the_products_are_those_of_a_forward(name):
    family = FAMILIES[name]
    spec, transformer = family.model, build(family)
    call = family.calls[:2][-1]
    facts = facts_of(transformer, spec)
    shapes = Seen(tuple(call["context"].shape), (tuple(call["x"].shape),))
    request = DiffusersFamily(spec, family.config).describe(shapes, batch=len(call["x"]))
    seen = [0]

    def note(layer: torch.nn.Linear, inputs: tuple[torch.Tensor, ...]) -> None:
        seen[0] += inputs[0].numel() // inputs[0].shape[-1] * layer.weight.numel()

    for blocks in spec.cut:
        for layer in transformer.get_submodule(blocks.path).modules():
            if isinstance(layer, torch.nn.Linear):
                layer.register_forward_pre_hook(note)
    run(transformer, family, call)
    told = request.tokens * facts.image_parameters + request.text_tokens * facts.text_parameters
    # The last of few blocks may have less of a side for text.
    assert 0.85 < request.batch * told / seen[0] < 1.1


def test_a_video_with_sound_has_the_tokens_of_both_and_rows_only_where_frames_are_whole_tokens():
    request = describe_request([(13, 16, 24), (102, 16)], (1, 1), 7, batch=2, steps=8)
    assert (request.tokens, request.text_tokens, request.batch) == (13 * 16 * 24 + 102, 7, 2)
    assert (request.rows, request.steps, request.in_pool) == (13 * 16, 8, True)
    assert describe_request([(3, 9, 12)], (2, 2), 0, batch=1, steps=0).rows == 1
    assert describe_request([(9, 12)], (2, 2), 0, batch=1, steps=0).rows == 5
