"""What is known of a request to a ComfyUI network."""

import torch

from parallel_runtime.engine.opened import Family
from parallel_runtime.networks.tables.blocks import LATENT_SHAPES
from parallel_runtime.requests.conditioning import Conditioning

LTX = Family("LTX-2", (1, 1, 1), rows_together=False)


def test_a_video_with_sound_has_the_tokens_of_both_and_not_as_many_as_it_has_numbers():
    shapes = [[2, 128, 13, 16, 24], [2, 8, 102, 16]]
    packed = torch.empty(2, 1, 128 * 13 * 16 * 24 + 8 * 102 * 16, device="meta")
    context = torch.empty(2, 1024, 4096, device="meta")
    seen = LTX.check(Conditioning({"context": context, LATENT_SHAPES: shapes}), packed)
    facts = LTX.describe(seen, batch=2, steps=8)
    assert facts.tokens == 13 * 16 * 24 + 102
    assert (facts.text_tokens, facts.batch, facts.steps, facts.in_pool) == (1024, 2, 8, True)


def test_a_picture_has_a_token_for_each_patch():
    seen = Family("X", (1, 2, 2), rows_together=True).check(
        Conditioning({}), torch.empty(2, 16, 1, 9, 12, device="meta")
    )
    facts = Family("X", (1, 2, 2), rows_together=True).describe(seen, batch=2)
    assert (facts.tokens, facts.text_tokens, facts.batch, facts.in_pool) == (5 * 6, 0, 1, False)
