"""Wan's model file: beside the tables of all families, converter, prefixes, padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_runtime.networks.diffusers.wan import WAN
from tests.family_files import FILES, header
from tests.parallel_runtime.model_forward import rules_of
from tests.tiny_model import to_original
from tests.tiny_wan import tiny_config


@pytest.mark.parametrize("name", ["text to video", "image to video"])
def test_weight_rules_agree_with_the_converter_of_diffusers(name):
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    config = FILES["Wan"].configs[name]
    tensors = {key: torch.randn(1) for key in header(FILES["Wan"], config, original=False)}
    original = to_original(WAN, tensors, config)
    expected = convert_wan_transformer_to_diffusers(dict(original))
    rules = {target: rule.source for target, rule in rules_of(WAN, tensors).items()}
    assert rules.keys() == expected.keys()
    assert all(torch.equal(original[rules[target]], tensor) for target, tensor in expected.items())


@given(frames=st.integers(1, 5), height=st.integers(2, 9), width=st.integers(2, 9), batch=st.integers(1, 2))
def test_any_size_is_padded_to_whole_tokens_and_cut_back(frames, height, width, batch):
    x = torch.randn(batch, 16, frames, height, width)
    arguments = WAN.adapter.to_transformer(x, torch.ones(batch), torch.randn(1, 3, 4096), tiny_config())
    padded = arguments["hidden_states"]
    assert padded.shape[3:] == (height + height % 2, width + width % 2)
    assert torch.equal(WAN.adapter.from_transformer(padded, x), x)
    assert WAN.adapter.output_shape(x.shape, tiny_config()) == x.shape
