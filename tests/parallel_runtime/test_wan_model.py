"""Wan's model file: beside the tables of all families, padding."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_runtime.networks.diffusers.wan import WAN
from tests.tiny_wan import tiny_config


@given(frames=st.integers(1, 5), height=st.integers(2, 9), width=st.integers(2, 9), batch=st.integers(1, 2))
def test_any_size_is_padded_to_whole_tokens_and_cut_back(frames, height, width, batch):
    x = torch.randn(batch, 16, frames, height, width)
    arguments = WAN.to_transformer(x, torch.ones(batch), torch.randn(1, 3, 4096), tiny_config())
    padded = arguments["hidden_states"]
    assert padded.shape[3:] == (height + height % 2, width + width % 2)
    assert torch.equal(WAN.from_transformer(padded, x), x)
    assert WAN.output_shape(x.shape, tiny_config()) == x.shape
