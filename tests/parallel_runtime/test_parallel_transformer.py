"""The wrapped transformer on one rank: same result, exact timestep, a way back, and its refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from parallel_runtime.attention.kernels import KERNELS
from parallel_runtime.config import ParallelPlan
from parallel_runtime.errors import ConfigurationError, UnsupportedModelError
from parallel_runtime.mesh.mesh import Mesh, single_rank_mesh
from parallel_runtime.networks.diffusers.flux import FLUX
from parallel_runtime.networks.diffusers.parallel_transformer import parallelize
from parallel_runtime.networks.sequence_attention import AttendedTokens
from tests.parallel_runtime.flux_forward import build_transformer, forward_arguments, relative_error, run

GIVEN = ((5, 3), 7, 2)
ONE = single_rank_mesh()


def hooks(transformer):
    """Every hook that sits on the transformer or a part of it."""
    return [
        (name, hook)
        for name, module in transformer.named_modules()
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    ]


def test_one_rank_gives_the_transformers_own_result_without_a_process_group():
    transformer = build_transformer(layers=2)
    expected = run(transformer, *GIVEN)
    assert torch.equal(run(parallelize(transformer, FLUX, ONE), *GIVEN), expected)
    assert not dist.is_initialized()


def test_arguments_may_be_given_by_position():
    transformer = parallelize(build_transformer(), FLUX, ONE)
    given = forward_arguments(*GIVEN)
    names = ("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep", "img_ids", "txt_ids")
    output = transformer(*(given[name] for name in names), given["guidance"], return_dict=False)[0]
    assert torch.equal(output, run(transformer, *GIVEN))


def test_attributes_that_the_wrapper_does_not_have_are_the_transformers():
    transformer = build_transformer()
    wrapped = parallelize(transformer, FLUX, ONE)
    assert wrapped.config is transformer.config
    assert wrapped.dtype == torch.float32
    assert wrapped.attention == "sdpa"
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = wrapped.no_such_thing


@pytest.mark.parametrize("embedder", ["time_text_embed", "time_text_embed.time_proj"])
def test_the_timestep_stays_exact_in_bfloat16(embedder):
    transformer = build_transformer(dtype=torch.bfloat16)
    reference = build_transformer()
    reference.load_state_dict(transformer.state_dict())  # the same weights, rounded alike
    given = forward_arguments(*GIVEN, dtype=torch.bfloat16)
    # Between two bfloat16 numbers, where rounding moves the scaled timestep by several units.
    given["timestep"] = torch.tensor([0.9046, 0.6039])
    in_float32 = {
        name: value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in given.items()
    }
    in_float32["guidance"] = torch.full((2,), 3.504)  # what both ComfyUI and diffusers make of 3.5 in bfloat16
    with torch.no_grad():
        expected, rounded = reference(**in_float32)[0], transformer(**given)[0]
    wrapped = parallelize(transformer, replace(FLUX, timestep_embedder=embedder), ONE)
    exact = wrapped(**given)[0]
    assert exact.dtype == torch.bfloat16
    assert relative_error(exact, expected) < 0.02
    assert relative_error(rounded, expected) > 5 * relative_error(exact, expected)


def test_attention_modules_that_are_not_found_are_refused():
    spec = replace(FLUX, self_attention=("blocks.*.self_attn",))
    with pytest.raises(UnsupportedModelError, match=r"blocks\.\*\.self_attn"):
        parallelize(build_transformer(), spec, ONE)


def test_a_module_that_the_data_names_and_the_transformer_lacks_is_refused_and_nothing_changes():
    transformer = build_transformer()
    with pytest.raises(UnsupportedModelError, match=r"is not as .* it has no module called blocks\.0\."):
        parallelize(transformer, replace(FLUX, timestep_embedder="blocks.0"), ONE)
    assert hooks(transformer) == []


def test_an_attention_backend_that_cannot_run_is_refused_and_nothing_changes():
    transformer = build_transformer()
    with pytest.raises(ConfigurationError, match="'cudnn' cannot run on cpu"):
        parallelize(transformer, FLUX, ONE, attention="cudnn")
    assert hooks(transformer) == []


def test_attention_to_other_tokens_than_its_own_is_refused_where_the_sequence_is_split():
    mesh = Mesh(ParallelPlan(ulysses=2), 0, ONE.coordinate)
    query, other = torch.zeros(1, 4, 2, 8), torch.zeros(1, 3, 2, 8)
    with pytest.raises(UnsupportedModelError, match="other tokens"):
        AttendedTokens(mesh).attend(KERNELS["math"], query, other, other, None, None)
